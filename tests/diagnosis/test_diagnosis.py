"""Diagnosis: every rule on both sides of its threshold, what may be tried, the order of findings, planted troubles."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.results import Trained
from fedstrata.diagnosis import Diagnosis, Finding, Remedy, diagnose
from fedstrata.diagnosis.causes import CAUSES, chance_skew
from fedstrata.diagnosis.evidence import mean_by_name, rank_correlation, recent_rounds
from fedstrata.diagnosis.rules import RULES, rank_findings
from fedstrata.diagnosis.symptoms import SYMPTOMS
from fedstrata.diagnosis.thresholds import HIGH, NEVER_SERIOUS, REPORTED, SLIGHT, THRESHOLDS, Threshold
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record
from fedstrata.techniques import method

STRATA = ["stem.conv", *(f"layer{i}.0.conv{j}" for i in (1, 2, 3, 4) for j in (1, 2)), "head"]
EVEN = [[1000] * 10] * 5


def record(number: int, accuracy: float | None, loss: Any = 1.0, train_loss: Any = 1.0) -> Record:
    return Record(
        round=number,
        accuracy=accuracy,
        loss=loss,
        bytes_up=1,
        bytes_down=1,
        flops=1,
        seconds=1.0,
        clients=[0],
        active=STRATA,
        refused=[],
        train_loss=train_loss,
        examples=1,
        steps=1,
        lr=0.1,
        memory=1,
    )


def run(
    probes: Sequence[dict[str, Any]] = (),
    facts: dict[str, Any] | None = None,
    accuracies: Sequence[float | None] = (),
    summary: dict[str, Any] | None = None,
    **config: Any,
) -> SavedRun:
    """A run as its files would tell it; one line of probes a round."""
    rows = [{"round": number, **row} for number, row in enumerate(probes, start=1)]
    records = [record(number, accuracy) for number, accuracy in enumerate(accuracies, start=1)]
    return SavedRun("run", {"method": "fedavg", **config}, records, rows, facts or {}, summary or {})


def facts(**more: Any) -> dict[str, Any]:
    """Of an ordinary ResNet on even labels."""
    strata = [{"name": name, "stage": name.split(".")[0], "parameters": 10, "normalised": True} for name in STRATA]
    model = {"parameters": 100, "strata": strata, "fields": more.pop("fields", [])}
    return {"input_shape": [3, 32, 32], "classes": 10, "counts": EVEN, "buffers": True, "model": model, **more}


# One run for each rule, with the figure that its severity comes from ------------------------------------------


def skewed(value: float) -> SavedRun:
    chance = chance_skew(EVEN)
    return run(facts=facts(skew=value * (1 - chance) + chance))


def poisoned(value: float) -> SavedRun:
    return run([{"statistics": {"running": 0.5, "batch": 0.5 + value, "spread": {"stem.conv": 0.4}}}], facts())


def deep(value: float) -> SavedRun:
    seen = [
        {"layer": name, "field": [n, n], "input": [100, 100]} for name, n in zip("ab", (3, 100 * value), strict=True)
    ]
    return run(facts=facts(fields=seen))


def stuck(value: float) -> SavedRun:
    return run(facts=facts(), accuracies=[0.1, 0.1, 0.1 + 0.9 * value])


def broken(value: float) -> SavedRun:
    return run(summary={"diverged": "training diverged in round 3: the test loss is not finite" if value else None})


def exploded(value: float) -> SavedRun:
    return replace(run(facts=facts()), records=losing([2.0, value * math.log(10)]))


def losing(test: Sequence[Any], train: Sequence[Any] | None = None) -> list[Record]:
    """Rounds with these losses; as many in training, where nothing is said of them."""
    pairs = zip(test, test if train is None else train, strict=True)
    return [record(number, None, *pair) for number, pair in enumerate(pairs, start=1)]


def opposed(value: float) -> SavedRun:
    return run([{"cosine": dict.fromkeys(STRATA, value)}])


def mismatched(value: float) -> SavedRun:
    return run(
        [{"gradnorm": {"alone": {n: [1.0, 9.0] for n in STRATA}, "averaged": {n: [value, 9.0] for n in STRATA}}}]
    )


def unlike(value: float) -> SavedRun:
    return run([{"cka": {"mean": {"stem": 0.99, "layer4": 1 - value}}}])


def forgetful(value: float) -> SavedRun:
    return run([{"calibration": {"before": [], "after": [], "held": 0.9, "missing": 0.2, "forgetting": value}}])


def drifting(value: float) -> SavedRun:
    return run([{"drift": {"held": {"layer1": 0.1}, "missing": {"stem": 0.0, "layer1": -value}}}])


def accumulated(value: float) -> SavedRun:
    """Of many orders of the strata, the one whose rank correlation is nearest."""
    rng, falling = random.Random(0), [float(2**n) for n in range(10, 0, -1)]
    orders = [falling, falling[::-1]]
    for _ in range(2000):
        orders.append(orders[0][:])
        one = rng.randrange(10)
        orders[-1].insert(rng.randrange(10), orders[-1].pop(one))
    best = min(orders, key=lambda order: abs(rank_correlation(range(10), order) + value))
    return run([{"divergence": dict(zip(STRATA, best, strict=True))}], facts())


def parted(value: float) -> SavedRun:
    return run([{"divergence": {**dict.fromkeys(STRATA, 0.1), "stem.conv": 0.1 * value}}], facts())


def inexact(value: float) -> SavedRun:
    return run([{"aggregation": dict.fromkeys(STRATA, value)}], facts(adapters=True))


CROWD = list(range(8))


def card(mean: float = 0.0, std: float = 1.0, **more: float) -> dict[str, Any]:
    """Of a client whose inputs have one channel."""
    shares = {"missing": 0.0, "constant": 0.0, "duplicates": 0.0}
    return {"mean": [mean], "std": [std], "min": -3.0, "max": 3.0, **shares, **more}


def odd(ordinary: Any, other: Any, client: int = 3) -> list[Any]:
    """A column of eight clients, one of which is another's."""
    return [other if one == client else ordinary for one in CROWD]


