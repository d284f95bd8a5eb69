"""Tokens from gradients, as pure functions: which went into an embedding, and which into a linear layer.

The gradient of a linear layer's weight is Σ_t δ_t·x_tᵀ, so its rows lie in the span of the inputs x_t, one for each
position. Where x_t depends on one token and its place alone, which is so until tokens are mixed, everybody who has the
model can compute it for any token, and try which ones lie in that span (Petrov et al., "DAGER: Exact Gradient Inversion
for Large Language Models", NeurIPS 2024). Where the gradient has fewer rows than there were tokens, as that of a
low-rank factor, it shows a part of the span only; then inputs are chosen one after the other (Davies and Eldar, "Rank
Awareness in Joint Sparse Recovery", IEEE Trans. Inf. Theory 2012).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORTLIST = 2000
"""Inputs that fit a gradient best, among which is then chosen."""
_EXPLAINED = 1e-3
"""The share of a span that may be left over once enough inputs are found."""
_LEAST, _SURE = 0.25, 0.999
"""An input of which less than this share lies in the span was not there; one of which this share does, was."""


def inputs_of_linear(weight: Tensor, bias: Tensor) -> Tensor:
    """The input x of a linear layer from the gradients of a loss of one example: ∂ℓ/∂W = δ·xᵀ and ∂ℓ/∂b = δ.

    Every row of ∂ℓ/∂W is δ_i·x; they are put together by least squares, x = δᵀ·∂ℓ/∂W / ‖δ‖².
    """
    size = bias.double().square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return ((bias.double() @ weight.double()) / size).to(weight.dtype)


def rounding_of(weight: Tensor) -> float:
    """How large a matrix of rounding errors is (its spectral norm, about), where w + Δ is stored in w's precision."""
    rows, columns = weight.shape
    step = torch.finfo(weight.dtype).eps * weight.abs().max().item()
    return step * (math.sqrt(rows) + math.sqrt(columns))


def embedded_tokens(change: Tensor, noise: float) -> list[int]:
    """The tokens that went into an embedding: those whose row has moved."""
    moved = change.norm(dim=1) > noise / math.sqrt(len(change))
    tokens: list[int] = moved.nonzero().flatten().tolist()
    return tokens


def row_space(changes: Sequence[Tensor], noises: Sequence[float]) -> Tensor:
    """An orthonormal basis (inputs × rank) of the rows of linear layers' gradients that have the same inputs.

    Directions that are not above rounding are left out.
    """
    scaled = [change.double() / max(noise, 1e-300) for change, noise in zip(changes, noises, strict=True)]
    _, sizes, rows = torch.linalg.svd(torch.cat(scaled), full_matrices=False)
    basis: Tensor = rows[sizes > math.sqrt(len(scaled))].T
    return basis


def share_in(basis: Tensor, inputs: Tensor) -> Tensor:
    """‖Uᵀx‖²/‖x‖² for each of the inputs (rows): 1 for what lies in the span of U's columns."""
    return (inputs @ basis).square().sum(1) / inputs.square().sum(1).clamp(min=1e-30)


@dataclass
class Shortlist:
    """The inputs that fit a span best so far.

    Args:
        basis: of the span, orthonormal columns.
        most: how many are kept.
    """

    basis: Tensor
    most: int = SHORTLIST

    def __post_init__(self) -> None:
        self._basis = self.basis.float()
        self.inputs, self.tokens, self.shares = self._basis.T[:0], torch.empty(0).long(), torch.empty(0)

    def offer(self, inputs: Tensor, tokens: Tensor) -> None:
        """Look at more inputs, one per row, and the token of each."""
        shares = share_in(self._basis, inputs)
        if len(self.shares) == self.most:
            good = shares > self.shares.min()
            inputs, tokens, shares = inputs[good], tokens[good], shares[good]
        shares, order = torch.cat([self.shares, shares]).topk(min(self.most, len(self.shares) + len(shares)))
        self.shares = shares
        self.inputs = torch.cat([self.inputs, inputs])[order]
        self.tokens = torch.cat([self.tokens, tokens])[order]

    def tokens_in(self, most: int) -> list[int]:
        """The tokens that the span is made of, by rank-aware pursuit among those that were kept."""
        chosen = pursue(self.inputs.double(), self.basis, most)
        return sorted({int(self.tokens[at]) for at in chosen})


def tells(basis: Tensor) -> bool:
    """False if the span is nothing, or the whole space, in which everything lies."""
    return 0 < basis.shape[1] < basis.shape[0]


def _by_chance(rank: int, size: int) -> float:
    """The share of an input that must lie in a span of that rank, for chance to be no explanation.

    Of a random direction in `size` dimensions the share is k/n on average, with a standard deviation of about
    √(2·k/n·(1 − k/n)/(n + 2)); five of these above it is rare even among all tokens.
    """
    share = rank / size
    rare = share + 5 * math.sqrt(2 * share * (1 - share) / (size + 2))
    return min(max(_LEAST, rare), _SURE)


def pursue(inputs: Tensor, basis: Tensor, most: int) -> list[int]:
    """Which of the inputs (rows) span what holds the basis, found one after the other.

    Each is the one of which, beyond those before it, the largest share lies in the rest of the span.
    """
    if not tells(basis):
        return []
    chosen: list[int] = []
    rest, left = inputs / inputs.norm(dim=1, keepdim=True).clamp(min=1e-30), basis
    own = torch.ones(len(inputs), dtype=inputs.dtype)
    while left.shape[1] and len(chosen) < min(most, len(inputs)):
        shares = (rest @ left).square().sum(1) / own
        shares[own < 1e-6] = 0.0
        best = int(shares.argmax())
        if shares[best] < _by_chance(left.shape[1], len(left) - len(chosen)):
            break
        chosen.append(best)
        direction = rest[best] / rest[best].norm()
        rest = rest - torch.outer(rest @ direction, direction)
        own = rest.square().sum(1)
        left = _orthonormal(left - torch.outer(direction, direction @ left))
    return chosen


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of what is left of orthonormal columns once a direction is taken out of them."""
    directions, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    left: Tensor = directions[:, sizes.square() > _EXPLAINED]
    return left


def shares_found(found: Iterable[int], there: Iterable[int]) -> tuple[float, float]:
    """(the share of the tokens that were found, the share of what was found that was there)."""
    claimed, real = set(found), set(there)
    right = len(claimed & real)
    return right / len(real) if real else 0.0, right / len(claimed) if claimed else 0.0


def pairs(tokens: Tensor, inputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, tokens) of every position, from sequences of one token each and their inputs (tokens, places, size)."""
    return ((inputs[:, place], tokens) for place in range(inputs.shape[1]))
