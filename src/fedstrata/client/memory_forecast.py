"""What a step will take in memory, before anybody trains: it is tried without numbers.

On torch's device `meta` tensors have shapes and no memory. A step runs there in a moment, by the very code that will
train, and what it makes is counted as it is in training (`fedstrata.models.memory`). So whatever is kept or let go is
known for any plan of any model. Only what techniques do beside the model's own step is not in it, and what a kernel
uses for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.cost import StepCost, count_step
from fedstrata.client.cpu_layouts import cpu_layouts
from fedstrata.client.hooks import NO_HOOKS
from fedstrata.client.large_params import find_large
from fedstrata.client.step import AutogradSteps
from fedstrata.client.visit import ClientVisit
from fedstrata.core.optim import build_optimizer
from fedstrata.core.rng import preserve_rng
from fedstrata.core.task import Task
from fedstrata.core.types import Assignment, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, one_line
from fedstrata.models.copying import copy_model
from fedstrata.models.in_place import work_in_place
from fedstrata.models.memory import saved_bytes
from fedstrata.models.strata import strata
from fedstrata.system.devices import HOST, META
from fedstrata.techniques.fedavg import chain

T = TypeVar("T")


@dataclass(frozen=True)
class StratumMemory:
    """What one stratum takes while everything trains, in bytes.

    Attributes:
        name: of its weight layer.
        weights: parameters and running statistics.
        gradient: of its parameters.
        optimiser: what the optimiser keeps of them.
        activations: what its forward pass, up to the next stratum, keeps for the backward pass.
        from_here: the most that is held at once in a step if it and all strata after it train, and those before are
            frozen: weights, gradients, optimiser's state, activations, batch.
    """

    name: str
    weights: int
    gradient: int
    optimiser: int
    activations: int
    from_here: int


@dataclass(frozen=True, eq=False)
class MemoryForecast:
    """What steps of a federation will take.

    Args:
        context: what clients are trained with; the strata of all architectures are known.
        work: how they train.
        inputs: an example's inputs, with an axis for the batch.
        targets: the same of what is to be learnt.
    """

    context: ClientContext
    work: Work
    inputs: Any
    targets: Tensor
    _known: dict[Any, StepCost] = field(default_factory=dict)
    _contexts: dict[torch.device, ClientContext] = field(default_factory=dict)
    _numbers: set[str] = field(default_factory=set)

    def step(self, arch: str, trains: Collection[str], rows: int) -> StepCost:
        """FLOPs of a step, and the most bytes that it holds at once.

        Args:
            arch: whose model.
            trains: names of the parameters that train.
            rows: examples of the batch.

        Raises:
            UsageError: if the model cannot take a step on zeros.
        """
        key = arch, frozenset(trains), rows
        if key not in self._known:
            self._known[key] = self._without_numbers(arch, lambda context: self._try(context, *key))
        return self._known[key]

    def describe(self, arch: str, rows: int) -> tuple[StratumMemory, ...]:
        """What every stratum takes, in order; idle ones never train."""
        replica, saved = self._without_numbers(arch, lambda context: self._save(context, arch, rows))
        kept = build_optimizer(self.work.optimizer).kept
        trains = [n for s in replica.strata for n in s.params if not s.idle]
        found = []
        for stratum in replica.strata:
            weights = sum(replica.params[n].nbytes for n in stratum.params)
            gradient = 0 if stratum.idle else weights
            weights += sum(replica.buffers[n].nbytes for n in stratum.buffers if n in replica.buffers)
            held = gradient, kept * gradient, saved.get(stratum.name, 0)
            peak = self.step(arch, trains, rows).memory
            found.append(StratumMemory(stratum.name, weights, *held, peak))
            trains = [n for n in trains if n not in stratum.params]
        return tuple(found)

    def _without_numbers(self, arch: str, compute: Callable[[ClientContext], T]) -> T:
        """Compute on the device meta; on the CPU, with zeros, where that is another matter.

        It is where recurrent layers run, which have kernels of their own there, and where somebody's own code looks at
        numbers.
        """
        if arch not in self._numbers:
            try:
                if not any(isinstance(m, nn.RNNBase) for m in self._context(META).replica(arch).modules):
                    with preserve_rng(), cpu_layouts():
                        return compute(self._context(META))
            except Exception:
                self._numbers.add(arch)
        try:
            with preserve_rng():
                return compute(self._context(HOST))
        except Exception as error:  # whatever a user's own model raises
            raise UsageError(f"a step of this model cannot be tried on zeros: {one_line(str(error), 200)}") from error

    def _context(self, device: torch.device) -> ClientContext:
        """A context of its own on a device, with scratch models that nobody else uses."""
        if device not in self._contexts:
            apart: dict[str, Any] = {"replicas": {}, "costs": {}, "cache": {}, "sample": None, "compile": False}
            self._contexts[device] = replace(self.context, device=device, allocate_delta=None, **apart)
        return self._contexts[device]

    def _batch(self, replica: ModelReplica, rows: int, device: torch.device) -> tuple[Any, Tensor]:
        """Zeros, as many rows as asked for."""
        first = torch.zeros(rows, dtype=torch.long, device=device)
        x, y = (t[:1].to(device)[first] for t in (self.inputs, self.targets))
        return replica.inputs(x), y

    def _try(self, context: ClientContext, arch: str, trains: Collection[str], rows: int) -> StepCost:
        """Take a step."""
        with self.ready(context, arch, trains) as steps:
            return count_step(steps, *self._batch(context.replica(arch), rows, context.device))[1]

    @contextmanager
    def ready(self, context: ClientContext, arch: str, trains: Collection[str]) -> Iterator[AutogradSteps]:
        """Inside, steps may be taken, as a visit takes them: with care, if techniques look at what passes."""
        visit = self._visit(context, arch, trains)
        replica, large = visit.replica, find_large(visit)
        visit.prepare(but=large.names)
        with large.borrow():
            steps = AutogradSteps(replica, context.method.buffers, NO_HOOKS, self.work, replica.model, large)
            with steps.running(replica, nobody_looks=not context.hooked):
                yield steps

    def _visit(self, context: ClientContext, arch: str, trains: Collection[str]) -> ClientVisit:
        """A client that is asked for a plan."""
        replica = context.replica(arch)
        names = tuple(n for n in replica.params if n in trains)
        asked = Assignment(
            round=0,
            client=0,
            arch=arch,
            params={n: torch.empty_like(p, memory_format=torch.contiguous_format) for n, p in replica.params.items()},
            buffers={},
            trains=names,
            uploads=names,
            work=self.work,
            seed=0,
            method=context.method.digest,
        )
        return ClientVisit(context, asked, TensorExamples(self.inputs[:1], self.targets[:1]), {}, replica)

    def _save(self, context: ClientContext, arch: str, rows: int) -> tuple[ModelReplica, dict[str, int]]:
        """(the replica, what each stratum keeps for the backward pass)."""
        groups = context.replica(arch).strata
        visit = self._visit(context, arch, {n for s in groups if not s.idle for n in s.params})
        visit.prepare()
        replica = visit.replica
        x, y = self._batch(replica, rows, context.device)
        steps = AutogradSteps(replica, context.method.buffers, NO_HOOKS, self.work, replica.model)
        with work_in_place(replica.in_place):
            batch = steps.objective.batch(x, y, 0, replica.params)
            names = [s.name for s in groups if not s.idle]
            return replica, saved_bytes(replica.model, lambda: steps.objective(batch, replica.model), names)


def forecast_memory(model: nn.Module, task: Task, work: Work, inputs: Any, targets: Tensor) -> MemoryForecast:
    """A forecast for one model that all clients train, under FedAvg.

    Args:
        model: is copied.
        task: what it learns.
        work: how.
        inputs: an example's inputs, with an axis for the batch.
        targets: the same of what is to be learnt.
    """
    two = inputs[:1][torch.zeros(2, dtype=torch.long)]
    context = ClientContext(
        build=lambda arch: copy_model(model),
        method=chain(),
        task=task,
        channels_last=True,
        strata={"": strata(model, two)},
    )
    return MemoryForecast(context, work, inputs, targets)
