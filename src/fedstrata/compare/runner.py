"""Runs what a comparison lacks, new runs and interrupted ones, in turn or side by side; and reads their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import TypeAdapter

from fedstrata.compare.cuts import Cuts, FellShort, falls_short, find_cut
from fedstrata.compare.plan import Plan, Run, identity
from fedstrata.config.identity import check_models
from fedstrata.config.schema import RunConfig, validate_settings, validate_values
from fedstrata.config.toml import read_toml
from fedstrata.core.results import Count, Fairness, Finite
from fedstrata.errors import Diverged, FedstrataError, Stopped, UsageError
from fedstrata.runs.files import read_object
from fedstrata.runs.reader import read_records
from fedstrata.runs.records import Record, rounds_to, simulated_seconds_to
from fedstrata.system.signals import begin_work, handle_signals


@dataclass(frozen=True)
class Result:
    """The result of a finished run; a run that diverged is finished, too."""

    seed: int
    directory: str
    accuracy: Finite | None
    best_accuracy: Finite | None
    rounds: Count
    rounds_to_target: Count | None
    bytes_up: Count
    bytes_down: Count
    flops: Count
    seconds: Finite
    diverged: str | None = None
    notes: tuple[str, ...] = ()
    score: Finite | None = None
    best_score: Finite | None = None
    metric: str = "accuracy"
    better: Literal["higher", "lower"] = "higher"
    metrics: dict[str, Finite | None] = field(default_factory=dict)
    fairness: Fairness | None = None
    global_fairness: Fairness | None = None
    incomplete: bool = False
    simulated_seconds: Finite | None = None
    simulated_seconds_to_target: Finite | None = None

    @property
    def global_over_clients(self) -> Fairness | None:
        """The global model's primary metric over clients, each on its own test examples; None where it is not whole."""
        return None if self.incomplete else self.global_fairness or self.fairness

    @property
    def own_over_clients(self) -> Fairness | None:
        """The same of the clients' own models, where they have any."""
        return self.fairness if self.incomplete or self.global_fairness is not None else None

    @property
    def global_mean(self) -> float | None:
        """The mean over clients of the global model's primary metric."""
        found = self.global_over_clients
        return None if found is None else found.mean

    @property
    def worst(self) -> float | None:
        """The worst of these."""
        found = self.global_over_clients
        return None if found is None else found.worst

    @property
    def spread(self) -> float | None:
        """Their standard deviation."""
        found = self.global_over_clients
        return None if found is None else found.std

    @property
    def own_mean(self) -> float | None:
        """The mean over clients of the clients' own models' primary metric."""
        found = self.own_over_clients
        return None if found is None else found.mean

    @property
    def own_worst(self) -> float | None:
        """The worst of these."""
        found = self.own_over_clients
        return None if found is None else found.worst

    @property
    def own_spread(self) -> float | None:
        """Their standard deviation."""
        found = self.own_over_clients
        return None if found is None else found.std


_RESULT = TypeAdapter(Result)
_SCORES = ("metric", "better", "score", "best_score", "metrics", "fairness", "global_fairness")


def find_result(run: Run) -> Result | None:
    """The result of a run, None if it is not finished.

    Raises:
        UsageError: if the directory holds another run.
    """
    recipe = run.directory / "run.toml"
    if not recipe.exists():
        return None
    try:
        found = identity(validate_values(RunConfig, read_toml(recipe)))
    except UsageError as error:
        raise UsageError(f"{recipe} does not describe a run: {error}") from None
    if repr(found) != repr(identity(run.config)):
        raise UsageError(f"{recipe} was edited: it no longer describes the run that the directory is named after")
    check_models(run.directory, run.config.model_dump(), read_object(run.directory / "versions.json"))
    try:
        summary = read_object(run.directory / "summary.json")
        main = {name: summary[name] for name in ("accuracy", "best_accuracy", "rounds", "notes")}
        main |= {"score": main["accuracy"], "best_score": main["best_accuracy"]}  # of a version that had no others
        main |= {name: summary[name] for name in _SCORES if name in summary}
        costs = {name: summary["costs"][name] for name in ("bytes_up", "bytes_down", "flops", "seconds")}
        about = {"seed": run.config.seed, "directory": str(run.directory), "diverged": summary.get("diverged")}
        about["incomplete"] = run.is_incomplete
        about["simulated_seconds"] = summary.get("simulated_seconds")
        return _RESULT.validate_python({**main, **costs, **about, **_to_target(run, summary)})
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None  # whole or absent: what is neither was edited, and a resume writes it again or says what is wrong


