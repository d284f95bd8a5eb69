"""Where divergence comes from: how far apart the gradients of single images are.

"Unlocking the Potential of Federated Learning for Deeper Models", the two experiments of Fig. 3. Symbols: draw or image
k of K, its gradient g_k, their mean ḡ, stratum L with d_L parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.client.gradients import compute_gradient
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.data.labels import check_range
from fedstrata.errors import UsageError, positive
from fedstrata.probes.measures.divergence import relative_length
from fedstrata.probes.measures.features import LIMIT
from fedstrata.probes.measures.reading import (
    check_labelled,
    check_names,
    device_of,
    params_of,
    scratch_copy,
)
from fedstrata.tasks.classification import CLASSIFICATION

DRAWS = 1000
"""Draws of the noise, as in the paper."""

_ENTRIES = 1 << 22
"""Numbers, at most, in the gradients of the examples that are differentiated together, if there are several."""

_TOGETHER = 64
"""Examples, at most, that are differentiated together."""


@dataclass(frozen=True)
class GradientSpread:
    """Standard deviations of gradients, stratum by stratum: one for each image, or for each class.

    Attributes:
        labels: the image's class, or the class.
        figures: stratum name → a figure for each of these.
        lengths: stratum name → ‖ḡ‖, the length of the mean gradient, for each of these.
        entries: stratum name → d_L.
    """

    labels: tuple[int, ...]
    figures: dict[str, tuple[float, ...]]
    lengths: dict[str, tuple[float, ...]]
    entries: dict[str, int]

    @property
    def unscaled(self) -> dict[str, tuple[float, ...]]:
        """Stratum name → √((1/K) Σ_k ‖g_k − ḡ‖²): the figures without their division by √d_L."""
        return {name: tuple(math.sqrt(self.entries[name]) * f for f in mine) for name, mine in self.figures.items()}

    @property
    def relative(self) -> dict[str, tuple[float, ...]]:
        """Stratum name → √((1/K) Σ_k ‖g_k − ḡ‖²)/‖ḡ‖."""
        return {
            name: tuple(relative_length(u**2, n**2) for u, n in zip(mine, self.lengths[name], strict=True))
            for name, mine in self.unscaled.items()
        }

    @property
    def means(self) -> dict[str, float]:
        """Stratum name → the mean: the dark line of Fig. 3, before its logarithm."""
        return {name: fmean(values) for name, values in self.figures.items()}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Stratum name → (smallest, largest): the light area of Fig. 3."""
        return {name: (min(values), max(values)) for name, values in self.figures.items()}


def input_noise(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    strata: Sequence[Stratum],
    std: float = 0.1,
    draws: int = DRAWS,
    seed: int = 0,
) -> GradientSpread:
    """How much noise on an image changes its gradient, for each image on its own (§3.3, Fig. 3a).

    √((1/K) Σ_k ‖g_k − ḡ‖²/d_L), where g_k is the gradient of the loss of the image with the k-th draw of noise, ḡ their
    mean. The paper speaks of the standard deviation among these gradients and gives no formula: this is the standard
    deviation of an entry, in the square mean over the stratum's entries, which is how Eq. 1 normalises. The model is
    in evaluation mode.

    Args:
        model: at whose parameters the gradients are taken.
        inputs: images as the model takes them, best one of each class.
        labels: their classes.
        strata: of the model.
        std: of the noise N(0, std²), in the units of the inputs.
        draws: K.
        seed: of the noise.
    """
    positive("input_noise", std=std)
    if draws < 2:
        raise UsageError(f"a standard deviation needs 2 or more draws, not {draws}")
    if not inputs.is_floating_point():
        raise UsageError(f"noise is added to inputs of floating point, not of {inputs.dtype}")

    def noisy(row: int) -> Iterator[Tensor]:
        rng = generator("input_noise", seed, row)
        for _ in range(draws):
            yield inputs[row].cpu() + std * torch.randn(inputs[row].shape, generator=rng, dtype=inputs.dtype)

    return _spread(model, inputs, labels, strata, [(partial(noisy, row), row) for row in range(len(inputs))])


def within_class(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    strata: Sequence[Stratum],
    limit: int | None = LIMIT,
    seed: int = 0,
) -> GradientSpread:
    """How far apart the gradients of single images of one class are, for each class on its own (§3.3, Fig. 3b).

    The figure is that of `input_noise`, with the K images of a class in place of K draws. Classes of which there is
    but one image are left out.

    Args:
        model: at whose parameters the gradients are taken.
        inputs: as the model takes them.
        labels: their classes.
        strata: of the model.
        limit: images of a class, at most, chosen at random; None for all, as in the paper.
        seed: chooses them.
    """
    if limit is not None and limit < 2:
        raise UsageError(f"the limit of images per class must be 2 or more, not {limit}")
    check_labelled((inputs, labels))
    groups = []
    for label in sorted(set(labels.tolist())):
        at = torch.nonzero(labels.cpu() == label).flatten()
        chosen = at[torch.randperm(len(at), generator=generator("within_class", seed, label))[:limit]].tolist()
        if len(chosen) > 1:
            groups.append((partial(map, inputs.__getitem__, chosen), chosen[0]))
    if not groups:
        raise UsageError("a standard deviation needs 2 or more images of a class, and no class has them")
    return _spread(model, inputs, labels, strata, groups)


