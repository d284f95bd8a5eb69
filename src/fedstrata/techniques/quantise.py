"""Quantisation: every number of a change in a few bits, of the same mean.

Reisizadeh, Mokhtari, Hassani, Jadbabaie and Pedarsani, "FedPAQ: A Communication-Efficient Federated Learning Method
with Periodic Averaging and Quantization", AISTATS 2020; the quantiser is that of Alistarh, Grubic, Li, Tomioka and
Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.encoding import Encoder, Malformed, Step, VectorForm, check_vector
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Setting
from fedstrata.errors import UsageError, one_of
from fedstrata.models.parts import check_pairs, check_rates, rate_of

if TYPE_CHECKING:
    from torch import Tensor

Bits = Literal[8, 4, 32]
Rounding = Literal["stochastic", "nearest"]


PAPERS = (
    Paper(
        "Amirhossein Reisizadeh and Aryan Mokhtari and Hamed Hassani and Ali Jadbabaie and Ramtin Pedarsani",
        "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization",
        "AISTATS",
        2020,
    ),
    Paper(
        "Dan Alistarh and Demjan Grubic and Jerry Li and Ryota Tomioka and Milan Vojnovic",
        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        "NeurIPS",
        2017,
    ),
)


def quantise(vector: Tensor, levels: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(whole numbers q from −levels to levels, the scale s = max|v|/levels): v ≈ s·q.

    With `noise` u, uniform in [0, 1), q = ⌊v/s + u⌋, whose mean is v/s; without, q is the whole number next to v/s.
    """
    scale = vector.abs().max() / levels
    steps = torch.where(scale > 0, vector / scale, torch.zeros_like(vector))
    steps = steps.round() if noise is None else (steps + noise).floor()
    return steps.clamp(-levels, levels).nan_to_num().to(torch.int8), scale.view(1)


def pack_halves(codes: Tensor) -> Tensor:
    """Whole numbers from −8 to 7, two per byte, the first one in the lower half; an odd last one beside a zero."""
    halves = torch.nn.functional.pad((codes + 8).to(torch.uint8), (0, len(codes) % 2), value=8)
    return halves[::2] | (halves[1::2] << 4)


def read_halves(packed: Tensor, length: int) -> Tensor:
    """The whole numbers again."""
    return torch.stack([packed & 15, packed >> 4], 1).view(-1)[:length].to(torch.int8) - 8


@dataclass(frozen=True, kw_only=True)
class Quantise(Encoder):
    """Every number of a change travels in 8 or 4 bits: Q(Δ) = s·⌊Δ/s + u⌋, u ~ U[0, 1), s = max|Δ| / (2^(bits−1) − 1).

    The mean of Q(Δ) is Δ. One s for each stratum travels beside it; beside `topk`, only the numbers that it has chosen
    are quantised.

    Args:
        bits: 8, 4 (two numbers per byte), or 32 for numbers as they are.
        rounding: `stochastic` as above; `nearest` is more exact in every number, and wrong on average.
        feedback: let clients remember what rounding has changed, e_k ← e_k + Δ_k − Q(e_k + Δ_k), and add it to their
            next change; for `nearest`, which never sends what is below s/2 otherwise.
        rates: other bits for some strata, (name pattern, bits) each, of which the first that fits counts:
            `(("head", 32), ("layer4*", 4))`; `head` is the classifier, whatever it is called.

    Running statistics and what techniques send travel whole, and so does the model on its way down.

    In half precision the server rounds what it reads to that type, too, and the mean is Δ up to this rounding.

    Deviations: QSGD's scale is the norm of a bucket, and its whole numbers are entropy coded; here it is the largest
    number of a stratum, and all have as many bits. FedPAQ has no feedback.
    """

    name: ClassVar[str] = "quantise"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    step: ClassVar[Step] = "round"
    bits: Bits = 8
    rounding: Rounding = "stochastic"
    feedback: bool = False
    rates: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_pairs("quantise's rates", self.rates, 4)
        one_of("quantise", get_args(Rounding), rounding=self.rounding)
        for bits in (self.bits, *(bits for _, bits in self.rates)):
            if bits not in get_args(Bits):
                raise UsageError(f"quantise's bits must be 8, 4 or 32, not {bits!r}")

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name no stratum."""
        if setting.arch == "":  # sub-models may lack strata
            check_rates("quantise's rates", self.rates, setting.strata)

    def encode(self, vector: Tensor, form: VectorForm, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Whole numbers, and their scale."""
        bits: Bits = rate_of(form.stratum, self.rates, self.bits)
        if bits == 32:
            return vector, torch.empty(0, dtype=torch.uint8)
        wide = vector.to(torch.promote_types(form.dtype, torch.float32))
        stochastic = self.rounding == "stochastic"
        noise = torch.rand(form.length, generator=rng, dtype=wide.dtype) if stochastic else None
        codes, scale = quantise(wide, 2 ** (bits - 1) - 1, noise)
        return pack_halves(codes) if bits == 4 else codes, scale

    def decode(self, encoded: Tensor, beside: Tensor, form: VectorForm) -> Tensor:
        """The vector, s·q."""
        bits: Bits = rate_of(form.stratum, self.rates, self.bits)
        name, dtype = form.stratum.name, torch.promote_types(form.dtype, torch.float32)
        what = f"its quantised numbers of '{name}'"
        if bits == 32:
            check_vector(f"its numbers of '{name}'", encoded, form.dtype, form.length)
            check_vector(f"the scales of '{name}'", beside, torch.uint8, 0)
            return encoded
        check_vector(f"the scales of '{name}'", beside, dtype, 1)
        if float(beside) < 0:
            raise Malformed(f"the scale of '{name}' is below 0")
        if bits == 4:
            check_vector(what, encoded, torch.uint8, (form.length + 1) // 2)
            encoded = read_halves(encoded, form.length)
        check_vector(what, encoded, torch.int8, form.length)
        return (encoded.to(dtype) * beside).to(form.dtype)
