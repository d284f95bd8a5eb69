"""A site of a Flower federation: it says which clients' data it has, and trains them when it is asked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedstrata import techniques, wire
from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.core.method import Method
from fedstrata.core.parts import Parts, zeros_of
from fedstrata.core.rng import preserve_rng
from fedstrata.core.task import Task
from fedstrata.core.types import Absence, Assignment, Examples, Update
from fedstrata.data.augmentation import build_augment
from fedstrata.data.client_data import take_apart
from fedstrata.data.examples import ReadTargets, TensorExamples, as_examples
from fedstrata.data.targets import read_any
from fedstrata.errors import FedstrataError, UsageError
from fedstrata.faults.fault import Fault, FaultSetting
from fedstrata.faults.plan import FaultPlan, parse_site_faults, plan_site_faults
from fedstrata.flower.messages import (
    ClientInfo,
    Greeting,
    TrainReply,
    TrainRequest,
    TrainSettings,
    allowance,
    check_flower,
    from_records,
    to_records,
)
from fedstrata.flower.mods import CONFIGS, Mod, answer_masked, apply_mods, check_mods, masks
from fedstrata.flower.site_store import ClientStore, ContextStore, SiteDirectoryStore, SiteStore
from fedstrata.models.adapted import base_digest
from fedstrata.models.inputs import fit_model, fit_training
from fedstrata.models.isolated_architectures import isolate_architectures
from fedstrata.models.norms import running_statistics
from fedstrata.models.stages import mark_stages
from fedstrata.server.compatibility import client_memory_mismatch
from fedstrata.system.devices import device_by_name
from fedstrata.tasks.registry import build_task

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

Model = nn.Module | Callable[[], nn.Module]
"""A model, or what makes one."""
NodeConfig = Mapping[str, Any]
"""What a SuperNode was started with, `--node-config`."""


def make_model(model: Model) -> nn.Module:
    """A model, made if need be; random numbers are given back as they were."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).cpu()
    with preserve_rng():
        made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"the model must be a torch.nn.Module, or a function that makes one, not {type(made).__name__}"
        )
    return made.cpu()


