"""Groups of runs that differ only in their seed: what a report draws as one line, with means and ranges over them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from fedstrata.config.identity import EXECUTION_FIELDS, PROBE_FIELDS
from fedstrata.diagnosis import Diagnosis, diagnose
from fedstrata.diagnosis.evidence import finite_number, finite_numbers
from fedstrata.errors import UsageError
from fedstrata.report.formatting import mean
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record
from fedstrata.runs.tried import Tried, read_tried

PALETTE = (
    ("#0072b2", "#56a9e8"),
    ("#d55e00", "#f0813a"),
    ("#009e73", "#2fc79c"),
    ("#cc79a7", "#e39cc4"),
    ("#b07d00", "#e6b32e"),
    ("#3aa0d8", "#8fd0f7"),
    ("#6b7480", "#a5adb8"),
)
"""Colours of groups, on light and on dark backgrounds: Okabe and Ito's, which every colour vision tells apart, a little
darker or lighter where the background needs it."""

DASHES = ("solid", "dash", "dot", "dashdot")
_UNLIKE = EXECUTION_FIELDS | PROBE_FIELDS | {"seed"}


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one method under one configuration.

    Args:
        name: unique among the groups of a report.
        label: the same, short enough for a legend.
        runs: one per seed.
        index: its place, which decides its colour.
    """

    name: str
    label: str
    runs: tuple[SavedRun, ...]
    index: int = 0

    @property
    def shown_run(self) -> SavedRun:
        """The run that is shown where a mean has no meaning: the one that got furthest, or the first of these."""
        return max(self.runs, key=lambda run: (len(run.probes) > 0, len(run.records)))

    def run_with(self, probe: str) -> SavedRun:
        """The run that is shown for a probe, which not every seed may have used."""
        return max(self.runs, key=lambda run: (len(run.series(probe)) > 0, run is self.shown_run, len(run.records)))

    @cached_property
    def diagnosis(self) -> Diagnosis | Exception:
        """Of the run that is shown; or why it failed: everything else in a report is as good as before."""
        unreadable = isinstance(self.tried, UsageError)  # which the page says where it shows what was tried
        try:
            return diagnose(replace(self.shown_run, path=None) if unreadable else self.shown_run)
        except Exception as error:
            return error

    @cached_property
    def tried(self) -> Tried | UsageError | None:
        """What was tried for one of its runs, the one that is shown before others; or why that cannot be read."""
        for run in sorted(self.runs, key=lambda run: run is not self.shown_run):
            try:
                found = read_tried(run.path)
            except (UsageError, OSError) as error:
                return UsageError(str(error).replace(f"{run.path}/", ""))
            if found is not None:
                return found
        return None

    @property
    def named_clients(self) -> list[int]:
        """The clients that the diagnosis names, each once."""
        found = () if isinstance(self.diagnosis, Exception) else self.diagnosis.findings
        return list(dict.fromkeys(client for finding in found for client in finding.clients))

    @property
    def colour(self) -> str:
        """Its colour on a light background."""
        return PALETTE[self.index % len(PALETTE)][0]

    @property
    def dash(self) -> str:
        """Its line style: solid until the colours are used up."""
        return DASHES[self.index // len(PALETTE) % len(DASHES)]

    @property
    def seeds(self) -> list[Any]:
        """The seeds, in the order given."""
        return [run.config.get("seed", 0) for run in self.runs]

    @property
    def is_own(self) -> bool:
        """True if the clients' own models are judged, in the mean, since the server has no whole one."""
        return self.runs[0].is_own

    @property
    def is_reference(self) -> bool:
        """True if everybody's data are pooled: methods are measured against it, and it wins nothing."""
        return self.runs[0].is_reference

    @property
    def rounds(self) -> int:
        """The rounds of the run that got furthest."""
        return max(len(run.records) for run in self.runs)


@dataclass(frozen=True)
class Point:
    """One point of a curve: the mean over the seeds that got there, and their range."""

    round: int
    x: float
    mean: float
    low: float
    high: float
    seeds: int


def group_runs(runs: Sequence[SavedRun]) -> list[RunGroup]:
    """Group runs that differ only in their seed, in the order given. A seed that occurs twice begins another group."""
    groups: list[list[SavedRun]] = []
    for run in map(_drop_unset, runs):
        home = next((group for group in groups if _belongs(run, group)), None)
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    groups = [[_hide_own_folders(run) for run in group] for group in groups]
    names = _names([group[0] for group in groups])
    each = zip(names, _labels(names), groups, strict=True)
    return [RunGroup(name, label, tuple(group), at) for at, (name, label, group) in enumerate(each)]


def _drop_unset(run: SavedRun) -> SavedRun:
    """The run without settings that are None: run.toml leaves them out, but a run in memory has them."""
    return replace(run, config={name: value for name, value in run.config.items() if value is not None})


_FOLDER = re.compile(r"""(['"])[^'"]*/([^'"/]+)\1""")


def hide_folders(text: str) -> str:
    """A text with the names of files alone, where it names some in quotes."""
    return _FOLDER.sub(r"\1\2\1", text)


def _hide_own_folders(run: SavedRun) -> SavedRun:
    """The run with the names of its own files alone: pages are sent to others, whom the folders are no business of."""
    own = {name: run.config[name] for name in ("dataset", "model", "archs") if isinstance(run.config.get(name), str)}
    return replace(run, config={**run.config, **{name: hide_folders(text) for name, text in own.items()}})


def _labels(names: Sequence[str], limit: int = 44) -> list[str]:
    """Long names without their middle, unless two would then be the same."""
    short = [n if len(n) <= limit else f"{n[: limit // 2]}…{n[-limit // 2 :]}" for n in names]
    return short if len(set(short)) == len(short) else list(names)


def _belongs(run: SavedRun, group: Sequence[SavedRun]) -> bool:
    seeds = [other.config.get("seed", 0) for other in group]
    return _settings_text(run) == _settings_text(group[0]) and run.config.get("seed", 0) not in seeds


def _settings_text(run: SavedRun) -> dict[str, str]:
    """The settings that runs of a group share, as text, because 1 client is not 1.0, which is all of them."""
    return {name: repr(value) for name, value in run.config.items() if name not in _UNLIKE}


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """The methods; if these are not unique with the settings that differ, and if need be with the directory."""
    names = [run.method for run in runs]
    unlike = [field for field in differing_fields(runs) if field not in {"method", "buffers"}]
    if len(set(names)) < len(names):
        names = [_name_with(run, [f"{f}={run.config[f]}" for f in unlike if f in run.config]) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} [{run.name}]" for name, run in zip(names, runs, strict=True)]
    return names


def _name_with(run: SavedRun, parts: Sequence[str]) -> str:
    return ", ".join([run.method, *parts])


def differing_fields(runs: Sequence[SavedRun]) -> list[str]:
    """Fields of the configuration that are not the same in all runs, leaving out seeds and what changes no result."""
    fields = dict.fromkeys(field for run in runs for field in run.config if field not in _UNLIKE)
    return [f for f in fields if len({repr(run.config.get(f)) for run in runs}) > 1]


Value = Callable[[Record], Any]
Places = Callable[[Sequence[Record]], Sequence[float]]


def by_round(records: Sequence[Record]) -> list[float]:
    """The rounds' own numbers."""
    return [record.round for record in records]


def by_bytes(records: Sequence[Record]) -> list[float]:
    """Bytes sent so far, up and down."""
    return list(accumulate((finite_number(r.bytes_up) or 0) + (finite_number(r.bytes_down) or 0) for r in records))


def by_simulated(size: float, records: Sequence[Record]) -> list[float]:
    """Simulated time so far, in units of so many seconds; zeros without a fleet."""
    return [(finite_number(r.simulated_seconds) or 0) / size for r in records]


def by_flops(records: Sequence[Record]) -> list[float]:
    """Operations of local training so far."""
    return list(accumulate(finite_number(r.flops) or 0 for r in records))


def mean_curve(group: RunGroup, value: Value, places: Places = by_round) -> list[Point]:
    """A number of the records over the rounds, as mean and range over the seeds that have it."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        for record, x in zip(run.records, places(run.records), strict=True):
            y = finite_number(value(record))
            if y is not None:
                found.setdefault(record.round, []).append((x, y))
    return [_point(at, pairs) for at, pairs in sorted(found.items())]


def _point(at: int, pairs: Sequence[tuple[float, float]]) -> Point:
    xs, ys = zip(*pairs, strict=True)
    return Point(at, sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys), len(ys))


def probe_curve(group: RunGroup, probe: str, value: Callable[[Any], Any], rounds: Iterable[int]) -> list[Point]:
    """A number that a probe found in some rounds, as mean and range over the seeds."""
    found: dict[int, list[float]] = {at: [] for at in rounds}
    for run in group.runs:
        for at, what in run.series(probe).items():
            if at in found:
                found[at].extend(finite_numbers([value(what)]))
    return [_point(at, [(at, y) for y in ys]) for at, ys in sorted(found.items()) if ys]


def probe_tables(group: RunGroup, probe: str, *path: str) -> dict[int, dict[str, float]]:
    """Round → {stratum or stage: mean over the seeds} of a probe; `path` leads to the table within what it found."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for run in group.runs:
        for at, what in run.series(probe).items():
            found.setdefault(at, []).append(_table_at(what, path))
    means = {at: _row_means(rows) for at, rows in sorted(found.items())}
    return {at: row for at, row in means.items() if row}


def _row_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {n: m for n in merge_orders(rows) if (m := mean(row.get(n) for row in rows)) is not None}


def _table_at(what: Any, path: Sequence[str]) -> Mapping[str, Any]:
    for step in path:
        what = what.get(step) if isinstance(what, Mapping) else None
    return what if isinstance(what, Mapping) else {}


def merge_orders(orders: Iterable[Iterable[str]]) -> list[str]:
    """All names of several orders: a new name goes after the one that it follows, or before the next known one."""
    first, *others = dict.fromkeys(map(tuple, orders)) or [()]
    found = list(dict.fromkeys(first))
    for names in others:
        place = next((found.index(name) for name in names if name in found), len(found))
        for name in names:
            if name not in found:
                found.insert(place, name)
            place = found.index(name) + 1
    return found


def model_order(tables_by_group: Sequence[Mapping[int, Mapping[str, Any]]], names: Sequence[str]) -> list[str]:
    """Strata or stages in the model's order.

    The longest list counts most: the model's names, or a round's, which include stages without parameters.
    """
    rows = dict.fromkeys(tuple(row) for table in tables_by_group for row in table.values())
    seen = {name for row in rows for name in row}
    longest_first = sorted([tuple(names), *rows], key=len, reverse=True)
    return [name for name in merge_orders(longest_first) if name in seen]


def strata_of(groups: Sequence[RunGroup]) -> list[str]:
    """Names of the strata of all models, in order."""
    return merge_orders(_part_names(group, "name") for group in groups)


def stages_of(groups: Sequence[RunGroup]) -> list[str]:
    """Names of the stages of all models, in order."""
    return merge_orders(_part_names(group, "stage") for group in groups)


def _part_names(group: RunGroup, what: str) -> list[str]:
    model = group.shown_run.facts.get("model")
    strata = model.get("strata") if isinstance(model, Mapping) else None
    return [str(part[what]) for part in strata or () if isinstance(part, Mapping) and what in part]


def primary_of(groups: Iterable[RunGroup]) -> str:
    """The name of the metric that runs are judged by: the first run's."""
    return next((run.records[-1].primary for group in groups for run in group.runs if run.records), "accuracy")


def judged_alike(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Those that are judged by the metric of the first one: numbers of different metrics are not compared."""
    metric = primary_of(groups)
    return [group for group in groups if primary_of([group]) == metric]


def metrics_of(groups: Sequence[RunGroup]) -> list[str]:
    """The names of all metrics that some run has, that which it is judged by first."""
    records = (record for group in groups for run in group.runs for record in run.records[-1:])
    return list(dict.fromkeys([primary_of(groups), *(name for record in records for name in record.all_metrics)]))


def is_lower_better(groups: Iterable[RunGroup]) -> bool:
    """True if less of the primary metric is better, of groups that are judged alike."""
    return any(record.better == "lower" for group in groups for run in group.runs for record in run.records[-1:])
