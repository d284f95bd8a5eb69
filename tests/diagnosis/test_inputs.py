"""Clients' inputs compared fairly: honest clients with other classes or targets are not called broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.examples import TensorExamples
from fedstrata.diagnosis import Finding, diagnose
from fedstrata.diagnosis.data_cards import odd_inputs
from fedstrata.diagnosis.input_groups import SHIFT, Inputs, read_part
from fedstrata.run import deal
from fedstrata.runs.data_cards import data_cards
from tests.diagnosis.test_diagnosis import CROWD, card, facts, odd, run

Spoil = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def dealt_facts(dataset: str, clients: int, seed: int, spoil: Spoil | None = None, **more: Any) -> dict[str, Any]:
    """Facts of a dataset dealt out as `fedstrata run` does, with nothing but what the cards and the labels say."""
    data, parts = deal(validate_settings(RunConfig, {"dataset": dataset, "clients": clients, "seed": seed, **more}))
    held = [data.train.select(part).batch(torch.arange(len(part))) for part in parts]
    held = held if spoil is None else [spoil(client, x.clone(), y.clone()) for client, (x, y) in enumerate(held)]
    found: dict[str, Any] = {"cards": data_cards([TensorExamples(x, y) for x, y in held], clients), "clients": clients}
    if data.task == "binary":
        found |= {"classes": 2, "counts": [torch.bincount(y, minlength=2).tolist() for _, y in held]}
    return found


def blamed(told: dict[str, Any]) -> tuple[int, ...]:
    finding = finding_of(told)
    return () if finding is None else finding.clients


def finding_of(told: dict[str, Any]) -> Finding | None:
    return next((one for one in diagnose(run(facts=told)).findings if one.name == "broken-inputs"), None)


@pytest.mark.parametrize(
    ("dataset", "clients", "seed"),
    [("breast-cancer", 8, seed) for seed in range(4)] + [("diabetes", 8, seed) for seed in range(5)],
)
def test_honest_clients_of_skewed_tables_are_not_blamed(dataset: str, clients: int, seed: int) -> None:
    """Three of eight hold malign tumours alone, whose columns are two deviations off: they are not broken."""
    assert blamed(dealt_facts(dataset, clients, seed)) == ()


@pytest.mark.parametrize("dataset", ["breast-cancer", "diabetes"])
@pytest.mark.parametrize(("factor", "words"), [(16.0, "divide them by"), (1 / 255, "multiply them by")])
def test_another_unit_is_found_in_skewed_tables(dataset: str, factor: float, words: str) -> None:
    told = dealt_facts(dataset, 8, 0, lambda k, x, y: (x * factor if k == 2 else x, y))
    finding = finding_of(told)
    assert finding is not None
    assert finding.clients == (2,)
    assert any(words in remedy.why for remedy in finding.remedies)


def test_wrong_labels_are_no_wrong_inputs() -> None:
    """With its answers denied, a client's inputs of either class are the other's: no mixture of both is out."""
    told = dealt_facts("breast-cancer", 8, 1, lambda k, x, y: (x, 1 - y if k == 3 else y), partition="iid")
    assert blamed(told) == ()


def test_multiplied_inputs_are_told_as_a_scale_not_as_a_shift() -> None:
    """255 times a mean of -0.9 is far below the others', too, but that is not what to put right."""
    finding = finding_of(facts(cards=odd(card(mean=-0.9), card(mean=-229.5, std=255.0))))
    assert finding is not None
    assert "vary 255 times as much as the others'" in finding.sentence
    assert "multiplied by 255" in finding.sentence
    assert "below the others'" not in finding.sentence
    assert any(remedy.why.endswith("divide them by 255") for remedy in finding.remedies)
    assert not any("others' mean" in remedy.why for remedy in finding.remedies)


def test_a_mean_of_few_examples_may_be_far_away() -> None:
    """A floor of 1.2/√n deviations: 0.15 for 64 examples, 0.38 for ten."""
    assert SHIFT.floor(64) == pytest.approx(0.15)
    assert SHIFT.floor(10) == pytest.approx(0.3795, rel=1e-3)
    for count, named in ((64, (3,)), (10, ())):
        assert blamed(facts(cards=odd(card(), {**card(mean=1.2), "count": count}))) == named


def test_the_largest_of_many_columns_counts_for_less() -> None:
    """√(z² − 2 ln 30) for the largest of thirty."""
    saved = {n: run(facts=facts(cards=[columns(n, 1.0 if k == 3 else 0.0) for k in CROWD])) for n in (1, 30)}
    scores = {n: odd_inputs(one)[3].score for n, one in saved.items()}
    assert scores[1] == pytest.approx(1 / 0.15)
    assert scores[30] == pytest.approx((scores[1] ** 2 - 6.802) ** 0.5, rel=1e-3)