def visits(**whole: Any) -> dict[str, Any]:
    """A row of the probe `visits` of eight clients that are all alike, but for what is given."""
    found = {"norm": [1.0] * 8, "cosine": [0.5] * 8, "nearest": [0.6] * 8} | whole
    told = {name: found.pop(name, [1.0] * 8) for name in ("loss", "examples", "steps", "statistics")}
    table = {"norm": {"head": found["norm"]}, "cosine": {"head": found["cosine"]}, "whole": found, **told}
    return {"clients": CROWD, "visits": table}


def exchanged(**columns: Any) -> dict[str, Any]:
    """A row of the probe `exchange` of eight clients that are all alike, but for what is given."""
    usual = {"own": [0.2] * 8, "expected": [0.2] * 8, "own_after": [0.1] * 8, "shared_after": [0.1] * 8}
    usual |= {"accuracy": [0.9] * 8, "consistent": [0.9] * 8}
    return {"clients": CROWD, "exchange": {**usual, **columns}}


def unlike_inputs(value: float) -> SavedRun:
    """The spread that counts at least is 0.15 deviations."""
    return run(facts=facts(cards=odd(card(), card(mean=0.15 * value))))


def refusing(value: float) -> SavedRun:
    refusal = [{"client": 3, "why": "it holds NaN or infinite numbers"}]
    records = [
        replace(record(number, None), clients=CROWD, refused=refusal if number <= 1000 * value else [])
        for number in range(1, 1001)
    ]
    return replace(run(), records=records)


def hostile(value: float) -> SavedRun:
    """The spread of logarithms that counts at least is 0.25."""
    return run([visits(norm=odd(1.0, math.exp(0.25 * value)))], facts())


def mislabelled(value: float) -> SavedRun:
    return run([exchanged(own=odd(0.2, 0.2 + value * math.log(10)))], facts())


def unlearnable(value: float) -> SavedRun:
    return run([visits(loss=odd(0.2, 0.2 + value * math.log(10)))], facts())


def probable(value: float) -> SavedRun:
    return run(facts=facts(probabilities=bool(value)))


def unbalanced(value: float) -> SavedRun:
    counts = [round(10_000 * (0.1 + value if label == 0 else (0.9 - value) / 9)) for label in range(10)]
    return run(facts=facts(counts=[counts], test_counts=[36] * 10, guess=0.1))


def by_depth(first: float, last: float) -> SavedRun:
    gradient = {name: first if place < 3 else last for place, name in enumerate(STRATA)}
    return run([{"depth": {"gradient": gradient, "dead": {}}}], facts())


def dead(value: float) -> SavedRun:
    return run([{"depth": {"gradient": {}, "dead": {"stem.conv": value, "head": 0.0}}}], facts())


def leaping(value: float) -> SavedRun:
    return run([{"rates": {"lr": 0.1, "before": 1.0, "after": {"0.1": 0.9, "1": 0.9 + value, "10": 3.0}}}])


def creeping(value: float) -> SavedRun:
    return run([{"rates": {"lr": 0.1, "before": 1.0, "after": {"0.1": 1.0, "1": 1 - 0.5 / value, "10": 0.5}}}])


def sparse(value: float) -> SavedRun:
    return run(facts=facts(examples=[value] * 5), accuracies=[0.3, 0.3])


def swinging(value: float) -> SavedRun:
    return run(facts=facts(clients=10), accuracies=[0.3, 0.3 + value] * 5)


def lonely(value: float) -> SavedRun:
    """Of a thousand clients so many train everything, the others the head alone."""
    saved = run(facts=facts(), accuracies=[0.3, 0.3])
    few = round(1000 * value)
    some = Trained(strata=STRATA, clients=list(range(few)))
    rest = Trained(strata=STRATA[-1:], clients=list(range(few, 1000)))
    trained = {"trained": [some, rest], "active": STRATA, "clients": list(range(1000))}
    return replace(saved, records=[replace(one, **trained) for one in saved.records])


def rising(value: float) -> SavedRun:
    return run(facts=facts(), accuracies=[0.1, 0.1, 0.1, 0.1, 0.1 + 0.9 * value, 0.1 + 0.9 * value])


def early(value: float) -> SavedRun:
    """One round, in which a hundred clients take 30 times the value of steps in the mean, of 32 examples each."""
    steps = max(round(3000 * value), 100)
    examples = [32 * (steps // 100 + (client < steps % 100)) for client in range(100)]
    return run(facts=facts(examples=examples), accuracies=[0.15])


PLANTED: dict[str, Callable[[float], SavedRun]] = {
    "broken-inputs": unlike_inputs,
    "refused-updates": refusing,
    "hostile-updates": hostile,
    "broken-labels": mislabelled,
    "broken-data": unlearnable,
    "probabilities": probable,
    "class-imbalance": unbalanced,
    "vanishing-gradients": lambda value: by_depth(1 / value, 1.0),
    "exploding-gradients": lambda value: by_depth(value, 1.0),
    "rate-too-large": leaping,
    "rate-too-small": creeping,
    "dead-units": dead,
    "rarely-trained": lonely,
    "few-examples": sparse,
    "participation-noise": swinging,
    "unfinished": rising,
    "too-early": early,
    "label-skew": skewed,
    "running-statistics": poisoned,
    "receptive-field": deep,
    "no-learning": stuck,
    "diverged": broken,
    "exploded-loss": exploded,
    "opposed-updates": opposed,
    "layer-mismatch": mismatched,
    "unlike-features": unlike,
    "forgetting": forgetful,
    "neuron-drift": drifting,
    "accumulation": accumulated,
    "diverging-strata": parted,
    "inexact-adapters": inexact,
}


def found(saved: SavedRun) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(saved).findings}


def test_every_rule_has_a_threshold_and_a_run_here() -> None:
    assert [rule.name for rule in RULES] == [*dict.fromkeys(rule.name for rule in RULES)]
    assert {rule.name for rule in RULES} == THRESHOLDS.keys() == PLANTED.keys()
    names = [rule.name for rule in RULES]
    for place, cause in enumerate(CAUSES):  # nothing explains itself by a detour
        assert cause.explains <= set(names[place + 1 :]), cause.name
        assert cause.backed_by <= cause.explains


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_is_silent_at_the_healthy_end_and_sure_at_the_other(name: str) -> None:
    threshold = THRESHOLDS[name]
    assert (name in diagnose(PLANTED[name](threshold.none)).looked) == (name != "diverged")
    assert name not in found(PLANTED[name](threshold.none))
    sure = found(PLANTED[name](threshold.full))[name]
    assert sure.severity == pytest.approx(SLIGHT if name in NEVER_SERIOUS else 1, abs=0.01)
    assert any(character.isdigit() for character in sure.sentence)
    assert sure.sentence.endswith(".")
    assert sure.sentence[0].isupper()
    least = 1 / 30 if name == "too-early" else 1e-6  # a client takes one step at least
    assert next(iter(sure.figure.values())) == pytest.approx(threshold.full, rel=0.01, abs=least)


@pytest.mark.parametrize("name", sorted(PLANTED.keys() - {"diverged", "accumulation", "probabilities"}))
def test_a_rule_begins_where_the_table_says(name: str) -> None:
    """A little below the reported severity nothing is said, a little above it is."""
    threshold = THRESHOLDS[name]

    def at(severity: float) -> float:
        if threshold.ratio:
            return float(threshold.none * (threshold.full / threshold.none) ** severity)
        return threshold.none + severity * (threshold.full - threshold.none)

    assert name not in found(PLANTED[name](at(REPORTED - 0.02)))
    assert found(PLANTED[name](at(REPORTED + 0.02)))[name].severity == pytest.approx(REPORTED + 0.02, abs=0.01)
    assert found(PLANTED[name](at(0.5)))[name].severity == pytest.approx(0.5, abs=0.01)


def test_severity_is_a_straight_line_between_the_two_ends() -> None:
    assert [Threshold(1, 3, "").severity(v) for v in (0, 1, 1.5, 2, 3, 9)] == [0, 0, 0.25, 0.5, 1, 1]
    assert [Threshold(0.1, -0.1, "").severity(v) for v in (0.2, 0.1, 0, -0.1, -1)] == [0, 0, 0.5, 1, 1]
    assert [Threshold(2, 32, "", ratio=True).severity(v) for v in (-1, 2, 8, 32)] == [0, 0, 0.5, 1]


# Single rules -------------------------------------------------------------------------------------------------


def test_chance_skew_is_what_dealing_at_random_gives() -> None:
    rng = np.random.default_rng(0)
    shares = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05])
    drawn = rng.multinomial(60, shares, size=4000)
    expected = np.abs(drawn / 60 - shares).sum(1).mean() / 2
    assert chance_skew(drawn.tolist()) == pytest.approx(expected, rel=0.03)
    assert chance_skew([[0, 0]]) == 0


