"""FedPart: full against partial updates, by cycle, order and warm-up, and the gradient's norm step by step.

Wang et al., "Why Go Full? Elevating Federated Learning Through Partial Network Updates", NeurIPS 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Run
from fedstrata.compare.table import stat
from fedstrata.core.text import bytes_text, flops_text, plural
from fedstrata.reproduce import fedpart_trace
from fedstrata.reproduce.claims import Check, above, cell, counted
from fedstrata.reproduce.fedpart_statistics import accuracy_by_seed
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    Tuning,
    at_round,
    best_until,
    dataset_name,
    figures_by_label,
    figures_by_seed,
    mean_of_last,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.runs.records import Record
from fedstrata.techniques.fedpart import FedPart

BASES = {"FedAvg": "", "FedProx": "fedprox(mu=0.01) + ", "MOON": "moon(mu=1.0) + "}
"""What FedPart is combined with: the paper's name → the beginning of a method."""

POLICIES = {"average": "averaged statistics", "local": "local statistics"}
FIRST = "client 0's statistics"
POSTER = {
    "CIFAR-10": {"FedAvg": (62.8, 60.7), "FedProx": (62.3, 62.8), "MOON": (60.5, 62.3)},
    "CIFAR-100": {"FedAvg": (37.2, 35.6), "FedProx": (37.5, 36.2), "MOON": (37.6, 35.4)},
    "Tiny-ImageNet": {"FedAvg": (21.4, 17.7), "FedProx": (21.5, 18.4), "MOON": (21.7, 18.4)},
}
"""FedPart and full updates after the last cycle: the best so far (the poster's columns never fall), local statistics.
The released code evaluates client 0's model."""


