"""Gradient norms around the averaging, step by step: what FedPart (NeurIPS 2024) shows as layer mismatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from fedstrata.client.gradients import compute_gradient
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.task import Task
from fedstrata.core.tensors import Tensors, load, scale, subtract, whole_norm
from fedstrata.core.types import Examples, Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, positive
from fedstrata.models.norms import normalises_batches
from fedstrata.probes.measures.reading import (
    Data,
    check_clients,
    check_names,
    device_of,
    scratch_copy,
)
from fedstrata.tasks.classification import CLASSIFICATION


@dataclass(frozen=True)
class GradientTrace:
    """Stratum name → the norm of its gradient at every step, from a client's own model on, and from the averaged."""

    alone: dict[str, list[float]]
    averaged: dict[str, list[float]]

    @property
    def jumps(self) -> dict[str, float]:
        """Stratum name → the norm at the first step after averaging over the norm without; far above 1 is a spike."""
        pairs = {name: (norms[0], self.alone[name][0]) for name, norms in self.averaged.items()}
        return {name: after / before for name, (after, before) in pairs.items() if before > 0}


def gradient_trace(
    local: nn.Module,
    averaged: nn.Module,
    data: Data,
    strata: Sequence[Stratum],
    steps: int = 10,
    batch_size: int = 32,
    lr: float = 0.01,
    seed: int = 0,
    task: Task = CLASSIFICATION,
) -> GradientTrace:
    """Gradient norms step by step if a client had gone on alone, and as it goes on from the averaged model.

    Both make the same plain steps θ ← θ − η∇L of SGD, in training mode, on the same batches with the same random
    numbers. All batches are of one size: the gradient of a smaller one is larger by chance alone. What is frozen stays,
    and is not measured; strata of nothing else are left out.

    Args:
        local: the client's model after its training.
        averaged: the server's model after the round, for the same client.
        data: the client's, in any form that `Federation` takes.
        strata: of both models.
        steps: how many.
        batch_size: examples per step, or all if the client has fewer.
        lr: η.
        seed: of batches and of what training draws.
        task: what is learnt.
    """
    positive("gradient_trace", steps=steps, batch_size=batch_size, lr=lr)
    (held,) = check_clients([data], task=task)
    if min(batch_size, len(held)) == 1 and (normalises_batches(local) or normalises_batches(averaged)):
        raise UsageError("a batch of one example has no statistics, which this model normalises by")
    order = list(islice(_full_batches(len(held), batch_size, seed), steps))
    return GradientTrace(*(_norms(model, held, order, strata, lr, seed, task) for model in (local, averaged)))


def _full_batches(examples: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """A fresh permutation every epoch, split into batches, without a last one that is smaller."""
    rng = generator("gradient_trace", seed)
    size = min(batch_size, examples)
    while True:
        yield from torch.split(torch.randperm(examples, generator=rng)[: examples // size * size], size)


def _norms(
    model: nn.Module,
    data: Examples,
    order: Sequence[Tensor],
    strata: Sequence[Stratum],
    lr: float,
    seed: int,
    task: Task,
) -> dict[str, list[float]]:
    with scratch_copy(model, training=True) as scratch:
        params: Tensors = {n: p for n, p in scratch.named_parameters() if p.requires_grad}
        check_names((n for s in strata for n in s.params), dict(scratch.named_parameters()), "the model has")
        trained = {s.name: names for s in strata if (names := [n for n in s.params if n in params])}
        found: dict[str, list[float]] = {name: [] for name in trained}
        device = device_of(scratch)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return task.mean_loss(scratch(x), y)

        seed_global(derive("gradient_trace", seed), device, everything=not isinstance(data, TensorExamples))
        for index in order:
            x, y = (part.to(device) for part in data.batch(index))
            grads = compute_gradient(partial(loss, x, y), params)
            for name, names in trained.items():
                found[name].append(float(whole_norm({n: grads[n] for n in names})))
            load(params, subtract(params, scale(grads, lr), list(params)))
    return found
