"""Diagnoses of runs whose data is at other sites, or in somebody's Python session: what is said, and what is not."""

from __future__ import annotations

import pytest
import torch

from fedstrata.config.identity import AT_SITES
from fedstrata.config.schema import Settings
from fedstrata.diagnosis import diagnose
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.errors import UsageError
from tests.diagnosis.test_diagnosis import facts, odd, run, visits


def test_rules_that_were_read_are_not_called_invisible() -> None:
    """The learning rate is judged by the losses, without the probe that searches it."""
    saved = run([visits()], facts(guess=0.1), accuracies=[0.1] * 6, engine="flower")
    diagnosis = diagnose(saved)
    (note,) = [note for note in diagnosis.notes if note.startswith("Cannot be seen")]
    assert "rate-too-large" in diagnosis.looked
    assert "rate too large" not in note
    assert "broken labels" in note
    assert not [name for name in diagnosis.looked if name.replace("-", " ") in note]


def test_what_a_flower_server_refuses_is_said_in_words() -> None:
    saved = run([visits(loss=odd(0.3, 2.3))], facts(), engine="flower")
    (finding,) = [finding for finding in diagnose(saved).findings if finding.name == "broken-data"]
    assert finding.remedies[0].why.startswith("ask the site of client 3 to stand aside until")
    offered = {name for remedy in finding.remedies for name in remedy.settings}
    assert not offered & AT_SITES
    assert any(remedy.method == "fedavg(reduce='median')" for remedy in finding.remedies)
    builder = RemedyBuilder(saved)
    assert builder.change_settings("", "", standardise="client") is None
    assert builder.change_settings("", "", lr=0.01) is not None
    several = builder.leave_out([1, 4])
    assert several is not None
    assert several.why.startswith("ask the sites of clients 1, 4 to stand aside")


def test_the_settings_are_those_that_the_server_refuses() -> None:
    pytest.importorskip("flwr")
    from fedstrata.flower import server_app

    for name in AT_SITES:
        with pytest.raises(UsageError, match=f"'{name}' has no meaning here"):
            server_app(torch.nn.Linear(2, 2), **{name: Settings.model_fields[name].default})


@pytest.mark.parametrize(
    ("config", "told", "never"),
    [
        ({"dataset": "digits"}, "fedstrata diagnose RUN --try", "try_federation"),
        ({}, "fedstrata.trials.try_federation(federation) measures", "--try"),
        ({"engine": "flower"}, "Severities are estimates by these figures.", "try"),
    ],
)
def test_what_can_be_tried_is_what_is_hinted_at(config: dict[str, str], told: str, never: str) -> None:
    text = " ".join(str(diagnose(run([visits(loss=odd(0.3, 2.3))], facts(), **config))).split())
    assert told in text
    assert never not in text
