"""Why a run learns little: rates on both sides, outputs, classes, depth, what is too few or too early; and harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.diagnosis import Finding, diagnose
from fedstrata.diagnosis.evidence import steps_per_visit
from fedstrata.diagnosis.gradients import gradients_by_depth
from fedstrata.diagnosis.harm import largest_severity, learned_share
from fedstrata.diagnosis.learning import progress_ratio, rise
from fedstrata.diagnosis.thresholds import HIGH, SLIGHT
from fedstrata.runs.reader import SavedRun
from tests.diagnosis.test_diagnosis import STRATA, by_depth, dead, facts, losing, record, run, unbalanced


def found(saved: SavedRun) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(saved).findings}


def options(saved: SavedRun, name: str) -> list[str]:
    return [remedy.options for remedy in found(saved)[name].remedies]


# Learning rates -----------------------------------------------------------------------------------------------


def test_progress_by_hand() -> None:
    """Ten times the rate takes off 0.8 where the run's own takes off 0.1: eight times; a hundred times explodes."""
    assert progress_ratio(2.0, {0.1: 2.0, 1.0: 1.9, 10.0: 1.2, 100.0: 50.0}) == (pytest.approx(8), 10)
    assert progress_ratio(2.0, {1.0: 2.0, 100.0: 1.0}) == (pytest.approx(5000), 100)  # a little counts at least
    assert progress_ratio(2.0, {1.0: 1.999, 10.0: 1.98}) == (1, 1)  # a hundredth is no progress to speak of
    assert progress_ratio(2.0, {1.0: 1.0}) == (1, 1)


def test_rises_by_hand() -> None:
    assert rise(2.0, {0.1: 1.8, 1.0: 3.0, 10.0: 9.0}) == pytest.approx(0.6)
    assert rise(2.0, {0.1: 1.8, 1.0: 1.9}) == 0  # the run's own rate helps
    assert rise(2.0, {0.1: 2.1, 1.0: 3.0}) == 0  # a tenth does not: something else is wrong
    assert rise(2.0, {0.1: 1.0, 1.0: 1e9}) == 10


def searched(after: dict[str, float], accuracies: tuple[float, ...] = (0.12, 0.12, 0.12)) -> SavedRun:
    rates = {"rates": {"lr": 0.1, "before": 2.0, "after": after}}
    return run([rates], facts(), accuracies, lr=0.0005)


def test_a_rate_that_is_too_small_is_made_larger_by_what_was_searched() -> None:
    saved = searched({"0.1": 2.0, "1": 1.99, "10": 1.9, "100": 1.0})
    assert "100 times 0.0005 lowers the held-out loss 100 times as much" in found(saved)["rate-too-small"].sentence
    assert options(saved, "rate-too-small")[0] == "--lr 0.05"
    assert found(saved)["no-learning"].explained_by == ("rate-too-small",)


def test_a_rate_that_is_too_large_is_made_smaller() -> None:
    saved = searched({"0.1": 1.0, "1": 4.0, "10": 90.0, "100": 900.0})
    assert options(saved, "rate-too-large")[0] == "--lr 5e-05"
    assert "rate-too-small" not in found(saved)


def test_a_run_that_has_learned_is_not_asked_about_its_rate() -> None:
    saved = searched({"0.1": 2.0, "1": 1.99, "10": 1.9, "100": 1.0}, (0.5, 0.9, 0.9))
    assert not {"rate-too-small", "rate-too-large"} & diagnose(saved).looked.keys()


def creeping(losses: list[float], accuracy: float = 0.12) -> SavedRun:
    records = [replace(one, accuracy=accuracy) for one in losing(losses)]
    return replace(run(facts=facts(), lr=0.01), records=records)


def test_from_losses_alone() -> None:
    """They fall steadily by 2 %: too small. They leap: too large. They fall by half, or all is learnt: neither."""
    slow, wild = [2.30, 2.29, 2.28, 2.27, 2.25], [2.3, 2.9, 2.2, 3.5, 2.4]
    assert "falls steadily, but only by 2.2 % in 5 rounds" in found(creeping(slow))["rate-too-small"].sentence
    assert options(creeping(slow), "rate-too-small")[0] == "--lr 0.1"
    assert "leaps up and down" in found(creeping(wild))["rate-too-large"].sentence
    for saved in (creeping([2.3, 2.0, 1.7, 1.3, 1.1]), creeping(slow, 0.9), creeping(wild, 0.9)):
        assert not {"rate-too-small", "rate-too-large"} & found(saved).keys()


def test_standstill_is_advised_in_both_directions() -> None:
    stuck = found(creeping([2.30, 2.29, 2.28, 2.27, 2.25]))["no-learning"]
    assert [one.options for one in stuck.remedies] == ["--lr 0.1", "--lr 0.003"]
    wild = found(creeping([2.3, 2.9, 2.2, 3.5, 2.4]))["no-learning"]
    assert [one.options for one in wild.remedies] == ["--lr 0.003", "--lr 0.1"]


# Outputs, classes ---------------------------------------------------------------------------------------------


