"""How good a model is: accuracy and mean loss on examples, under the run's buffer policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.client.context import Bench
from fedstrata.core.rng import derive, own_rng, seed_global
from fedstrata.core.technique import Buffers
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.types import Examples
from fedstrata.data.batching import sheets
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import UnknownClass
from fedstrata.models.norms import judging
from fedstrata.tasks.classification import task_loss


@dataclass(frozen=True, eq=False)
class Exam:
    """What is to be judged: parameters and running statistics, the policy for the latter, a seed, and the model."""

    params: Tensors
    buffers: Tensors
    policy: Buffers
    seed: int = 0
    arch: str = ""


Mark = tuple[int, float]
"""(examples that were right, sum of the losses) of one batch."""


def mark(bench: Bench, exam: Exam, examples: Examples, parts: Sequence[Tensor], which: Iterable[int]) -> list[Mark]:
    """Judge some of the batches; each draws its random numbers, if any, from a seed of its own."""
    load(bench.params, exam.params)
    load(bench.buffers, bench.initial if exam.policy == "drop" else exam.buffers)
    model = bench.model
    device = next(iter(bench.params.values())).device
    marks = []
    with own_rng(), torch.inference_mode(), judging(model, exam.policy, len(examples)):
        for part in which:
            seed_global(derive(exam.seed, part), device, everything=not isinstance(examples, TensorExamples))
            x, y = examples.batch(parts[part])
            logits, y = model(bench.inputs(x.to(device))), y.to(device)
            try:
                marks.append((int((logits.argmax(1) == y).sum()), task_loss(logits, y, "sum").item()))
            except UnknownClass as error:
                raise error.at(getattr(examples, "whose", ""), y, parts[part]) from None
    return marks


def total(marks: Iterable[Mark], examples: int) -> tuple[float, float]:
    """(accuracy, mean loss) from the marks of all batches, in order."""
    right, loss = 0, 0.0
    for correct, part in marks:
        right, loss = right + correct, loss + part
    return right / examples, loss / examples


def evaluate(
    bench: Bench,
    params: Tensors,
    buffers: Tensors,
    examples: Examples,
    policy: Buffers,
    batch_size: int = 512,
    seed: int = 0,
) -> tuple[float, float]:
    """(accuracy, mean loss) of a model with these parameters and running statistics."""
    return judge(bench, Exam(params, buffers, policy, seed), examples, batch_size)


def judge(bench: Bench, exam: Exam, examples: Examples, batch_size: int = 512) -> tuple[float, float]:
    """(accuracy, mean loss) of what is to be judged."""
    parts = sheets(examples, exam.policy, batch_size)
    return total(mark(bench, exam, examples, parts, range(len(parts))), len(examples))
