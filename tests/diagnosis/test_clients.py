"""Single clients in a diagnosis: scores by hand, every sort of trouble with its innocent twin, real federations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.types import Assignment, replace_fields
from fedstrata.diagnosis import Finding, diagnose
from fedstrata.diagnosis.clients import CLIENT_RULES
from fedstrata.diagnosis.outliers import length_scores, outlier_scores, robust_scores, worst_strata
from fedstrata.run import deal
from fedstrata.runs.reader import SavedRun
from tests.diagnosis.test_diagnosis import CROWD, card, exchanged, facts, odd, record, run, visits

ABOUT_CLIENTS = {rule.name for rule in CLIENT_RULES}


def found(saved: SavedRun) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(saved).findings}


def blamed(saved: SavedRun) -> dict[str, tuple[int, ...]]:
    """Finding → the clients that it names."""
    return {name: finding.clients for name, finding in found(saved).items() if finding.clients}


# Scores -------------------------------------------------------------------------------------------------------


def test_robust_scores_by_hand() -> None:
    """The median is 3 and the median distance from it 1: (v − 3)/1.4826; or over the floor, if that is more."""
    values = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 103.0}
    assert robust_scores(values, 0.1) == pytest.approx({k: (v - 3) / 1.4826 for k, v in values.items()})
    assert robust_scores(values, 10.0)[4] == pytest.approx(10)
    assert robust_scores({}, 0.1) == {}


def test_robust_scores_are_scipys() -> None:
    from scipy.stats import median_abs_deviation

    values = np.random.default_rng(0).normal(size=31)
    scores = robust_scores(dict(enumerate(values)), 1e-9)
    expected = (values - np.median(values)) / median_abs_deviation(values, scale="normal")
    assert list(scores.values()) == pytest.approx(list(expected), rel=1e-4)


def test_a_length_that_the_number_of_steps_explains_is_none() -> None:
    """Ten times the steps, ten times the norm: in the norm per step there is nothing odd."""
    row = visits(norm=odd(1.0, 10.0), steps=odd(5.0, 50.0))
    assert length_scores(row, row["visits"]["whole"]["norm"])[3] == pytest.approx(0, abs=1e-9)
    row = visits(norm=odd(1.0, 10.0))
    assert length_scores(row, row["visits"]["whole"]["norm"])[3] == pytest.approx(math.log(10) / 0.25)


def test_outlier_scores_by_client_and_stratum() -> None:
    """By norm in one stratum, by direction in another; nothing of rounds that show three clients."""
    row = visits()
    row["visits"]["norm"] = {"stem": odd(1.0, math.e), "head": [1.0] * 8}
    row["visits"]["cosine"] = {"stem": [0.5] * 8, "head": odd(0.5, -0.2)}
    few = {"clients": [0, 1, 2], "visits": {"norm": {"stem": [1, 1, 9]}, "cosine": {"stem": [1, 1, 1]}}}
    saved = run([row, few])
    scores = outlier_scores(saved)
    assert scores.keys() == {1}
    assert scores[1][3] == pytest.approx({"stem": 4, "head": 7})
    assert scores[1][0] == {"stem": 0, "head": 0}
    assert worst_strata(saved, 3) == ["head (7.0)", "stem (4.0)"]
    assert worst_strata(saved, 0) == []


# Inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (card(std=255.0), "vary 255 times as much as the others' (deviation 255)"),
        (card(mean=1.2), "mean is 1.2, 1.2 deviations above the others'"),
        (card(mean=-4.0), "4.0 deviations below the others'"),
        (card(std=0.0), "vary by 0.0 % of what the others' do"),
        (card(std=0.0, constant=1.0), "100.0 % of its inputs are one number throughout"),
        (card(missing=0.2), "20.0 % of its inputs' numbers are missing"),
        (card(duplicates=0.9), "90.0 % of its inputs are there more than once"),
    ],
)
def test_inputs_that_are_unlike_everybody_elses(other: dict[str, Any], words: str) -> None:
    finding = found(run(facts=facts(cards=odd(card(), other))))["broken-inputs"]
    assert finding.clients == (3,)
    assert words in finding.sentence
    assert "client 3" in finding.sentence
    assert finding.remedies[0].options == "--without 3"
    assert any(remedy.method == "fedavg(reduce='median')" for remedy in finding.remedies)
    assert any("inputs of client 3" in remedy.why for remedy in finding.remedies)


@pytest.mark.parametrize(
    "cards",
    [
        [card(mean=0.1 * k, std=1 + 0.2 * k) for k in CROWD],  # every client's camera is another
        [card(std=4.0**k) for k in CROWD],
        odd(card(), None),
        odd(card(), card(mean=0.4, std=1.5)),
        [card(), card(), card(std=255.0)],  # of three, none can be said to be the odd one
        [card(), card(), card(), card(), *[card(std=99.0)] * 4],  # nor of two halves
        [card(missing=0.3) for _ in CROWD],
    ],
)
def test_inputs_that_differ_as_clients_do(cards: list[Any]) -> None:
    assert "broken-inputs" not in found(run(facts=facts(cards=cards)))


def test_one_column_of_a_table_in_another_unit() -> None:
    rows = [{**card(), "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0 if k != 5 else 39.0]} for k in CROWD]
    finding = found(run(facts=facts(cards=rows)))["broken-inputs"]
    assert finding.clients == (5,)
    assert "39 times as much as the others' in column 2" in finding.sentence
    assert any("divide them by 39 in column 2" in remedy.why for remedy in finding.remedies)


def test_a_client_with_a_name_is_named() -> None:
    names = [f"site {k}" for k in CROWD]
    finding = found(run(facts=facts(cards=odd(card(), card(std=99.0)), client_names=names)))["broken-inputs"]
    assert "client 3 (site 3)" in finding.sentence


# Labels -------------------------------------------------------------------------------------------------------


def test_labels_that_were_exchanged_and_labels_at_random() -> None:
    for consistent, words in ((0.9, "would be on 90.0 % if labels were exchanged"), (0.2, "some are random")):
        row = exchanged(own=odd(0.2, 4.0), accuracy=odd(0.9, 0.05), consistent=odd(0.9, consistent))
        finding = found(run([row], facts()))["broken-labels"]
        assert finding.clients == (3,)
        assert "cost the global model 4.00, where examples of the same classes cost 0.20 elsewhere" in finding.sentence
        assert words in finding.sentence


def test_a_model_that_is_good_at_home_and_bad_elsewhere_gives_labels_away_too() -> None:
    """Where several clients have the same wrong labels, the global model half believes them."""
    after = [2.0 if k in (1, 4, 6) else 0.1 for k in CROWD]
    assert blamed(run([exchanged(shared_after=after)], facts())) == {"broken-labels": (1, 4, 6)}
    assert "broken-labels" not in found(
        run([exchanged(shared_after=[2.0] * 8)], facts())
    )  # everybody's: too little data


def test_classes_that_are_hard_for_everybody_do_not_give_a_client_away() -> None:
    """Its examples cost a lot, but so do examples of its classes elsewhere."""
    assert not blamed(run([exchanged(own=odd(0.2, 3.0), expected=odd(0.2, 2.9))], facts()))


def numbers(**more: Any) -> dict[str, Any]:
    """Facts of a regression."""
    return facts(**more) | {"classes": 0, "has_classes": False, "counts": []}


def test_targets_in_the_same_range_are_compared_and_told_so() -> None:
    row = exchanged(own=odd(1.0, 3.0), expected=[1.0] * 8, doubt=[0.2] * 8)
    finding = found(run([row], numbers()))["broken-labels"]
    assert finding.clients == (3,)
    assert "The targets of client 3 do not fit the inputs" in finding.sentence
    assert "where examples with targets in the same range cost 1.00 elsewhere" in finding.sentence
    assert "class" not in finding.sentence


def test_a_loss_of_few_examples_may_be_large_by_chance() -> None:
    """Two losses of guessing more than elsewhere: ten standard errors of 0.2, but not 2.33 of 0.9."""
    for doubt, named in ((0.2, {"broken-labels": (3,)}), (0.9, {})):
        row = exchanged(own=odd(1.0, 3.0), expected=[1.0] * 8, doubt=odd(0.2, doubt))
        assert blamed(run([row], numbers())) == named


def test_where_targets_were_not_told_apart_its_own_model_must_be_bad_elsewhere_too() -> None:
    """Older runs compare with everybody's examples: who has other targets costs more anyway."""
    for there, named in ((0.2, {}), (4.0, {"broken-labels": (3,)})):
        row = exchanged(own=odd(1.0, 3.0), expected=[1.0] * 8, own_after=[0.2] * 8, shared_after=odd(0.2, there))
        saved = run([row], numbers())
        assert blamed(saved) == named
    finding = found(saved)["broken-labels"]
    assert finding.severity == pytest.approx(0.495)
    assert "where everybody's examples cost 1.00 elsewhere" in finding.sentence
    assert "a client with other targets than most may show, too" in finding.sentence


