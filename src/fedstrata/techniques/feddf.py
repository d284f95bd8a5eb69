"""FedDF: the average, then distilled from the clients' models together.

Lin, Kong, Stich and Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import nn, torch
from fedstrata.core.rng import generator
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add, each, load
from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Tao Lin and Lingjing Kong and Sebastian U. Stich and Martin Jaggi",
        "Ensemble Distillation for Robust Model Fusion in Federated Learning",
        "NeurIPS",
        2020,
    ),
)

AT_ONCE = 50
"""Batches that are held in memory at a time."""


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(σ(teacher's logits) ‖ σ(student's logits)), the mean over rows."""
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)


@dataclass(frozen=True, kw_only=True)
class FedDF(Technique):
    """The average, distilled: after the mean, trained towards the mean of the clients' logits on unlabelled inputs.

    In every round w ← mean of the w_k, then `steps` steps of Adam, its rate falling to 0 along a cosine, on
    KL(σ(1/|S| Σ_k f(w_k, x)) ‖ σ(f(w, x))). Inputs come from the server's public data (`public`: a dataset, or inputs
    of the user's own, without labels), or are noise. Clients of different depth teach with the models that they have.

    Args:
        noise: take standard normal noise in place of public data.
        steps: of the server in every round; 0 is FedAvg.
        lr: of Adam, as in the paper.
        batch_size: inputs per step, as in the paper.

    Deviations: the paper takes up to 10,000 steps and stops early on a validation set; here their number is fixed.
    Norm layers keep the averaged running statistics. What does not travel in a round does not move. The server's
    computation is in a run's seconds, not in its FLOPs, which are those of the clients.
    """

    name: ClassVar[str] = "feddf"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    synchronous: ClassVar[str] = SYNCHRONOUS
    needs_whole: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    needs_deltas: ClassVar[bool] = True
    noise: bool = False
    steps: int = 100
    lr: float = 1e-3
    batch_size: int = 128

    def __post_init__(self) -> None:
        not_negative("feddf", steps=self.steps)
        positive("feddf", lr=self.lr, batch_size=self.batch_size)

    def check(self, setting: Setting) -> None:
        """Refuse to distil without inputs."""
        if not self.noise and setting.public is None and self.steps:
            raise UsageError("feddf distils on unlabelled inputs: give public data, or say feddf(noise=True)")
        if self.noise and not setting.sample.is_floating_point():
            raise UsageError("feddf(noise=True) needs inputs that are real numbers, and these are whole ones")

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The averaged model, distilled; what did not travel stays."""
        if not self.steps or not round.arrived:
            return delta, state
        start = add(round.params, delta)
        student = round.model(start, round.buffers, "")
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in round.arrived)
        moving = {n: p for n, p in student.named_parameters() if p.requires_grad}
        self._distil(student, list(moving.values()), round)
        return {**delta, **{n: p.detach().contiguous() - round.params[n] for n, p in moving.items()}}, state

    def _inputs(self, round: RoundView) -> Iterator[Tensor]:
        """A batch of unlabelled inputs for every step."""
        rng = generator(round.seed, self.name)
        if self.noise or round.public is None:
            for _ in range(self.steps):
                yield torch.randn(self.batch_size, *round.like.shape[1:], generator=rng, dtype=round.like.dtype)
            return
        left = torch.empty(0, dtype=torch.int64)
        size = min(self.batch_size, len(round.public))
        for _ in range(self.steps):
            if len(left) < size:
                left = torch.randperm(len(round.public), generator=rng)
            yield round.public.batch(left[:size])[0]
            left = left[size:]

    def _distil(self, student: nn.Module, moving: Sequence[Tensor], round: RoundView) -> None:
        optimizer = torch.optim.Adam(moving, lr=self.lr, fused=True)
        source, step = self._inputs(round), 0
        while inputs := list(islice(source, AT_ONCE)):
            for x, teacher in zip(inputs, _mean_logits(round, inputs), strict=True):
                optimizer.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
                optimizer.zero_grad()
                torch.autograd.backward(distillation(student(x), teacher))
                optimizer.step()
                step += 1


def _mean_logits(round: RoundView, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The mean over the clients' models of their logits, for every batch."""
    sums: list[Tensor] = []
    models: dict[str, nn.Module] = {}
    for update, asked in zip(round.updates, round.asked, strict=True):
        params = add({n: round.params[n] for n in asked.params}, update.delta)
        buffers = {**round.buffers, **update.buffers}
        teacher = models.get(asked.arch)
        if teacher is None:
            teacher = models[asked.arch] = round.model(params, buffers, asked.arch)
        else:
            mine = {**dict(teacher.named_parameters()), **dict(teacher.named_buffers())}
            load(mine, {n: t for n, t in {**params, **buffers}.items() if n in mine})
        with torch.no_grad():
            logits = [teacher(x) for x in inputs]
        sums = each("add_", sums, logits) if sums else logits
    return each("div_", sums, len(round.updates))