def test_label_skew_of_small_clients_is_not_taken_for_skew() -> None:
    """Thirty examples of ten classes each are dealt out unevenly by chance alone."""
    rng = np.random.default_rng(1)
    counts = rng.multinomial(30, [0.1] * 10, size=50)
    skew = np.abs(counts / 30 - counts.sum(0) / counts.sum()).sum(1).mean() / 2
    assert skew > 0.18
    saved = run(facts=facts(counts=counts.tolist(), skew=float(skew)))
    assert "label-skew" not in found(saved)


def test_label_skew_tells_how_many_classes_a_client_lacks() -> None:
    counts = [[50 if c in (k, k + 1) else 0 for c in range(10)] for k in range(0, 10, 2)]
    row = {"calibration": {"forgetting": 0.31}, "cosine": {"head": -0.1}}
    finding = found(run([row], facts(counts=counts, skew=0.8)))["label-skew"]
    assert finding.figure["classes_lacking"] == 8
    assert "lacks 8.0 of 10 classes" in finding.sentence
    assert "costs 31.0 points" in finding.sentence


def test_a_cause_that_is_only_a_fact_is_left_out_where_its_symptoms_were_looked_for_in_vain() -> None:
    calm, torn = {"cosine": {"head": 0.5}}, {"cosine": {"head": -0.1}}
    for name in ("label-skew", "receptive-field"):
        alone = PLANTED[name](THRESHOLDS[name].full)
        assert name in found(alone)
        assert name not in found(replace(alone, probes=[{"round": 1, **calm}]))
        assert name in found(replace(alone, probes=[{"round": 1, **torn}]))


def test_rounds_before_anything_can_have_been_learned_do_not_count() -> None:
    """Two steps per round: after fourteen rounds running statistics still show what they began with."""
    rows = [{"statistics": {"running": 0.1, "batch": 0.9}}] * 15
    for rounds, judged in ((14, False), (15, True)):
        diagnosis = diagnose(run(rows[:rounds], facts(), [0.1] * rounds, steps=2))
        assert ("running-statistics" in diagnosis.looked) == ("no-learning" in diagnosis.looked) == judged
        assert ("Running statistics were not judged" in str(diagnosis)) != judged
    few = facts(counts=[[3] * 10] * 4)
    assert "running-statistics" not in diagnose(run(rows[:7], few, epochs=2, batch_size=16)).looked
    assert "running-statistics" in diagnose(run(rows[:8], few, epochs=2, batch_size=16)).looked


def test_running_statistics_must_not_have_come_right_again() -> None:
    gaps = [0.9, 0.3, 0.0, 0.0]
    rows = [{"statistics": {"running": 0.0, "batch": gap}} for gap in gaps]
    assert diagnose(run(rows)).looked["running-statistics"] == pytest.approx(0)
    assert diagnose(run(rows[::-1])).looked["running-statistics"] == pytest.approx(0.4)
    assert recent_rounds(run(rows * 6), "statistics") == [row["statistics"] for row in (rows * 6)[-8:]]


def test_the_most_divergent_strata_are_named_with_the_round_since_which_they_are() -> None:
    small, large = dict.fromkeys(STRATA, 1.0), {"stem.conv": 30.0, "head": 10.0}
    rows = [{"divergence": {**small, **(large if number != 1 else {})}} for number in range(5)]
    finding = found(run(rows, facts()))["diverging-strata"]
    assert "stem.conv (30, 30 times the median), head (10, 10 times the median), since round 3" in finding.sentence
    assert finding.figure["times_median"] == 30


def test_where_clients_part_most_is_told_of_a_healthy_run_too() -> None:
    diagnosis = diagnose(parted(2))
    assert not diagnosis.findings
    assert "part most in stem.conv (0.2, 2.0 times the median)" in str(diagnosis)


def test_updates_stand_in_for_gradients_that_were_not_measured() -> None:
    row = parted(50).probes[0]["divergence"]
    assert "Clients' updates part most" in found(run([{"proxy": row}], facts()))["diverging-strata"].sentence


