"""What a worker keeps between visits, none of it state of the federation: model replicas, and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.client.compiling import CompiledForward
from fedstrata.core.encoding import Encoding
from fedstrata.core.low_rank import RankCuts, cut_ranks
from fedstrata.core.method import Method
from fedstrata.core.task import Task
from fedstrata.core.tensors import LINE, FlatTensors, Tensors, clone, load, subtract, whole_lines
from fedstrata.core.types import Assignment, Augment, Stratum, replace_fields
from fedstrata.errors import FedstrataError, UsageError
from fedstrata.models.adapted import base_names
from fedstrata.models.in_place import find_in_place
from fedstrata.models.layer_gradients import Layer, compose_layers
from fedstrata.models.layouts import has_own_hooks, is_foreign, lay_out, release_guard
from fedstrata.models.norms import constants, normalises_batches, running_statistics, without_statistics
from fedstrata.models.passes import preserve_model
from fedstrata.models.strata import strata
from fedstrata.models.zoo.layers import Block
from fedstrata.system.devices import HOST, META, use_device
from fedstrata.system.machine import compute_with
from fedstrata.tasks.classification import Classification

LARGE = 1 << 18
"""Numbers of a parameter from which on its passes through memory are counted."""
Build = Callable[[str], nn.Module]
"""Makes the model of an architecture; "" is the server's own."""


class ServerParams:
    """The server's parameters as a replica takes them up, for one visit after the other.

    Visits that follow each other mostly begin with the same. Then they are held in one buffer laid out as the replica's
    own: to load them is one copy, and what a visit has changed is one difference.

    Args:
        params: the replica's own.
        turned: True if some of them have their channels last.
        steady: True if nobody's own code may give a parameter other memory.
    """

    def __init__(self, params: Tensors, turned: bool, steady: bool) -> None:
        self._params, self._turned, self.steady = params, turned, steady
        self._names = tuple(params)
        self._own = params.flat if steady and isinstance(params, FlatTensors) else None
        self._sent: Tensors | None = None
        self._copy: Tensor | None = None

    @cached_property
    def values(self) -> Tensors:
        """The replica's own, without gradients."""
        return {n: p.detach() for n, p in self._params.items()}

    def load(self, sent: Tensors) -> None:
        """Give the replica the values that were sent."""
        again = sent is self._sent
        if not again:
            self._sent, self._copy = sent, self._buffer_of(sent)
        if self._own is not None and self._copy is not None:
            self._own.copy_(self._copy)
            return
        load(self._params, sent)
        if again and self._own is not None:  # a visit that comes alone needs none
            self._copy = self._own.clone()

    def _buffer_of(self, sent: Tensors) -> Tensor | None:
        """The buffer that tensors were sent in, if it is laid out as the replica's own."""
        if not isinstance(sent, FlatTensors) or self._own is None or self._turned:
            return None
        same = list(sent) == list(self._params) and all(sent[n].shape == p.shape for n, p in self._params.items())
        return sent.flat if same and sent.flat.dtype == self._own.dtype else None

    def subtract(self, sent: Tensors, names: Sequence[str], out: Tensors | None) -> Tensors:
        """What the replica's values are more than those that were sent, into the tensors of `out` if there are any."""
        own, copy = self._own, self._copy if sent is self._sent and not self._turned else None
        if own is not None and copy is not None and isinstance(out, FlatTensors) and tuple(names) == self._names:
            torch.sub(own, copy, out=out.flat)
            return out
        values = self.values if self.steady else {n: p.detach() for n, p in self._params.items()}
        if self._turned:
            values = {n: values[n].contiguous() for n in names}
        return subtract(values, sent, names, out)