def test_probabilities_explain_why_nothing_is_learned() -> None:
    saved = run(facts=facts(probabilities=True), accuracies=[0.12, 0.14, 0.14])
    first = diagnose(saved).findings[0]
    assert first.name == "probabilities"
    assert "softmax" in first.remedies[0].why
    assert found(saved)["no-learning"].explained_by == ("probabilities",)
    assert "probabilities" not in found(run(facts=facts(probabilities=False)))


def test_imbalance_is_told_against_the_test_set() -> None:
    saved = replace(unbalanced(0.84), records=[record(n, 0.12) for n in (1, 2, 3)])
    finding = found(saved)["class-imbalance"]
    assert "94.0 % of all examples are of class 0, which has 10.0 % of the test examples" in finding.sentence
    assert options(saved, "class-imbalance")[0] == "--task \"classification(weights='balanced')\""
    alike = replace(saved, facts={**saved.facts, "test_counts": saved.facts["counts"][0]})
    assert "class-imbalance" not in found(alike)
    assert "class-imbalance" not in found(replace(saved, records=[record(n, 0.95) for n in (1, 2, 3)]))


def test_balanced_weights_are_not_offered_twice() -> None:
    saved = replace(unbalanced(0.84), config={"task": "classification(weights='balanced')"})
    assert not any("task" in one for one in options(saved, "class-imbalance"))
    smooth = replace(unbalanced(0.84), config={"task": "classification(label_smoothing=0.1)"})
    assert "label_smoothing=0.1" in options(smooth, "class-imbalance")[0]


# Depth --------------------------------------------------------------------------------------------------------


def test_gradients_that_vanish_are_told_with_their_strata() -> None:
    finding = found(by_depth(1e-7, 1.0))["vanishing-gradients"]
    assert "1e+07 times as large in the last third of the 10 strata" in finding.sentence
    assert "stem.conv, layer1.0.conv1, layer1.0.conv2" in finding.sentence
    shallow = run([{"depth": {"gradient": {"a": 1e-9, "b": 1.0}}}])
    assert "vanishing-gradients" not in diagnose(shallow).looked


def test_gradients_of_the_first_measured_round_count() -> None:
    rows = [*by_depth(1e-7, 1.0).probes, {"depth": {"gradient": dict.fromkeys(STRATA, 1.0)}}]
    saved = run([{k: v for k, v in row.items() if k != "round"} for row in rows], facts())
    assert gradients_by_depth(saved)["stem.conv"] == 1e-7


def test_a_model_of_the_zoo_is_replaced_and_one_of_ones_own_gets_words() -> None:
    named = replace(by_depth(1e-7, 1.0), config={"model": "resnet26(width=4, residual=False)"})
    assert options(named, "vanishing-gradients")[0] == '--model "resnet26(width=4, residual=True)"'
    words = found(by_depth(1e-7, 1.0))["vanishing-gradients"].remedies
    assert any("residual links" in remedy.why for remedy in words)


def test_dead_units_are_told_with_their_strata() -> None:
    finding = found(dead(0.9))["dead-units"]
    assert "stem.conv (90.0 %); 45.0 % in the mean" in finding.sentence
    assert finding.remedies[0].options == "--lr 0.01"


# Too few, too early -------------------------------------------------------------------------------------------


def test_swings_count_only_where_few_take_part() -> None:
    for everybody, said in ((10, True), (1, False)):
        saved = run(facts=facts(clients=everybody), accuracies=[0.3, 0.5] * 5)
        assert ("participation-noise" in found(saved)) == said
    steady = run(facts=facts(clients=10), accuracies=[0.1 + 0.05 * n for n in range(10)])
    assert "participation-noise" not in found(steady)


def test_a_run_that_has_hardly_begun_is_told_how_long_it_needs() -> None:
    """Four rounds of five steps, at 15 %: nothing can be said before 30 steps, and nothing is called right."""
    saved = run(facts=facts(examples=[160] * 8), accuracies=[0.1, 0.12, 0.13, 0.15])
    diagnosis = diagnose(saved)
    assert diagnosis.verdict == "Too early to judge: it needs 6 rounds."
    assert not diagnosis.healthy
    finding = found(saved)["too-early"]
    assert "15.0 % after 4 rounds of 5 steps per client; it needs 6 rounds, 30 steps" in finding.sentence
    assert finding.remedies


def test_turns_of_a_visit_are_steps_too() -> None:
    """FedRep's ten passes for the head and one for the body, whatever `epochs` says: 55 steps, so one round is enough.

    A method that this version does not know is taken at the configuration's word.
    """
    saved = run(facts=facts(examples=[160] * 8), accuracies=[0.1, 0.12, 0.13, 0.15])
    for method, said in (("fedrep", False), ("fedrep(head_epochs=1)", False), ("from_elsewhere", True)):
        assert ("too-early" in found(replace(saved, config={**saved.config, "method": method}))) == said
    given = replace(saved, config={**saved.config, "method": "fedrep", "steps": 7})
    assert steps_per_visit(given) == 55  # the turns are in their place


