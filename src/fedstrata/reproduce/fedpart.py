"""FedPart: full against partial updates, by cycle, order and warm-up, and the gradient's norm step by step.

Wang et al., "Why Go Full? Elevating Federated Learning Through Partial Network Updates", NeurIPS 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow
from fedstrata.compare.table import stat
from fedstrata.core.text import bytes_text, flops_text, plural
from fedstrata.reproduce import fedpart_trace
from fedstrata.reproduce.claims import Check, Seeds, above, cell, within
from fedstrata.reproduce.fedpart_statistics import accuracy_by_seed
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    at_round,
    figures_by_label,
    figures_by_seed,
    mean_of_last,
    unfinished_note,
)
from fedstrata.techniques.fedpart import FedPart

BASES = {"FedAvg": "", "FedProx": "fedprox(mu=0.01) + ", "MOON": "moon(mu=1.0) + "}
"""What FedPart is combined with: the paper's name → the beginning of a method."""

POLICIES = {"average": "averaged statistics", "local": "local statistics"}
FIRST = "client 0's statistics"
PAPER = {"FedAvg": "62.8 against 60.7 %", "FedProx": "62.3 against 62.8 %", "MOON": "60.5 against 62.3 %"}
"""CIFAR-10 after four cycles, with local statistics; the released code evaluates client 0's model."""


