"""What a reproduction is going to take: how many runs, and how many minutes, by finished runs or by a pilot."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from fedstrata.compare import News, Plan, Run
from fedstrata.compare.plan import identity
from fedstrata.compare.runner import find_result
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.text import plural
from fedstrata.reproduce.parts import OwnWork
from fedstrata.run import open_run
from fedstrata.runs.files import disk_errors, read_object, write_atomic
from fedstrata.system.machine import cores

_ALIKE = {"seed", "lr", "rounds", "eval_every", "partition", "target", "stop_at_target"}
"""Fields that a round's time hardly depends on: runs that differ in nothing else are of one kind."""


@dataclass(frozen=True)
class Pace:
    """The seconds of a kind of run in one process: before its first round, and of each round."""

    setup: float
    round: float


def kind_of(config: RunConfig) -> str:
    """What a round's time depends on."""
    return json.dumps({name: value for name, value in identity(config).items() if name not in _ALIKE}, sort_keys=True)


def measure_pace(config: RunConfig) -> Pace:
    """Make one round of a run in this process, without keeping anything, and take the processor's time.

    Other work on the machine does not count, nor do processes that a long run starts only once.
    """
    begin = time.process_time()
    short = {"rounds": 1, "eval_every": 1, "target": None, "stop_at_target": False, "workers": 1}
    federation = open_run(config.model_copy(update=short), None)
    try:
        ready = time.process_time()
        federation.fit(progress=False)
    finally:
        federation.close()
    return Pace(ready - begin, time.process_time() - ready)


def processes_of(config: RunConfig) -> int:
    """How many processes share a run's rounds."""
    return max(1, min(cores(), config.workers if isinstance(config.workers, int) else cores()))


class Paces:
    """How long runs take: as those of their kind that are finished, else as in a pilot of one round.

    Args:
        out: where the runs are, and the pilot's figures are kept.
        pilot: True to measure what is not known.
        say: told of every pilot.
    """

    def __init__(self, out: Path, pilot: bool, say: Callable[[str], None]) -> None:
        self._out, self._pilot, self._say = out, pilot, say
        self._path = out / "pilot.json"
        kept = read_object(self._path)
        self._measured = {kind: Pace(*pace) for kind, pace in kept.items() if isinstance(pace, list) and len(pace) == 2}
        self._finished: dict[str, list[float]] = {}

    def learn(self, runs: Sequence[Run]) -> None:
        """Take the time of those runs that are finished."""
        for run in {run.directory: run for run in runs}.values():
            result = find_result(run)
            if result is not None and result.rounds:
                self._finished.setdefault(kind_of(run.config), []).append(result.seconds / result.rounds)

    def seconds(self, config: RunConfig, rounds: int, cost: float = 1.0) -> float | None:
        """The seconds of so many rounds with a configuration; None if nothing is known of its kind.

        Args:
            config: of the run.
            rounds: how many.
            cost: a round's, in the mean over the run, of the first one's; for a pilot, which has only that.
        """
        kind = kind_of(config)
        pace = self._measured.get(kind)
        setup = 0.0 if pace is None else pace.setup
        if kind in self._finished:
            return setup + rounds * statistics.fmean(self._finished[kind])
        if pace is None and self._pilot:
            pace = self._measure(kind, config)
        return None if pace is None else pace.setup + rounds * cost * pace.round / processes_of(config)

    def _measure(self, kind: str, config: RunConfig) -> Pace:
        pace = measure_pace(config)
        self._say(f"pilot of {config.method} on {config.model}, {config.dataset}: {pace.round:.1f} s per round")
        self._measured[kind] = pace
        with disk_errors(self._out):
            self._out.mkdir(parents=True, exist_ok=True)
        kept = {kind: [pace.setup, pace.round] for kind, pace in self._measured.items()}
        write_atomic(self._path, json.dumps(kept, indent=1) + "\n")
        return pace


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedPart:
    """A part, or its trials: what is to be made of it.

    Args:
        name: of the part.
        runs: how many it has that no part before it has.
        finished: how many of them are there.
        seconds: of wall time for the others; None if it is not known.
    """

    name: str
    runs: int
    finished: int
    seconds: float | None


