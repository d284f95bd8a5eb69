"""Inputs on another scale: the unit that was forgotten, a camera that inverts, a sensor that is dead or noisy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.core.lazy import torch
from fedstrata.core.types import Examples
from fedstrata.errors import UsageError, not_negative
from fedstrata.faults.fault import SHARE, Fault, FaultSetting
from fedstrata.faults.spoilt_examples import SpoiltExamples, check_real_numbers, map_real_numbers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inputs(Fault):
    """Wrong inputs: gain·x + offset + noise·N(0, 1), of what the model would get.

    Args:
        gain: 255 is bytes that nobody divided, 0 a dead sensor, −1 with an offset of 1 an inverted picture.
        offset: what is added.
        noise: deviation of what is drawn anew whenever an example is read.
        share, clients: whom it hits.
    """

    name: ClassVar[str] = "inputs"
    gain: float = 255.0
    offset: float = 0.0
    noise: float = 0.0
    share: float = SHARE
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("inputs", noise=self.noise)
        for name, value in (("gain", self.gain), ("offset", self.offset)):
            if abs(value) == float("inf"):
                raise UsageError(f"inputs' {name} must be finite, not {value}")

    def check(self, setting: FaultSetting) -> None:
        """Refuse tokens."""
        check_real_numbers(self.name, setting.sample)

    def spoil(self, examples: Examples, client: int, setting: FaultSetting) -> Examples:
        """The same examples with other inputs."""
        return SpoiltExamples(examples, inputs=self._see)

    def _see(self, x: Any, places: Tensor) -> Any:
        return map_real_numbers(x, self._transform)

    def _transform(self, x: Tensor) -> Tensor:
        seen = x * self.gain + self.offset
        return seen + self.noise * torch.randn(x.shape, dtype=x.dtype) if self.noise else seen
