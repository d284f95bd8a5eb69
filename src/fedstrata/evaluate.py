"""How good a model is: accuracy and mean loss on examples, under the run's buffer policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedstrata.core import Buffers
from fedstrata.data.examples import Examples
from fedstrata.tensors import Tensors, generator
from fedstrata.workshop import Bench, load, task_loss


@contextmanager
def _batch_statistics(model: nn.Module) -> Iterator[None]:
    """Normalisation by the batch at hand, with running statistics left alone: evaluation under the policy `drop`."""
    norms = [m for m in model.modules() if isinstance(m, _NormBase)]
    before = [m.momentum for m in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def without_statistics(model: nn.Module) -> nn.Module:
    """The model with norm layers that always use the batch at hand: what the policy `drop` trains and evaluates."""
    for norm in model.modules():
        if isinstance(norm, _NormBase):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model


def evaluate(
    bench: Bench,
    params: Tensors,
    buffers: Tensors,
    examples: Examples,
    policy: Buffers,
    batch_size: int = 512,
) -> tuple[float, float]:
    """(accuracy, mean loss) of a model with these parameters and running statistics.

    Under the policy `drop` norm layers use the statistics of each evaluation batch; batches are drawn in a fixed random
    order then, so that a test set sorted by class is judged like any other.
    """
    load(bench.params, params)
    load(bench.buffers, bench.initial if policy == "drop" else buffers)
    model = bench.model.eval()
    device = next(iter(bench.params.values())).device
    correct, total = 0, 0.0
    by_batch = policy == "drop" and len(examples) > 1  # a single example has no statistics of its own
    order = torch.randperm(len(examples), generator=generator("evaluate")) if by_batch else torch.arange(len(examples))
    parts = list(torch.split(order, batch_size))
    if by_batch and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    with torch.inference_mode(), _batch_statistics(model) if by_batch else nullcontext():
        for index in parts:
            x, y = examples.batch(index)
            logits, y = model(bench.inputs(x.to(device))), y.to(device)
            total += task_loss(logits, y, "sum").item()
            correct += int((logits.argmax(1) == y).sum())
    return correct / len(examples), total / len(examples)