def test_a_column_that_hardly_varies_anywhere_accuses_nobody() -> None:
    """The corners of pictures: five of eight clients each have one grey pixel where all others have none.

    Together they would be most clients, of whom nobody is named, and hide the one whose inputs are multiplied.
    """
    cards = []
    for client in range(8):
        std = [1.0] * 20 + [0.0] * 8
        if client < 5:
            std[20 + client] = 0.05
        cards.append({**card(), "mean": [0.0] * 28, "std": [s * (255 if client == 6 else 1) for s in std]})
    assert blamed(facts(cards=cards)) == (6,)
    assert blamed(facts(cards=cards[:6])) == ()


def columns(count: int, mean: float) -> dict[str, Any]:
    return {**card(), "mean": [mean, *[0.0] * (count - 1)], "std": [1.0] * count}


def grouped(means: Sequence[float | None]) -> dict[str, Any]:
    """A card of classes of 20 examples each, with these means; None for a class that the client lacks."""
    held = {str(k): {"count": 20, "mean": [m], "std": [1.0]} for k, m in enumerate(means) if m is not None}
    known = [m for m in means if m is not None]
    return {**card(mean=sum(known) / len(known)), "count": 20 * len(known), "groups": held}


def test_classes_are_compared_with_the_same_classes() -> None:
    """By hand: class 0 is at 0 and class 1 at 3. One at 6 is beyond both by 3, one that has class 1 alone is not."""
    cards = [*[grouped([0.0, None])] * 4, *[grouped([None, 3.0])] * 3, grouped([None, 6.0])]
    inputs = Inputs({k: read_part(c) for k, c in enumerate(cards)}, _groups(cards), {})
    scores = {client: score for client, (score, _) in inputs.judge_means(0).items()}
    assert scores == pytest.approx({**dict.fromkeys(range(7), 0.0), 7: 3 / (1.2 / 20**0.5)})


def test_even_clients_are_judged_as_a_whole_unless_their_classes_say_otherwise() -> None:
    """Everybody another camera, a little brighter each: the darkest is beyond all others, and is not out."""
    cards = [grouped([0.5 * k, 0.5 * k]) for k in CROWD]
    assert blamed({"cards": cards, "counts": [[20, 20]] * 8, "classes": 2, "clients": 8}) == ()
    mixed = odd(grouped([0.0, 0.0]), grouped([2.0, 2.0]))
    assert blamed({"cards": mixed, "counts": [[20, 20]] * 8, "classes": 2, "clients": 8}) == (3,)


def test_a_class_that_nobody_else_holds_may_be_elsewhere() -> None:
    """Where two classes are known, the third may be a deviation off, or two; not a hundred."""
    rest = [grouped([0.0, 3.0, None])] * 7
    for mean, named in ((5.0, ()), (100.0, (7,))):
        assert blamed({"cards": [*rest, grouped([None, None, mean])], "clients": 8}) == named


def _groups(cards: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {k: {name: read_part(one) for name, one in c["groups"].items()} for k, c in enumerate(cards)}


def test_cards_of_before_are_still_read() -> None:
    """They tell no classes: with even labels as ever; with others, whoever is beyond all others by far."""
    old = [
        {n: v for n, v in c.items() if n not in ("groups", "count")}
        for c in dealt_facts("breast-cancer", 8, 0)["cards"]
    ]
    counts = dealt_facts("breast-cancer", 8, 0)["counts"]
    assert blamed({"cards": old, "counts": counts, "classes": 2, "clients": 8}) == ()
    old[4] = {**old[4], "mean": [255 * m for m in old[4]["mean"]], "std": [255 * s for s in old[4]["std"]]}
    assert blamed({"cards": old, "counts": counts, "classes": 2, "clients": 8}) == (4,)
    assert blamed(facts(cards=odd(card(), card(std=255.0)))) == (3,)


def test_a_card_with_broken_groups_is_read_without_them() -> None:
    wrong: list[Any] = ["x", {"0": 5}, {"0": {"count": -1, "mean": [0.0], "std": [1.0]}}, {"0": {"mean": [1.0]}}]
    for groups in wrong:
        cards = odd({**card(), "groups": groups}, {**card(std=255.0), "groups": groups, "count": "many"})
        assert blamed(facts(cards=cards)) == (3,)


def test_a_federation_with_skewed_answers_blames_nobody() -> None:
    """As the command line runs it, from data to diagnosis."""
    data, parts = deal(validate_settings(RunConfig, {"dataset": "breast-cancer", "clients": 8, "seed": 0}))
    model = fs.build_model("mlp(hidden=(16,))", data.input_shape, 1, seed=0)
    settings: dict[str, Any] = {
        "rounds": 3,
        "lr": 0.01,
        "probe": "visits exchange",
        "probe_every": 3,
        "engine": "serial",
    }
    fed = fs.Federation(model, data.train.split(parts), data.test, task=data.task, **settings)
    fed.fit()
    assert not any(finding.clients for finding in diagnose(fed.saved_run()).findings)