@dataclass(frozen=True, eq=False)
class ModelReplica:
    """A scratch model with its tensors by name.

    Args:
        model: the module itself.
        forward: the module, compiled if that was asked for.
        params: its parameters.
        server: what the server sent last.
        buffers: its running statistics.
        initial: the first values of these.
        constants: the buffers that state_dict leaves out, and their first values.
        strata: its strata, in order.
        batch_norm: True if a batch of one example cannot be normalised.
        channels_last: True if its convolutions want their inputs in that layout.
        own_code: True if it has modules that neither torch nor we have written.
        sample: one batch of inputs.
        task: what it learns.
        base: the frozen base beneath adapters, by the names of its parameters.
    """

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    params: Tensors
    server: ServerParams
    buffers: Tensors
    initial: Tensors
    constants: tuple[Tensors, Tensors]
    strata: tuple[Stratum, ...]
    batch_norm: bool
    channels_last: bool
    own_code: bool
    sample: Tensor | None
    task: Task
    base: frozenset[str] = frozenset()

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs in the layout that the model's convolutions are fastest with."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model and all that is in it."""
        return tuple(self.model.modules())

    @cached_property
    def large(self) -> frozenset[str]:
        """Contiguous parameters that no cache holds, of layers of which it is known that they only read them."""
        if self.own_code or has_own_hooks(self.model):  # which may write to parameters
            return frozenset()
        layers = [m for m in self.modules if type(m) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)]
        read = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        return frozenset(
            n for n, p in self.params.items() if id(p) in read and p.numel() >= LARGE and p.is_contiguous()
        )

    @cached_property
    def in_place(self) -> tuple[nn.ReLU | Block, ...]:
        """The modules that may work in place while nobody looks."""
        return find_in_place(self.model)

    @cached_property
    def known_layers(self) -> Layer | None:
        """The model for steps at which nobody looks, where all of its layers' gradients are known to us."""
        # Without numbers, on the device meta, a step is tried to learn what it takes: the same as on the CPU.
        here = all(p.device in (HOST, META) for p in self.params.values())
        plain = self.forward is self.model and here
        return compose_layers(self.model) if plain else None

    @cached_property
    def scalar_dtype(self) -> torch.dtype:
        """The type for single numbers, such as rates and counts: the widest of the parameters', at least float32."""
        kinds = {p.dtype for p in self.params.values() if p.is_floating_point()}
        return reduce(torch.promote_types, kinds, torch.float32)

    @cached_property
    def width(self) -> int:
        """How many answers the model tells apart: of a classifier, its classes."""
        if self.sample is None:
            raise FedstrataError("a context without a sample of inputs cannot tell what the model puts out")
        with preserve_model(self.model):  # a copy may be impossible: a model may keep something of its last step
            outputs: Tensor = self.model(self.inputs(self.sample))
        return self.task.width(outputs)