def test_few_strata_and_slight_differences_are_no_accumulation() -> None:
    few = dict(zip(STRATA[:5], (5.0, 4.0, 3.0, 2.0, 1.0), strict=True))
    slight = {name: 1 - place / 1000 for place, name in enumerate(STRATA)}
    assert "accumulation" not in diagnose(run([{"divergence": few}], facts())).looked
    assert "accumulation" not in found(run([{"divergence": slight}], facts()))


def test_rank_correlation_is_numpys_of_the_ranks() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.permutation(12), rng.permutation(12)
    assert rank_correlation(list(left), list(right)) == pytest.approx(np.corrcoef(left, right)[0, 1])
    assert rank_correlation([1, 2, 3, 4], [5, 5, 9, 9]) == pytest.approx(
        np.corrcoef([0, 1, 2, 3], [0.5, 0.5, 2.5, 2.5])[0, 1]
    )
    assert rank_correlation([1, 2], [3, 3]) == 0


def test_ranks_of_a_long_run_take_no_longer_than_sorting() -> None:
    """A run may have 100,000 rounds, and to look for each among all others would take an hour."""
    compared = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < float(other)

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return float(self) == other

        __hash__ = float.__hash__

    values = [Counted(value) for value in np.random.default_rng(0).normal(size=2000)]
    rank_correlation(range(2000), values)
    assert 0 < compared < 2000 * 50


def test_a_mismatch_is_said_to_be_against_the_larger_one() -> None:
    told = found(mismatched(20))["layer-mismatch"].sentence
    assert "20 times what it is, or was in the first measured round, for a client that goes on alone" in told


def test_stages_are_told_in_the_order_of_the_rows() -> None:
    """Also where the first row lacks one; the head puts out no features, and no stage is told twice."""

    def said(*means: dict[str, float]) -> str:
        return found(run([{"cka": {"mean": mean}} for mean in means]))["unlike-features"].sentence.partition(
            "examples "
        )[2]

    late = {"stem": 0.99, "layer1": 0.9, "layer2": 0.3}
    assert said({"layer1": 0.9, "layer2": 0.3}, late) == (
        "their features after layer2 have a CKA of 0.30, and their features after stem one of 0.99."
    )
    assert said({"layer1": 0.3, "head": 0.5}) == "their features after layer1 have a CKA of 0.30."
    assert said({"stem": 0.9, "head": 0.5}) == (
        "their outputs have a CKA of 0.50, and their features after stem one of 0.90."
    )
    assert list(mean_by_name([{"a": 1, "d": 1}, {"a": 1, "b": 1, "d": 1}, {"b": 1, "c": 1, "d": 1}])) == list("abcd")


def test_opposition_is_told_in_the_median_over_the_strata() -> None:
    assert "is -0.10 in the median over the strata" in found(opposed(-0.1))["opposed-updates"].sentence


def test_gradients_that_have_all_but_vanished_do_not_spike() -> None:
    """Converged: ten times larger after averaging, but nothing against the beginning."""
    rows = [
        {"gradnorm": {"alone": {"head": [2.0]}, "averaged": {"head": [2.0]}}},
        *[{"gradnorm": {"alone": {"head": [0.01]}, "averaged": {"head": [0.1]}}}] * 3,
    ]
    assert diagnose(run(rows)).looked["layer-mismatch"] == pytest.approx(0.05)


def test_a_receptive_field_is_told_from_the_layer_on_that_exceeds_the_image() -> None:
    sides = {"stem.conv": 3, "layer1.0.conv1": 9, "layer2.0.conv1": 40, "layer3.0.conv1": 120}
    fields = [{"layer": name, "field": [n, n], "input": [8, 8]} for name, n in sides.items()]
    finding = found(run(facts=facts(fields=fields), model="resnet26(width=2)"))["receptive-field"]
    assert "at width 2: from convolution 2 of 4 on (layer1.0.conv1, 9×9)" in finding.sentence
    assert "exceed the 8×8 image, and layer3.0.conv1 sees 120×120, 15 times its side" in finding.sentence


def test_rows_without_numbers_are_no_evidence() -> None:
    empty: dict[str, Any] = {
        "divergence": {},
        "cosine": {},
        "cka": {"mean": {"stem": None}},
        "gradnorm": {"alone": {}, "averaged": {}},
        "drift": {"held": {}, "missing": {}},
        "calibration": {"before": [None], "after": [None]},
        "statistics": {"running": 0.5},
    }
    assert diagnose(run([empty], {"model": {}})).looked == {}
    assert diagnose(run()).verdict == "There is nothing to judge this run by."
    assert not diagnose(run()).healthy


# What cannot be read ------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (None, "x", True, -1.0, float("nan"), float("inf"), 1e300, 10**400, [], {}, [None], {"a": None})

UNKNOWN = "of_a_later_version"
"""A method to which no remedy is added, which takes most of the time."""


def whole() -> dict[str, Any]:
    """A row with everything."""
    rows = (poisoned(0.3), opposed(-0.2), mismatched(20), unlike(0.9), forgetful(0.6), drifting(0.7), accumulated(1.0))
    rows += (hostile(9), mislabelled(0.9), leaping(0.5), by_depth(1e-6, 1.0))
    parts = {name: value for saved in rows for name, value in saved.probes[0].items()}
    return {**parts, "clients": CROWD, "seconds": {"cka": 0.1}, "missed": {"proxy": "why"}}


