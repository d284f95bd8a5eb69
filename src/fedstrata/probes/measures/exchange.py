"""The global model on a client's own examples, and a client's model on everybody's: whose examples are unlike others'?

What a client's examples should cost the global model follows from what examples of the same classes, or with targets
in the same range, cost elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstrata.core.task import Task
from fedstrata.core.types import Examples
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.probes.measures.reading import batches, measure_once, scratch_copy
from fedstrata.tasks.classification import CLASSIFICATION

RANGES, LEAST = 10, 10
"""Ranges that targets which are numbers are parted into, at most, and the examples of each, at least."""


@dataclass(frozen=True)
class Exchange:
    """Mean losses, client by client; None where a task or the examples do not tell.

    Attributes:
        own: of the model that a client begins with, on its own examples.
        expected: of the same model on shared examples, class by class in the client's own mixture; where targets are
            numbers, range by range.
        doubt: the standard error of own − expected; None where losses cannot be told class by class, or range by range.
        own_after: of the client's model after its training, on its own examples.
        shared_after: of that model on shared examples, in the client's own mixture of classes.
        accuracy: of the model that a client begins with, on its own examples.
        consistent: the accuracy if every class that this model names stood for the label that the client's examples
            have most often there: as high as elsewhere if labels were exchanged, low if they are random.
    """

    own: list[float | None]
    expected: list[float | None]
    doubt: list[float | None]
    own_after: list[float | None]
    shared_after: list[float | None]
    accuracy: list[float | None]
    consistent: list[float | None]


@dataclass(frozen=True, eq=False)
class _Losses:
    """What each example costs a model, and the class that the model names; empty where a task does not tell."""

    mean: float
    each: Tensor
    named: Tensor


def exchange(
    before: Sequence[nn.Module],
    local: Sequence[nn.Module],
    data: Sequence[Examples],
    shared: tuple[Tensor, Tensor],
    task: Task = CLASSIFICATION,
) -> Exchange:
    """Models and examples exchanged: every client's own, before and after its training, against the shared ones.

    Args:
        before: the model that each client begins with.
        local: each client's model after its training.
        data: each client's examples.
        shared: labelled examples that all models are shown.
        task: what is learnt.
    """
    if not len(before) == len(local) == len(data):
        raise UsageError(f"there are {len(before)}, {len(local)} models and {len(data)} clients' examples")
    common = TensorExamples(*shared)
    ranges = target_ranges(shared[1])
    there = target_groups(shared[1], ranges)
    starts = measure_once(lambda model: _losses(model, common, task), before)
    rows: list[tuple[float | None, ...]] = []
    for place, mine in enumerate(data):
        labels = mine.labels()
        groups = None if there is None else target_groups(labels, ranges)
        was, now = _losses(before[place], mine, task), _losses(local[place], mine, task)
        begun, after = starts[place], _losses(local[place], common, task)
        right, consistent = agreement(was.named, labels) if task.has_classes else (None, None)
        expected, elsewhere = (
            one.mean if there is None else mixture_loss(one.mean, one.each, there, groups) for one in (begun, after)
        )
        doubt = None if there is None or groups is None else mixture_error(was.each, begun.each, there, groups)
        rows.append((was.mean, expected, doubt, now.mean, elsewhere, right, consistent))
    return Exchange(*(list(column) for column in zip(*rows, strict=True)))


def target_ranges(targets: Tensor) -> Tensor | None:
    """What parts single numbers into tenths, or fewer parts of ten examples at least; None for other targets."""
    if not targets.is_floating_point() or targets.numel() != len(targets) or not len(targets):
        return None
    parts = min(RANGES, max(len(targets) // LEAST, 1))
    return targets.reshape(-1).double().quantile(torch.linspace(0, 1, parts + 1, dtype=torch.float64)[1:-1])


def target_groups(targets: Tensor, ranges: Tensor | None) -> Tensor | None:
    """The class of each example, or the range that its target lies in; None where there is neither."""
    if ranges is not None:
        return torch.bucketize(targets.reshape(-1).double(), ranges) if targets.numel() == len(targets) else None
    whole = targets.dim() == 1 and not targets.is_floating_point() and bool((targets >= 0).all())
    return targets if whole else None


def mixture_error(own: Tensor, each: Tensor, groups: Tensor, mine: Tensor) -> float | None:
    """The standard error of a client's mean loss minus Σ_c p(c) ℓ̄_c; None where losses are not known one by one.

    Of n_c of a client's losses in class c, and m_c elsewhere, with variances s² and t² within the classes, it is the
    root of s²/n + Σ_c p(c)² t²/m_c.
    """
    if not len(own) or not len(each):
        return None
    width = int(max(groups.max(), mine.max())) + 1
    held, seen = (torch.bincount(one, minlength=width).double() for one in (mine, groups))
    share = held * (seen > 0) / (held * (seen > 0)).sum().clamp(min=1)
    spread = _within(own, mine, width) / len(own)
    return float((spread + _within(each, groups, width) * (share.square() / seen.clamp(min=1)).sum()).sqrt())


def _within(losses: Tensor, groups: Tensor, width: int) -> Tensor:
    """The variance of losses within classes."""
    counts = torch.bincount(groups, minlength=width).double()
    sums = torch.zeros(width, dtype=torch.float64).index_add_(0, groups, losses.double())
    apart = losses.double() - (sums / counts.clamp(min=1))[groups]
    return apart.square().sum() / max(len(losses) - int((counts > 0).sum()), 1)


def mixture_loss(mean: float, each: Tensor, labels: Tensor, mixture: Tensor | None) -> float | None:
    """Σ_c p(c) ℓ̄_c: the mean loss of each class, weighed by how frequent it is in a mixture of labels.

    Classes that only the mixture has are left out of both sums; None if these are all. Without classes it is the mean.

    Args:
        mean: over all examples.
        each: what each of the examples costs.
        labels: theirs.
        mixture: labels whose frequencies are p; None where there are no classes.
    """
    if mixture is None or not len(each):
        return mean
    width = int(max(labels.max(), mixture.max())) + 1
    seen = torch.bincount(labels, minlength=width).double()
    sums = torch.zeros(width, dtype=torch.float64).index_add_(0, labels, each.double())
    wanted = torch.bincount(mixture, minlength=width).double() * (seen > 0)
    return float((wanted * sums / seen.clamp(min=1)).sum() / wanted.sum()) if wanted.any() else None


def agreement(named: Tensor, labels: Tensor) -> tuple[float, float]:
    """(share of examples whose label was named, the share if each named class stood for its most frequent label)."""
    width = int(max(named.max(), labels.max())) + 1
    table = torch.bincount(named * width + labels, minlength=width * width).reshape(width, width)
    return float(table.diagonal().sum() / len(labels)), float(table.amax(1).sum() / len(labels))


def _losses(model: nn.Module, data: Examples, task: Task) -> _Losses:
    """What examples cost a model, in evaluation mode."""
    total, weight = 0.0, 0.0
    each: list[tuple[Tensor, Tensor]] = []
    named: list[tuple[Tensor, Tensor]] = []
    with scratch_copy(model) as scratch, torch.no_grad():
        for rows, x, y in batches(scratch, data):
            outputs = scratch(x)
            losses, weights = task.sums(outputs, y)
            total, weight = total + float(losses), weight + weights
            if task.has_classes:
                named.append((rows, outputs.argmax(1).cpu()))
            if task.has_terms and y.numel() == len(y):
                single, share = task.terms(outputs, y)
                each.append((rows, (single / share.clamp(min=1e-12)).cpu()))
    return _Losses(total / max(weight, 1e-12), _in_order(each), _in_order(named))


def _in_order(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Values in the order of the examples, whatever the order of the batches."""
    if not parts:
        return torch.empty(0)
    rows, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return values[rows.argsort()]
