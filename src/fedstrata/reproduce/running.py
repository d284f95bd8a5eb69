"""Makes a reproduction's parts: their trials, their runs and their own work, as far as they are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedstrata.compare import Comparison, News, Plan, Run, plan, run_missing, show, tabulate
from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError, UsageError
from fedstrata.reproduce.parts import Findings, Grid, OwnWork, Part, PartResources
from fedstrata.reproduce.planning import (
    WORK_LOG,
    Outlook,
    Paces,
    PlannedPart,
    RunClock,
    log_work,
    plan_own_work,
    plan_runs,
    set_workers,
)
from fedstrata.reproduce.report import PartReport
from fedstrata.reproduce.tuning import Rates, choose_rates, tune_methods, tuning_plan
from fedstrata.runs.directory import RunDirectory, versions
from fedstrata.runs.files import read_object
from fedstrata.system.machine import cores


class RunsListener(Protocol):
    """Is told of the runs while they go on."""

    def hear(self, news: News) -> None:
        """Hear of a round, or of a run's end."""


Clock = Callable[[News], str]
Watching = Callable[[Plan, Clock], AbstractContextManager[RunsListener]]


@dataclass(frozen=True)
class Workshop:
    """Where a reproduction is made, and who is told.

    Args:
        out: the directory of everything.
        resources: the data, and how many at once.
        watch: the runs and a clock → a context that is told of them.
        say: called with a line about the progress of work that is not a run.
    """

    out: Path
    resources: PartResources
    watch: Watching | None
    say: Callable[[str], None]

    @property
    def free(self) -> dict[str, Any]:
        """Fields of all runs that change no result."""
        return {} if self.resources.data_dir is None else {"data_dir": self.resources.data_dir}

    @property
    def runs(self) -> Path:
        """The directory of all runs."""
        return self.out / "runs"

    def trials(self, part: Grid) -> Plan:
        """The runs by which a part's learning rates are chosen."""
        return tuning_plan(part, self.free, self.runs)

    def grid(self, part: Grid) -> Plan:
        """A part's runs."""
        return plan({**part.values, **self.free}, self.runs)


# --- before it begins ------------------------------------------------------------------------------------------------


def look_ahead(chosen: Sequence[Part], shop: Workshop, paces: Paces, others: Sequence[str]) -> Outlook:
    """Plan all parts: how many runs, and how long they may take."""
    jobs, seen, found = shop.resources.workers, set[Path](), list[PlannedPart]()
    for part in chosen:
        if isinstance(part, OwnWork):
            found.append(plan_own_work(part, shop.out, paces, jobs, shop.resources.data_dir))
            continue
        stages = {f"{part.name}, trials": shop.trials(part)} if part.tuning else {}
        rates = choose_rates(part, shop.trials(part), shop.out) if part.tuning else None
        stages[part.name] = shop.grid(part if rates is None else tune_methods(part, rates))
        for name, runs in stages.items():
            paces.learn(runs.runs)
            found.append(plan_runs(name, runs.runs, seen, paces, jobs, part.round_cost))
    return Outlook(tuple(found), jobs, tuple(others))


# --- the work --------------------------------------------------------------------------------------------------------


def make_parts(
    chosen: Sequence[Part], shop: Workshop, paces: Paces, run: bool
) -> tuple[list[PartReport], dict[Path, FedstrataError]]:
    """All trials first, then all runs, side by side; then, part by part, its own work and the findings.

    Args:
        chosen: the parts.
        shop: where they are made.
        paces: what is known of how long runs take.
        run: False to make nothing and to report on what is there.
    """
    failures: dict[Path, FedstrataError] = {}
    trials = [(part, shop.trials(part)) for part in chosen if isinstance(part, Grid) and part.tuning]
    if run and trials:
        failures |= _run_grids(trials, shop, paces)
    rates = {part.name: choose_rates(part, grid, shop.out) for part, grid in trials}
    tuned = [_tune_part(part, rates.get(part.name)) for part in chosen]
    grids = [(part, shop.grid(part)) for part in tuned if isinstance(part, Grid) and rates.get(part.name, True)]
    if run and grids:
        failures |= _run_grids(grids, shop, paces)
    there = {part.name: tabulate(grid, failures) for part, grid in grids}
    sections = []
    for part in tuned:
        if isinstance(part, OwnWork):
            sections.append(_report_own_work(part, shop, run))
        elif part.name in there:
            sections.append(_report_grid(part, there[part.name], rates.get(part.name)))
        else:
            note = "the trials by which its learning rates are chosen are not finished"
            sections.append(PartReport(part, Findings((), (), (note,)), "", missing=len(shop.grid(part).runs)))
    return sections, failures