@dataclass(frozen=True)
class Outlook:
    """All that a reproduction is going to make, part by part.

    Args:
        parts: in order.
        jobs: runs at the same time.
        others: parts that are made only if they are asked for.
    """

    parts: tuple[PlannedPart, ...]
    jobs: int
    others: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Of wall time for all that is missing; None if of some part it is not known."""
        return _add_known([part.seconds for part in self.parts])

    def as_dict(self) -> dict[str, Any]:
        """Everything, in full precision."""
        return {**asdict(self), "seconds": self.seconds}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = RichTable(title="Plan", title_justify="left", expand=False)
        table.add_column("part")
        for name in ("runs", "finished", "to make", "minutes"):
            table.add_column(name, justify="right")
        runs, finished = (sum(getattr(part, name) for part in self.parts) for name in ("runs", "finished"))
        whole = PlannedPart("all", runs, finished, self.seconds)
        for part in (*self.parts, whole):
            counts = (part.runs, part.finished, part.runs - part.finished)
            table.add_row(part.name, *map(str, counts), minutes_text(part.seconds))
        yield from console.render(table, options if console.is_terminal else options.update(max_width=1000))
        side = f" with {plural(self.jobs, 'run')} at a time"
        yield Text(
            f"minutes{side}: estimates from finished runs, else from a pilot of one round, for cores without other work"
        )
        if self.others:
            yield Text(f"made only if asked for by --parts: {', '.join(self.others)}")


def minutes_text(seconds: float | None) -> str:
    """Seconds in minutes; a dash for None."""
    return "–" if seconds is None else f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def plan_runs(
    name: str, runs: Sequence[Run], seen: set[Path], paces: Paces, jobs: int, cost: Callable[[Run], float]
) -> PlannedPart:
    """What is to be made of a grid, without the runs that have been seen before, which it adds to."""
    mine = {run.directory: run for run in runs if run.directory not in seen}
    seen.update(mine)
    missing = [run for run in mine.values() if find_result(run) is None]
    known = [paces.seconds(set_workers(run.config, jobs), _rounds_left(run), cost(run)) for run in missing]
    whole = _add_known(known)
    wall = None if whole is None else whole / max(1, min(jobs, len(known)))
    return PlannedPart(name, len(mine), len(mine) - len(missing), wall)


def _add_known(values: Sequence[float | None]) -> float | None:
    """Their sum; None if one of them is."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _rounds_left(run: Run) -> int:
    """Of a run that was interrupted, the rounds that it lacks."""
    try:
        return max(0, run.rounds - (run.directory / "metrics.jsonl").read_bytes().count(b"\n"))
    except OSError:
        return run.rounds


def set_workers(config: RunConfig, jobs: int) -> RunConfig:
    """As a run has them: one worker if there are other runs beside it."""
    return config.model_copy(update={"workers": 1}) if jobs > 1 else config


def plan_own_work(part: OwnWork, out: Path, paces: Paces, jobs: int, data_dir: str | None) -> PlannedPart:
    """What is to be made of a part's own work: as long as its seeds that are there, else as long as its runs."""
    missing = [seed for seed in part.seeds if not part.file(out, seed).exists()]
    log = read_object(out / WORK_LOG)
    took = [log[part.file(out, seed).name]["seconds"] for seed in part.seeds if part.file(out, seed).name in log]
    each = statistics.fmean(took) if took else None
    if missing and each is None:
        fields = {"workers": jobs, "data_dir": data_dir, "seed": missing[0]}
        configs = [validate_settings(RunConfig, {**fields, **run}) for run in part.trainings()]
        each = _add_known([paces.seconds(config, config.rounds) for config in configs])
    seconds = 0.0 if not missing else None if each is None else each * len(missing)
    return PlannedPart(part.name, len(part.seeds), len(part.seeds) - len(missing), seconds)


WORK_LOG = "work.json"
"""The file that tells of each seed's own work how long it took, and where it was done."""


# --- while it goes on ------------------------------------------------------------------------------------------------


class RunClock:
    """How long the runs have taken so far, and how long the rest may take: by what was planned, or else by rounds.

    Args:
        every: all runs.
        planned: a run → its seconds, or None if they are not known.
        now: the time, in seconds.
    """

    def __init__(
        self, every: Plan, planned: Callable[[Run], float | None], now: Callable[[], float] = time.monotonic
    ) -> None:
        missing = {run.directory: run for run in every.runs if find_result(run) is None}
        seconds = {path: planned(run) for path, run in missing.items()}
        by_rounds = None in seconds.values()
        self._rounds = {path: run.rounds for path, run in missing.items()}
        self._weights = {p: self._rounds[p] if by_rounds else seconds[p] or 0.0 for p in missing}
        self._before = {path: run.rounds - _rounds_left(run) for path, run in missing.items()}
        self._shares = dict.fromkeys(missing, 0.0)
        self._now, self._begin = now, now()

    def tell(self, news: News) -> str:
        """What to say after some news."""
        path = news.run.directory
        if path in self._shares:
            before = self._before[path]
            done = max(0, news.rounds - before) / max(1, self._rounds[path] - before)
            self._shares[path] = 1.0 if news.is_last else max(self._shares[path], min(1.0, done))
        spent = self._now() - self._begin
        done = sum(self._weights[path] * share for path, share in self._shares.items())
        left = sum(self._weights.values()) - done
        rest = f", about {minutes_text(spent * left / done)} left" if done and left > 0 else ""
        return f"{minutes_text(spent)} minutes so far{rest}"


def log_work(out: Path, name: str, seconds: float, about: Mapping[str, str]) -> None:
    """Remember how long a seed's own work took, and where it was done."""
    log = read_object(out / WORK_LOG)
    write_atomic(out / WORK_LOG, json.dumps({**log, name: {"seconds": seconds, **about}}, indent=1) + "\n")
