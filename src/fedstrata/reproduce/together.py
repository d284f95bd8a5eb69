"""All five together: what is best for its bytes and FLOPs, and which ideas add up. A study of ours, not a paper's.

Accuracy of FedAvg, FedProx, SCAFFOLD, FedDyn, FedPart, FedNLR, FedImpro and InCo, alone and in combinations, at equal
rounds, at equal bytes and at equal FLOPs, with the same effort of tuning; fronts; the gain of a combination against the
sum of its parts' gains; and how far clients part under each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Run
from fedstrata.compare.runner import read_finished_records
from fedstrata.compare.table import stat
from fedstrata.core.text import bytes_text, flops_text
from fedstrata.reproduce.claims import GAINS, PLAIN, Check, Unit, above, always_above, best, cell
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    Part,
    figures_by_seed,
    label_methods,
    published,
    unfinished_note,
)
from fedstrata.reproduce.plots import plot_fronts
from fedstrata.reproduce.together_costs import (
    COSTS,
    Trace,
    additivity,
    at_equal_cost,
    equal_budgets,
    mean_trace,
    pareto_front,
    trace,
)
from fedstrata.reproduce.together_settings import (
    COMBINATIONS,
    DEEP_COMBINATIONS,
    EVERYTHING,
    FEDAVG,
    HETERO,
    PART,
    SCALES,
    TogetherScale,
    accuracy_of,
    best_accuracy,
    combination,
    where,
)
from fedstrata.reproduce.verdicts import CONFIDENCE, Seeds, differences

ROUNDS = "at equal rounds"
INTERVAL = f"{100 * CONFIDENCE:g} % interval"
PROBES = {"weightdiv": "divergence of the clients' weights", "cosine": "cosine of the clients' updates"}
"""Probe → what it measures, in the mean over the strata that train."""
BEST = (
    "an accuracy is the best so far, in the whole run or within a budget; at equal bytes (both ways) and at equal "
    "FLOPs (of the clients) a budget is what the cheapest method's whole run costs with the same seed; ± is the sample "
    "standard deviation over the seeds"
)


def parts(scale: str) -> list[Part]:
    """The parts of the study; at `evidence` those on all networks, and on depths with CIFAR-10, must be asked for."""
    chosen = SCALES[scale]
    found: list[Part] = [_table(chosen, data) for data in chosen.datasets]
    found += [_depths(chosen, data, headline=at == 0) for at, data in enumerate(chosen.datasets)]
    return [*found, *(_networks(chosen, data, headline=scale != "evidence") for data in chosen.datasets)]


def round_cost(run: Run) -> float:
    """What a round costs in the mean, of the first one, for estimates: measured on the networks of `evidence`."""
    method = run.config.method
    sampled = 1.6 if "fedimpro" in method else 1.0
    return 0.95 * sampled * (0.7 if "fedpart" in method else 1.0)


# --- the runs --------------------------------------------------------------------------------------------------------


def _table(scale: TogetherScale, data: str) -> Grid:
    return Grid(
        scale.part_name("table", data),
        f"each idea alone and in combinations on {where(data)}: accuracy at equal cost, fronts, what adds up, and why",
        scale.values(method=label_methods(scale.methods()), dataset=data),
        lambda comparison: _Study(scale.part_name("table", data), where(data), FEDAVG, COMBINATIONS).assess(comparison),
        draws=True,
        tuning=scale.tuning,
        round_cost=round_cost,
    )


def _depths(scale: TogetherScale, data: str, *, headline: bool) -> Grid:
    name = scale.part_name("depths", data)
    return Grid(
        name,
        f"InCo, FedPart and FedDyn with clients' models of {len(scale.depths)} depths on {where(data)}",
        scale.values(method=label_methods(scale.deep_methods()), dataset=data, **scale.models),
        lambda comparison: _Study(name, f"{where(data)}, depths", HETERO, DEEP_COMBINATIONS).assess(comparison),
        draws=True,
        headline=headline,
        tuning=scale.tuning,
        round_cost=round_cost,
    )


NETWORKED: tuple[tuple[str, ...], ...] = ((PART,), *((name,) for name in EVERYTHING if name != PART), EVERYTHING)
"""What is tried on every network, beside FedAvg: each idea, and all of them."""


def _networks(scale: TogetherScale, data: str, *, headline: bool) -> Grid:
    entries = []
    for net, network in scale.networks.items():
        methods = {FEDAVG: "fedavg"} | {combination(p): scale.method(p, network) for p in NETWORKED}
        entries += [{**e, "label": f"{e['label']}, {net}", "model": network.model} for e in label_methods(methods)]
    values = {k: v for k, v in scale.values(method=entries, dataset=data).items() if k != "model"}
    return Grid(
        scale.part_name("networks", data),
        f"a shallow and a deep network, with the deeper paper's guideline on stems and without, on {where(data)}",
        {**values, **scale.network_fields},
        lambda comparison: _assess_networks(scale, comparison),
        headline=headline,
        tuning=scale.tuning,
        round_cost=round_cost,
    )


# --- what is found on one network ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Study:
    """One comparison of a base, ideas and their combinations.

    Args:
        name: the part's.
        where: the setting, in words.
        base: what gains are over.
        combinations: the parts of each.
    """

    name: str
    where: str
    base: str
    combinations: Sequence[tuple[str, ...]]

    def assess(self, comparison: Comparison) -> Findings:
        """All tables, claims and the picture."""
        traces = {kind: {row.method: _traces(row, kind) for row in comparison.rows} for kind in COSTS}
        whole = {row.method: figures_by_seed(row, best_accuracy) for row in comparison.rows}
        measures = {ROUNDS: whole} | {f"at equal {kind}": at_equal_cost(of) for kind, of in traces.items()}
        curves = {kind: {label: mean_trace(list(of.values())) for label, of in t.items()} for kind, t in traces.items()}
        curves = {kind: {label: curve for label, curve in of.items() if curve} for kind, of in curves.items()}
        probed = {kind: {row.method: _probed(row, kind) for row in comparison.rows} for kind in PROBES}
        tables = [
            self._accuracies(measures, traces),
            *(_front_table(kind, of, self.where, self.base) for kind, of in curves.items()),
            self._sums(f"Gains over {self.base}, and whether they add up", measures, GAINS),
            self._probe_table(probed),
        ]
        title = f"How far clients part, less {self.base}'s, and whether that adds up"
        tables.append(self._sums(title, {text: probed[kind] for kind, text in PROBES.items()}, PLAIN))
        fronts = {kind: [(p.cost, p.accuracy) for p in pareto_front(of)] for kind, of in curves.items()}
        pictures = {f"{self.name}.png": partial(plot_fronts, curves, fronts)} if all(fronts.values()) else {}
        notes = (BEST, _PROBE_NOTE, _SUM_NOTE, *unfinished_note(comparison))
        return Findings(tuple(tables), tuple(self._checks(measures)), notes, pictures, self._data(comparison, whole))

    def _data(self, comparison: Comparison, whole: Mapping[str, Seeds]) -> dict[str, Any]:
        """Every method's gains at equal rounds, seed by seed, for those who quote them."""
        methods = {row.method: row.run.config.method for row in comparison.rows if row.method != self.base}
        gains = {label: differences(whole[label], whole[self.base]) for label in methods}
        return {"where": self.where, "base": self.base, "methods": methods, "gains": gains}

    def _accuracies(
        self, measures: Mapping[str, Mapping[str, Seeds]], traces: Mapping[str, Mapping[str, Mapping[int, Trace]]]
    ) -> FindingsTable:
        """Accuracies by every measure, and what the whole run costs, of the base's."""
        rows = []
        for label in measures[ROUNDS]:
            shares = [_share(of[label], of[self.base]) for of in traces.values()]
            rows.append((label, *(cell(of[label]) for of in measures.values()), *shares))
        budgets = [
            f"{measure} ({_cost_text(kind, equal_budgets(traces[kind]))})"
            for kind, measure in zip(COSTS, list(measures)[1:], strict=True)
        ]
        columns = ("method", ROUNDS, *budgets, *(f"{kind} of the run, of {self.base}'s" for kind in COSTS))
        return FindingsTable(f"Best accuracy on {self.where}, %", columns, tuple(rows))

    def _sums(self, title: str, figures: Mapping[str, Mapping[str, Seeds]], unit: Unit) -> FindingsTable:
        """Every combination against the sum of its parts, by every figure."""
        rows = []
        for parts in self.combinations:
            for measure, found in figures.items():
                sums = additivity(found, self.base, combination(parts), parts)
                cells = map(unit.cell, (sums.gain, sums.parts, sums.surplus))
                ends = unit.interval(sums.verdict).removeprefix(INTERVAL) or "–"
                rows.append((combination(parts), measure, *cells, ends, sums.reading))
        columns = ("combination", "by", "its gain", "sum of its parts' gains", "difference", INTERVAL, "reading")
        return FindingsTable(title, columns, tuple(rows), left=2)

    def _probe_table(self, probed: Mapping[str, Mapping[str, Seeds]]) -> FindingsTable:
        labels = next(iter(probed.values()))
        rows = tuple((label, *(PLAIN.cell(of[label]) for of in probed.values())) for label in labels)
        return FindingsTable("How far clients part, second half of the run", ("method", *PROBES.values()), rows)

    def _checks(self, measures: Mapping[str, Mapping[str, Seeds]]) -> list[Check]:
        """Sums, parts, and the best of all, by every measure."""
        checks = []
        for measure, found in measures.items():
            for parts in self.combinations:
                label = combination(parts)
                sums = additivity(found, self.base, label, parts)
                pairs = {part: (found[label], found[part]) for part in parts}
                name = f"{label} gains more than its parts together {measure} on {self.where}"
                checks += [
                    above(name, sums.gain, sums.parts, unit=GAINS),
                    always_above(f"{label} beats each of its parts {measure} on {self.where}", pairs),
                ]
            ours = [combination(parts) for parts in self.combinations]
            checks.append(best(f"a combination is the best of all {measure} on {self.where}", ours, found))
        return checks


