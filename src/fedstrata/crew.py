"""What techniques do during a visit: their hooks side by side (Crew), and the loss that they shape (Objective)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from fedstrata.core import Assignment, Batch, Buffers, ClientView, Hooks, Into, Slots, Times
from fedstrata.data.examples import Examples
from fedstrata.errors import FedstrataError, UsageError, did_you_mean
from fedstrata.methods import Method
from fedstrata.strata import composes
from fedstrata.tensors import Tensors, add, add_, clone, lent
from fedstrata.workshop import Bench, judging, task_loss


@dataclass(frozen=True, eq=False)
class Crew:
    """The hooks of a visit, sorted by what they do."""

    hooks: Mapping[str, Hooks]

    def all(self, kind: str) -> list[Any]:
        """Every technique's hook of a kind, left to right, where there is one."""
        return [hook for h in self.hooks.values() if (hook := getattr(h, kind)) is not None]

    @cached_property
    def _corrections(self) -> list[Callable[[Tensors, Batch], Tensors | Times]]:
        return self.all("correct")

    @cached_property
    def _tallies(self) -> dict[str, Callable[[Tensors, Tensors, Batch], Tensors]]:
        return {name: h.tally for name, h in self.hooks.items() if h.tally is not None}

    @property
    def outputs(self) -> list[Callable[[Batch], Tensor]]:
        """What changes the model's outputs, in order: who looks at the model itself, then the `output` hooks."""
        whole = [functions[""] for functions in self.all("features") if "" in functions]
        return [*(partial(_at_the_end, function) for function in whole), *self.all("output")]

    @property
    def places(self) -> list[str]:
        """The modules that `features` hooks look at or change in every step."""
        return [place for functions in self.all("features") for place in functions if place != ""]

    @contextmanager
    def tapped(self, objective: Objective) -> Iterator[None]:
        """The `features` hooks, attached to the modules that they name."""
        handles = []
        for functions in self.all("features"):
            for name in (name for name in functions if name != ""):
                handles.append(at_place(objective.model, name, partial(_replaced, functions[name], objective)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tallied(self, tallies: Slots, grads: Tensors, batch: Batch) -> Slots:
        """What the techniques sum up, one step later."""
        if not self._tallies:
            return tallies
        return {n: tally(tallies.get(n, {}), grads, batch) for n, tally in self._tallies.items()}

    def corrected(self, grads: Tensors, batch: Batch, own: bool = False) -> Tensors:
        """The gradients with every technique's correction, each computed from the raw gradients, added.

        Where the gradients are the caller's `own` it may be done in place, if no correction can hold them.
        """
        terms = [correct(grads, batch) for correct in self._corrections]
        plus = add_ if own and {*map(type, terms)} <= {Times} else add
        for term in terms:
            grads = plus(grads, term.tensors, term.factor) if isinstance(term, Times) else plus(grads, term)
        return grads

    def scale(self, names: Sequence[str], device: torch.device) -> list[Tensor] | None:
        """The product of the techniques' scales for the trained names, or None where nobody scales."""
        scales = self.all("scale")
        if not scales:
            return None
        one = torch.ones((), device=device)
        return [reduce(torch.mul, (s[n] for s in scales if n in s), one) for n in names]

    def uploaded(self, delta: Tensors) -> Tensors:
        """The delta that travels: what was trained, plus what techniques add; each sees what was trained."""
        sent = delta
        for upload in self.all("upload"):
            sent = add(sent, upload(delta))
        return sent

    def finished(self, delta: Tensors, tallies: Slots, memory: Slots) -> tuple[Slots, Slots]:
        """(slots that travel, the client's whole new memory)."""
        slots: Slots = {}
        kept = dict(memory)
        for name, hook in self.hooks.items():
            if hook.finish is not None:
                slot, remembered = hook.finish(delta, tallies.get(name, {}))
                if slot:
                    slots[name] = slot
                if remembered is not None:
                    kept[name] = remembered
        return slots, kept

    @cached_property
    def present(self) -> tuple[Any, ...]:
        """What settles how much the hooks compute: which of them there are, and the variant that they name."""
        return tuple(
            (name, hook.variant, *(getattr(hook, f.name) is None for f in fields(hook)))
            for name, hook in self.hooks.items()
        )


def _at_the_end(function: Callable[[Batch, Tensor], Tensor], batch: Batch) -> Tensor:
    return function(batch, batch.logits)


def _replaced(function: Callable[[Batch, Tensor], Tensor], objective: Objective, there: Tensor) -> Tensor:
    return there if objective.silent else function(objective.current[-1], there)


def at_place(model: nn.Module, place: str, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Let a function replace a module's output or, for an `Into`, its input, until the handle is removed."""
    module = _module(model, place)
    if isinstance(place, Into):
        return module.register_forward_pre_hook(lambda m, args: (function(args[0]), *args[1:]))
    return module.register_forward_hook(lambda m, args, output: function(output))


class _Seen(BaseException):
    """Ends a run of the model where all that is wanted has been computed."""

    def __init__(self, there: Tensor) -> None:
        self.there = there


def seen_at(model: nn.Module, place: str, run: Callable[[], Any]) -> Tensor:
    """What is at a place of the model while it runs, which it does no further than there."""

    def see(there: Tensor) -> Tensor:
        raise _Seen(there)

    handle = at_place(model, place, see)
    try:
        run()
    except _Seen as seen:
        return seen.there
    finally:
        handle.remove()
    raise UsageError(f"the model's module '{place}' does not run")


def stages_to(model: nn.Module, place: str) -> list[nn.Module]:
    """The stages of a plain `nn.Sequential` whose composition ends at a place; none where it is no end of a stage."""
    hooked = model._forward_hooks or model._forward_pre_hooks
    if not composes(model) or hooked or str(place) not in model._modules:
        return []
    names = list(model._modules)
    end = names.index(str(place)) + (not isinstance(place, Into))
    return [stage for stage in list(model._modules.values())[:end] if stage is not None]


@contextmanager
def watched(model: nn.Module, watch: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Every function is called with what is at its place whenever the model comes by."""
    handles = [at_place(model, place, partial(_shown, look)) for place, look in watch.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shown(look: Callable[[Tensor], None], there: Tensor) -> Tensor:
    look(there)
    return there


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise UsageError(f"the model has no module '{name}'{did_you_mean(name, known)}") from None


Differentiate = Callable[[Callable[[Tensors], Tensor], Tensors], Tensors]
"""(loss as a function of named tensors, where) → its gradient there."""


def by_autograd(loss: Callable[[], Tensor], leaves: Tensors) -> Tensors:
    """The gradient by torch's tape; what the loss does not use has a gradient of zero."""
    frozen = [p for p in leaves.values() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_()
    try:
        with torch.enable_grad():
            value = loss()
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    return dict(zip(leaves, grads, strict=True))


@dataclass(eq=False)
class Objective:
    """The local loss of a visit: the task's, on outputs that techniques may change, plus the techniques' terms.

    Args:
        model: called with parameters of its own, or with others for a hook that asks for them.
        params: the parameters at the current step.
        buffers: the running statistics; a hook's own passes leave them as they are.
        outputs: what changes the model's outputs.
        losses: their `loss` hooks.
        task: (logits, labels) → the task's loss.
        differentiate: how a hook's wish for a gradient elsewhere is met where the model does not hold its parameters
            itself; None where it does.
        policy: for running statistics, in passes that a hook asks for.
    """

    model: nn.Module
    params: Tensors
    buffers: Tensors
    outputs: Sequence[Callable[[Batch], Tensor]]
    losses: Sequence[Callable[[Batch], Tensor]]
    task: Callable[[Tensor, Tensor], Tensor] = task_loss
    differentiate: Differentiate | None = None
    policy: Buffers = "average"
    current: list[Batch] = field(default_factory=list)
    nested: bool = False
    silent: bool = False
    _ways: dict[str, list[nn.Module]] = field(default_factory=dict)

    @cached_property
    def _own(self) -> Tensors:
        """The model's tensors by name, where it holds them itself."""
        return {**self.params, **self.buffers}

    @cached_property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.model.modules())

    def batch(self, x: Tensor, y: Tensor, step: int, params: Tensors) -> Batch:
        """A step as the hooks will see it."""
        return Batch(x, y, params, step, x, partial(self._gradient, x, y, step), partial(self._forward, x))

    def __call__(self, batch: Batch, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(task loss, whole loss)."""
        self.current[:] = [batch]
        batch.logits = forward(batch.x)
        for output in self.outputs:
            batch.logits = output(batch)
        task = loss = self.task(batch.logits, batch.y)
        for term in self.losses:
            loss = loss + term(batch)
        return task, loss

    def _forward(self, x: Tensor, given: Tensors, module: str) -> Tensor:
        """What the model or one of its modules puts out at other parameters, without hooks, as in an evaluation."""
        given = {**given, **clone({n: given.get(n, b) for n, b in self.buffers.items()})}
        self.silent = True
        try:
            with self._evaluated(len(x)):
                if self.differentiate is None and not torch.is_grad_enabled():
                    with lent(self._own, given):
                        return self._seen(x, module)
                values = {**self.params, **given}
                return seen_at(self.model, module, partial(functional_call, self.model, values, (x,)))
        finally:
            self.silent = False

    @contextmanager
    def _evaluated(self, rows: int) -> Iterator[None]:
        """Inside, the model is in the modes of an evaluation; afterwards in those that it trains in."""
        modes = [module.training for module in self._modules]
        try:
            with judging(self.model, self.policy, rows):
                yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                module.training = mode

    def _seen(self, x: Tensor, place: str) -> Tensor:
        """What is at a place for these inputs; where stages lead there, without any hook."""
        way = self._ways.get(place)
        if way is None:
            way = self._ways[place] = stages_to(self.model, place)
        if not way:
            return seen_at(self.model, place, partial(self.model, x))
        for stage in way:
            x = stage(x)
        return x

    def _gradient(self, x: Tensor, y: Tensor, step: int, given: Tensors) -> Tensors:
        """Gradient of the whole loss at other parameters; running statistics stay untouched."""
        if self.nested:
            raise FedstrataError("Batch.gradient cannot be asked for by a loss or output hook: it would call itself")
        before, self.nested = list(self.current), True
        buffers = clone(self.buffers)

        def loss(moved: Tensors, forward: Callable[[Tensor], Tensor]) -> Tensor:
            batch = self.batch(x, y, step, moved)
            batch.again = True
            return self(batch, forward)[1]

        def elsewhere(moved: Tensors) -> Tensor:
            params = {**self.params, **moved}
            return loss(params, lambda x: functional_call(self.model, {**params, **buffers}, (x,)))

        try:
            if self.differentiate is not None:
                return self.differentiate(elsewhere, given)
            with lent(self._own, {**given, **buffers}):
                return by_autograd(lambda: loss(self.params, self.model), {n: self.params[n] for n in given})
        finally:
            self.current[:], self.nested = before, False


def open_crew(
    method: Method,
    bench: Bench,
    data: Examples,
    a: Assignment,
    memory: Slots,
    rng: Callable[[str], torch.Generator],
    counts: Callable[[], Tensor],
    outputs: Callable[[str], Iterator[tuple[Tensor, Tensor]]],
    observe: Callable[[Mapping[str, Callable[[Tensor], None]]], None],
) -> Crew:
    """Every technique's hooks for a visit; `rng` gives a technique its random stream."""
    statistics = partial(clone, {} if method.buffers == "drop" else bench.buffers)
    return Crew(
        {
            t.name: t.local(
                ClientView(
                    model=bench.model,
                    data=data,
                    assignment=a,
                    strata=bench.strata,
                    slot=a.slots.get(t.name, {}),
                    memory=memory.get(t.name, {}),
                    rng=rng(t.name),
                    counts=counts,
                    statistics=statistics,
                    outputs=outputs,
                    observe=observe,
                )
            )
            for t in method.at("local")
        }
    )
