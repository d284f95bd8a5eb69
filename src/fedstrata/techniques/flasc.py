"""FLASC: of adapters only the largest numbers travel, down and up; clients train all of them.

Kuo, Raje, Rajesh and Smith, "Federated LoRA with Sparse Communication", 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.low_rank import adapters_of
from fedstrata.core.technique import Setting
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError
from fedstrata.techniques.low_rank import check_adapters
from fedstrata.techniques.topk import LargestNumbers, find_largest

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = "clients begin with the largest numbers of the adapters alone, and the other reckons with all of them"


def keep_largest(tensor: Tensor, share: float) -> Tensor:
    """The tensor with its ⌈share·d⌉ numbers of largest size, and zeros in the place of all others."""
    flat = tensor.reshape(-1)
    places = find_largest(flat, max(1, math.ceil(round(share * len(flat), 6))))
    kept = torch.zeros_like(flat).index_copy_(0, places, flat[places])
    return torch.where(kept != 0, kept, 0.0).view(tensor.shape)


@dataclass(frozen=True, kw_only=True)
class FLASC(LargestNumbers):
    """Sparse adapters both ways: a client begins with top_down(P), trains all of it to P_k, and sends top_up(P_k − P).

    P ← P + Σ p_k top_up(P_k − top_down(P)); top_d keeps the share d of the numbers, the largest. Places travel as a bit
    for every number, or less. What is not of an adapter, such as the head, travels whole.

    Args:
        up: the share that travels up, of each stratum's adapter.
        down: the share that travels down, of each factor.

    Deviations from the paper: it chooses the largest numbers over all adapters at once.
    """

    name: ClassVar[str] = "flasc"
    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "Kevin Kuo and Arian Raje and Kousik Rajesh and Virginia Smith",
            "Federated LoRA with Sparse Communication",
            "arXiv",
            2024,
            arxiv="2406.05233",
        ),
    )
    refuses: ClassVar[dict[str, str]] = dict.fromkeys(
        ("fedexlora", "hetlora", "hlora", "flora", "feddf", "fedasync", "finetune", "fedbabu", "ccvr"), WHOLE
    )
    up: float = 0.25
    down: float = 0.25
    feedback: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name, share in (("up", self.up), ("down", self.down)):
            if not 0 < share <= 1:
                raise UsageError(f"flasc's {name} must be above 0 and at most 1, not {share}")

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters."""
        check_adapters(self.name, setting)

    def share_of(self, stratum: Stratum) -> float:
        """Of an adapter `up`, of all else everything."""
        return 1.0 if stratum.low_rank is None else self.up

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Clients begin with the largest numbers of every factor."""
        if self.down == 1:
            return assignment
        names = [n for one in adapters_of(strata) for n in (one.a, one.b) if n in assignment.params]
        kept = {n: keep_largest(assignment.params[n], self.down) for n in names}
        return replace(assignment, params={**assignment.params, **kept}, sparse=(*assignment.sparse, *kept))