def _to_target(run: Run, summary: Mapping[str, Any]) -> dict[str, Any]:
    """When the target was reached, in rounds and in simulated time, even if the run had no target, or another one."""
    target, names = run.config.target, ("rounds_to_target", "simulated_seconds_to_target")
    if target is None or summary.get("target") == target:
        return {name: summary.get(name) for name in names}
    records = read_finished_records(run.directory)
    return dict(zip(names, (rounds_to(records, target), simulated_seconds_to(records, target)), strict=True))


def read_finished_records(directory: Path) -> list[Record]:
    """The rounds of a finished run.

    Raises:
        UsageError: if metrics.jsonl does not hold them.
    """
    path, rounds = directory / "metrics.jsonl", read_object(directory / "summary.json").get("rounds")
    found = list(read_records(path, ended=True))
    if isinstance(rounds, int) and len(found) < rounds:
        raise UsageError(f"{path} does not hold the {rounds} rounds that summary.json tells of")
    return found


@dataclass(frozen=True)
class News:
    """How far a run is: its rounds so far; at its end its result, or what went wrong, or that it was cut short."""

    run: Run
    rounds: int
    result: Result | None = None
    failure: FedstrataError | None = None
    is_cut: bool = False

    @property
    def is_last(self) -> bool:
        """True for the last news of a run."""
        return self.result is not None or self.failure is not None or self.is_cut


Listener = Callable[[News], None]
Failures = dict[Path, FedstrataError]


def missing(plan: Plan) -> list[Run]:
    """The runs that are not finished, each directory once, and all methods of one seed before the next seed's.

    So that a table of the finished runs soon compares all methods.
    """
    ordered = sorted(plan.runs, key=lambda run: plan.seeds.index(run.config.seed))
    return list({run.directory: run for run in ordered if find_result(run) is None}.values())


def run_missing(plan: Plan, jobs: int = 1, on_news: Listener | None = None) -> Failures:
    """Run what is missing and go on with what was interrupted; a run that fails does not stop the others.

    Args:
        plan: all runs.
        jobs: how many run at the same time; with more than one, each in a process of its own.
        on_news: called after every round and at every run's end.

    Returns:
        What went wrong, by directory.

    Raises:
        UsageError: if no run at all can be made, before anything is written.
        Stopped: after Ctrl-C; every run can go on later.
    """
    check_jobs(jobs)
    tell = on_news or (lambda news: None)
    try:
        runs = missing(plan)
        check_some_fit(runs)
        failures = run_all(runs, jobs, tell, plan.workers)
    except KeyboardInterrupt:
        total = len({run.directory for run in plan.runs})
        done = total - len(missing(plan))
        raise Stopped(f"stopped with {done} of {total} runs finished; the same command goes on") from None
    return failures


def check_jobs(jobs: int) -> None:
    """Refuse a number of runs at once with which none would ever begin."""
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"jobs must be a whole number of 1 or more, not {jobs!r}")


def run_all(runs: Sequence[Run], jobs: int, tell: Listener, workers: bool = False) -> Failures:
    """Run them to their ends, or to their cuts.

    Args:
        runs: what to run; what was interrupted goes on.
        jobs: how many at the same time.
        tell: called after every round and at every run's end.
        workers: True if the user has set the number of workers; else runs in processes of their own have one.

    Returns:
        What went wrong, by directory.
    """
    failures: Failures = {}
    if jobs > 1 and not workers:
        runs = [replace(run, config=run.config.model_copy(update={"workers": 1})) for run in runs]
    begin_work()
    (_one_by_one if jobs == 1 else _side_by_side)(runs, jobs, tell, failures)
    return failures


def check_some_fit(runs: Sequence[Run]) -> None:
    """Refuse what would fail in every row of the table, such as missing data."""
    from fedstrata.run import open_run

    first = None
    for run in {(run.setting, run.label): run for run in runs}.values():
        try:
            open_run(run.config, None).close()
        except UsageError as error:
            first = first or error
        except Exception:
            return  # not a mistake in the input: the run itself will report it
        else:
            return
    if first is not None:
        raise first


def _report_end(run: Run, failure: FedstrataError | None, tell: Listener, failures: Failures) -> None:
    result = find_result(run) if failure is None else None
    cut = find_cut(run.directory, run.cuts) if failure is None and result is None else None
    if cut is not None:
        tell(News(run, cut, is_cut=True))
        return
    if result is None:
        failure = failures[run.directory] = failure or FedstrataError(f"{run.directory} holds no result")
    tell(News(run, 0 if result is None else result.rounds, result, failure))


