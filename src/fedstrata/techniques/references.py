"""Reference runs: what the same work gives without a federation, with all data in one place or each on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.technique import Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum

_ALONE = "a reference run is plain training, to compare methods with"


@dataclass(frozen=True, kw_only=True)
class Centralised(Technique):
    """Reference: one party holds all data and takes as many steps as the clients of each round together.

    The same budget of steps as a federated run with the same settings, so that centralised − federated is the price of
    keeping the data apart. As in a client's visit, the optimiser is made anew in every round.
    """

    name: ClassVar[str] = "centralised"
    exclusive: ClassVar[str] = _ALONE
    centralised: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Local(Technique):
    """Reference: every client trains on its own data alone, and no parameter travels.

    Whoever is asked in a round takes the steps that it would take in a federation, and goes on with its own model. The
    run's accuracy is the mean over all clients of their own models' on the test set; the server's model never moves.
    """

    name: ClassVar[str] = "local"
    defaults: ClassVar[dict[str, str]] = {"buffers": "local"}
    exclusive: ClassVar[str] = _ALONE
    personalised: ClassVar[bool] = True
    incomplete: ClassVar[bool] = True
    caveat: ClassVar[str] = "accuracy: local is the mean of the clients' own models on the whole test set"

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Nothing travels."""
        return replace(assignment, uploads=())
