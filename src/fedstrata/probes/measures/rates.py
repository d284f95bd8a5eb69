"""A search for the learning rate: a few local steps with several of them, judged on examples that were held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fedstrata.client.gradients import compute_gradient
from fedstrata.core.optim import build_optimizer
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.task import Task
from fedstrata.core.tensors import Tensors, load, scale, whole_norm
from fedstrata.core.types import Examples, Work
from fedstrata.data.examples import TensorExamples, join_examples
from fedstrata.errors import UsageError
from fedstrata.models.norms import normalises_batches, without_statistics
from fedstrata.probes.measures.reading import batches, device_of, scratch_copy
from fedstrata.tasks.classification import CLASSIFICATION

FACTORS = (0.1, 1.0, 10.0, 100.0)
"""What the run's own learning rate is multiplied by."""


@dataclass(frozen=True)
class RateSearch:
    """Losses on held-out examples: before the steps, and after them by what the learning rate was multiplied by."""

    before: float
    after: dict[float, float]


def search_rates(
    model: nn.Module,
    clients: Sequence[TensorExamples],
    work: Work,
    steps: int = 8,
    factors: Sequence[float] = FACTORS,
    seed: int = 0,
    task: Task = CLASSIFICATION,
) -> RateSearch:
    """One round of the plain mean on half of each client's examples, judged on the other halves together.

    Every client takes a few steps of the run's optimiser from the same model, and the mean of their models is judged:
    norm layers use the batch at hand, for running statistics would lag behind. All clients weigh the same.

    Args:
        model: to begin with.
        clients: some clients' examples.
        work: how the run trains; its learning rate is the one that is multiplied.
        steps: of every client.
        factors: of the learning rate.
        seed: of the halves, the batches, and what training draws.
        task: what is learnt.
    """
    held = [data for data in clients if len(data) >= 4]
    if not held:
        raise UsageError("no client has four examples, half of which could be held out")
    orders = [torch.randperm(len(data), generator=generator("rates", seed, i)) for i, data in enumerate(held)]
    trained = [data.select(order[: len(order) // 2]) for data, order in zip(held, orders, strict=True)]
    judged = join_examples([data.select(order[len(order) // 2 :]) for data, order in zip(held, orders, strict=True)])
    after = {}
    for factor in factors:
        ends = [_train(model, data, replace(work, lr=work.lr * factor), steps, seed, task) for data in trained]
        mean = {n: torch.stack([end[n] for end in ends]).mean(0) for n in ends[0]}
        after[factor] = _judge(model, mean, judged, task)
    return RateSearch(_judge(model, {}, judged, task), after)


def _train(model: nn.Module, data: TensorExamples, work: Work, steps: int, seed: int, task: Task) -> Tensors:
    """The parameters after a few steps."""
    size = min(work.batch_size, len(data))
    if size == 1 and normalises_batches(model):
        raise UsageError("a batch of one example has no statistics, which this model normalises by")
    rng = generator("rates", seed, "order")
    with scratch_copy(model, training=True) as scratch:
        device = device_of(scratch)
        seed_global(derive("rates", seed), device)
        params: Tensors = {n: p for n, p in scratch.named_parameters() if p.requires_grad}
        move = build_optimizer(work.optimizer).start([p.detach() for p in params.values()], work.lr, None)
        for _ in range(steps):
            x, y = (part.to(device) for part in data.batch(torch.randperm(len(data), generator=rng)[:size]))
            grads = compute_gradient(partial(_loss, scratch, task, x, y), params)
            if work.clip is not None:
                grads = scale(grads, torch.clamp(work.clip / (whole_norm(grads) + 1e-6), max=1.0))
            move(list(grads.values()))
        return {n: p.detach().clone() for n, p in params.items()}


def _loss(model: nn.Module, task: Task, x: Tensor, y: Tensor) -> Tensor:
    return task.mean_loss(model(x), y)


def _judge(model: nn.Module, params: Tensors, data: Examples, task: Task) -> float:
    """The mean loss with these parameters."""
    total, weight = 0.0, 0.0
    with scratch_copy(model) as scratch, torch.no_grad():
        without_statistics(scratch)
        mine: Tensors = dict(scratch.named_parameters())
        load(mine, params)
        for _, x, y in batches(scratch, data):
            losses, weights = task.sums(scratch(x), y)
            total, weight = total + float(losses), weight + weights
    return total / max(weight, 1e-12)
