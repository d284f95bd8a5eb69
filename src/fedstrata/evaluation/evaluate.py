"""How good a model is: accuracy and mean loss on examples, under the run's buffer policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.client.context import ModelReplica
from fedstrata.core.rng import derive, preserve_rng, seed_global
from fedstrata.core.technique import Buffers
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.types import Examples
from fedstrata.data.batching import eval_batches
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import UnknownClass
from fedstrata.models.norms import evaluation_mode
from fedstrata.tasks.classification import task_loss


@dataclass(frozen=True, eq=False)
class EvalRequest:
    """What is to be evaluated: parameters and running statistics, the policy for the latter, a seed, and the model."""

    params: Tensors
    buffers: Tensors
    policy: Buffers
    seed: int = 0
    arch: str = ""


BatchScore = tuple[int, float]
"""(examples that were right, sum of the losses) of one batch."""


def score_batches(
    replica: ModelReplica, request: EvalRequest, examples: Examples, parts: Sequence[Tensor], which: Iterable[int]
) -> list[BatchScore]:
    """Judge some of the batches; each draws its random numbers, if any, from a seed of its own."""
    load(replica.params, request.params)
    load(replica.buffers, replica.initial if request.policy == "drop" else request.buffers)
    model = replica.model
    device = next(iter(replica.params.values())).device
    scores = []
    with preserve_rng(), torch.inference_mode(), evaluation_mode(model, request.policy, len(examples)):
        for part in which:
            seed_global(derive(request.seed, part), device, everything=not isinstance(examples, TensorExamples))
            x, y = examples.batch(parts[part])
            logits, y = model(replica.inputs(x.to(device))), y.to(device)
            try:
                scores.append((int((logits.argmax(1) == y).sum()), task_loss(logits, y, "sum").item()))
            except UnknownClass as error:
                raise error.at(getattr(examples, "whose", ""), y, parts[part]) from None
    return scores


def combine_scores(scores: Iterable[BatchScore], examples: int) -> tuple[float, float]:
    """(accuracy, mean loss) from the scores of all batches, in order."""
    right, loss = 0, 0.0
    for correct, part in scores:
        right, loss = right + correct, loss + part
    return right / examples, loss / examples


def evaluate(
    replica: ModelReplica, request: EvalRequest, examples: Examples, batch_size: int = 512
) -> tuple[float, float]:
    """(accuracy, mean loss) of what is to be evaluated."""
    parts = eval_batches(examples, request.policy, batch_size)
    return combine_scores(score_batches(replica, request, examples, parts, range(len(parts))), len(examples))
