"""FedRep: first the client's own head, then the shared body.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum, Turn
from fedstrata.errors import whole_number
from fedstrata.techniques.keep import Keep

PAPERS = (
    Paper(
        "Liam Collins and Hamed Hassani and Aryan Mokhtari and Sanjay Shakkottai",
        "Exploiting Shared Representations for Personalized Federated Learning",
        "ICML",
        2021,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedRep(Keep):
    """A shared representation under heads of the clients' own, which take turns: first the head, then the body.

    In every visit the head h_i trains for τ epochs with the received representation φ held fixed,
    h_i ← GRD(f_i(h, φ), h_i, α), and then φ for some more with the new head held fixed, φ_i ← GRD(f_i(h_i, φ), φ, α).
    The server takes the mean of the φ_i; the h_i stay.

    Args:
        strata: the head, as for `keep`.
        head_epochs: τ, passes over the client's data for the head.
        body_epochs: passes for the representation.

    These take the place of the run's epochs or steps. What is held fixed costs no backward pass. Norm layers use and
    move their running statistics in both turns.

    Deviation: the mean weighs clients by their examples, like FedAvg; the paper's clients have as many each.
    """

    name: ClassVar[str] = "fedrep"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {
        **Keep.refuses,
        "fednova": "steps of the head are none of what travels, and it would count them",
    }
    head_epochs: int = 10
    body_epochs: int = 1

    def __post_init__(self) -> None:
        whole_number("fedrep", 1, head_epochs=self.head_epochs, body_epochs=self.body_epochs)

    @property
    def epochs_per_visit(self) -> int:
        """Those of the head, and those of the body."""
        return self.head_epochs + self.body_epochs

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """The head trains and stays; then the body trains and travels."""
        head = self.kept(strata)
        own = tuple(n for n in assignment.trains if n in head)
        shared = tuple(n for n in assignment.trains if n not in head)
        turns = (Turn(own, self.head_epochs), Turn(shared, self.body_epochs))
        return replace(super().plan(assignment, strata, state), turns=turns)