@dataclass(frozen=True)
class FedPartScale:
    """The settings of a reproduction.

    Args:
        run: fields that all runs have.
        seeds: all of them.
        cycles: how many, in a run.
        strata: how many the model has.
        full: full rounds at the beginning of a cycle.
        each: rounds per stratum.
        group: strata that train at once.
        warmups: full rounds before the first cycle.
        ends: steps at either end of a round whose norms are compared.
    """

    run: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    cycles: int = 2
    strata: int = 10
    full: int = 5
    each: int = 2
    group: int = 1
    warmups: tuple[int, ...] = (0, 5, 25)
    ends: int = 3

    @property
    def partial(self) -> int:
        """Partial rounds of a cycle."""
        return self.each * math.ceil(self.strata / self.group)

    @property
    def cycle(self) -> int:
        """Rounds of a cycle."""
        return self.full + self.partial

    @property
    def share(self) -> float:
        """The share of what full updates send: every stratum in its own rounds, and all in the full rounds."""
        return (self.full + self.each) / self.cycle

    def part(self, **others: Any) -> str:
        """FedPart as a method, with these arguments instead of the scale's."""
        arguments = {"full_rounds": self.full, "rounds_per_stratum": self.each, "group": self.group} | others
        return str(FedPart(**arguments))

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields; evaluated at the end of every cycle."""
        rounds = {"rounds": self.cycles * self.cycle, "eval_every": self.cycle}
        return {**self.run, "seed": list(self.seeds), **rounds, **others}


SCALES = {
    "smoke": FedPartScale(
        {
            "dataset": "digits(examples=400, test_examples=100)",
            "model": "resnet8(width=2, stem='3x3', maxpool=False)",
            "partition": "iid",
            "clients": 2,
            "steps": 2,
            "batch_size": 8,
            "lr": 0.003,
            "optimizer": "adam",
            "engine": "serial",
            "workers": 1,
        },
        seeds=(0,),
        cycles=1,
        full=2,
        each=2,
        group=5,
        warmups=(0, 1),
        ends=1,
    ),
    "small": FedPartScale(
        {
            "dataset": "cifar-10(examples=2000, test_examples=4000)",
            "model": "resnet8(width=16)",
            "partition": "iid",
            "clients": 4,
            "epochs": 2,
            "batch_size": 32,
            "lr": 0.001,
            "optimizer": "adam",
        },
        seeds=(1, 2, 3),
    ),
    "paper": FedPartScale(
        {
            "dataset": "cifar-10(examples=20000)",
            "model": "resnet8(width=64)",
            "partition": "iid",
            "clients": 40,
            "epochs": 8,
            "batch_size": 32,
            "lr": 0.001,
            "optimizer": "adam",
            "device": "cuda",
        },
        cycles=4,
        warmups=(0, 5, 60),
        ends=5,
    ),
}


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    return [_cycles(chosen), _orders(chosen), _warmup(chosen), _trace(chosen)]


# --- accuracy and costs by cycle -------------------------------------------------------------------------------------


def _cycles(scale: FedPartScale) -> Grid:
    methods = [
        {"method": f"{beginning}{update}", "label": f"{base}, {kind}"}
        for base, beginning in BASES.items()
        for kind, update in (("full", "fedavg"), ("FedPart", scale.part()))
    ]
    return Grid(
        "cycles",
        "full-network updates (FNU) against FedPart, by cycle, with what they cost",
        scale.values(method=methods, buffers=list(POLICIES)),
        lambda comparison: _assess_cycles(scale, comparison),
    )


Rows = Mapping[tuple[str, str], ComparisonRow]
"""(what happens to running statistics, method) → its row of the comparison."""
Ends = Mapping[tuple[str, int], Mapping[str, Seeds]]
"""(by which statistics a model is evaluated, cycle) → method → seed → accuracy at the end of the cycle."""


def _assess_cycles(scale: FedPartScale, comparison: Comparison) -> Findings:
    rows = {(row.run.buffers, row.method): row for row in comparison.rows}
    labels = list(dict.fromkeys(row.method for row in comparison.rows))
    ends = _cycle_ends(scale, rows, labels)
    accuracy = [
        (statistics, str(cycle), *(cell(seeds) for seeds in found.values()))
        for (statistics, cycle), found in ends.items()
    ]
    costs = [_cost_row(policy, base, rows, scale.cycles) for policy in POLICIES for base in BASES]
    what = [f"{name}{of}" for name in ("up", "down", "FLOPs") for of in (", full", ", FedPart", " share")]
    return Findings(
        (
            FindingsTable(
                "Accuracy at the end of every cycle, %", ("statistics", "cycle", *labels), tuple(accuracy), 2
            ),
            FindingsTable("Costs of a cycle, all clients together", ("statistics", "method", *what), tuple(costs), 2),
        ),
        (*_accuracy_checks(scale, ends), *_cost_checks(scale, rows)),
        (
            f"a cycle is {plural(scale.cycle, 'round')}; averaged: clients' running statistics are averaged and sent; "
            "local: each client keeps its own, and their mean is used to judge the model; client 0's: the same runs at "
            "their end, judged with what client 0 has kept",
            "± is the sample standard deviation over the seeds",
            "bytes are of encoded messages, with heads and statistics, for which the uplink's check (with averaged "
            "statistics) allows one point; local ones all come back in every round, to judge the model by",
            *unfinished_note(comparison),
        ),
    )


def _cycle_ends(scale: FedPartScale, rows: Rows, labels: Sequence[str]) -> Ends:
    ends: dict[tuple[str, int], dict[str, Seeds]] = {}
    for policy, statistics in POLICIES.items():
        for cycle in range(1, scale.cycles + 1):
            accuracy = at_round(cycle * scale.cycle)
            ends[statistics, cycle] = {label: figures_by_seed(rows[policy, label], accuracy) for label in labels}
    ends[FIRST, scale.cycles] = {label: accuracy_by_seed(rows["local", label]) for label in labels}
    return ends


def _accuracy_checks(scale: FedPartScale, ends: Ends) -> list[Check]:
    checks = []
    for statistics in (*POLICIES.values(), FIRST):
        for base in BASES:
            pair = [ends[statistics, scale.cycles][f"{base}, {kind}"] for kind in ("FedPart", "full")]
            paper = PAPER[base] if statistics == FIRST else ""
            checks.append(above(f"FedPart beats full updates ({base}, {statistics})", *pair, paper=paper))
    return checks


def _cost_checks(scale: FedPartScale, rows: Rows) -> list[Check]:
    full, part = (rows["average", f"FedAvg, {kind}"] for kind in ("full", "FedPart"))
    exact = scale.share
    uplink = f"uplink is {100 * exact:.1f} % of full updates'"
    computation = "computation is at most 73.3 % of full updates'"
    return [
        within(uplink, _shares(part, full, "bytes_up"), exact - 0.01, exact + 0.01, paper="28.0 %"),
        within(computation, _shares(part, full, "flops"), 0, 0.733, paper="73.3 %"),
    ]


def _shares(part: ComparisonRow, full: ComparisonRow, name: str) -> list[float]:
    """Seed by seed, a cost as a share of full updates'."""
    whole = {result.seed: getattr(result, name) for result in full.sound_results}
    return [getattr(result, name) / whole[result.seed] for result in part.sound_results if result.seed in whole]