def _tune_part(part: Part, rates: Rates | None) -> Part:
    return tune_methods(part, rates) if isinstance(part, Grid) and rates is not None else part


def _run_grids(grids: Sequence[tuple[Grid, Plan]], shop: Workshop, paces: Paces) -> dict[Path, FedstrataError]:
    every = Plan(tuple(run for _, grid in grids for run in grid.runs), shop.runs, False)
    costs = {run.directory: part.round_cost for part, grid in grids for run in grid.runs}

    def planned(run: Run) -> float | None:
        config = set_workers(run.config, shop.resources.workers)
        return paces.seconds(config, run.rounds, costs[run.directory](run))

    clock = RunClock(every, planned)
    with nullcontext() if shop.watch is None else shop.watch(every, clock.tell) as watcher:
        failures = run_missing(every, shop.resources.workers, None if watcher is None else watcher.hear)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in every.runs}):
        raise wrong[0]
    return failures


# --- what there is to report -----------------------------------------------------------------------------------------


def _report_grid(part: Grid, comparison: Comparison, rates: Rates | None) -> PartReport:
    findings = part.assess(comparison)
    lacking = sorted({seed for row in comparison.rows for seed in row.missing_seeds})
    missing = sum(len(row.missing_seeds) for row in comparison.rows)
    directories = [Path(result.directory) for row in comparison.rows for result in row.results]
    where = _machine_texts(RunDirectory(path).versions() for path in directories)
    if rates is not None:
        findings = replace(findings, notes=(str(rates), *findings.notes))
    figures = {} if rates is None else {"chosen": dict(rates.chosen), "scores": dict(rates.scores)}
    settings = show.settings_text(comparison)
    return PartReport(part, _hold_back(findings, lacking), settings, where, missing, figures)


def _hold_back(findings: Findings, lacking: Sequence[int]) -> Findings:
    """The claims that some of the lacking seeds belong to are not judged."""
    checks = tuple(replace(check, missing=check.lacks(lacking)) for check in findings.checks)
    return replace(findings, checks=checks)


def _report_own_work(part: OwnWork, shop: Workshop, run: bool) -> PartReport:
    found: dict[int, dict[str, Any]] = {}
    for seed in part.seeds:
        there = part.file(shop.out, seed).exists()
        if not there and not run:
            continue
        begin = time.monotonic()
        found[seed] = part.figures(shop.out, seed, shop.resources)
        if not there:
            log_work(shop.out, part.file(shop.out, seed).name, time.monotonic() - begin, versions())
            shop.say(f"{part.name} seed {seed}: done")
    settings = "; ".join(f"{name} {value}" for name, value in part.settings["run"].items())
    settings = f"{settings}; seeds {', '.join(map(str, part.seeds))}"
    if not found:
        return PartReport(part, Findings((), (), ("no seed is finished",)), settings, missing=len(part.seeds))
    log = read_object(shop.out / WORK_LOG)
    where = _machine_texts(log.get(part.file(shop.out, seed).name, {}) for seed in found)
    lacking = [seed for seed in part.seeds if seed not in found]
    return PartReport(part, _hold_back(part.assess(found), lacking), settings, where, len(lacking))


def _machine_texts(about: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Where runs were made, here or elsewhere, each machine once: results depend on the processor's instructions."""
    return tuple(dict.fromkeys(_machine_text(found) for found in about))


def _machine_text(found: Mapping[str, Any]) -> str:
    if "torch" not in found:
        return "a machine that is not recorded"
    names = {"fedstrata": "fedstrata", "python": "Python"}
    others = [f"{name} {found[key]}" for key, name in names.items() if key in found]
    return ", ".join([f"{found.get('processor', found.get('machine'))}; torch {found['torch']}", *others])


def describe_machine(jobs: int) -> str:
    """This machine, and how it is used."""
    return (
        f"{_machine_text(versions())}; {plural(cores(), 'core')}, {plural(jobs, 'run')} at once, one thread per client"
    )
