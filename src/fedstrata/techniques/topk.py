"""Top-k with error feedback: of every stratum's change only the largest numbers travel; what stays behind is not lost.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; in federated learning Sattler, Wiedemann,
Müller and Samek, "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data", IEEE TNNLS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.core.bits import count_bytes, find_bits, pack_bits
from fedstrata.core.citation import Paper
from fedstrata.core.encoding import Encoder, Malformed, Step, VectorForm, check_vector
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Setting
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.parts import check_pairs, check_rates, rate_of

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Sebastian U. Stich and Jean-Baptiste Cordonnier and Martin Jaggi",
        "Sparsified SGD with Memory",
        "NeurIPS",
        2018,
    ),
    Paper(
        "Felix Sattler and Simon Wiedemann and Klaus-Robert Müller and Wojciech Samek",
        "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data",
        "IEEE TNNLS",
        2020,
        kind="journal",
    ),
)


def find_largest(vector: Tensor, k: int) -> Tensor:
    """The places of the k numbers of largest size, in order; of those that are alike the first ones.

    NaN is larger than anything.
    """
    sizes = vector.abs().to(torch.promote_types(vector.dtype, torch.float32)).nan_to_num(nan=math.inf)
    least = sizes.kthvalue(len(sizes) - k + 1).values
    above, alike = (sizes > least).nonzero().view(-1), (sizes == least).nonzero().view(-1)
    return torch.cat([above, alike[: k - len(above)]]).sort().values


def place_type(length: int) -> torch.dtype:
    """The smallest type for places in a vector: they are counted from its smallest number on."""
    types = (torch.uint8, torch.int16, torch.int32)
    return next((dtype for dtype in types if length <= 2 ** (8 * dtype.itemsize)), torch.int64)


def is_mapped(length: int, k: int) -> bool:
    """True if a bit for every number takes no more bytes than k places."""
    return count_bytes(length) <= k * place_type(length).itemsize


def pack_places(places: Tensor, length: int) -> Tensor:
    """Places in order, in the fewest bytes: nothing where all travel, a bit for every number, or place by place."""
    if len(places) == length:
        return torch.empty(0, dtype=torch.uint8)
    if not is_mapped(length, len(places)):
        dtype = place_type(length)
        return (places + torch.iinfo(dtype).min).to(dtype)
    return pack_bits(places, length)


def read_places(packed: Tensor, length: int, k: int) -> Tensor:
    """The k places again.

    Raises:
        Malformed: if they are not different ones of the vector, in order.
    """
    if k == length:
        check_vector("places", packed, torch.uint8, 0)
        return torch.arange(length)
    if is_mapped(length, k):
        check_vector("places", packed, torch.uint8, count_bytes(length))
        places = find_bits(packed)
        if len(places) != k:
            raise Malformed(f"places are {len(places)} instead of {k}")
    else:
        dtype = place_type(length)
        check_vector("places", packed, dtype, k)
        places = packed.long() - torch.iinfo(dtype).min
    if not bool((places[1:] > places[:-1]).all()):
        raise Malformed("places are out of order, or one is there twice")
    if int(places[-1]) >= length or int(places[0]) < 0:
        raise Malformed(f"places reach beyond the {length} numbers that there are")
    return places


class LargestNumbers(Encoder):
    """Of every stratum's change a share travels, its largest numbers, and beside them their places."""

    step: ClassVar[Step] = "select"

    def share_of(self, stratum: Stratum) -> float:
        """The share of a stratum's numbers that travels, rounded up."""
        raise NotImplementedError

    def count_encoded(self, form: VectorForm) -> int:
        """⌈share·d⌉, of at least one number."""
        return min(form.length, max(1, math.ceil(round(self.share_of(form.stratum) * form.length, 6))))

    def encode(self, vector: Tensor, form: VectorForm, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The largest numbers, and their places."""
        k = self.count_encoded(form)
        places = torch.arange(k) if k == form.length else find_largest(vector, k)
        return vector[places], pack_places(places, form.length)

    def decode(self, encoded: Tensor, beside: Tensor, form: VectorForm) -> Tensor:
        """The vector, with zeros where nothing travelled."""
        name, k = form.stratum.name, self.count_encoded(form)
        check_vector(f"its chosen numbers of '{name}'", encoded, form.dtype, k)
        try:
            places = read_places(beside, form.length, k)
        except Malformed as error:
            raise Malformed(f"its chosen numbers' {error}, in '{name}'") from None
        return torch.zeros(form.length, dtype=form.dtype).index_copy_(0, places, encoded)


@dataclass(frozen=True, kw_only=True)
class TopK(LargestNumbers):
    """Of every stratum's change the largest numbers alone travel: C(e_k + Δ_k); e_k ← e_k + Δ_k − C(e_k + Δ_k).

    C keeps the ⌈share·d⌉ numbers of largest size of the d that travel of a stratum, and sets the others to 0; up travel
    these numbers and their places. What stays behind, e_k, is the client's memory, and is added to its next change: a
    number that is always small travels once it has added up. A stratum that does not travel in a round keeps its e_k.

    Args:
        share: of a stratum's numbers that travels, rounded up.
        feedback: remember e_k; without it what stays behind is lost, and a model may never reach its optimum.
        rates: another share for some strata, (name pattern, share) each, of which the first that fits counts:
            `(("head", 0.5), ("layer4*", 0.1))`; `head` is the classifier, whatever it is called.

    Running statistics and what techniques send travel whole, and so does the model on its way down.

    Deviations: numbers are chosen stratum by stratum, as in layer-wise top-k, not over the whole model. Sattler et al.
    also send one size for all chosen numbers, and compress what the server sends; their number of places is entropy
    coded, where places here take the smallest type that holds them, or one bit per number where that is less.
    """

    name: ClassVar[str] = "topk"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    share: float = 0.01
    feedback: bool = True
    rates: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_pairs("topk's rates", self.rates, 0.5)
        for share in (self.share, *(share for _, share in self.rates)):
            if not 0 < share <= 1:
                raise UsageError(f"topk's shares must be above 0 and at most 1, not {share}")

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name no stratum."""
        if setting.arch == "":  # sub-models may lack strata
            check_rates("topk's rates", self.rates, setting.strata)

    def share_of(self, stratum: Stratum) -> float:
        """What the first of the rates that names a stratum says, or the share of all."""
        share: float = rate_of(stratum, self.rates, self.share)
        return share