def _attempt(
    config: RunConfig, directory: Path, on_round: Callable[[int], None], cuts: Cuts = MappingProxyType({})
) -> FedstrataError | None:
    """Run a configuration to its end or a cut, or go on with it; returns what went wrong, if anything did."""
    from fedstrata.run import open_run

    def follow(record: Record) -> None:
        on_round(record.round)
        if falls_short(record, cuts):
            raise FellShort

    try:
        resume = (directory / "run.toml").exists()
        if resume:  # the target changes no result, but a resume insists on it
            config = config.model_copy(update={"target": read_toml(directory / "run.toml").get("target")})
        open_run(config, directory, resume=resume).fit(follow, progress=False)
    except (Diverged, FellShort):
        return None  # a result: the files say so
    except FedstrataError as error:
        return error
    except MemoryError:
        return FedstrataError("there is not enough memory")
    except Exception as error:
        return FedstrataError(f"internal error: {type(error).__name__}: {error}")
    return None


def _one_by_one(runs: Sequence[Run], jobs: int, tell: Listener, failures: Failures) -> None:
    """Run them in this process, one after the other."""
    for run in runs:
        tell(News(run, 0))
        failure = _attempt(run.config, run.directory, lambda rounds, run=run: tell(News(run, rounds)), run.cuts)  # type: ignore[misc]
        _report_end(run, failure, tell, failures)


class _Job:
    """A run in a process of its own, which stops when its standard input ends: also if this process is killed."""

    def __init__(self, run: Run) -> None:
        self.run, self.heard = run, 0
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 – unlike a pipe it is never full
        code = f"import sys; sys.path[:] = {sys.path!r}; from fedstrata.compare.runner import run_job; run_job()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is this process's affair
            text=True,
        )
        order = {"config": run.config.model_dump(), "directory": str(run.directory), "cuts": [*run.cuts.items()]}
        assert self.process.stdin is not None
        with suppress(OSError):  # a process that died at once is noticed by its end
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def rounds(self) -> int:
        """How many rounds the run has written."""
        try:
            return (self.run.directory / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def stop(self) -> None:
        """Let the process save its last round and end, if it has not."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def end(self) -> FedstrataError | None:
        """Wait for the process to end; returns what went wrong, if anything did."""
        self.stop()
        code = self.process.wait()
        self._said.seek(0)
        with self._said:
            words = self._said.read().splitlines()
        try:
            answer = json.loads(words[-1])
            kind = UsageError if answer["code"] == UsageError.exit_code else FedstrataError
            return None if answer["failure"] is None else kind(answer["failure"])
        except (ValueError, LookupError, TypeError):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return FedstrataError(f"its process {how}")


def _side_by_side(runs: Sequence[Run], jobs: int, tell: Listener, failures: Failures) -> None:
    """Run some of them at the same time, each in a process of its own."""
    waiting, active = list(reversed(runs)), list[_Job]()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                active.append(_Job(waiting.pop()))
                tell(News(active[-1].run, 0))
            time.sleep(0.05)
            for job in list(active):
                if job.process.poll() is not None:
                    active.remove(job)
                    _report_end(job.run, job.end(), tell, failures)
                elif (rounds := job.rounds()) != job.heard:
                    job.heard = rounds
                    tell(News(job.run, rounds))
    finally:
        _stop_jobs(active)


def _stop_jobs(active: Sequence[_Job]) -> None:
    for job in active:
        job.stop()
    try:
        for job in active:
            job.process.wait()
    except KeyboardInterrupt:  # a second one: files are whole at every moment, so nothing is lost but a round
        for job in active:
            job.process.kill()
        raise
    finally:
        for job in active:
            job.end()


def run_job() -> None:
    """What a job's process does: the run that its standard input names, until that input ends."""
    order = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored where this all began
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    with handle_signals() as stop:
        begin_work()
        try:
            config, directory = validate_settings(RunConfig, order["config"]), Path(order["directory"])
            failure = _attempt(config, directory, lambda rounds: None, dict(order["cuts"]))
        except KeyboardInterrupt:
            stop.acknowledge()
            sys.exit(Stopped.exit_code)
    print(json.dumps({"failure": failure and str(failure), "code": failure and failure.exit_code}))