def test_what_is_too_little_to_be_told_does_not_hide_wrong_labels() -> None:
    """An update that is a little too long, with a score of 4.8, is no finding, and clears nobody."""
    long = math.exp(4.8 * 0.25)
    row = visits(norm=odd(1.0, long)) | exchanged(own=odd(0.2, 4.0))
    assert blamed(run([row], facts())) == {"broken-labels": (3,)}


def test_broken_inputs_explain_what_they_cost() -> None:
    saved = run([exchanged(own=odd(0.2, 9.0))], facts(cards=odd(card(), card(std=255.0))))
    assert blamed(saved) == {"broken-inputs": (3,)}


def test_without_a_look_at_the_data_the_reported_loss_tells() -> None:
    saved = run([visits(loss=odd(0.3, 2.3), cosine=odd(0.5, -0.1))], facts())
    finding = found(saved)["broken-data"]
    assert finding.clients == (3,)
    assert "reports a training loss of 2.30, where the median client reports 0.30" in finding.sentence
    assert "cannot be seen from updates alone" in finding.sentence
    assert "broken-data" not in diagnose(run([visits(loss=odd(0.3, 2.3)) | exchanged()], facts())).looked


# Updates ------------------------------------------------------------------------------------------------------


def test_updates_that_go_backwards() -> None:
    """The client's own loss rises by what it sends, and nothing is wrong with its data."""
    row = visits(cosine=odd(0.5, -0.5), loss=[0.15] * 8) | exchanged(
        own_after=odd(0.1, 1.5), shared_after=odd(0.1, 1.5)
    )
    finding = found(run([row], facts()))["hostile-updates"]
    assert finding.clients == (3,)
    assert "raises the loss on its own examples from 0.20 to 1.50" in finding.sentence
    assert "its cosine to the others' centre is -0.50" in finding.sentence
    assert "furthest out in head (10.0)" in finding.sentence
    offered = [remedy.method for remedy in finding.remedies if remedy.method]
    assert offered[:2] == ["fedavg(reduce='median')", "fedavg(reduce='geometric_median')"]
    assert finding.remedies[0].options == "--without 3"