def test_a_run_that_is_good_already_is_not_too_early() -> None:
    assert diagnose(run(facts=facts(examples=[160] * 8), accuracies=[0.9, 0.95])).healthy


def test_a_run_that_still_rises_is_told_to_go_on() -> None:
    """From 0.2 of the way to 0.5 in two of six rounds: 0.3 of the 0.8 that were missing."""
    saved = run(facts=facts(), accuracies=[0.1, 0.2, 0.25, 0.28, 0.4, 0.55])
    finding = found(saved)["unfinished"]
    assert finding.figure["gained"] == pytest.approx(0.375, abs=1e-3)
    assert finding.severity < HIGH
    assert finding.remedies[0].settings["rounds"] == finding.figure["rounds_needed"] > 6


def test_rounds_after_the_last_one_are_no_training() -> None:
    """The model stands at 0.55 after six rounds; in a seventh one clients tune models of their own."""
    rising = [0.1, 0.2, 0.25, 0.28, 0.4, 0.55]
    planned = run(facts=facts(), accuracies=rising, rounds=6)
    tuned = run(facts=facts(), accuracies=[*rising, 0.55], rounds=6)
    assert found(tuned)["unfinished"] == found(planned)["unfinished"]
    assert found(tuned)["unfinished"] != found(run(facts=facts(), accuracies=[*rising, 0.55], rounds=7))["unfinished"]


# Harm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "largest"), [(0.958, SLIGHT), (0.91, SLIGHT), (0.82, 0.7475), (0.73, 1.0), (0.2, 1.0)]
)
def test_what_a_finding_can_weigh(accuracy: float, largest: float) -> None:
    """Of the way from 0.1 to 1: a tenth that is missing allows nothing serious, three tenths anything."""
    saved = run(facts=facts(guess=0.1), accuracies=[0.2, accuracy])
    assert learned_share(saved) == pytest.approx((accuracy - 0.1) / 0.9)
    assert largest_severity(saved, "label-skew") == pytest.approx(largest, abs=1e-3)
    assert largest_severity(saved, "diverged") == 1
    assert largest_severity(run(), "label-skew") == 1


@pytest.mark.parametrize(("rmse", "serious"), [(0.7, True), (0.63, False), (0.2, False)])
def test_nobody_knows_how_small_an_error_could_be(rmse: float, serious: bool) -> None:
    """Guessing errs by 0.75: 0.15 of the way to 0 is 0.6375, and who is beyond it has learnt."""
    judged = replace(record(1, None), metrics={"rmse": rmse}, primary="rmse", better="lower")
    saved = replace(run(facts=facts(guess=0.75)), records=(judged,))
    assert (largest_severity(saved, "rate-too-small") > HIGH) is serious


def test_a_run_near_the_best_there_is_has_nothing_serious() -> None:
    """However its clients differ."""
    counts = [[50 if c in (k, k + 1) else 0 for c in range(10)] for k in range(0, 10, 2)]
    row = {"calibration": {"forgetting": 0.6, "held": 0.9, "missing": 0.1}, "cosine": {"head": -0.3}}
    known = facts(counts=counts, skew=0.8, guess=0.1)
    assert diagnose(run([row], known, [0.5, 0.6])).verdict == "First of all: label skew."
    good = diagnose(run([row], known, [0.9, 0.958]))
    assert good.healthy
    assert good.verdict.startswith("Nothing serious: ")


# Real federations ---------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A network of one's own: some plain convolutions of width 4, and a softmax if asked for."""

    def __init__(self, depth: int = 1, softmax: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(1 if not k else 4, 4, 3, padding=1) for k in range(depth))
        self.head, self.softmax = nn.Linear(4 * 64, 10), softmax

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        out: Tensor = self.head(x.flatten(1))
        return out.softmax(1) if self.softmax else out


def federated(model: nn.Module, **settings: Any) -> SavedRun:
    data = fs.load_dataset("digits(examples=600)")
    split = data.train.split(fs.partition(data.train.labels(), "iid", clients=4, seed=0))
    probes = {"probe": "depth rates", "probe_every": 3, "engine": "serial"}
    given = {"rounds": 6, "epochs": 2, "batch_size": 16, "lr": 0.1, **probes, **settings}
    federation = fs.Federation(model, split, data.test, **given)
    federation.fit()
    return federation.saved_run()


@pytest.mark.parametrize(
    ("made", "settings", "cause"),
    [
        ({}, {"lr": 0.0005}, "rate-too-small"),
        ({"softmax": True}, {"lr": 0.05}, "probabilities"),
        ({"depth": 17}, {}, "vanishing-gradients"),
    ],
)
def test_what_an_outsider_planted(made: dict[str, Any], settings: dict[str, Any], cause: str) -> None:
    torch.manual_seed(0)
    diagnosis = diagnose(federated(Own(**made), **settings))
    assert diagnosis.findings[0].name == cause
    assert diagnosis.findings[0].severity >= HIGH


def test_nothing_of_it_in_a_sound_run() -> None:
    torch.manual_seed(0)
    diagnosis = diagnose(federated(Own()))
    assert diagnosis.healthy
