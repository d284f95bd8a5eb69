"""FedBABU: the body alone is learnt together, under a head that nobody trains; then everybody fine-tunes.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Setting
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError
from fedstrata.models.parts import HEAD, Patterns, check_parts, names_of_parts
from fedstrata.techniques.finetune import FineTune
from fedstrata.techniques.keep import ONE_MODEL

PAPERS = (
    Paper(
        "Jaehoon Oh and Sangmook Kim and Se-Young Yun",
        "FedBABU: Toward Enhanced Representation for Federated Image Classification",
        "ICLR",
        2022,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedBABU(FineTune):
    """Body aggregation and body update: the head keeps its initial values, only the body trains and travels.

    θ = (θ_ext, θ_cls): in all rounds the learning rate of θ_cls is 0, so that it is the same random head for everybody
    and needs no aggregation, and θ_ext is averaged. After the last round every client fine-tunes the model.

    Args:
        epochs: of fine-tuning.
        lr: of fine-tuning; by default that of the last round.
        strata: what is fine-tuned, as for `keep`; by default everything, the paper's own choice.
        head: what is held fixed until then, as for `keep`.
    """

    name: ClassVar[str] = "fedbabu"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {
        **FineTune.refuses,
        "groupavg": ONE_MODEL,
        "finetune": "fedbabu fine-tunes by itself: say fedbabu(epochs=…)",
    }
    head: Patterns = HEAD

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name nothing."""
        super().check(setting)
        if setting.arch == "":
            check_parts("fedbabu's head", self.head, setting.strata)
            if names_of_parts(self.head, setting.strata).issuperset(setting.movable):
                raise UsageError("fedbabu's head is all that trains: there is no body to learn")

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """The body trains and travels; after the last round the model is fine-tuned."""
        if assignment.is_after_training:
            return self.tune(assignment, strata)
        head = self.fixed(strata)
        body = tuple(n for n in assignment.trains if n not in head)
        return replace(assignment, trains=body, uploads=body)

    def fixed(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """The head, which has no turn where strata take turns."""
        return names_of_parts(self.head, strata)
