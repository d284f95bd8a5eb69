"""One client's visit: the replica made ready for it, and the hooks of its techniques with all that they may ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.gradients import sample_gradients
from fedstrata.client.hooks import Answers, HookSet, open_view
from fedstrata.client.personal import params_to_begin_with, personal_names, personal_params
from fedstrata.core.rng import generator
from fedstrata.core.technique import Batch, ClientView, Measure, Technique, overrides
from fedstrata.core.tensors import Tensors, load, match_layout
from fedstrata.core.types import BUFFERS, Assignment, Examples, Slots, replace_fields
from fedstrata.data.batching import eval_batches
from fedstrata.data.labels import check_range
from fedstrata.errors import UsageError
from fedstrata.models.norms import evaluation_mode
from fedstrata.models.taps import value_at, watch_places
from fedstrata.system.devices import to_device


@dataclass(frozen=True, eq=False)
class ClientVisit:
    """What a client is asked for, and with what.

    Args:
        context: where it is trained.
        assignment: what the server asks for.
        data: the client's examples.
        memory: what the client remembers.
        replica: the model of its architecture.
    """

    context: ClientContext
    assignment: Assignment
    data: Examples
    memory: Slots
    replica: ModelReplica

    def prepare(self, but: Collection[str] = ()) -> None:
        """Load the replica, and freeze what does not train: autograd then skips the frozen prefix by itself.

        Parameters that are named in `but` keep their values.
        """
        replica, a = self.replica, self.assignment
        if but:
            load(replica.params, {n: p for n, p in a.params.items() if n not in but})
        else:
            replica.server.load(a.params)
        if self.memory:
            load(replica.params, personal_params(a, self.memory))
        if replica.buffers:
            load(replica.buffers, self._starting_buffers())
        load(*replica.constants)
        self.freeze()
        if not all(module.training for module in replica.modules):
            replica.model.train()
        if a.update_buffers is not None:
            self._freeze_norms()

    def freeze(self) -> None:
        """Freeze what does not train."""
        replica, trains = self.replica, set(self.assignment.trains)
        for name, p in replica.params.items():
            p.grad = None  # of a step that was interrupted
            if p.requires_grad is not (name in trains):
                p.requires_grad_(name in trains)

    def _freeze_norms(self) -> None:
        """Let norm layers whose running statistics stay as they are run as in evaluation."""
        for owner in {name.rpartition(".")[0] for name in self.frozen_buffers()}:
            norm = self.replica.model.get_submodule(owner)
            if isinstance(norm, _NormBase):
                norm.eval()

    def _starting_buffers(self) -> Tensors:
        """The client's own running statistics, the server's, or, where there are none yet, the model's initial ones."""
        own = self.memory.get(BUFFERS) if self.context.method.buffers == "local" else None
        return own or self.assignment.buffers or self.replica.initial

    def frozen_buffers(self) -> tuple[str, ...]:
        """The names of the running statistics that stay as they are."""
        if self.assignment.update_buffers is None:
            return ()
        moves = set(self.assignment.update_buffers)
        return tuple(n for n in self.replica.buffers if n not in moves)

    def build_hooks(self) -> HookSet:
        """Every technique's hooks; they see the parameters that training begins with, in the replica's layout."""
        params = match_layout(params_to_begin_with(self.assignment, self.memory), self.replica.params)
        a = replace_fields(self.assignment, params=params)
        method, answers = self.context.method, self._answers()
        chosen = method.acting("local", a.is_after_training)
        views = {t: open_view(t, method, self.replica, self.data, a, self.memory, answers) for t in chosen}
        packs = {t.name: partial(t.pack, view=view) for t, view in views.items() if overrides(t, "pack")}
        kept = frozenset(personal_names(a))
        return HookSet({t.name: t.local(view) for t, view in views.items()}, packs, kept)

    def open_view(self, technique: Technique) -> ClientView:
        """What a technique may see of this client."""
        a = replace_fields(self.assignment, params=params_to_begin_with(self.assignment, self.memory))
        about = self.replica, self.data, a, self.memory
        return open_view(technique, self.context.method, *about, self._answers())

    def _answers(self) -> Answers:
        """What techniques are told of this client."""
        replica = self.replica

        def outputs(place: str) -> Iterator[tuple[Tensor, Tensor]]:
            for run, y in self.passes():
                yield value_at(replica.model, place, run), y

        def observe(watch: Mapping[str, Callable[[Tensor], None]]) -> None:
            with watch_places(replica.model, watch):
                for run, _ in self.passes():
                    run()

        return Answers(
            rng=partial(generator, self.assignment.seed),
            prepare=lambda technique, view: technique.prepare(view),
            draws=_draw_step_by_step,
            normal=lambda name, rng: lambda shape, dtype: torch.randn(shape, generator=rng, dtype=dtype),
            counts=partial(count_classes, self.data, replica),
            outputs=outputs,
            observe=observe,
            sum_rows=lambda rows: (rows.sum(0), len(rows)),
            sizes=lambda: torch.tensor(len(self.data)),
            measure_gradients=self.measure_gradients,
        )

    def measure_gradients(self, parts: int, measure: Measure) -> Tensors:
        """What is made of the gradients on some of the client's examples, at what the replica holds."""
        a, policy = self.assignment, self.context.method.buffers
        return measure(sample_gradients(self.replica, self.data, policy, a.seed, a.work.batch_size, parts))

    def passes(self) -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        """Batch by batch over all of the client's data: (what runs the model on it, as in an evaluation; labels)."""
        replica, data, policy = self.replica, self.data, self.context.method.buffers
        device = next(iter(replica.params.values())).device
        with torch.no_grad(), evaluation_mode(replica.model, policy, len(data)):
            for index in eval_batches(data, policy, 256):
                x, y = data.batch(index)
                yield partial(replica.model, replica.inputs(to_device(x, device))), to_device(y, device)


def _draw_step_by_step(technique: Technique, view: ClientView) -> Callable[[Batch], Tensors]:
    """What draws the random numbers of each step of one client when it is taken."""
    draw = technique.draws(view)
    return lambda batch: {} if draw is None else draw(len(batch.y))


def count_classes(data: Examples, replica: ModelReplica) -> Tensor:
    """How many examples of each class there are."""
    if not replica.task.has_classes:
        raise UsageError(f"the task '{replica.task.name}' has no classes to count: a technique must say needs_classes")
    labels = data.labels()
    check_range(labels, replica.width, owner_of(data))
    return torch.bincount(labels, minlength=replica.width).to(replica.scalar_dtype)


def owner_of(data: Examples, client: int | None = None) -> str:
    """Whose data it is, as far as it knows itself, for messages."""
    return getattr(data, "whose", "") or ("" if client is None else f"client {client}")