def places(held: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all that is in something, the thing itself left out; of ten strata the first two will do."""
    inner = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
    return [
        at for key, value in list(inner)[: 99 if not path else 2] for at in ((*path, key), *places(value, (*path, key)))
    ]


def mangled(held: Any, path: tuple[Any, ...], *odd: Any) -> Any:
    """A copy with another value at a place, or without it."""
    copy = json.loads(json.dumps(held))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if odd:
        inner[path[-1]] = odd[0]
    else:
        del inner[path[-1]]
    return copy


@pytest.mark.slow
def test_no_row_whatever_is_in_it_ends_a_diagnosis() -> None:
    """One value at a time is missing or odd, in rows around a sound one, or alone."""
    sound, known = {**whole(), "round": 1}, {**facts(skew=0.8), **deep(30).facts}
    for path in places(sound):
        for bad in (mangled(sound, path), *(mangled(sound, path, odd) for odd in ODD)):
            for rows in ([bad], [bad, sound, bad]):
                saved = replace(run(facts=known, method=UNKNOWN), probes=rows)
                json.dumps(diagnose(saved).as_dict(), allow_nan=False)
    for odd in ODD:
        assert diagnose(replace(run(), probes=[odd])).looked == {}


def test_no_facts_or_losses_whatever_is_in_them_end_a_diagnosis() -> None:
    row, known = whole(), {**facts(skew=0.8), **deep(30).facts}
    for path in places(known):
        for bad in (mangled(known, path), *(mangled(known, path, odd) for odd in ODD)):
            json.dumps(diagnose(run([row], bad, [0.1], method=UNKNOWN)).as_dict(), allow_nan=False)
    for odd in ODD:
        records = [*losing([odd, 1.0, odd]), record(4, odd)]
        json.dumps(diagnose(replace(run(facts=known), records=records)).as_dict(), allow_nan=False)


def test_a_null_row_of_statistics_leaves_the_others() -> None:
    null = {"statistics": {"running": None, "batch": 0.5}}
    rows = [null, *poisoned(0.3).probes, null]
    assert diagnose(run(rows, facts())).looked["running-statistics"] == pytest.approx(0.3)


def test_rounds_that_were_tried_after_the_end_count_on() -> None:
    far = {**dict.fromkeys(STRATA, 1.0), "stem.conv": 30.0}
    rows = [{"round": number, "tried": True, "divergence": far} for number in (3, 4, 5)]
    saved = replace(run(facts=facts(), accuracies=[0.5, 0.6]), probes=rows)
    assert "since round 3" in found(saved)["diverging-strata"].sentence


# Explosions ---------------------------------------------------------------------------------------------------


def test_an_exploded_loss_comes_first_and_explains_the_rest() -> None:
    row = {name: value for name, value in whole().items() if name not in ("visits", "exchange")}
    saved = run([row], {**facts(skew=0.8), **deep(30).facts}, lr=1000.0)
    first, *rest = diagnose(replace(saved, records=losing([2.0, 30.0]))).findings
    assert first.name == "exploded-loss"
    assert first.severity < min(rest[0].severity, 0.8)
    assert first.sentence == "The loss has exploded: the test loss is 30, 13 times that of guessing; at first it was 2."
    assert [one.options for one in first.remedies] == ["--lr 0.1", "--clip 1.0"]
    unexplained = {one.name for one in rest if "exploded-loss" not in one.explained_by}
    assert unexplained == {"label-skew", "receptive-field"}


def test_the_loss_may_have_exploded_in_the_first_round_already() -> None:
    lost = replace(run(facts=facts()), records=losing([1e10, 1e19, 7030.0]))
    assert found(lost)["exploded-loss"].severity == 1
    assert "more than 1000 times that of guessing" in found(lost)["exploded-loss"].sentence
    endless = losing([None, None], [2.0, float("inf")])
    assert "training loss is no longer finite" in found(replace(run(), records=endless))["exploded-loss"].sentence


def test_a_loss_that_is_large_in_the_test_alone_or_from_the_start_has_not_exploded() -> None:
    for losses in (losing([2.0, 1e3], [2.0, 0.1]), losing([20.0, 22.0]), losing([1.0, 5.0]), losing([None], [None])):
        assert "exploded-loss" not in found(replace(run(facts=facts()), records=losses))


def test_figures_of_what_has_exploded_are_not_told_to_the_last_digit() -> None:
    wild = run([{"drift": {"held": {"stem": 2e10}, "missing": {"stem": -2e10}}, **mismatched(1e12).probes[0]}])
    told = [one.sentence for one in found(wild).values()]
    assert any("lose more than 1000 % of" in one and "change by more than 1000 %." in one for one in told)
    assert any("norm is more than 1000 times what" in one for one in told)


def test_a_clip_that_is_there_is_made_smaller() -> None:
    for clip, offered in ((None, 1.0), (50.0, 1.0), (1.0, 0.1), (0.5, 0.05)):
        saved = replace(exploded(40), config={"method": "fedavg", "lr": 0.5, "clip": clip})
        assert [one.settings for one in remedies(saved)["exploded-loss"]] == [{"lr": 0.05}, {"clip": offered}]


def test_a_run_that_diverged_without_probes_is_told_so_and_nothing_else() -> None:
    """Skew that is in the facts comes behind it."""
    diagnosis = diagnose(replace(broken(1.0), facts=skewed(0.9).facts))
    assert [one.name for one in diagnosis.findings] == ["diverged", "label-skew"]
    assert diagnosis.verdict == "First of all: diverged."
    assert [one.options for one in diagnosis.findings[0].remedies] == ["--lr 0.01", "--clip 1.0"]
    assert not diagnosis.unmeasured
    assert "easured" not in str(diagnosis)


# The order of findings ----------------------------------------------------------------------------------------


def finding(name: str, severity: float, *causes: str) -> Finding:
    return Finding(name, severity, "", {}, (), causes)


def test_symptoms_rank_below_the_causes_that_explain_them() -> None:
    mixed = [
        finding("forgetting", 1.0, "label-skew"),
        finding("layer-mismatch", 0.7),
        finding("label-skew", 0.6),
        finding("opposed-updates", 0.3, "label-skew"),
        finding("running-statistics", 0.4),
    ]
    names = [one.name for one in rank_findings(mixed)]
    assert names == ["layer-mismatch", "label-skew", "forgetting", "running-statistics", "opposed-updates"]


def test_the_verdict_names_what_comes_first() -> None:
    """A slight cause above the serious symptom that it explains."""
    rows = [*forgetful(0.5).probes]
    diagnosis = diagnose(run(rows, skewed(0.3).facts))
    assert [one.severity >= HIGH for one in diagnosis.findings] == [False, True]
    assert diagnosis.verdict == "First of all: label skew."


def test_findings_say_what_explains_them() -> None:
    rows = [{**forgetful(0.9).probes[0], **opposed(-0.1).probes[0]}]
    diagnosis = diagnose(run(rows, skewed(0.5).facts))
    assert [one.name for one in diagnosis.findings] == ["label-skew", "opposed-updates", "forgetting"]
    assert [one.explained_by for one in diagnosis.findings] == [(), ("label-skew",), ("label-skew",)]
    assert "Forgetting (severity 1.00, explained by label skew)." in str(diagnosis)


# Remedies -----------------------------------------------------------------------------------------------------

METHODS = (
    "fedavg",
    "scaffold",
    "feddyn(alpha=0.01) + fedlc",
    "fedavg(reduce='median')",
    "fedavg(buffers='local') + fedpart",
    "fedadam(lr=0.01) + fedimpro(split='layer1') + moon",
    "fedspeed",
    "ccvr + fedrs + fednlr",
    "groupavg",
    "centralised",
    "local",
)
MODELS: tuple[dict[str, Any], ...] = (
    {"model": "resnet101(width=8, stem='7x7', maxpool=True, residual=False, plan='reversed')", "dataset": "cifar-10"},
    {"model": "cnn8(width=2)", "augment": "rrc"},
    {"model": "mlp", "epochs": 4},
    {"model": "resnet26(width=2)", "archs": "resnet10; resnet26"},
    {"rounds": 10},
)


def remedies(saved: SavedRun) -> dict[str, tuple[Remedy, ...]]:
    return {one.name: one.remedies for one in diagnose(saved).findings}


@pytest.mark.parametrize("own", METHODS)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: str(m.get("model")).partition("(")[0])
def test_every_remedy_can_be_run(own: str, model: dict[str, Any]) -> None:
    """Of every rule: the method parses and still has all that it had, and a run's configuration accepts the rest."""
    mine = {technique.name for technique in method(own).techniques}
    for name, plant in PLANTED.items():
        saved = plant(THRESHOLDS[name].full)
        known = {"method": own, **model}
        for remedy in remedies(replace(saved, config=known, facts={**facts(), **saved.facts})).get(name, ()):
            assert remedy.why
            assert remedy.paper or not remedy.options or "without" in remedy.settings  # that takes no paper
            assert remedy.options or "model" not in known or not remedy.paper
            changed = {**({} if remedy.method is None else {"method": remedy.method}), **remedy.settings}
            validate_settings(RunConfig, {**{k: v for k, v in known.items() if k != "dataset"}, **changed})
            assert all(known.get(key) != value for key, value in changed.items())
            if remedy.method is not None:
                assert mine <= {technique.name for technique in method(remedy.method).techniques}
                assert str(method(remedy.method)) == remedy.method


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_every_finding_has_a_remedy_for_a_plain_run(name: str) -> None:
    saved = PLANTED[name](THRESHOLDS[name].full)
    plain = {"method": "fedavg", **MODELS[0]}
    assert remedies(replace(saved, config=plain, facts={**facts(), **saved.facts}))[name]


def test_remedies_keep_the_users_own_method() -> None:
    offered = [one.method for one in remedies(replace(skewed(0.8), config={"method": "scaffold"}))["label-skew"]]
    assert offered == [f"scaffold + {name}" for name in ("feddyn", "ccvr", "fednlr", "fedlc", "fedrs", "moon")]


def test_combinations_that_refuse_each_other_are_not_offered() -> None:
    offered = remedies(replace(skewed(0.8), config={"method": "fedlc + fedadam"}))["label-skew"]
    assert not any(name in str(one.method) for one in offered for name in ("fedrs", "feddyn"))
    assert offered
    assert not remedies(replace(skewed(0.8), config={"method": "local"}))["label-skew"]
    assert "label-skew" not in found(replace(skewed(0.8), config={"method": "centralised"}))
    assert not remedies(replace(skewed(0.8), config={"method": "of_a_later_version"}))["label-skew"]


def test_what_needs_classes_is_not_offered_without() -> None:
    for plant, name in ((skewed, "label-skew"), (forgetful, "forgetting"), (unlike, "unlike-features")):
        saved = replace(plant(0.8), config={"model": "resnet8", "method": "fedavg"})
        offered = {
            known: {str(one.method) for one in remedies(replace(saved, facts={**facts(), **saved.facts, **more}))[name]}
            for known, more in {"yes": {"has_classes": True}, "older": {}, "no": {"has_classes": False}}.items()
        }
        assert offered["yes"] == offered["older"] > offered["no"]
        assert all(not one.needs_classes for text in offered["no"] for one in method(text).techniques)


@pytest.mark.parametrize(
    ("metric", "guess", "scores", "says"),
    [
        ("accuracy", 0.25, (0.3, 0.28), "hardly learned: 28.0 % after 2 rounds, where guessing gives 25.0 %"),
        ("auroc", 0.5, (0.4, 0.51), "AUROC 51.0 % after 2 rounds, where guessing gives AUROC 50.0 %"),
        ("rmse", 77.0, (90.0, 76.1), "RMSE 76.1 after 2 rounds, where guessing gives RMSE 77"),
        ("perplexity", 21.5, (30.0, 20.9), "perplexity 20.9 after 2 rounds, where guessing gives perplexity 21.5"),
        ("r2", 0.0, (-3.0, 0.02), "R² 0.02 after 2 rounds, where guessing gives R² 0"),
        ("auroc", 0.5, (0.6, 0.8), None),
        ("rmse", 77.0, (70.0, 54.0), None),
        ("perplexity", 21.5, (11.0, 9.0), None),
        ("own", 0.5, (0.1, 0.1), None),
    ],
)
def test_learning_is_judged_by_the_tasks_own_metric(
    metric: str, guess: float, scores: tuple[float, ...], says: str | None
) -> None:
    """Whatever its direction, and against what guessing scores on the test set."""
    records = [
        replace(record(number, None), primary=metric, metrics={metric: score})
        for number, score in enumerate(scores, start=1)
    ]
    saved = replace(run(facts=facts(guess=guess, counts=[])), records=records, config={"steps": 40})
    finding = found(saved).get("no-learning")
    assert (None if finding is None else says in finding.sentence) == (None if says is None else True)


@pytest.mark.parametrize(
    ("metric", "running", "batch", "lost"),
    [
        ("accuracy", 0.5, 0.8, 0.3),
        ("rmse", 4.0, 0.5, 0.875),
        ("rmse", 0.5, 4.0, -0.875),
        ("perplexity", 21.0, 11.0, 0.5),
        ("r2", -3.0, 0.6, 0.9),
        ("own", 0.5, 0.8, None),
    ],
)
def test_running_statistics_are_judged_by_the_tasks_own_metric(
    metric: str, running: float, batch: float, lost: float | None
) -> None:
    """Of a share, by the difference; else by the part of the way to the best there is."""
    saved = replace(
        run([{"statistics": {"running": running, "batch": batch}}], facts()),
        records=[replace(record(1, None), primary=metric, metrics={metric: running})],
        config={"method": "fedavg", "steps": 40},
    )
    looked = diagnose(saved).looked.get("running-statistics")
    assert looked == (None if lost is None else pytest.approx(lost, abs=1e-3))
    finding = found(saved).get("running-statistics")
    assert (finding is not None) == (lost is not None and lost > 0)
    if finding is not None and metric == "rmse":
        assert "it reaches RMSE 4 with them and RMSE 0.5 with each batch's own" in finding.sentence
        assert "evaluation too: RMSE 0.5 by this very probe" in finding.remedies[0].why


def test_a_metric_that_was_not_defined_is_no_early_measurement() -> None:
    saved = replace(
        run([{"statistics": {"running": None, "batch": None}}], facts()), config={"method": "fedavg", "steps": 40}
    )
    assert any("the run's metric was undefined" in note for note in diagnose(saved).notes)
    own = replace(record(1, None), primary="own", metrics={"own": 0.5})
    saved = replace(saved, probes=[{"round": 1, "statistics": {"running": 0.4, "batch": 0.5}}], records=[own])
    assert any("how good 'own' can be is not known" in note for note in diagnose(saved).notes)


@pytest.mark.parametrize(("last", "times"), [(120.0, 60.0), (2.0, 1.0), (0.5, 0.25)])
def test_a_loss_without_classes_explodes_against_the_first(last: float, times: float) -> None:
    saved = replace(run(facts={}), records=losing([2.0, last]))
    assert diagnose(saved).looked["exploded-loss"] == times
    assert ("exploded-loss" in found(saved)) == (times > 10)


def test_fedimpro_is_cut_at_the_first_stage_above_the_stem() -> None:
    offered = remedies(replace(skewed(0.8), config={"model": "resnet8", "method": "fedavg"}))["label-skew"]
    assert "fedimpro(split='layer1')" in [one.method for one in offered]


def test_inco_is_for_clients_of_different_depth() -> None:
    for archs, wanted in (("resnet10; resnet18", True), (None, False)):
        config = {"model": "resnet18", "method": "fedavg", **({"archs": archs} if archs else {})}
        offered = remedies(replace(unlike(0.9), config=config, facts=facts()))["unlike-features"]
        assert ("inco" in [one.method for one in offered]) == wanted


def test_buffers_are_changed_where_the_method_names_them_too() -> None:
    plain, named = (
        remedies(replace(poisoned(0.5), config={"method": text}))["running-statistics"][0]
        for text in ("scaffold", "fedavg(buffers='local') + scaffold")
    )
    assert (plain.method, plain.settings) == (None, {"buffers": "drop"})
    assert (named.method, named.settings) == ("fedavg(buffers='drop') + scaffold", {"buffers": "drop"})
    assert plain.options == "--buffers drop"


def test_a_network_that_is_too_deep_is_replaced_by_one_whose_fields_fit() -> None:
    saved = replace(deep(20), config={"model": "resnet101(width=4, stem='7x7', maxpool=True)", "method": "fedavg"})
    offered = [one.settings.get("model") for one in remedies(saved)["receptive-field"]]
    assert offered == [
        "resnet101(width=4, stem='3x3', maxpool=False)",
        "resnet18(width=4, stem='3x3', maxpool=False)",
        "resnet101(width=8, stem='7x7', maxpool=True)",
    ]
    plain = replace(deep(20), config={"model": "cnn8", "method": "fedavg"})
    assert "cnn4" in [one.settings.get("model") for one in remedies(plain)["receptive-field"]]


def test_a_model_without_a_name_gets_advice_in_words() -> None:
    offered = remedies(deep(20))["receptive-field"]
    assert all(one.options == "" and one.why for one in offered)
    assert len(offered) == 3


def test_fedpart_is_given_rounds_for_a_cycle() -> None:
    offered = remedies(replace(mismatched(20), facts=facts(), config={"method": "fedprox", "rounds": 10}))
    assert offered["layer-mismatch"][0].options == '--method "fedprox(mu=0.01) + fedpart" --rounds 25'.replace(
        "fedprox(mu=0.01)", str(method("fedprox"))
    )


# What is shown ------------------------------------------------------------------------------------------------


def sick() -> Diagnosis:
    """Everything at once."""
    rows: dict[str, Any] = {}
    for plant, value in ((poisoned, 0.3), (opposed, -0.2), (mismatched, 20), (unlike, 0.9), (forgetful, 0.6)):
        rows |= plant(value).probes[0]
    rows |= {**drifting(0.7).probes[0], **accumulated(1.0).probes[0]}
    told = {**deep(30).facts, "skew": 0.8}
    lost = run([rows], told, [0.1, 0.1, 0.1], {"diverged": "yes."}, **MODELS[0])
    return diagnose(replace(lost, records=[replace(one, loss=1e9, train_loss=1e9) for one in lost.records]))


def test_a_terminal_shows_it_in_a_hundred_columns() -> None:
    text = str(sick())
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("run (fedavg): First of all: ")
    assert "\n1. " in text
    assert "--buffers drop" in text


def test_json_has_all_of_it() -> None:
    diagnosis = sick()
    read = json.loads(json.dumps(diagnosis.as_dict(), allow_nan=False))
    assert [one["name"] for one in read["findings"]] == [one.name for one in diagnosis.findings]
    others = {"diverging-strata", "inexact-adapters"}
    assert {one.name for one in diagnosis.findings} >= {rule.name for rule in SYMPTOMS} - others
    assert {"diverged", "exploded-loss", "label-skew", "receptive-field"} <= {one.name for one in diagnosis.findings}
    assert read["findings"][0]["remedies"][0].keys() == {"method", "settings", "options", "why", "paper"}
    assert read["healthy"] is False


def test_markdown_has_every_remedy() -> None:
    diagnosis = sick()
    text = diagnosis.markdown()
    for one in diagnosis.findings:
        assert one.sentence in text
        assert all(remedy.why in text and remedy.paper in text for remedy in one.remedies)


def test_what_was_not_measured_is_said_with_the_way_to_measure_it() -> None:
    diagnosis = diagnose(run([{"cosine": {"head": 0.5}}], facts(buffers=False)))
    assert diagnosis.healthy
    assert "opposed-updates" not in diagnosis.unmeasured
    assert "running-statistics" not in diagnosis.unmeasured
    assert diagnosis.unmeasured["unlike-features"] == ("cka",)
    assert "A run with --probe all measures them." in str(diagnosis)
    assert "opposed updates 0.5" in str(diagnosis)


def test_what_could_not_be_measured_is_said_with_the_reason() -> None:
    """Of probes that were used, nobody is told to use them."""
    names = ("divergence", "proxy", "cosine", "cka", "gradnorm", "drift", "calibration", "statistics")
    names += ("visits", "exchange", "depth", "rates")
    missed = {"cka": "there is 1 model", "drift": "no"}
    row: dict[str, Any] = {"clients": [0], "seconds": dict.fromkeys(names, 0.1), "missed": missed}
    diagnosis = diagnose(run([row], facts()))
    assert not diagnosis.unmeasured
    assert "Could not be measured: unlike features (there is 1 model)." in diagnosis.notes
    assert "Could not be measured: neuron drift (no)." in diagnosis.notes
    assert any("opposed updates" in note and note.endswith("(it takes two clients).") for note in diagnosis.notes)
    assert "--probe all" not in str(diagnosis)
    del row["seconds"]["gradnorm"]
    assert diagnose(run([row], facts())).unmeasured == {"layer-mismatch": ("gradnorm",)}


def test_a_healthy_run_is_said_to_be() -> None:
    rows = [{**opposed(0.5).probes[0], **unlike(0.05).probes[0], **mismatched(0.9).probes[0]}]
    diagnosis = diagnose(run(rows, facts(skew=0.02), [0.5, 0.8, 0.9]))
    assert diagnosis.healthy
    assert diagnosis.verdict == "Nothing is wrong by the 7 figures that were looked at."
    assert diagnose(opposed(0.5)).verdict == "Nothing is wrong by the one figure that was looked at."
    slight = diagnose(opposed(0.0))
    assert slight.healthy
    assert slight.verdict == "Nothing serious: 1 slight finding."


def test_the_page_has_the_table_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    told = {row[0]: row[2:4] for row in rows if row[0] in THRESHOLDS}
    assert told == {name: [f"{one.none:g}", f"{one.full:g}"] for name, one in THRESHOLDS.items()}


# Planted troubles, in real federations ------------------------------------------------------------------------

PROBES = "divergence proxy cosine cka gradnorm drift calibration statistics"
SOUND = "resnet8(width=8, stem='3x3', maxpool=False)"


def federated(
    model: str,
    partition: str = "iid",
    change: Callable[[int, Tensor], Tensor] = lambda client, images: images,
    clients: int = 5,
    seed: int = 0,
    **settings: Any,
) -> SavedRun:
    """A short run on small digits with all probes; `change` is done to the images of a client, not to the test's."""
    data = fs.load_dataset("digits(examples=600)")
    split = data.train.split(fs.partition(data.train.labels(), partition, clients=clients, seed=seed))
    held = [examples.batch(torch.arange(len(examples))) for examples in split]
    federation = fs.Federation(
        fs.build_model(model, data.input_shape, data.classes, seed=seed),
        [(change(client, images), labels) for client, (images, labels) in enumerate(held)],
        data.test,
        seed=seed,
        **{
            "rounds": 4,
            "epochs": 2,
            "batch_size": 16,
            "probe": PROBES,
            "probe_every": 4,
            "probe_examples": 128,
            **settings,
        },
    )
    federation.fit()
    return federation.saved_run()


@pytest.mark.slow
def test_label_skew_is_found_first() -> None:
    """Two classes of ten per client, with a small network that is sound."""
    first, *rest = diagnose(federated("cnn4(width=8)", "shards(classes=2)")).findings
    assert first.name == "label-skew"
    assert first.severity > 0.75
    assert {"forgetting", "unlike-features"} <= {one.name for one in rest if "label-skew" in one.explained_by}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_neurons_drift_in_the_scenario_of_fednlr_and_not_with_even_data(seed: int) -> None:
    """Appendix A on digits: 25 hidden neurons, one class per client. With even data no class is missing."""
    told = {}
    for partition in ("shards(classes=1)", "iid"):
        saved = federated(
            "mlp(hidden=(25,))",
            partition,
            clients=10,
            seed=seed,
            rounds=25,
            epochs=1,
            steps=10,
            lr=0.1,
            probe="drift",
            probe_every=5,
        )
        told[partition] = {one.name: one for one in diagnose(saved).findings}
    assert "neuron-drift" not in told["iid"]
    found = told["shards(classes=1)"]["neuron-drift"]
    assert 0.03 < found.figure["drift"] < 0.15
    assert found.figure["held"] > 0


@pytest.mark.slow
def test_a_network_that_is_much_too_deep_is_found_first() -> None:
    """Twenty-six narrow layers behind a large stem on images of eight pixels, with even data."""
    saved = federated("resnet26(width=2, stem='7x7', maxpool=True)", rounds=3, probe_every=3, batch_size=32)
    first, *rest = diagnose(saved).findings
    assert first.name == "receptive-field"
    assert first.severity == 1
    assert "unlike-features" in {one.name for one in rest if "receptive-field" in one.explained_by}


def brighter(client: int, images: Tensor) -> Tensor:
    """Another contrast and brightness for each of five clients; the labels stay even."""
    return images * (1 + 0.8 * client) + 1.2 * client


@pytest.mark.slow
def test_poisoned_running_statistics_are_found_first() -> None:
    """Every client's camera is another; who normalises with the batch at hand would not notice."""
    first = diagnose(federated(SOUND, change=brighter)).findings[0]
    assert first.name == "running-statistics"
    assert first.severity > 0.9
    assert first.remedies[0].settings == {"buffers": "drop"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn4(width=8)", SOUND])
def test_nothing_serious_is_found_in_a_healthy_federation(model: str) -> None:
    diagnosis = diagnose(federated(model))
    assert diagnosis.healthy
    assert all(one.severity < HIGH for one in diagnosis.findings)
    assert len(diagnosis.looked) >= 7


def test_a_run_is_diagnosed_from_its_files(tmp_path: Path) -> None:
    """The same from a directory as from the federation itself."""
    out = tmp_path / "run"
    told = diagnose(federated("mlp", "shards(classes=2)", rounds=2, probe_every=1, out=out))
    assert diagnose(SavedRun.read(out)).findings == told.findings