Measure = Callable[[int], Callable[[list[Record]], float | None]]
"""A round → what a run's rounds are judged by up to there."""
TUNING_SEED = 0
PARTIAL_COST = 0.6
"""Of a partial round, as a share of a full one's: measured, for estimates."""
MOON_COST = 1.8
"""Of a round with MOON, of its first one: by counted FLOPs."""


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
        every_round: True if every round is evaluated, so that the best so far can be told, by which the poster judges.
        trials: learning rates that all methods are tried with; none to leave them all as they are.
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
    every_round: bool = False
    trials: tuple[float, ...] = ()

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

    @property
    def measures(self) -> dict[str, Measure]:
        """By what a run is judged after a round."""
        return {"best so far": best_until, "end of cycle": at_round} if self.every_round else {"": at_round}

    @property
    def tuning(self) -> Tuning | None:
        """Trials of one cycle."""
        fields = {"rounds": self.cycle, "eval_every": self.cycle}
        return Tuning(self.trials, TUNING_SEED, mean_of_last(1), fields) if self.trials else None

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields; evaluated at the end of every cycle, if not in every round."""
        rounds = {"rounds": self.cycles * self.cycle, "eval_every": 1 if self.every_round else self.cycle}
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
        every_round=True,
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
    "evidence": FedPartScale(
        {
            "dataset": "cifar-10(examples=10000, test_examples=2000)",
            "model": "resnet8(width=16)",
            "partition": "iid",
            "clients": 20,
            "epochs": 2,
            "batch_size": 32,
            "lr": 0.001,
            "optimizer": "adam",
        },
        seeds=(1, 2, 3, 4, 5),
        cycles=3,
        warmups=(0, 5, 60),
        ends=5,
        every_round=True,
        trials=(0.0005, 0.001, 0.002),
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
        every_round=True,
    ),
}


EVIDENCE_DATA = {
    "cifar-100": "cifar-100(examples=10000, test_examples=2000)",
    "tiny-imagenet": "tiny-imagenet(examples=10000, test_examples=1000)",
}
"""Part → the dataset of its pair, at the scale `evidence`."""


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    if scale != "evidence":
        return [_cycles(chosen), _orders(chosen), _warmup(chosen), _trace(chosen)]
    one: dict[str, Any] = {"bases": ("FedAvg",), "policies": ("local",)}
    pairs: list[Part] = [
        _cycles(chosen, **one),
        _cycles(chosen, "averaged", bases=("FedAvg",), policies=("average",)),
        _cycles(chosen, "moon", bases=("MOON",), policies=("local",)),
    ]
    others: list[Part] = [
        *(_cycles(chosen, name, **one, dataset=data) for name, data in EVIDENCE_DATA.items()),
        _orders(chosen),
        _warmup(chosen),
        _trace(chosen),
    ]
    return [*pairs, *(replace(part, headline=False) for part in others)]


# --- accuracy and costs by cycle -------------------------------------------------------------------------------------


def _cycles(
    scale: FedPartScale,
    name: str = "cycles",
    *,
    bases: Sequence[str] = tuple(BASES),
    policies: Sequence[str] = tuple(POLICIES),
    **fields: Any,
) -> Grid:
    methods = [
        {"method": f"{BASES[base]}{update}", "label": f"{base}, {kind}"}
        for base in bases
        for kind, update in (("full", "fedavg"), ("FedPart", scale.part()))
    ]
    return Grid(
        name,
        "full-network updates (FNU) against FedPart, by cycle, with what they cost",
        scale.values(method=methods, buffers=list(policies), **fields),
        lambda comparison: _assess_cycles(scale, comparison),
        tuning=scale.tuning,
        round_cost=lambda run: _round_cost(scale, run),
    )


def _round_cost(scale: FedPartScale, run: Run) -> float:
    """A round in the mean over a cycle, of its first one, which is full, and has no earlier model for MOON."""
    partial = scale.partial if "fedpart" in run.config.method else 0
    later = MOON_COST if "moon" in run.config.method else 1.0
    return later * (scale.cycle - partial * (1 - PARTIAL_COST)) / scale.cycle


Rows = Mapping[tuple[str, str], ComparisonRow]
"""(what happens to running statistics, method) → its row of the comparison."""
Ends = Mapping[tuple[str, int], Mapping[str, Seeds]]
"""(by which statistics a model is judged, cycle) → method → seed → accuracy up to the end of the cycle."""


def _assess_cycles(scale: FedPartScale, comparison: Comparison) -> Findings:
    rows = {(row.run.buffers, row.method): row for row in comparison.rows}
    labels = list(dict.fromkeys(row.method for row in comparison.rows))
    policies = list(dict.fromkeys(policy for policy, _ in rows))
    bases = [base for base in BASES if f"{base}, full" in labels]
    data = dataset_name(comparison.rows[0].run.config.dataset)
    tables, checks = list[FindingsTable](), list[Check]()
    for name, measure in scale.measures.items():
        ends = _cycle_ends(scale, measure, rows, labels, policies)
        if name != "best so far" and "local" in policies:
            ends[FIRST, scale.cycles] = {label: accuracy_by_seed(rows["local", label]) for label in labels}
        title = f"Accuracy {f'({name}) ' if name else ''}at the end of every cycle, %"
        cells = [(of, str(at), *(cell(seeds) for seeds in found.values())) for (of, at), found in ends.items()]
        tables.append(FindingsTable(title, ("statistics", "cycle", *labels), tuple(cells), 2))
        checks += _accuracy_checks(scale, ends, bases, name, data)
    costs = tuple(_cost_row(policy, base, rows, scale.cycles) for policy in policies for base in bases)
    what = [f"{name}{of}" for name in ("up", "down", "FLOPs") for of in (", full", ", FedPart", " share")]
    tables.append(FindingsTable("Costs of a cycle, all clients together", ("statistics", "method", *what), costs, 2))
    checks += _cost_checks(scale, rows, "average" if "average" in policies else policies[0], bases[0])
    return Findings(tuple(tables), tuple(checks), _cycle_notes(scale, comparison))


def _cycle_notes(scale: FedPartScale, comparison: Comparison) -> tuple[str, ...]:
    best = (
        "best so far: the highest of all rounds up to there, evaluated in every one, as the poster's columns, which "
        "never fall, must be; with client 0's statistics only the end can be judged",
    )
    return (
        f"a cycle is {plural(scale.cycle, 'round')}; averaged: clients' running statistics are averaged and sent; "
        "local: each client keeps its own, and their mean is used to judge the model; client 0's: the same runs at "
        "their end, judged with what client 0 has kept",
        *(best if scale.every_round else ()),
        "± is the sample standard deviation over the seeds",
        "bytes are of encoded messages, with heads and statistics, for which the uplink's check allows one point, or "
        "two with local statistics, which all come back in every round, to judge the model by; of CIFAR-10 and a cycle "
        "the poster has 4.83 for full updates and 1.35 for FedPart",
        *unfinished_note(comparison),
    )


def _cycle_ends(
    scale: FedPartScale, measure: Measure, rows: Rows, labels: Sequence[str], policies: Sequence[str]
) -> dict[tuple[str, int], Mapping[str, Seeds]]:
    return {
        (POLICIES[policy], cycle): {
            label: figures_by_seed(rows[policy, label], measure(cycle * scale.cycle)) for label in labels
        }
        for policy in policies
        for cycle in range(1, scale.cycles + 1)
    }


def _accuracy_checks(scale: FedPartScale, ends: Ends, bases: Sequence[str], measure: str, data: str) -> list[Check]:
    """As the poster has it: FedPart above full updates or, on CIFAR-10 with FedProx and MOON, below."""
    checks = []
    for statistics in (statistics for statistics, cycle in ends if cycle == scale.cycles):
        for base in bases:
            figures = dict(zip(("FedPart", "full"), POSTER.get(data, POSTER["CIFAR-10"])[base], strict=True))
            first, second = sorted(figures, key=lambda kind: -figures[kind])
            pair = [ends[statistics, scale.cycles][f"{base}, {kind}"] for kind in (first, second)]
            claim = "FedPart beats full updates" if first == "FedPart" else "full updates beat FedPart"
            name = f"{claim} ({', '.join(filter(None, (base, statistics, measure)))})"
            paper = f"{figures[first]} against {figures[second]} %" if statistics != POLICIES["average"] else ""
            checks.append(above(name, *pair, paper=paper))
    return checks


def _cost_checks(scale: FedPartScale, rows: Rows, policy: str, base: str) -> list[Check]:
    full, part = (rows[policy, f"{base}, {kind}"] for kind in ("full", "FedPart"))
    exact, slack = scale.share, 0.01 if policy == "average" else 0.02
    uplink = f"uplink is {100 * exact:.1f} % of full updates'"
    computation = "computation is at most 73.3 % of full updates'"
    return [
        counted(uplink, _shares(part, full, "bytes_up"), exact - slack, exact + slack, paper="28.0 %"),
        counted(computation, _shares(part, full, "flops"), 0, 0.733, paper="73.3 %"),
    ]


def _shares(part: ComparisonRow, full: ComparisonRow, name: str) -> dict[int, float]:
    """Seed → a cost as a share of full updates'."""
    whole = {result.seed: getattr(result, name) for result in full.sound_results}
    return {
        result.seed: getattr(result, name) / whole[result.seed] for result in part.sound_results if result.seed in whole
    }


