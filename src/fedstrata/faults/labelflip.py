"""Label flipping: clients whose labels are wrong, all in the same way or by chance.

Tolpegin, Truex, Gursoy and Liu, "Data Poisoning Attacks Against Federated Learning Systems", ESORICS 2020; label c as
C − 1 − c is from Fang, Cao, Jia and Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning",
USENIX Security 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.types import Examples
from fedstrata.errors import UsageError, one_of
from fedstrata.faults.fault import SHARE, Fault, FaultSetting
from fedstrata.faults.spoilt_examples import SpoiltExamples

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Vale Tolpegin and Stacey Truex and Mehmet Emre Gursoy and Ling Liu",
        "Data Poisoning Attacks Against Federated Learning Systems",
        "ESORICS",
        2020,
    ),
    Paper(
        "Minghong Fang and Xiaoyu Cao and Jinyuan Jia and Neil Zhenqiang Gong",
        "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning",
        "USENIX Security",
        2020,
    ),
)


def mirror(classes: int, labels: Tensor, places: Tensor) -> Tensor:
    """C − 1 − c."""
    return classes - 1 - labels


def advance(classes: int, labels: Tensor, places: Tensor) -> Tensor:
    """c + 1, and 0 for the last class."""
    return (labels + 1) % classes


def exchange(shuffled: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """The labels that stand in the same places once all are shuffled."""
    return shuffled[places]


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Fault):
    """Wrong labels: class c is taken for C − 1 − c, for the next one, or labels are shuffled among examples.

    Args:
        how: `mirror`, `next` or `shuffle`, which leaves a client as many labels of each class as before.
        share, clients: whom it hits.
    """

    name: ClassVar[str] = "labelflip"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    how: Literal["mirror", "next", "shuffle"] = "mirror"
    share: float = SHARE
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("labelflip", ("mirror", "next", "shuffle"), how=self.how)

    def check(self, setting: FaultSetting) -> None:
        """Refuse targets that are no classes."""
        if not setting.task.has_labels:
            raise UsageError(f"'labelflip' needs labels of classes, and the task '{setting.task.name}' has none")

    def spoil(self, examples: Examples, client: int, setting: FaultSetting) -> Examples:
        """The same examples under other labels."""
        if self.how == "shuffle":
            rng = generator(setting.seed, "fault", self.name, client)
            shuffled = examples.labels()[torch.randperm(len(examples), generator=rng)]
            return SpoiltExamples(examples, targets=partial(exchange, shuffled))
        return SpoiltExamples(examples, targets=partial(mirror if self.how == "mirror" else advance, setting.classes()))
