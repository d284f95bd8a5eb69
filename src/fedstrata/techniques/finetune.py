"""Fine-tuning: after the last round every client trains the global model on its own data, and keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.technique import Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import positive, whole_number
from fedstrata.models.parts import Patterns, check_parts, names_of_parts


@dataclass(frozen=True, kw_only=True)
class FineTune(Technique):
    """After the last round every client, also one that never took part, trains the model on its own data and keeps it.

    Plain local training: no other technique takes part in it, and nothing of it travels. Until then the method is what
    it is without it, and so is the global model.

    Args:
        epochs: passes over the client's data.
        lr: learning rate; by default that of the last round.
        strata: what trains, as for `keep`; by default everything.
    """

    name: ClassVar[str] = "finetune"
    epilogue: ClassVar[int] = 1
    personalised: ClassVar[bool] = True
    tunes: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {
        "ccvr": "both have the round after the last one, and what is fine-tuned would not be the refitted model"
    }
    epochs: int = 5
    lr: float | None = None
    strata: Patterns = ()

    def __post_init__(self) -> None:
        whole_number(self.name, 0, epochs=self.epochs)
        if self.lr is not None:
            positive(self.name, lr=self.lr)

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name nothing."""
        if setting.arch == "":
            check_parts(f"{self.name}'s strata", self.strata, setting.strata)

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Before the end nothing; then what is to be tuned trains, and stays."""
        return self.tune(assignment, strata) if assignment.is_after_training else assignment

    def tune(self, assignment: Assignment, strata: tuple[Stratum, ...]) -> Assignment:
        """The work of the round after the last one."""
        if not self.epochs:
            return replace(assignment, trains=())
        work = replace(assignment.work, epochs=self.epochs, steps=None, lr=self.lr or assignment.work.lr)
        chosen = names_of_parts(self.strata, strata)
        trains = tuple(n for n in assignment.trains if n in chosen or not self.strata)
        return replace(assignment, trains=trains, work=work)