def client_app(
    model: Model,
    data: Callable[..., Any],
    *,
    archs: Mapping[str, Model] | None = None,
    method: Method | None = None,
    task: Task | None = None,
    keep: str | Path | None = None,
    device: str = "cpu",
    mods: Sequence[Mod] = (),
    faults: str | None = None,
) -> ClientApp:
    """A Flower ClientApp that trains whatever method the server runs.

    Args:
        model: the server's model, or a function that makes it; its weights do not matter here.
        data: partition number → that client's data, a pair of tensors (inputs, labels) or a map-style Dataset. A
            function of two arguments is also given the SuperNode's own configuration.
        archs: sub-models by name, where clients have different ones; the same as the server's.
        method: the method, where it has techniques that are not fedstrata's; else the server says which.
        task: what is learnt, where it is none of fedstrata's tasks; else the server says which.
        keep: directory for what clients remember; without one it is in Flower's context, and lost with the SuperNode.
        device: where training runs.
        mods: Flower's, such as `LocalDpMod`, around what is sent; only where that is the change of parameters and
            nothing else: no slots of techniques, no running statistics. `secaggplus_mod` comes first, and then this
            site sends updates only under secure aggregation.
        faults: what goes wrong here, on purpose, for drills: `"signflip(clients=(3,))"`, or at all clients of this site
            where none is named.
    """
    check_flower()
    check_mods(mods)
    drill = parse_site_faults(faults)
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    site = Site(model, data, archs or {}, method, None if keep is None else Path(keep), device, mods, task, drill)
    app = ClientApp()

    @app.query()
    def greet(message: Message, context: Context) -> Message:
        return Message(to_records(site.greeting(context.node_config)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if mods and masks(mods[0]):
            return answer_masked(mods[0], site.answer_message, message, context)
        answer, update, _ = site.answer_message(message, context)
        return Message(to_records(answer, b"" if update is None else wire.encode(update)), reply_to=message)

    return app


def partitions(config: NodeConfig) -> list[int]:
    """The clients whose data a SuperNode has: `partition-id=3`, or several, `partition-id="3,5"`."""
    said = config.get("partition-id")
    words = str(said).replace(",", " ").split()
    if said is None or not words or not all(word.isdecimal() for word in words):
        raise UsageError("start the SuperNode with --node-config 'partition-id=…', the number of its client from 0 on")
    return [int(word) for word in words]


@dataclass(eq=False)
class Site:
    """What a ClientApp does, whatever carries its messages."""

    model: Model
    data: Callable[..., Any]
    archs: Mapping[str, Model] = field(default_factory=dict)
    method: Method | None = None
    keep: Path | None = None
    device: str = "cpu"
    mods: Sequence[Mod] = ()
    task: Task | None = None
    faults: tuple[Fault, ...] = ()
    contexts: dict[str, ClientContext] = field(default_factory=dict, init=False)

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """The models by architecture."""
        return {name: make_model(model) for name, model in {"": self.model, **self.archs}.items()}

    def examples(self, client: int, config: NodeConfig, read: ReadTargets = read_any) -> Examples:
        """A client's data to train on; `read` tells what a target is."""
        arguments = (client, config)[: min(len(inspect.signature(self.data).parameters), 2)]
        with preserve_rng():
            train, _ = take_apart(self.data(*arguments), client)
            return as_examples(train, f"client {client}", read)

    def greeting(self, config: NodeConfig) -> Greeting:
        """Whose data is here."""
        try:
            return Greeting(parties=[self._party(client, config) for client in partitions(config)])
        except FedstrataError as error:
            return Greeting(parties=[], refusal=str(error))

    def _party(self, client: int, config: NodeConfig) -> ClientInfo:
        data = self.examples(client, config)
        like, target = _like(data)
        said = config.get("num-partitions")
        population = said if isinstance(said, int) else None
        tensors = like.tensors if isinstance(like, Parts) else {"": like}
        for part in (*tensors.values(), target):
            if not wire.carries(part):
                raise UsageError(f"client {client} has examples of type {part.dtype}, which messages do not carry")
        about: dict[str, Any] = {"client": client, "examples": len(data), "population": population}
        about |= {f"target_{name}": value for name, value in _form(target).items()}
        if isinstance(like, Parts):
            parts = [{"name": name, **_form(part)} for name, part in tensors.items()]
            about |= {"shape": [], "dtype": "float32", "parts": parts, "named": like.named}
        else:
            about |= _form(like)
        return ClientInfo.model_validate(about)

    def answer_message(self, message: Message, context: Context) -> tuple[TrainReply, Update | None, float]:
        """The answer to a message, the update that goes with it, if any, and the client's weight in the mean."""
        try:
            if CONFIGS in message.content.config_records and not any(masks(mod) for mod in self.mods):
                raise UsageError("secure aggregation needs Flower's mod here too: client_app(…, mods=[secaggplus_mod])")
            ask, body = from_records(message.content, TrainRequest, allowance(weights_of(self.models.values())))
            if ask.client not in partitions(context.node_config):
                raise UsageError(f"the data of client {ask.client} is not here")
            data = self.examples(ask.client, context.node_config, self._task(ask.regime).read_targets)
            store: SiteStore = ContextStore(context.state) if self.keep is None else SiteDirectoryStore(self.keep)
            leave = partial(apply_mods, self.mods, clip=ask.regime.clip, message=message, context=context)
            answer, update = self.visit(ask, body, data, ClientStore(store, ask.run, ask.client), leave)
            uniform = self.client_context(ask.regime, _like(data)[0]).method.weight == "uniform"
            return answer, update, 1.0 if uniform else float(len(data))
        except FedstrataError as error:
            return TrainReply(refusal=str(error)), None, 0.0

    def visit(
        self,
        ask: TrainRequest,
        message: bytes,
        data: Examples,
        store: ClientStore,
        leave: Callable[[Assignment, Update], Update] = lambda assignment, update: update,
    ) -> tuple[TrainReply, Update | None]:
        """Train as asked: the answer and the update; or what the server must know before that can be done.

        `leave` has the last word on what is sent.
        """
        store.settle(ask.held, ask.memory, ask.until)
        memory = store.memory(ask.memory)
        if memory is None:
            return TrainReply(lost="memory"), None
        client_context = self.client_context(ask.regime, _like(data)[0])
        assignment = _read_assignment(client_context, ask, message, store)
        if assignment is None:
            return TrainReply(lost="parameters"), None
        plan = self._plan_faults(client_context, assignment)
        own = plan.without_own(memory)
        params, buffers = assignment.params, client_context.replica(assignment.arch).buffers
        if plan.check_memory(memory, params) or client_memory_mismatch(client_context.method, own, params, buffers):
            return TrainReply(lost="memory"), None
        with preserve_rng(), client_context.computing(ask.regime.threads):
            trained = train_client(client_context, assignment, plan.spoil_client(ask.client, data), own)
        answer, kept = plan.change_all(trained, assignment, memory)
        if isinstance(answer, Absence):
            raise UsageError(answer.why)
        update = leave(assignment, answer)
        if ask.holds:
            store.hold(assignment, client_context.base(assignment.arch))
        if kept:
            store.remember(assignment.round, kept)
        return TrainReply(kept=bool(kept)), update

    def _plan_faults(self, context: ClientContext, assignment: Assignment) -> FaultPlan:
        """What goes wrong in a visit, on purpose; nothing, but in drills."""
        if not self.faults:
            return FaultPlan()
        task, replica = context.task, context.replica(assignment.arch)
        classes = replica.width if task.has_classes else 2
        setting = FaultSetting(task, context.sample, lambda: classes, assignment.run_seed)
        return plan_site_faults(self.faults, assignment.client, setting, context.encoding(assignment.arch))

    def client_context(self, regime: TrainSettings, like: Any) -> ClientContext:
        """Where clients are trained; the last one is kept, for as long as this process lives."""
        key = f"{regime.model_dump_json()} {like.shape} {like.dtype}"
        if key not in self.contexts:
            self.contexts = {key: self._build_context(regime, like)}
        return self.contexts[key]

    def _task(self, regime: TrainSettings) -> Task:
        """What is learnt: what the server says, or the task of its own that this site knows by that text."""
        if self.task is None:
            return build_task(regime.task)
        if str(self.task) != regime.task:
            raise UsageError(f"this site learns '{self.task}', and the server '{regime.task}'")
        return self.task

    def _build_context(self, regime: TrainSettings, like: Any) -> ClientContext:
        chosen = techniques.method(regime.method) if self.method is None else self.method.with_buffers(regime.buffers)
        _check_bases(self.models, regime.bases)
        models = {name: _fitted(model, like) for name, model in self.models.items()}
        if chosen.branches and regime.branches:
            models, _ = isolate_architectures(models, regime.branches.__getitem__, len(regime.branches))
        return ClientContext(
            build=lambda arch: copy.deepcopy(models[arch]),
            method=chosen,
            task=self._task(regime),
            augment=build_augment(regime.augment, like.shape[1:]),
            device=device_by_name(self.device),
            sample=like,
            channels_last=regime.channels_last,
            compile=regime.compile,
            archs=tuple(models),
        )


def _read_assignment(
    context: ClientContext, ask: TrainRequest, message: bytes, store: ClientStore
) -> Assignment | None:
    """The assignment in a message, checked against what was asked for; None if what it counts on is not held here."""
    held = store.held_assignment(ask.held)
    if held is None and ask.held >= 0:
        return None
    try:
        assignment = wire.decode_assignment(message, held, context.base)
    except wire.NotHeld:
        return None
    if assignment.client != ask.client or assignment.arch not in context.archs:
        raise UsageError(f"the assignment is for another client, or for the unknown model '{assignment.arch}'")
    if assignment.method != context.method.digest:
        raise UsageError(f"this site runs the method '{context.method}', and the server another one")
    return context.in_order(assignment)


def _check_bases(models: Mapping[str, nn.Module], bases: Mapping[str, str]) -> None:
    """Refuse to train adapters on another base than the server's: it is never sent."""
    for arch, model in models.items():
        own, theirs = base_digest(model), bases.get(arch, "")
        if own != theirs:
            told = f" of the architecture '{arch}'" if arch else ""
            raise UsageError(
                f"the frozen base{told} beneath the adapters is another one here ({own or 'none'}) than at the server "
                f"({theirs or 'none'}): give both sides the same files and the same adapter"
            )


def _fitted(model: nn.Module, like: Any) -> nn.Module:
    """A copy of a model that takes such inputs as one thing, and gives one tensor."""
    model = copy.deepcopy(model)
    with preserve_rng(), suppress(Exception):  # zeros may not be what it takes; training will tell
        fit_model(model, like)
        fit_training(model, like)
    return mark_stages(model, like)


def _form(tensor: Tensor) -> dict[str, Any]:
    """What one row of a tensor looks like."""
    return {"shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _like(data: Examples) -> tuple[Any, Tensor]:
    """Two inputs and targets of the data's shape and type, all zeros: what a model must know of it."""
    if not len(data):
        return torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with preserve_rng():
        x, y = (data.padded if isinstance(data, TensorExamples) else data).batch(torch.arange(1))
    return zeros_of(x, 2), zeros_of(y, 2)


def weights_of(models: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and running statistics."""
    return sum(t.nbytes for m in models for t in (*m.parameters(), *running_statistics(m).values()))
