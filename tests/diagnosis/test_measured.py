"""Harm that was measured: what findings cost by what was tried, and what that makes of their severity."""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.diagnosis import Finding
from fedstrata.diagnosis.measured import measure_findings, reference_note
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import Control, Reference, Tried, TriedRemedy

SAVED = SavedRun("run", {}, (), facts={"guess": 0.1})


def gain(gained: float, low: float, high: float) -> dict[str, Any]:
    return {"command": "", "scores": (0.5, 0.5), "gained": gained, "low": low, "high": high}


def tried(remedies: tuple[TriedRemedy, ...] = (), references: tuple[Reference, ...] = ()) -> Tried:
    about: dict[str, Any] = {"metric": "accuracy", "higher_is_better": True, "rounds": 5, "seeds": (0, 1)}
    return Tried(control=Control(scores=(0.4, 0.4)), remedies=remedies, references=references, **about)


def against(finding: str, *figures: float) -> TriedRemedy:
    return TriedRemedy(finding=finding, change="--lr 0.01", verdict="helps", **gain(*figures))


@pytest.mark.parametrize(("gained", "severity"), [(0.045, 0.25), (0.09, 0.5), (0.18, 0.75), (0.5, 1.0)])
def test_severity_is_the_share_of_the_way_that_it_costs(gained: float, severity: float) -> None:
    """From guessing, 0.1, to 1 it is 0.9: a tenth of that, 0.09, is serious, and three tenths, 0.27, are the worst."""
    found = Finding("rate-too-large", 0.3, "Too large.", {})
    (measured,) = measure_findings([found], SAVED, tried((against("rate-too-large", gained, gained / 2, 2 * gained),)))
    assert measured.severity == pytest.approx(severity)
    assert measured.harm is not None
    assert measured.harm.cost == gained
    assert f"It costs about {100 * gained:.3g} points" in measured.sentence
    assert "measured against a run with --lr 0.01" in measured.sentence


def test_what_is_not_decided_leaves_the_estimate() -> None:
    found = Finding("rate-too-large", 0.3, "Too large.", {})
    (measured,) = measure_findings([found], SAVED, tried((against("rate-too-large", 0.2, -0.1, 0.5),)))
    assert measured.severity == 0.3
    assert "does not show that it costs anything" in measured.sentence
    assert measure_findings([found], SAVED, tried((against("label-skew", 0.2, 0.1, 0.3),))) == [found]
    assert measure_findings([found], SAVED, None) == [found]


def test_clients_are_measured_against_everybody_else() -> None:
    found = Finding("broken-labels", 0.9, "Broken.", {}, clients=(3, 5))
    good = Reference(name="without clients 3, 5", leaves_out=(3, 5), **gain(0.09, 0.05, 0.13))
    (measured,) = measure_findings([found], SAVED, tried(references=(good,)))
    assert measured.severity == 0.5
    assert "measured against a run without clients 3, 5" in measured.sentence
    harmless = good.model_copy(update={"gained": -0.02, "low": -0.03, "high": -0.01})
    (measured,) = measure_findings([found], SAVED, tried(references=(harmless,)))
    assert measured.severity == 0.1
    as_advice = TriedRemedy(
        finding="x", change="--without 3,5", verdict="hurts", **harmless.model_dump(exclude={"name"})
    )
    (measured,) = measure_findings([found], SAVED, tried((as_advice,)))
    assert measured.severity == 0.1


def test_clients_are_not_blamed_for_what_a_remedy_brings() -> None:
    """Without client 3 at most 1.8 points are gained, 2 % of the way: severity is 0.5·0.02/0.1 = 0.1 at most."""
    found = Finding("broken-inputs", 0.9, "Broken.", {}, clients=(3,))
    better = against("broken-inputs", 0.5, 0.4, 0.6)
    assert measure_findings([found], SAVED, tried((better,))) == [found]
    alone = TriedRemedy(
        finding="broken-inputs", change="--without 3", verdict="no gain", leaves_out=(3,), **gain(0.003, -0.005, 0.018)
    )
    (measured,) = measure_findings([found], SAVED, tried((better, alone)))
    assert measured.severity == pytest.approx(0.1)
    assert measured.harm is not None
    assert measured.harm.cost == 0.003
    assert "does not show that it costs anything" in measured.sentence


def test_clients_whom_everybody_needs_explain_nothing() -> None:
    blamed = Finding("broken-labels", 0.4, "Broken.", {}, clients=(2,))
    other = Finding("opposed-updates", 0.6, "Opposed.", {}, explained_by=("broken-labels", "label-skew"))
    without = Reference(name="without client 2", leaves_out=(2,), **gain(-0.004, -0.006, -0.001))
    first, second = measure_findings([blamed, other], SAVED, tried(references=(without,)))
    assert first.severity == 0.1
    assert second.explained_by == ("label-skew",)
    harmful = without.model_copy(update={"gained": 0.2, "low": 0.1, "high": 0.3})
    assert measure_findings([blamed, other], SAVED, tried(references=(harmful,)))[1] == other


def test_pooled_data_tells_how_much_there_is_to_gain() -> None:
    assert reference_note(None) == []
    (note,) = reference_note(tried(references=(Reference(name="centralised", **gain(0.3, 0.2, 0.4)),)))
    assert "gains 30 points" in note
    assert "about as much as there is to gain" in note
    pooled = (Reference(name="centralised", **gain(0.0, -0.1, 0.1)),)
    (note,) = reference_note(tried((against("rate-too-large", 0.8, 0.7, 0.9),), pooled))
    assert "gains 0 points" in note
    assert "no sign that distributing the data costs anything" in note
    small = (Reference(name="centralised", **gain(0.1, 0.0, 0.2)),)
    (note,) = reference_note(tried((against("rate-too-large", 0.8, 0.7, 0.9),), small))
    assert "a remedy does better" in note
    worse = (Reference(name="centralised", **gain(-0.05, -0.1, 0.1)),)
    assert "loses 5 points against the run" in reference_note(tried(references=worse))[0]
