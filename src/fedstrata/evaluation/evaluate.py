"""How good a model is: the task's metrics and mean loss on examples, under the run's buffer policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.context import ModelReplica
from fedstrata.core.rng import derive, preserve_rng, seed_global
from fedstrata.core.task import Metric, Task
from fedstrata.core.technique import Buffers
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.types import Examples
from fedstrata.data.batching import eval_batches
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import UnknownClass
from fedstrata.errors import UsageError
from fedstrata.models.norms import evaluation_mode
from fedstrata.system.devices import to_device
from fedstrata.tasks.metrics import WholeOutputs


@dataclass(frozen=True, eq=False)
class EvalRequest:
    """What is to be evaluated: parameters and running statistics, the policy for the latter, a seed, and the model."""

    params: Tensors
    buffers: Tensors
    policy: Buffers
    seed: int = 0
    arch: str = ""


@dataclass(frozen=True, eq=False)
class BatchScore:
    """What is known of one batch.

    Args:
        width: how many answers the model tells apart.
        loss: sum of the losses.
        weight: sum of the examples' weights in it.
        observed: what each of the task's metrics has to know.
    """

    width: int
    loss: float
    weight: float
    observed: tuple[Tensors, ...]

    def __reduce__(self) -> Any:
        """On its way from a worker as arrays: torch would send tensors through files of shared memory."""
        arrays = tuple({name: tensor.numpy() for name, tensor in part.items()} for part in self.observed)
        return _from_arrays, (self.width, self.loss, self.weight, arrays)


def _from_arrays(width: int, loss: float, weight: float, arrays: Sequence[Mapping[str, Any]]) -> BatchScore:
    observed = tuple({name: torch.from_numpy(array.copy()) for name, array in part.items()} for part in arrays)
    return BatchScore(width, loss, weight, observed)


class NothingCounts(UsageError):
    """Examples of which none counts in the task's loss: all are passed over, or have no weight."""


@dataclass(frozen=True)
class Scores:
    """How good a model is: its mean loss, and the task's metrics by name; None for what is not defined here."""

    loss: float
    metrics: dict[str, float | None]

    def primary(self, task: Task) -> float | None:
        """The one that a task is judged by."""
        return self.loss if task.primary == "loss" else self.metrics[task.primary]


def score_batches(
    replica: ModelReplica,
    request: EvalRequest,
    examples: Examples,
    parts: Sequence[Tensor],
    which: Iterable[int],
    build: Callable[[Task, int], Sequence[Metric]] | None = None,
) -> list[BatchScore]:
    """Judge some of the batches; each draws its random numbers, if any, from a seed of its own.

    `build`: gives the metrics to judge by, for a number of answers; None for the task's own.
    """
    load(replica.params, request.params)
    load(replica.buffers, replica.initial if request.policy == "drop" else request.buffers)
    model, task = replica.model, replica.task
    device = next(iter(replica.params.values())).device
    metrics: Sequence[Metric] | None = None
    scores = []
    with preserve_rng(), torch.inference_mode(), evaluation_mode(model, request.policy, len(examples)):
        for part in which:
            seed_global(derive(request.seed, part), device, everything=not isinstance(examples, TensorExamples))
            x, y = examples.batch(parts[part])
            outputs, y = model(replica.inputs(to_device(x, device))), to_device(y, device)
            width = task.width(outputs)
            metrics = (build or metrics_of)(task, width) if metrics is None else metrics
            try:
                seen = outputs.cpu(), y.cpu()
                observed = tuple(metric.observe(*seen) for metric in metrics)
                loss, weight = task.sums(outputs, y)
                scores.append(BatchScore(width, loss.item(), weight, observed))
            except UnknownClass as error:
                raise error.at(getattr(examples, "whose", ""), y, parts[part]) from None
    return scores


def metrics_of(task: Task, width: int) -> Sequence[Metric]:
    """What judges a task; functions by name are given all outputs at once."""
    found = task.build_metrics(width)
    return [WholeOutputs(found)] if isinstance(found, Mapping) else found


def combine_scores(task: Task, scores: Sequence[BatchScore]) -> Scores:
    """What all batches' scores come to, in order.

    Raises:
        NothingCounts: if there is no loss to take the mean of.
    """
    loss = weight = 0.0
    for score in scores:
        loss, weight = loss + score.loss, weight + score.weight
    if not weight:
        raise NothingCounts(f"the model cannot be evaluated: no example counts in the loss of the task '{task}'")
    values: dict[str, float | None] = {}
    for metric, *observed in zip(metrics_of(task, scores[0].width), *(score.observed for score in scores), strict=True):
        values |= {name: value if isfinite(value) else None for name, value in metric.compute(observed).items()}
    task.check_primary(values)  # of most tasks it is known before the first round
    return Scores(loss / weight, values)


def evaluate(replica: ModelReplica, request: EvalRequest, examples: Examples, batch_size: int = 512) -> Scores:
    """How good what is to be evaluated is."""
    parts = eval_batches(examples, request.policy, batch_size)
    return combine_scores(replica.task, score_batches(replica, request, examples, parts, range(len(parts))))


def judge(task: Task, outputs: Tensor, targets: Tensor) -> float | None:
    """The task's primary metric of some outputs; None where it is not defined on them."""
    width = task.width(outputs)
    loss, weight = task.sums(outputs, targets)
    observed = tuple(metric.observe(outputs, targets) for metric in metrics_of(task, width))
    with suppress(NothingCounts):
        return combine_scores(task, [BatchScore(width, loss.item(), weight, observed)]).primary(task)
    return None


def _details_of(task: Task, width: int) -> Sequence[Metric]:
    return task.build_details(width)


def describe(replica: ModelReplica, request: EvalRequest, examples: Examples) -> dict[str, Any]:
    """What a report shows of a model beside its metrics, as JSON; nothing where the task has nothing to show."""
    parts = eval_batches(examples, request.policy)
    if not replica.task.build_details(1):
        return {}
    scores = score_batches(replica, request, examples, parts, range(len(parts)), _details_of)
    found: dict[str, Any] = {}
    details = replica.task.build_details(scores[0].width)
    for detail, *observed in zip(details, *(score.observed for score in scores), strict=True):
        found |= detail.compute(observed)
    return found