def test_losses_in_a_run_that_wrong_inputs_have_wrecked_accuse_nobody_else() -> None:
    """Client 3's inputs are seen; that client 5 reports a large loss then follows from what they did to the model."""
    row = visits(loss=odd(0.3, 16.0, client=5))
    told = found(run([row], facts(cards=odd(card(), card(std=255.0)))))
    assert told["broken-data"].clients == (5,)
    assert "broken-inputs" in told["broken-data"].explained_by


def test_a_client_whose_training_fails_and_who_says_so_is_not_hostile() -> None:
    """It raises its own loss, too, but reports it: 1.3, where it began at 0.2."""
    after = exchanged(own_after=odd(0.1, 1.5), shared_after=odd(0.1, 1.5))
    for reported, named in ((1.3, {}), (0.15, {"hostile-updates": (3,)})):
        row = visits(cosine=odd(0.5, -0.5), loss=odd(0.15, reported)) | after
        assert blamed(run([row], facts())) == named


@pytest.mark.parametrize(("method", "named"), [("scaffold", {}), ("fedprox(mu=0.1)", {"hostile-updates": (3,)})])
def test_steps_by_control_variates_need_not_lower_the_clients_own_loss(method: str, named: Any) -> None:
    """With a cosine of -0.15, which accuses nobody by itself."""
    row = visits(cosine=odd(0.1, -0.15), loss=[0.15] * 8) | exchanged(
        own_after=odd(0.1, 1.5), shared_after=odd(0.1, 1.5)
    )
    saved = run([row], facts())
    assert blamed(replace(saved, config={**saved.config, "method": method})) == named