def _cost_row(policy: str, base: str, rows: Rows, cycles: int) -> tuple[str, ...]:
    cells: list[str] = []
    full, part = (rows[policy, f"{base}, {kind}"] for kind in ("full", "FedPart"))
    for name, text in (("bytes_up", bytes_text), ("bytes_down", bytes_text), ("flops", flops_text)):
        for row in (full, part):
            mean = row.of(name)
            cells.append("–" if mean is None else text(mean.mean / cycles))
        share = stat(_shares(part, full, name))
        cells.append("–" if share is None else f"{100 * share.mean:.1f} %")
    return (policy, base, *cells)


# --- the order of strata ---------------------------------------------------------------------------------------------

ORDERS = ("sequential", "reverse", "random")


def _orders(scale: FedPartScale) -> Grid:
    methods = [{"method": scale.part(order=order), "label": order} for order in ORDERS]
    return Grid(
        "orders",
        "in which order strata train",
        scale.values(method=methods, buffers="local"),
        lambda comparison: _assess_orders(scale, comparison),
    )


def _assess_orders(scale: FedPartScale, comparison: Comparison) -> Findings:
    cycles = range(1, scale.cycles + 1)
    ends = [figures_by_label(comparison, at_round(cycle * scale.cycle)) for cycle in cycles]
    rows = [(str(c), *(cell(end[o]) for o in ORDERS)) for c, end in zip(cycles, ends, strict=True)]
    first, *others = ORDERS
    checks = [
        above(f"{first} order ≥ {other}", ends[-1][first], ends[-1][other], ties=True, paper=paper)
        for other, paper in zip(
            others, ("33.59 against 31.79 %, CIFAR-100", "33.59 against 31.44 %, CIFAR-100"), strict=True
        )
    ]
    table = FindingsTable("Accuracy at the end of every cycle by order, %", ("cycle", *ORDERS), tuple(rows))
    return Findings((table,), tuple(checks), unfinished_note(comparison))


# --- full rounds before ----------------------------------------------------------------------------------------------


def _warmup(scale: FedPartScale) -> Grid:
    """Cycles of partial rounds only, so that 0 rounds before the first one are 0 full rounds."""
    partial = scale.cycles * scale.partial
    methods = [
        {
            "method": scale.part(full_rounds=0, warmup=before),
            "label": plural(before, "full round"),
            "rounds": before + partial,
            "eval_every": math.gcd(before, before + partial),
        }
        for before in scale.warmups
    ]
    values = scale.values(method=methods, buffers="local")
    return Grid(
        "warmup",
        "full rounds before the first of the partial ones",
        {name: value for name, value in values.items() if name not in ("rounds", "eval_every")},
        lambda comparison: _assess_warmup(scale, comparison),
    )


def _assess_warmup(scale: FedPartScale, comparison: Comparison) -> Findings:
    after = figures_by_label(comparison, mean_of_last(1))
    before = {
        row.method: figures_by_seed(row, at_round(count))
        for row, count in zip(comparison.rows, scale.warmups, strict=True)
    }
    rows = [
        (when, *(cell(found) for found in column.values())) for when, column in (("before", before), ("after", after))
    ]
    labels = list(after)
    papers = ("61.25 against 58.48 %", "66.18 against 61.25 %")
    checks = [
        above(f"warm-up helps: {more} ≥ {less}", after[more], after[less], ties=True, paper=paper)
        for less, more, paper in zip(labels, labels[1:], papers, strict=False)
    ]
    most = labels[-1]
    name = f"partial rounds improve what {most} have trained"
    checks.append(above(name, after[most], before[most], paper="66.18 against 58.92 %"))
    title = f"Accuracy before and after {plural(scale.cycles * scale.partial, 'partial round')}, %"
    return Findings((FindingsTable(title, ("", *labels), tuple(rows)),), tuple(checks), unfinished_note(comparison))


# --- the gradient's norm ---------------------------------------------------------------------------------------------


def _trace(scale: FedPartScale) -> OwnWork:
    methods = {"full": "fedavg", "FedPart": scale.part()}
    run = {**scale.run, "rounds": scale.cycle, "buffers": "local"}
    return OwnWork(
        "trace",
        "the gradient's norm, step by step, around full and partial aggregation",
        {"run": run, "methods": methods, "ends": scale.ends},
        scale.seeds,
        fedpart_trace.work,
        lambda found: fedpart_trace.assess(found, scale.ends),
        draws=True,
    )