_PROBE_NOTE = (
    "divergence is the mean distance of the clients' weights from their mean, cosine that of every two clients' "
    "updates; both in the mean over the strata that trained, in the measured rounds of the second half"
)
_SUM_NOTE = (
    "a combination's gain is over the base, paired by seed, and so is the sum of what its parts gain alone; the "
    "reading is by the 90 % interval of their difference"
)


def _traces(row: ComparisonRow, kind: str) -> dict[int, Trace]:
    """Seed → accuracy against cost."""
    found = {r.seed: read_finished_records(Path(r.directory)) for r in row.sound_results}
    return {seed: trace(rounds, COSTS[kind], accuracy_of) for seed, rounds in found.items()}


def _probed(row: ComparisonRow, kind: str) -> dict[int, float]:
    """Seed → a probe's mean over strata and over the later half of the measured rounds."""
    found = {}
    for result in row.sound_results:
        rounds = [_mean_number(strata) for strata in published(Path(result.directory), kind).values()]
        later = [value for value in rounds[len(rounds) // 2 :] if value is not None]
        if later:
            found[result.seed] = statistics.fmean(later)
    return found


def _mean_number(strata: Mapping[str, float | None]) -> float | None:
    """The mean over the strata that moved; one that stood still has a divergence of 0 or no cosine."""
    moved = [value for value in strata.values() if value is not None and math.isfinite(value) and value]
    return statistics.fmean(moved) if moved else None


def _cost_text(kind: str, seeds: Seeds) -> str:
    """A cost in the mean over seeds."""
    mean = stat(seeds.values())
    return "–" if mean is None else bytes_text(mean.mean) if kind == "bytes" else flops_text(mean.mean)


def _share(mine: Mapping[int, Trace], base: Mapping[int, Trace]) -> str:
    """What whole runs cost, of the base's."""
    shares = [mine[seed][-1][0] / base[seed][-1][0] for seed in mine if seed in base]
    return f"{100 * statistics.fmean(shares):.0f} %" if shares else "–"


def _front_table(kind: str, curves: Mapping[str, Trace], where: str, base: str) -> FindingsTable:
    """The methods on the front, from the cheapest on: at which costs, and how good at the last of them."""
    front, whole = pareto_front(curves), curves[base][-1][0] if base in curves else math.nan
    rows = []
    for label in dict.fromkeys(point.label for point in front):
        mine = [point for point in front if point.label == label]
        first, last = (f"{100 * point.cost / whole:.1f} %" for point in (mine[0], mine[-1]))
        rows.append((label, str(len(mine)), first, last, f"{100 * mine[-1].accuracy:.2f}"))
    columns = ("method", "points on the front", f"first at, of {base}'s whole run", "last at", "accuracy there, %")
    return FindingsTable(f"The front by {kind} on {where}, in the mean over the seeds", columns, tuple(rows))


# --- what is found on several ----------------------------------------------------------------------------------------


def _assess_networks(scale: TogetherScale, comparison: Comparison) -> Findings:
    """Accuracies and gains by network, and whether a gain depends on it."""
    whole = {row.method: figures_by_seed(row, best_accuracy) for row in comparison.rows}
    cheap = {net: _equal_bytes(comparison, net) for net in scale.networks}
    labels = [FEDAVG, *map(combination, NETWORKED)]
    tables, checks = [], list[Check]()
    for measure, found in (
        (ROUNDS, {net: {label: whole[f"{label}, {net}"] for label in labels} for net in scale.networks}),
        ("at equal bytes", cheap),
    ):
        rows = tuple((label, *(cell(found[net][label]) for net in scale.networks)) for label in labels)
        tables.append(FindingsTable(f"Best accuracy {measure}, %", ("method", *scale.networks), rows))
        checks += [
            above(f"{label} beats FedAvg {measure}, {net}", found[net][label], found[net][FEDAVG])
            for net in scale.networks
            for label in labels[1:]
        ]
    return Findings(tuple(tables), tuple(checks), (BEST, _GUIDELINE_NOTE, *unfinished_note(comparison)))


_GUIDELINE_NOTE = (
    "guidelines on: a 7x7 stem with a stride and max-pool, which the deeper paper recommends; off: a 3x3 stem without; "
    "a budget of bytes is that of the cheapest method on the same network"
)


def _equal_bytes(comparison: Comparison, net: str) -> dict[str, Seeds]:
    """Method → seed → accuracy at equal bytes, on one network."""
    suffix = f", {net}"
    rows = {row.method.removesuffix(suffix): row for row in comparison.rows if row.method.endswith(suffix)}
    return at_equal_cost({label: _traces(row, "bytes") for label, row in rows.items()})
