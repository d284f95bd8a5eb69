"""Missing inputs: columns of a table, or pixels, that a client never has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.aggregation.arithmetic import floor_share
from fedstrata.core.lazy import torch
from fedstrata.core.rng import derive
from fedstrata.core.types import Examples
from fedstrata.errors import UsageError
from fedstrata.faults.fault import SHARE, Fault, FaultSetting
from fedstrata.faults.spoilt_examples import SpoiltExamples, check_real_numbers, map_real_numbers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Missing(Fault):
    """Missing inputs: the same places of every input hold NaN, or a number that stands for it.

    Args:
        rate: of the places; which ones is drawn for every client, and one at least is missing unless it is 0.
        fill: what stands there; None for NaN, with which a client's update is NaN, too, and refused.
        share, clients: whom it hits.
    """

    name: ClassVar[str] = "missing"
    rate: float = 0.1
    fill: float | None = None
    share: float = SHARE
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate <= 1:
            raise UsageError(f"missing's rate must be from 0 to 1, not {self.rate}")

    def check(self, setting: FaultSetting) -> None:
        """Refuse tokens."""
        check_real_numbers(self.name, setting.sample)

    def spoil(self, examples: Examples, client: int, setting: FaultSetting) -> Examples:
        """The same examples with holes."""
        return SpoiltExamples(examples, inputs=partial(self._see, derive(setting.seed, "fault", self.name, client)))

    def _see(self, seed: int, x: Any, places: Tensor) -> Any:
        return map_real_numbers(x, lambda part: self._punch(part, seed))

    def _punch(self, x: Tensor, seed: int) -> Tensor:
        size = x[:1].numel()
        count = max(1, floor_share(self.rate, size)) if self.rate and size else 0
        lost = torch.zeros(size, dtype=torch.bool)
        lost[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count]] = True
        return x.masked_fill(lost.view(x.shape[1:]), float("nan") if self.fill is None else self.fill)