def test_an_honest_client_may_go_another_way() -> None:
    """Its update lowers the loss on its own examples, as training does: a note says why it is rare, and no more."""
    counts = [[100] * 10 if k != 3 else [1000, *[0] * 9] for k in CROWD]
    row = visits(cosine=odd(0.5, -0.2)) | exchanged()
    diagnosis = diagnose(run([row], facts(counts=counts, examples=[1000] * 8)))
    assert not any(finding.clients for finding in diagnosis.findings)
    (note,) = [note for note in diagnosis.notes if "by no sign broken" in note]
    assert note.endswith("client 3, because 78.7 % of its labels are not everybody's.")  # 0.9 · 7/8


def test_on_a_server_that_sees_updates_alone_the_direction_has_to_do() -> None:
    flipped = found(run([visits(cosine=odd(0.5, -0.5))], facts()))["hostile-updates"]
    assert flipped.clients == (3,)
    assert "Whether its examples explain that cannot be seen" in flipped.sentence
    assert not blamed(run([visits(cosine=odd(0.5, 0.1))], facts()))
    assert not blamed(run([visits(cosine=[0.3 * (-1) ** k for k in CROWD])], facts()))  # nobody agrees with anybody


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (visits(norm=odd(1.0, 30.0)), "30 times as long as the median client's"),
        (visits(norm=odd(1.0, 0.0), cosine=odd(0.5, None)), "next to nothing"),
    ],
)
def test_updates_that_are_too_long_or_nothing(row: dict[str, Any], words: str) -> None:
    finding = found(run([row], facts()))["hostile-updates"]
    assert finding.clients == (3,)
    assert words in finding.sentence


def test_updates_that_are_copies() -> None:
    near = [0.99999 if k in (2, 5) else 0.6 for k in CROWD]
    finding = found(run([visits(nearest=near)], facts()))["hostile-updates"]
    assert finding.clients == (2, 5)
    assert "the updates of clients 2, 5 are all but the same" in finding.sentence
    assert not blamed(run([visits(nearest=[0.9999] * 8)], facts()))  # all are alike: they have learnt everything


def test_updates_that_never_change() -> None:
    rows = [visits(norm=[1.25 if k == 3 else 1 + 0.01 * number + 0.02 * k for k in CROWD]) for number in range(4)]
    assert blamed(run(rows, facts())) == {"hostile-updates": (3,)}
    assert "the same norm, 1.25, in 3 rounds" in found(run(rows, facts()))["hostile-updates"].sentence


def test_copies_in_a_model_that_was_wrecked_are_chance() -> None:
    """All who train the last bias alone are alike."""
    near = [0.99999 if k in (2, 5) else 0.6 for k in CROWD]
    saved = run([visits(nearest=near)], facts())
    wrecked = replace(saved, records=[record(1, 0.1, 2.3, 1e4), record(2, 0.1, 2.3, 2.3)])
    assert blamed(saved) == {"hostile-updates": (2, 5)}
    assert not blamed(wrecked)


def test_a_majority_is_never_blamed() -> None:
    for count, named in ((3, 3), (4, 0)):
        losses = [2.0 if k < count else 0.2 for k in CROWD]
        saved = run([exchanged(own=losses)], facts())
        assert len(blamed(saved).get("broken-labels", ())) == named


def test_updates_that_are_refused_are_told_with_their_reason() -> None:
    refusal = [{"client": 3, "why": "it holds NaN or infinite numbers"}]
    records = [replace(record(n, 0.2), clients=CROWD, refused=refusal if n > 1 else []) for n in range(1, 6)]
    finding = found(replace(run(facts=facts()), records=records))["refused-updates"]
    assert finding.clients == (3,)
    assert "4 of 5 from client 3, because it holds NaN or infinite numbers" in finding.sentence
    assert "refused-updates" not in found(
        replace(run(facts=facts()), records=[replace(r, refused=[]) for r in records])
    )


REFUSALS = [
    ("it holds NaN or infinite numbers", "missing or huge inputs do this", True),
    ("it did not come", "give it more time to answer, or fewer local epochs", False),
    ("it did not answer in time", "look at the network and the log of the site of client 3", False),
    ("it answers round 6 in round 7", "give it more time to answer", False),
    ("it ran another method (a instead of b)", "at the version and the settings that run there", False),
]