@dataclass(eq=False)
class ClientContext:
    """What a worker keeps between visits, none of it state of the federation: scratch models, and measured costs.

    Args:
        build: makes the model of an architecture.
        method: the method that this federation runs.
        task: what it learns.
        augment: changes training inputs, batch by batch.
        device: where training runs.
        sample: one batch of inputs, to try models on.
        channels_last: lay convolutions out with the channels last, which is faster and rounds differently.
        compile: compile the forward and backward pass, which takes a while at first and rounds differently.
        archs: the names of all architectures.
        strata: of architectures whose strata are known; those of others are found when they are needed.
        cuts: of architectures, what they hold of factors of which they hold less than the server's model.
        replicas: the scratch models, by architecture.
        costs: what was counted, by what was computed; of steps, by the shape of their inputs.
        cache: whatever else a way of training keeps between visits.
        allocate_delta: (parameters, names) → memory for a visit's delta, tensors like those of these names; None for
            memory of its own.
        allocate_stack: the same for the deltas of visits that are trained at once.
    """

    build: Build
    method: Method
    task: Task = field(default_factory=Classification)
    augment: Augment | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sample: Tensor | None = None
    channels_last: bool = False
    compile: bool = False
    archs: tuple[str, ...] = ("",)
    strata: Mapping[str, tuple[Stratum, ...]] = field(default_factory=dict)
    cuts: Mapping[str, RankCuts] = field(default_factory=dict)
    replicas: dict[str, ModelReplica] = field(default_factory=dict)
    costs: dict[Any, Any] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    allocate_delta: Callable[[Tensors, Sequence[str]], Tensors] | None = None
    allocate_stack: Callable[[Tensors], Tensors] | None = None

    @cached_property
    def hooked(self) -> bool:
        """True if a technique has a part on the client."""
        return any(self.method.at("local"))

    def encoding(self, arch: str) -> Encoding | None:
        """What techniques make of what an architecture's clients send; None if that travels as it is."""
        return self.method.encoding({arch: self.replica(arch).strata}) if self.method.encoders else None

    @contextmanager
    def computing(self, threads: int) -> Iterator[None]:
        """torch as it is to be wherever one of this worker's models runs, and as it was before afterwards."""
        with compute_with(threads), use_device(self.device):
            try:
                yield
            finally:
                release_guard()

    def for_worker(self, device: torch.device) -> ClientContext:
        """The same on a device, for another process: with what was counted, but without models and caches."""
        return replace(self, device=device, replicas={}, costs=dict(self.costs), cache={})

    def replica(self, arch: str) -> ModelReplica:
        """The scratch model of an architecture, made at its first use."""
        if arch not in self.replicas:
            model = self.build(arch).to(self.device).train()
            turned = lay_out(model, self.channels_last)
            base = base_names(model)
            params, foreign = _flatten(dict(model.named_parameters()), turned), is_foreign(model)
            sample = self.sample if self.sample is None else self.sample.to(self.device)
            self.replicas[arch] = ModelReplica(
                model=model,
                forward=CompiledForward(model) if self.compile else model,
                params=params,
                server=ServerParams(params, bool(turned), steady=not (foreign or has_own_hooks(model))),
                buffers=running_statistics(model),
                initial=clone(running_statistics(model)),
                constants=constants(model),
                strata=self.strata[arch] if arch in self.strata else strata(model, sample),
                batch_norm=normalises_batches(model),
                channels_last=bool(turned),
                own_code=foreign,
                sample=sample,
                task=self.task,
                base=base,
            )
            if sample is not None and self.hooked:
                _ = self.replicas[arch].width  # now: a technique may ask for it while FLOPs are counted
        return self.replicas[arch]

    def base(self, arch: str) -> Tensors:
        """The frozen base of an architecture's own model, which is never sent; empty where there is none."""
        if arch not in self.archs:  # a message may name any
            return {}
        key = ("base", arch)
        if key not in self.cache:
            model = self.build(arch)
            names = base_names(model)
            self.cache[key] = {n: p.detach() for n, p in model.named_parameters() if n in names}
        held: Tensors = self.cache[key]
        return held

    def in_order(self, assignment: Assignment) -> Assignment:
        """An assignment that was put together of several parts, with its parameters in the model's order."""
        names = list(self.replica(assignment.arch).params)
        if not self.base(assignment.arch) or list(assignment.params) == names:
            return assignment
        if assignment.params.keys() != set(names):
            raise UsageError("the assignment does not bring the parameters of this model")
        return replace_fields(assignment, params={n: assignment.params[n] for n in names})

    def model(self, params: Tensors, buffers: Tensors, arch: str, turn: bool = False) -> nn.Module:
        """A new model with these parameters and running statistics, as it would be evaluated.

        With `turn` it is laid out as for training.
        """
        model, params = self.build(arch), cut_ranks(params, self.cuts.get(arch, {}))
        if turn:
            _turn(dict(model.named_parameters()), lay_out(model, self.channels_last))
        mine: Tensors = {**dict(model.named_parameters()), **running_statistics(model)}
        load(mine, {n: t for n, t in {**params, **buffers}.items() if n in mine})
        if self.method.buffers == "drop":
            without_statistics(model)
        return model.eval()


def _flatten(params: Tensors, last: Collection[str]) -> Tensors:
    """Lay a model's parameters one after the other in one buffer, each at the beginning of a cache line.

    Large ones stay where they are: a copy of them would take their memory twice, and leave a hole of that size.

    Args:
        params: are changed in place.
        last: the names of those that get their channels last.
    """
    small = {n: p for n, p in params.items() if n in last or not _is_large_and_apart(p)}
    for dtype in {p.dtype for p in small.values()}:
        mine = {n: p for n, p in small.items() if p.dtype == dtype}
        sizes = [whole_lines(p.numel(), dtype) for p in mine.values()]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(mine.values())).device)
        for (name, p), part in zip(mine.items(), torch.split(flat, sizes), strict=True):
            view = _view(part[: p.numel()], p.shape, name in last)
            p.data = view.copy_(p.data)
        if len(mine) == len(params):
            return FlatTensors(params, flat)
    return params


def _is_large_and_apart(p: Tensor) -> bool:
    """True for a large parameter that fills memory of its own already, from the beginning of a cache line on."""
    fills = p.is_contiguous() and p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return p.numel() >= LARGE and fills and p.data_ptr() % LINE == 0


def _turn(params: Tensors, last: Collection[str]) -> None:
    """Give parameters with these names their channels last."""
    for p in (params[name] for name in last):
        p.data = _view(torch.empty(p.numel(), dtype=p.dtype, device=p.device), p.shape, last=True).copy_(p.data)


def _view(flat: Tensor, shape: Sequence[int], last: bool) -> Tensor:
    """A buffer as a tensor, contiguous or with the channels last.

    Its strides say so even where there is one channel: convolutions look at them.
    """
    if not last:
        return flat.view(shape)
    n, c, h, w = shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)
