"""The global model on a client's own examples, and a client's model on everybody's: whose examples are unlike others'?

What a client's examples should cost the global model follows from what examples of the same classes cost elsewhere.
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


@dataclass(frozen=True)
class Exchange:
    """Mean losses, client by client; None where a task or the examples do not tell.

    Attributes:
        own: of the model that a client begins with, on its own examples.
        expected: of the same model on shared examples, class by class in the client's own mixture.
        own_after: of the client's model after its training, on its own examples.
        shared_after: of that model on shared examples, in the client's own mixture of classes.
        accuracy: of the model that a client begins with, on its own examples.
        consistent: the accuracy if every class that this model names stood for the label that the client's examples
            have most often there: as high as elsewhere if labels were exchanged, low if they are random.
    """

    own: list[float | None]
    expected: list[float | None]
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
    starts = measure_once(lambda model: _losses(model, common, task), before)
    rows: list[tuple[float | None, ...]] = []
    for place, mine in enumerate(data):
        labels = mine.labels() if task.has_classes else None
        was, now = _losses(before[place], mine, task), _losses(local[place], mine, task)
        after = _losses(local[place], common, task)
        right, consistent = (None, None) if labels is None else agreement(was.named, labels)
        expected, there = (mixture_loss(one.mean, one.each, shared[1], labels) for one in (starts[place], after))
        rows.append((was.mean, expected, now.mean, there, right, consistent))
    return Exchange(*(list(column) for column in zip(*rows, strict=True)))


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
                if task.has_terms:
                    single, share = task.terms(outputs, y)
                    each.append((rows, (single / share.clamp(min=1e-12)).cpu()))
    return _Losses(total / max(weight, 1e-12), _in_order(each), _in_order(named))


def _in_order(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Values in the order of the examples, whatever the order of the batches."""
    if not parts:
        return torch.empty(0)
    rows, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return values[rows.argsort()]