@pytest.mark.parametrize(("why", "words", "clip"), REFUSALS)
def test_what_to_do_about_a_refusal_follows_from_its_reason(why: str, words: str, clip: bool) -> None:
    refused = [{"client": 3, "why": why}]
    records = [replace(record(n, 0.2), clients=CROWD, refused=refused) for n in range(1, 6)]
    remedies = found(replace(run(facts=facts()), records=records))["refused-updates"].remedies
    assert words in remedies[0].why
    assert ("inputs" in remedies[0].why) is clip
    assert any(remedy.options == "--without 3" for remedy in remedies)
    assert any("clip" in remedy.settings for remedy in remedies) is clip


def test_what_to_do_about_devices_that_are_late() -> None:
    """There is no site whose log could be read, and nobody is left out where all are late."""
    refused = [{"client": c, "why": "it came too late: after 9 simulated seconds, and 1 were allowed"} for c in CROWD]
    records = [replace(record(n, 0.2), clients=CROWD, refused=refused) for n in range(1, 6)]
    saved = replace(run(facts=facts(), fleet="phone*8(up='1kB/s')", deadline=1.0), records=records)
    remedies = found(saved)["refused-updates"].remedies
    assert "a longer deadline" in remedies[0].why
    assert [remedy.options for remedy in remedies[1:]] == ["--stragglers narrow"]
    assert found(saved)["rarely-trained"].explained_by == ("refused-updates",)  # no budget keeps them from training
    some = [replace(r, refused=refused[:1]) for r in records]
    remedies = found(replace(saved, records=some))["refused-updates"].remedies
    assert any(remedy.options == f"--without {CROWD[0]}" for remedy in remedies)


def collapsed(first: Sequence[float], norms: Sequence[float], **config: Any) -> SavedRun:
    """A run whose model dies in its first round, with these losses and norms; then all report ln 10."""
    rows = [visits(loss=first, norm=norms), *[visits(loss=[2.3] * 8, norm=[0.1 + 0.01 * k for k in CROWD])] * 7]
    mean = sum(first) / 8
    records = [replace(record(n, 0.1, 2.3, mean if n == 1 else 2.3), clients=CROWD) for n in range(1, 9)]
    return replace(run(rows, facts(guess=0.1), **config), records=records)


def test_a_client_that_wrecks_the_model_in_the_first_round_is_named_though_later_rounds_do_not_show_it() -> None:
    diagnosis = diagnose(collapsed(odd(2.28, 15400.0), odd(0.5, 4197.0), engine="flower"))
    first = diagnosis.findings[0]
    assert (first.name, first.clients, first.severity) == ("broken-data", (3,), 1.0)
    assert "in round 1 client 3 reports a training loss of 1.54e+04" in first.sentence
    assert diagnosis.verdict == "First of all: broken data (client 3)."
    (rate,) = [finding for finding in diagnosis.findings if finding.name == "rate-too-large"]
    assert "broken-data" in rate.explained_by


@pytest.mark.parametrize("others", [3.0, 40.0, 900.0])
def test_where_the_learning_rate_is_too_large_for_everybody_nobody_is_named(others: float) -> None:
    """One happens to be worst, but the others' losses have left all bounds, too."""
    saved = collapsed([others * (1 + k) if k != 3 else 90000.0 for k in CROWD], odd(5.0, 4000.0))
    assert not blamed(saved)
    assert found(saved)["rate-too-large"].severity == 1.0


def test_losses_of_a_model_that_is_dead_for_everybody_accuse_nobody() -> None:
    assert not blamed(run([visits(loss=odd(300.0, 9000.0))], facts()))


def test_without_classes_a_reported_loss_is_never_serious() -> None:
    """A client whose targets are other than most has a larger loss, too."""
    finding = found(run([visits(loss=odd(0.3, 2.3))], numbers()))["broken-data"]
    assert finding.severity == pytest.approx(0.495)
    assert "or its targets are only other than most" in finding.sentence


def test_an_explosion_is_explained_by_the_client_that_caused_it() -> None:
    """Then it does not come first."""
    records = [replace(record(n, 0.1), loss=1e6, train_loss=1e6) for n in (1, 2)]
    saved = replace(run(facts=facts(cards=odd(card(), card(std=255.0)))), records=records)
    first, second = diagnose(saved).findings[:2]
    assert (first.name, second.name) == ("broken-inputs", "exploded-loss")
    assert second.explained_by == ("broken-inputs",)
    assert diagnose(saved).verdict == "First of all: broken inputs (client 3)."


