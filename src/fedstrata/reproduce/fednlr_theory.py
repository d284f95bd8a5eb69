"""FedNLR's theory, checked with numbers in double precision: Example 1, Theorem 2, Lemma 4 and Eq. 16.

Symbols: a two-layer network without biases, h = ReLU(W₁x), p = softmax(W₂h); class c is the one that client k lacks, c'
the one that it holds. Eq. 10 ends with A·h^c − A·h^c, the same symbol twice, which would be 0; what is meant is A·h^c −
A·h^c'. The update in Theorem 2's proof leaves out ReLU's derivative: it is that of a neuron which is active on all of
the client's examples; others move by those examples that activate them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.techniques.fednlr import temperature

# --- a two-layer network ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoLayers:
    """A network of two layers without biases: a row of `hidden` for each neuron, a row of `out` for each class."""

    hidden: Tensor
    out: Tensor

    def activations(self, x: Tensor) -> Tensor:
        """ReLU(W₁x), a row for each example."""
        return (x @ self.hidden.T).clamp(min=0)

    def scores(self, x: Tensor) -> Tensor:
        """The probability scores p, a row for each example."""
        return torch.softmax(self.activations(x) @ self.out.T, -1)

    def step(self, x: Tensor, label: int, lr: float) -> TwoLayers:
        """One step of gradient descent on the summed cross-entropy of examples of one class."""
        return self.descend(x, torch.full((len(x),), label), lr)

    def descend(self, x: Tensor, labels: Tensor, lr: float) -> TwoLayers:
        """The same, of examples of any classes."""
        activations = self.activations(x)
        error = self.scores(x) - torch.eye(len(self.out), dtype=x.dtype)[labels]
        back = (error @ self.out) * (activations > 0)
        return TwoLayers(self.hidden - lr * back.T @ x, self.out - lr * error.T @ activations)


def collapsed(hidden: Tensor, examples: Tensor) -> TwoLayers:
    """A network in the state of Eq. 2 with A = 1: the classifier's row of a class is the activations on its example.

    Args:
        hidden: the first layer.
        examples: one of each class, which all others of the class are equal to.
    """
    return TwoLayers(hidden, (examples @ hidden.T).clamp(min=0))


def printed_reduction(net: TwoLayers, own: Tensor, other: Tensor, missing: int, lr: float) -> Tensor:
    """Theorem 2's Δh of every neuron on examples of a class, as printed, after one step on a client that lacks it.

    η Σ_k x_kᵀx_i((p_c'(x_k) − 1)w_{2,c',m} + p_c(x_k)w_{2,c,m}), but no more than the activation w_{1,m}ᵀx_i itself.

    Args:
        net: before the step; of two classes.
        own: the client's examples x_k, all of the other class c'.
        other: examples x_i of the missing class c.
        missing: c.
        lr: η.
    """
    held = 1 - missing
    scores = net.scores(own)
    pulls = (scores[:, held, None] - 1) * net.out[held] + scores[:, missing, None] * net.out[missing]
    falls = lr * (other @ own.T) @ pulls
    before = other @ net.hidden.T
    return torch.where(before - falls <= 0, before, falls)


# --- Example 1 -------------------------------------------------------------------------------------------------------

EXAMPLE = {"h₁": (0.67, 0.73), "h₂": (1.11, 1.04), "p₁": (0.45, 0.63), "p₂": (0.55, 0.37)}
"""Eq. 9, on class 2: before and after one step on the client of class 1, with the learning rate 0.5."""
EXAMPLE_LR = 0.5


def example_network() -> tuple[TwoLayers, Tensor]:
    """Example 1's network and its two examples, (1, 1/3) of class 1 and (1/3, 1) of class 2.

    The figure with its parameters is not at hand. Each neuron looks for one class's example, W₁ = (x¹, x²), and the
    classifier is collapsed onto the activations, W₂ = (h¹, h²): all eight numbers of Eq. 9 follow to their two digits.
    """
    examples = torch.tensor([[1.0, 1 / 3], [1 / 3, 1.0]], dtype=torch.float64)
    return collapsed(examples, examples), examples


def example_figures() -> dict[str, tuple[float, float]]:
    """Eq. 9's figures of that network."""
    net, (first, second) = example_network()
    nets = (net, net.step(first.unsqueeze(0), 0, EXAMPLE_LR))
    rows = [[*one.activations(second).tolist(), *one.scores(second).tolist()] for one in nets]
    return {name: (before, after) for name, before, after in zip(EXAMPLE, *rows, strict=True)}


# --- learning rates --------------------------------------------------------------------------------------------------


def shares(activations: Tensor, mu: float) -> Tensor:
    """Eq. 15's q, which add up to 1: softmax(h̄/T) with Eq. 16's T."""
    return torch.softmax(activations / temperature(activations, mu), -1)


def discrepancy(activations: Tensor, heat: float) -> float:
    """The largest over the smallest learning rate of a layer at a temperature."""
    q = torch.softmax(activations / heat, -1)
    return float(q.max() / q.min())


def rate_bounds(mus: list[float], widths: list[int]) -> tuple[float, float]:
    """Lemma 4's lowest and highest learning rate of any neuron, for η = 1.

    1/(μ_max(M_max − 1) + 1) and μ_max/(μ_max + M_min − 1).
    """
    mu = max(mus)
    return 1 / (mu * (max(widths) - 1) + 1), mu / (mu + min(widths) - 1)
