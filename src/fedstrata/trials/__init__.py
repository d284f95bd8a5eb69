"""Which advice helps, and by how much? Runs a diagnosis's remedies beside the run itself, with paired seeds."""

from __future__ import annotations

from fedstrata.trials.choice import Budget, Trial, choose_trials
from fedstrata.trials.federations import try_federation
from fedstrata.trials.outcome import summarise_trials
from fedstrata.trials.runs import try_remedies
from fedstrata.trials.show import tried_text

__all__ = [
    "Budget",
    "Trial",
    "choose_trials",
    "summarise_trials",
    "tried_text",
    "try_federation",
    "try_remedies",
]
