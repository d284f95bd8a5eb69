"""Does a paper's result hold here? Its settings at three scales, its tables, and its claims as named checks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from fedstrata.compare import News, Plan, plan, run_missing, show, tabulate
from fedstrata.data.readers.archives import DATA_VARIABLE
from fedstrata.errors import FedstrataError, UsageError, did_you_mean
from fedstrata.reproduce import deeper, fedimpro, fednlr, fedpart, inco
from fedstrata.reproduce.claims import Check
from fedstrata.reproduce.parts import Findings, FindingsTable, Grid, OwnWork, Part, PartResources
from fedstrata.reproduce.plots import check_plots
from fedstrata.reproduce.report import PartReport, Reproduction
from fedstrata.runs.directory import RunDirectory, versions

__all__ = ["PAPERS", "SCALES", "Check", "Findings", "FindingsTable", "Reproduction", "parts", "reproduce"]

PAPERS: Mapping[str, Callable[[str], list[Part]]] = {
    "fedpart": fedpart.parts,
    "fednlr": fednlr.parts,
    "fedimpro": fedimpro.parts,
    "inco": inco.parts,
    "deeper": deeper.parts,
}
"""Paper → its parts at a scale."""

SCALES = ("smoke", "small", "paper")


class RunsListener(Protocol):
    """Is told of the runs while they go on."""

    def hear(self, news: News) -> None:
        """Hear of a round, or of a run's end."""


Watching = Callable[[Plan], AbstractContextManager[RunsListener]]


def parts(paper: str, scale: str, only: Sequence[str] = ()) -> list[Part]:
    """The parts of a paper's reproduction; of those named, if any are.

    Raises:
        UsageError: for an unknown paper, scale or part.
    """
    if paper not in PAPERS:
        raise UsageError(f"there is no reproduction of '{paper}'{did_you_mean(paper, PAPERS)}")
    if scale not in SCALES:
        raise UsageError(f"there is no scale '{scale}'{did_you_mean(scale, SCALES)}")
    found = PAPERS[paper](scale)
    for name in only:
        if name not in (names := [part.name for part in found]):
            raise UsageError(f"{paper} has no part '{name}'{did_you_mean(name, names)}")
    return [part for part in found if not only or part.name in only]


def reproduce(
    paper: str,
    scale: str = "smoke",
    *,
    data_dir: str | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    watch: Watching | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Reproduction:
    """Make a paper's runs at a scale, as far as they are missing, and check its claims by them.

    Args:
        paper: fedpart, fednlr, fedimpro, inco or deeper.
        scale: smoke (seconds, data without files), small (real data, two cores) or paper (its settings, for a GPU).
        data_dir: where the data files are; default: FEDSTRATA_DATA.
        out: for the runs and the report; what is finished there is not done again. None keeps nothing.
        jobs: how many runs at the same time, each in a process of its own.
        only: names of parts; none for all.
        watch: the runs → a context that is told of them.
        say: called with a line about the progress of work that is not a run.

    Raises:
        UsageError: for what cannot be made, before anything is written.
        Stopped: after Ctrl-C; the same call with the same `out` goes on.
    """
    chosen = parts(paper, scale, only)
    if jobs < 1:
        raise UsageError(f"jobs must be 1 or more, not {jobs}")
    where = _find_data(scale, data_dir)
    _check_needs(chosen, None if out is None else Path(out))
    with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as place:
        sections, failures = _run_parts(chosen, Path(place), PartResources(where, jobs), watch, say)
        command, machines = _command_text(paper, scale, out, jobs, only), _machine_texts(Path(place) / "runs")
        outcome = Reproduction(paper, scale, command, tuple(sections), failures, machines)
        if out is not None:
            outcome.write(Path(out))
    return outcome


def _find_data(scale: str, data_dir: str | None) -> str | None:
    where = data_dir or os.environ.get(DATA_VARIABLE)
    if scale != "smoke" and not where:
        raise UsageError(
            f"the scale '{scale}' needs real data: say where it is with --data-dir DIR, or {DATA_VARIABLE} in the "
            "environment"
        )
    return where


def _check_needs(chosen: Sequence[Part], out: Path | None) -> None:
    """Refuse early what could not be written, drawn or computed here."""
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a directory")
    if out is not None and any(part.draws for part in chosen):
        check_plots()
    for part in chosen:
        if isinstance(part, OwnWork):
            part.needs()


def _run_parts(
    chosen: Sequence[Part], out: Path, resources: PartResources, watch: Watching | None, say: Callable[[str], None]
) -> tuple[list[PartReport], dict[Path, FedstrataError]]:
    """All runs of all parts first, side by side; then, part by part, its own work and the findings."""
    free = {} if resources.data_dir is None else {"data_dir": resources.data_dir}
    grids = {part.name: plan({**part.values, **free}, out / "runs") for part in chosen if isinstance(part, Grid)}
    every = Plan(tuple(run for grid in grids.values() for run in grid.runs), out / "runs", False)
    failures = _run_grids(every, resources.workers, watch) if grids else {}
    sections = []
    for part in chosen:
        if isinstance(part, Grid):
            comparison = tabulate(grids[part.name], failures)
            sections.append(PartReport(part, part.assess(comparison), show.settings_text(comparison)))
        else:
            sections.append(_report_own_work(part, out, resources, say))
    return sections, failures


def _run_grids(every: Plan, jobs: int, watch: Watching | None) -> dict[Path, FedstrataError]:
    with nullcontext() if watch is None else watch(every) as watcher:
        failures = run_missing(every, jobs, None if watcher is None else watcher.hear)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in every.runs}):
        raise wrong[0]
    return failures


def _report_own_work(part: OwnWork, out: Path, resources: PartResources, say: Callable[[str], None]) -> PartReport:
    found: dict[int, dict[str, Any]] = {}
    for seed in part.seeds:
        there = part.file(out, seed).exists()
        found[seed] = part.figures(out, seed, resources)
        if not there:
            say(f"{part.name} seed {seed}: done")
    settings = "; ".join(f"{name} {value}" for name, value in part.settings["run"].items())
    return PartReport(part, part.assess(found), f"{settings}; seeds {', '.join(map(str, part.seeds))}")


def _machine_texts(runs: Path) -> tuple[str, ...]:
    """Where the runs were made, here or elsewhere: torch and the processor."""
    found = [RunDirectory(path.parent).versions() for path in runs.glob("*/versions.json")] or [versions()]
    return tuple(dict.fromkeys(f"torch {v.get('torch')} on {v.get('processor', v.get('machine'))}" for v in found))


def _command_text(paper: str, scale: str, out: str | Path | None, jobs: int, only: Sequence[str]) -> str:
    """The command that repeats it, with placeholders for directories."""
    words = ["fedstrata reproduce", paper, f"--scale {scale}"]
    words += ["--data-dir DIR"] if scale != "smoke" else []
    words += ["--out DIR"] if out is not None else []
    words += [f"--jobs {jobs}"] if jobs > 1 else []
    return " ".join([*words, *(f"--only {name}" for name in only)])