# Real federations ---------------------------------------------------------------------------------------------


def federated(
    spoil: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda client, x, y: (x, y),
    factors: Sequence[float] = (1.0,) * 6,
    partition: str = "iid",
    **settings: Any,
) -> SavedRun:
    """Six clients of small digits; `spoil` changes a client's examples, `factors` multiply the clients' updates."""
    data = fs.load_dataset("digits(examples=900)")
    split = data.train.split(fs.partition(data.train.labels(), partition, clients=6, seed=1))
    clients = [spoil(k, *held.batch(torch.arange(len(held)))) for k, held in enumerate(split)]
    probes = {"probe": "visits exchange", "probe_every": 2, "engine": "serial"}
    given = {"rounds": 6, "epochs": 2, "batch_size": 16, "lr": 0.1, "seed": 1, **probes, **settings}
    fed = fs.Federation(fs.build_model("mlp(hidden=(32,))", data.input_shape, 10, seed=1), clients, data.test, **given)
    inside = fed._engine.run

    def multiplied(assignments: Sequence[Assignment], recall: Any) -> Iterator[Any]:
        for update, memory in inside(assignments, recall):
            delta = {n: t * factors[update.client] for n, t in update.delta.items()}
            yield replace_fields(update, delta=delta), memory

    fed._engine.run = multiplied  # type: ignore[method-assign]
    fed.fit()
    return fed.saved_run()


def test_a_client_whose_inputs_are_not_scaled() -> None:
    saved = federated(lambda k, x, y: (x * 255 if k == 2 else x, y))
    first = diagnose(saved).findings[0]
    assert (first.name, first.clients) == ("broken-inputs", (2,))


def test_a_client_whose_labels_are_shifted() -> None:
    saved = federated(lambda k, x, y: (x, (y + 1) % 10 if k == 4 else y))
    first = diagnose(saved).findings[0]
    assert (first.name, first.clients) == ("broken-labels", (4,))
    assert "if labels were exchanged one for another" in first.sentence


def test_a_client_whose_updates_have_another_sign() -> None:
    saved = federated(factors=(1, -2, 1, 1, 1, 1))
    first = diagnose(saved).findings[0]
    assert (first.name, first.clients) == ("hostile-updates", (1,))


def regressed(seed: int, clients: int, partition: str, reversed_at: int | None = None) -> SavedRun:
    """Diabetes, dealt out by tenths of the targets as `fedstrata run` does."""
    given = {"dataset": "diabetes", "clients": clients, "seed": seed, "partition": partition}
    data, parts = deal(validate_settings(RunConfig, given))
    held = [data.train.select(part).batch(torch.arange(len(part))) for part in parts]
    held = [(x, y.min() + y.max() - y if k == reversed_at else y) for k, (x, y) in enumerate(held)]
    settings: dict[str, Any] = {"rounds": 10, "lr": 0.05, "probe": "visits exchange", "probe_every": 3, "seed": seed}
    model = fs.build_model("mlp(hidden=(16,))", data.input_shape, 1, seed=seed)
    fed = fs.Federation(model, held, data.test, task=data.task, engine="serial", **settings)
    fed.fit()
    return fed.saved_run()


@pytest.mark.parametrize(("clients", "seed"), [(6, 0), (6, 1), (8, 4)])
def test_honest_clients_of_a_skewed_regression_are_not_blamed(clients: int, seed: int) -> None:
    assert not blamed(regressed(seed, clients, "dirichlet(alpha=0.1)"))


@pytest.mark.parametrize("partition", ["iid", "dirichlet(alpha=0.5)"])
def test_a_client_whose_targets_are_reversed(partition: str) -> None:
    assert blamed(regressed(0, 8, partition, reversed_at=2)) == {"broken-labels": (2,)}


@pytest.mark.parametrize("partition", ["iid", "dirichlet(alpha=0.3)", "shards(classes=3)"])
def test_honest_clients_are_not_blamed(partition: str) -> None:
    assert not blamed(federated(partition=partition, rounds=10))
