"""Margins: how far examples are from the nearest point that a model takes for another class (FedImpro, Def. 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.errors import UsageError
from fedstrata.models.stages import run_from
from fedstrata.probes.measures.reading import BATCH, device_of, scratch_copy

SMALLEST = 1e-12
"""Of a gradient's norm: below it two classes' difference depends on nothing, and no way leads from one to the other."""


def margins(model: nn.Module, x: Tensor, y: Tensor, place: str | None = None) -> Tensor:
    """For each example, to first order, d(x, x') to the nearest x' that is misclassified; 0 where x itself is.

    Where the model takes x for y, and were its logits z linear nearby, class j would win at a distance of
    (z_y − z_j) / ‖∇(z_y − z_j)‖; the margin is the least of these over j ≠ y. Exact for a linear model; elsewhere an
    estimate, as good as the logits are linear up to there. It is infinite where, to first order, no way leads to
    another class.

    Args:
        model: as it is evaluated.
        x: inputs, real numbers; or, with a `place`, the features that leave that stage.
        y: their classes.
        place: measure distances between features there, and run the model from there on; None for inputs.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise UsageError("margins are distances between inputs that are real numbers, and these are whole ones")
    if any(isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules()):
        raise UsageError("margins are each example's own, and this model normalises by its batch's statistics")
    found = []
    with scratch_copy(model) as scratch, torch.enable_grad():
        scratch.requires_grad_(False)
        for some, labels in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True):
            here = some.detach().to(device_of(scratch)).clone().requires_grad_(True)
            logits = scratch(here) if place is None else run_from(scratch, here, place)
            found.append(_nearest(here, logits, labels.to(logits.device)).cpu())
    return torch.cat(found) if found else torch.zeros(0)


def _nearest(x: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The least distance to another class; every row's gradient is its own, since no row looks at another."""
    rows = torch.arange(len(labels), device=labels.device)
    own = logits[rows, labels]
    gaps = own[:, None] - logits
    distances = torch.full_like(logits, torch.inf)
    for other in range(logits.shape[1]):
        (slope,) = torch.autograd.grad(gaps[:, other].sum(), x, retain_graph=True)
        norm = slope.flatten(1).norm(dim=1)
        reachable = (labels != other) & (norm > SMALLEST)
        distances[reachable, other] = (gaps[:, other] / norm).detach()[reachable]
    right = logits.argmax(1) == labels
    nearest = distances.amin(1)
    return torch.where(right, nearest.clamp(min=0), torch.zeros_like(nearest))


def mean_margin(values: Tensor) -> float | None:
    """W_d: the mean over the examples whose margin is finite; None if none is."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else None


@dataclass(frozen=True)
class MarginTerms:
    """W_d of local models (Theorem 4.1), client by client, all in the examples' own distance.

    Args:
        others: W_d(ρ(θ + Δ_m), D∖D_m): on the other clients' examples, the generalisation contribution (Eq. 2).
        sample: W_d(ρ(θ + Δ_m), D̃_m): on the client's own examples, which it has trained on.
        whole: W_d(ρ(θ + Δ_m), D_m): on examples that nobody has trained on, in the client's mixture of classes.

    None stands for what cannot be told: of no finite margin, or where a class of the mixture is missing.
    """

    others: list[float | None]
    sample: list[float | None]
    whole: list[float | None]

    def bound(self, client: int, distance: float) -> float | None:
        """What the theorem puts below `others`, for a conditional distance C_d between the client and the others."""
        whole, sample = self.whole[client], self.sample[client]
        return None if whole is None or sample is None else sample - abs(whole - sample) - 2 * distance


def margin_terms(
    local: Sequence[nn.Module], held: Sequence[tuple[Tensor, Tensor]], fresh: tuple[Tensor, Tensor]
) -> MarginTerms:
    """The three margins of each local model.

    Under label skew clients differ in their mixture of classes alone, so that examples of the whole distribution,
    weighed class by class, are examples of D_m.

    Args:
        local: each client's model after its training.
        held: each client's examples (inputs, classes).
        fresh: examples that nobody has trained on.
    """
    if len(local) != len(held) or len(local) < 2:
        raise UsageError(f"margins need two or more clients, each with examples; there are {len(local)} models")
    terms = MarginTerms([], [], [])
    for client, model in enumerate(local):
        found = [margins(model, x, y) for x, y in held]
        rest = torch.cat([m for at, m in enumerate(found) if at != client])
        terms.others.append(mean_margin(rest))
        terms.sample.append(mean_margin(found[client]))
        terms.whole.append(_in_mixture(margins(model, *fresh), fresh[1], held[client][1]))
    return terms


def _in_mixture(values: Tensor, labels: Tensor, mixture: Tensor) -> float | None:
    """The mean of values, class by class, weighed as the classes of a mixture are."""
    classes = sorted(set(mixture.tolist()))
    means = [mean_margin(values[labels == c]) for c in classes]
    shares = [float((mixture == c).float().mean()) for c in classes]
    known = [mean * share for mean, share in zip(means, shares, strict=True) if mean is not None]
    return sum(known) if len(known) == len(means) else None