def _cost_row(policy: str, base: str, rows: Rows, cycles: int) -> tuple[str, ...]:
    cells: list[str] = []
    full, part = (rows[policy, f"{base}, {kind}"] for kind in ("full", "FedPart"))
    for name, text in (("bytes_up", bytes_text), ("bytes_down", bytes_text), ("flops", flops_text)):
        for row in (full, part):
            mean = row.of(name)
            cells.append("–" if mean is None else text(mean.mean / cycles))
        share = stat(_shares(part, full, name).values())
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
        round_cost=lambda run: _round_cost(scale, run),
    )


def _assess_orders(scale: FedPartScale, comparison: Comparison) -> Findings:
    cycles = range(1, scale.cycles + 1)
    ends = [figures_by_label(comparison, at_round(cycle * scale.cycle)) for cycle in cycles]
    rows = [(str(c), *(cell(end[o]) for o in ORDERS)) for c, end in zip(cycles, ends, strict=True)]
    first, *others = ORDERS
    checks = [
        above(f"{first} order beats {other}", ends[-1][first], ends[-1][other], paper=paper)
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
        round_cost=lambda run: (run.config.rounds - partial * (1 - PARTIAL_COST)) / run.config.rounds,
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
        above(f"warm-up helps: {more} rather than {less}", after[more], after[less], paper=paper)
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
