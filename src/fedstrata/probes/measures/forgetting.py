"""What local training forgets: accuracy class by class, before and after."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.probes.measures.reading import (
    batches,
    check_labelled,
    class_set,
    measure_once,
    scratch_copy,
    start_models,
)
from fedstrata.tasks.classification import CLASSIFICATION


@dataclass(frozen=True)
class Calibration:
    """Accuracies before and after local training; None where nothing could be measured.

    Attributes:
        before: of each class in order, of the model that clients begin with.
        after: of each class, of the clients' own models after training, in the mean over the clients.
        held: after training, on the classes that a client holds: in the mean over these, then over the clients.
        missing: the same on the classes that it lacks.
        forgetting: how much training lowers the accuracy on the classes that a client lacks, in the same mean.
    """

    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    held: float | None
    missing: float | None
    forgetting: float | None


def forgetting(
    before: nn.Module | Sequence[nn.Module],
    local: Sequence[nn.Module],
    held: Sequence[Collection[int]],
    inputs: Tensor,
    labels: Tensor,
) -> Calibration:
    """What clients' models know of each class, and what they forget of the classes that they lack.

    Classes weigh the same, however many examples of them there are. Models are judged in evaluation mode.

    Args:
        before: the model that all clients begin with, or one for each where they are of different depths.
        local: each client's model after its training.
        held: for each client, the classes that it has examples of.
        inputs: of examples of all classes that everybody is judged by.
        labels: theirs.
    """
    starts = start_models(before, local, held)
    check_labelled((inputs, labels))
    found = measure_once(partial(_accuracies, inputs=inputs, labels=labels), starts)
    found += [_accuracies(model, inputs, labels) for model in local]
    if len(sizes := {len(accuracies) for accuracies in found}) > 1:
        raise UsageError(f"models of {min(sizes)} and of {max(sizes)} classes cannot be compared")
    was, now = torch.stack(found).chunk(2)
    present = ~now[0].isnan()
    own = torch.tensor([[c in mine for c in range(now.shape[1])] for mine in map(class_set, held)])
    return Calibration(
        before=_as_tuple(was.mean(0)),
        after=_as_tuple(now.mean(0)),
        held=_mean(now, own & present),
        missing=_mean(now, ~own & present),
        forgetting=_mean(was - now, ~own & present),
    )


def _accuracies(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Of each class that the model tells apart; NaN for those without examples."""
    hits, rows = [], []
    with scratch_copy(model) as scratch, torch.no_grad():
        for _, x, y in batches(scratch, TensorExamples(inputs, labels)):
            logits = scratch(x)
            CLASSIFICATION.mean_loss(logits, y)  # refuses labels that the model has no output for
            rows.append(y)
            hits.append(y[logits.argmax(1) == y])
    right, seen = (torch.bincount(torch.cat(part), minlength=logits.shape[1]).double().cpu() for part in (hits, rows))
    return right / seen


def _mean(values: Tensor, where: Tensor) -> float | None:
    """Over a row's chosen entries, then over the rows that have any."""
    rows = [float(mine[chosen].mean()) for mine, chosen in zip(values, where, strict=True) if chosen.any()]
    return fmean(rows) if rows else None


def _as_tuple(values: Tensor) -> tuple[float | None, ...]:
    return tuple(None if value != value else value for value in values.tolist())