def _spread(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    strata: Sequence[Stratum],
    groups: Sequence[tuple[Callable[[], Iterable[Tensor]], int]],
) -> GradientSpread:
    """One figure per group: its images, and the row that has their label."""
    check_labelled((inputs, labels))
    with scratch_copy(model) as scratch:
        if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in scratch.modules()):
            raise UsageError("one image has no gradient of its own in a model that normalises by the batch")
        check_names(params_of(strata), dict(scratch.named_parameters()), "the model has")
        device = device_of(scratch)
        first = inputs[:2].to(device)
        _check_labels(scratch, first, labels)
        names = [n for stratum in strata for n in stratum.params]
        gradients = single_gradients(scratch, names, first, labels[:2].to(device))
        size = max(1, min(_TOGETHER, _ENTRIES // sum(p.numel() for p in scratch.parameters())))
        found = []
        for images, row in groups:
            label = labels[row].to(device)
            parts = (gradients(x.to(device), label.expand(len(x))) for x in _stacks(images(), size))
            found.append(_deviation(parts, strata))
    kept = tuple(int(labels[row]) for _, row in groups)
    figures, lengths = ({s.name: tuple(mine[s.name][at] for mine in found) for s in strata} for at in (0, 1))
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    return GradientSpread(kept, figures, lengths, {s.name: sum(sizes[n] for n in s.params) for s in strata})


def _check_labels(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Here, since many gradients at once would put it in other words."""
    with torch.no_grad():
        outputs = model(x).shape[1]
    check_range(labels, outputs)


def _stacks(images: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    stack: list[Tensor] = []
    for image in images:
        stack.append(image)
        if len(stack) == size:
            yield torch.stack(stack)
            stack = []
    if stack:
        yield torch.stack(stack)


def _deviation(parts: Iterable[Tensors], strata: Sequence[Stratum]) -> dict[str, tuple[float, float]]:
    """Stratum name → (√((1/K) Σ_k ‖g_k − ḡ‖²/d_L) = √((E‖g − a‖² − ‖E(g − a)‖²)/d_L), ‖ḡ‖).

    With the first gradient as a, which keeps the numbers small, one pass over the gradients is enough.
    """
    first: Tensors = {}
    sums: Tensors = {}
    squares: dict[str, float] = {}
    count = 0
    for part in parts:
        count += len(next(iter(part.values())))
        for name, rows in part.items():
            start = first.setdefault(name, rows[0].double())
            moved = rows.double() - start
            sums[name] = sums[name] + moved.sum(0) if name in sums else moved.sum(0)
            squares[name] = squares.get(name, 0.0) + float(moved.square().sum())
    found = {}
    for stratum in strata:
        square = sum(squares[n] / count - float((sums[n] / count).square().sum()) for n in stratum.params)
        mean = sum(float((first[n] + sums[n] / count).square().sum()) for n in stratum.params)
        spread = math.sqrt(max(square, 0.0) / sum(first[n].numel() for n in stratum.params))
        found[stratum.name] = spread, math.sqrt(mean)
    return found


def single_gradients(
    model: nn.Module, names: Sequence[str], x: Tensor, y: Tensor
) -> Callable[[Tensor, Tensor], Tensors]:
    """(inputs, labels) → each example's own gradient, examples first; `x` and `y` are one batch to try.

    Many at once with `torch.func.vmap`, or one by one where it cannot run the model.
    """
    own = dict(model.named_parameters())
    params: Tensors = {n: own[n] for n in names}
    fixed = {n: p.detach() for n, p in own.items()}
    values = {n: fixed[n] for n in names}

    def loss(moved: Tensors, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, {**fixed, **moved}, (image.unsqueeze(0),))
        return CLASSIFICATION.mean_loss(logits, label.unsqueeze(0))

    vectorised = vmap(grad(loss), in_dims=(None, 0, 0))

    def together(x: Tensor, y: Tensor) -> Tensors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that run one by one
            found: Tensors = vectorised(values, x, y)
        return found

    def plain(image: Tensor, label: Tensor) -> Tensor:
        return CLASSIFICATION.mean_loss(model(image.unsqueeze(0)), label.unsqueeze(0))

    def alone(x: Tensor, y: Tensor) -> Tensors:
        each = [compute_gradient(partial(plain, *one), params) for one in zip(x, y, strict=True)]
        return {n: torch.stack([mine[n] for mine in each]) for n in params}

    try:
        together(x, y)
    except Exception:  # the user's code runs on stand-ins, so it may fail in any way; what is really wrong fails again
        return alone
    return together
