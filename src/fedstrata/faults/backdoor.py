"""A backdoor: inputs with a mark in the corner are to be taken for one class.

Gu, Dolan-Gavitt and Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain", 2017, for
the mark; Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020, for clients
that bring it in, and for the boost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.aggregation.arithmetic import floor_share
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.rng import generator
from fedstrata.core.types import Absence, Examples, Update
from fedstrata.data.examples import SelectedExamples
from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.faults.fault import SHARE, Fault, FaultSetting, VisitView
from fedstrata.faults.scale import multiply
from fedstrata.faults.spoilt_examples import SpoiltExamples, check_real_numbers, map_real_numbers

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Tianyu Gu and Brendan Dolan-Gavitt and Siddharth Garg",
        "BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain",
        "arXiv",
        2017,
        arxiv="1708.06733",
    ),
    Paper(
        "Eugene Bagdasaryan and Andreas Veit and Yiqing Hua and Deborah Estrin and Vitaly Shmatikov",
        "How To Backdoor Federated Learning",
        "AISTATS",
        2020,
    ),
)


def stamp(x: Tensor, rows: Tensor, size: int, value: float) -> Tensor:
    """Inputs with a mark in some rows: a square in the last corner of pictures, the last columns of a table."""
    marked = x.clone()
    if x.dim() > 2:
        marked[rows, ..., -size:, -size:] = value
    else:
        marked[rows, ..., -size:] = value
    return marked


@dataclass(frozen=True, kw_only=True)
class Backdoor(Fault):
    """A backdoor: some examples bear a mark and the label of the target; `attack_success` tells how well it is learnt.

    After an evaluation, the share of the other classes' test examples that are taken for the target once they bear the
    mark is in the round's record.

    Args:
        target: the class that marked inputs are to be taken for.
        size: of the mark: so many pixels in each direction in the last corner, or so many columns at the end of a row.
        value: of its numbers, as the model gets them.
        poison: share of a client's examples that bear it, drawn for every client.
        boost: what the client's change is multiplied with; the number of clients of a round lets one of them put its
            model in the place of the mean (the paper's model replacement).
        share, clients: whom it hits.
    """

    name: ClassVar[str] = "backdoor"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    target: int = 0
    size: int = 3
    value: float = 1.0
    poison: float = 0.5
    boost: float = 1.0
    share: float = SHARE
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("backdoor", size=self.size, boost=self.boost)
        not_negative("backdoor", target=self.target)
        if not 0 <= self.poison <= 1:
            raise UsageError(f"backdoor's poison must be from 0 to 1, not {self.poison}")

    def check(self, setting: FaultSetting) -> None:
        """Refuse tokens, a mark as large as an input, tasks without classes, and a target that is none of them."""
        check_real_numbers(self.name, setting.sample)
        parts = setting.sample.tensors.values() if isinstance(setting.sample, Parts) else [setting.sample]
        room = min(min(part.shape[1:][-2:], default=1) for part in parts if part.is_floating_point())
        if self.size >= room:
            raise UsageError(f"backdoor's mark is {self.size} in size, and would cover inputs of {room} altogether")
        if not setting.task.has_classes:
            raise UsageError(f"'backdoor' needs classes, and the task '{setting.task.name}' has none")
        if self.target >= setting.classes():
            raise UsageError(f"backdoor's target is {self.target}, and the classes are 0 to {setting.classes() - 1}")

    def spoil(self, examples: Examples, client: int, setting: FaultSetting) -> Examples:
        """The same examples, some with the mark and the target's label."""
        order = torch.randperm(len(examples), generator=generator(setting.seed, "fault", self.name, client))
        poisoned = torch.zeros(len(examples), dtype=torch.bool)
        poisoned[order[: floor_share(self.poison, len(examples))]] = True
        return SpoiltExamples(examples, partial(self._mark, poisoned), partial(self._label, poisoned))

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """boost·Δ_k."""
        return update if self.boost == 1 else multiply(update, self.boost)

    def tell_success(self, test: Examples, setting: FaultSetting) -> Examples | None:
        """All test examples of other classes, with the mark and the target's label."""
        others = torch.nonzero(test.labels() != self.target).flatten()
        if not len(others):
            return None
        everyone = torch.ones(len(others), dtype=torch.bool)
        chosen = SelectedExamples(test, others)
        return SpoiltExamples(chosen, partial(self._mark, everyone), partial(self._label, everyone))

    def _mark(self, poisoned: Tensor, x: Any, places: Tensor) -> Any:
        rows = poisoned[places]
        return map_real_numbers(x, lambda part: stamp(part, rows, self.size, self.value))

    def _label(self, poisoned: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        return labels.masked_fill(poisoned[places], self.target)
