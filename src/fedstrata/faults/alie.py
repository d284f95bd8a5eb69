"""ALIE: a little is enough; many small lies, in every number within what honest clients differ by.

Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.types import Update, replace_fields
from fedstrata.errors import UsageError, one_of
from fedstrata.faults.fault import SHARE, Fault

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Gilad Baruch and Moran Baruch and Yoav Goldberg",
        "A Little Is Enough: Circumventing Defenses For Distributed Learning",
        "NeurIPS",
        2019,
    ),
)


def largest_z(clients: int, attackers: int) -> float:
    """z_max = max{z : φ(z) < (n − m − s)/(n − m)}, s = ⌊n/2 + 1⌋ − m: how far m of n clients may go.

    With the s honest clients that are further out than that they are a majority. At least 0, where the paper's number
    is below it because attackers are few; with s = 1 where they are a majority by themselves.
    """
    honest = clients - attackers
    supporters = max(1, clients // 2 + 1 - attackers)
    below = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(below)) if below > 0 else 0.0


def spread_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation) of each number over some clients, in double precision."""
    stacked = torch.stack([t.double() for t in tensors])
    return stacked.mean(0), stacked.std(0, correction=0)


@dataclass(frozen=True, kw_only=True)
class Alie(Fault):
    """A little is enough: all attackers send mean − z·std, number by number.

    Baruch et al. 2019, Algorithm 3, with the deviation taken off every number, whatever the sign of its mean. n are the
    clients whose updates have come in the round, m the attackers among them.

    Args:
        z: how many deviations; None for the paper's z_max, with which enough honest clients are further out.
        sees: whose mean and deviation: the `others`' updates, or those that the attackers would have sent themselves
            (`mates`), which is all that the paper's attacker needs.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "alie"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    z: float | None = None
    sees: Literal["others", "mates"] = "others"
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("alie", ("others", "mates"), sees=self.sees)
        if self.z is not None and abs(self.z) == float("inf"):
            raise UsageError(f"alie's z must be finite, not {self.z}")

    def collude(self, own: Update, others: Sequence[Update], mates: Sequence[Update]) -> Update:
        """mean − z·std."""
        z = largest_z(len(others) + len(mates), len(mates)) if self.z is None else self.z
        seen = others if self.sees == "others" else mates
        lies = {}
        for name, tensor in own.delta.items():
            if known := [update.delta[name] for update in seen if name in update.delta]:
                mean, deviation = spread_of(known)
                tensor = (mean - z * deviation).to(tensor.dtype)
            lies[name] = tensor
        return replace_fields(own, delta=lies, finite=False)
