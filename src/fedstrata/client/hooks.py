"""What techniques do during a visit: their hooks, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.context import ModelReplica
from fedstrata.client.personal import personal_names, personal_params
from fedstrata.core.method import Method
from fedstrata.core.technique import Batch, ClientView, Hooks, Measure, Technique, Times
from fedstrata.core.tensors import Tensors, add, add_, clone
from fedstrata.core.types import Assignment, Examples, Slots


@dataclass(frozen=True, eq=False)
class HookSet:
    """The hooks of a visit, sorted by what they do.

    Args:
        hooks: by technique.
        pack: what techniques make of their slots before these travel.
        kept: parameters that train and do not travel: no technique corrects or sums up their gradients, since what it
            would pull them towards is not theirs; steps in which nothing else trains are none of their affair.
    """

    hooks: Mapping[str, Hooks]
    pack: Mapping[str, Callable[[Tensors], Tensors]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

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

    def update_tallies(self, tallies: Slots, grads: Tensors, batch: Batch) -> Slots:
        """What the techniques sum up over the steps, one step later."""
        if not self._tallies:
            return tallies
        grads = self._shared(grads)
        if self.kept and not grads:
            return tallies
        return {n: tally(tallies.get(n, {}), grads, batch) for n, tally in self._tallies.items()}

    def _shared(self, grads: Tensors) -> Tensors:
        """The gradients of what travels."""
        return {n: g for n, g in grads.items() if n not in self.kept} if self.kept else grads

    def correct_gradients(self, grads: Tensors, batch: Batch, own: bool = False) -> Tensors:
        """The gradients with every technique's correction, each computed from the raw gradients, added.

        Where the gradients are the caller's `own` it may be done in place, if no correction can hold them.
        """
        shared = self._shared(grads)
        if self.kept and not shared:
            return grads
        terms = [correct(shared, batch) for correct in self._corrections]
        plus = add_ if own and {*map(type, terms)} <= {Times} else add
        for term in terms:
            shared = plus(shared, term.tensors, term.factor) if isinstance(term, Times) else plus(shared, term)
        return {**grads, **shared} if self.kept else shared

    def step_scales(self, moved: Tensors) -> list[Tensor] | None:
        """The product of the techniques' scales for each parameter that moves, or None where nobody scales."""
        scales = self.all("scale")
        if not scales:
            return None
        one = torch.ones((), device=next((p.device for p in moved.values()), None))
        return [reduce(torch.mul, (s[n] for s in scales if n in s), one) for n in moved]

    def build_upload(self, delta: Tensors) -> Tensors:
        """The delta that travels: what was trained, plus what techniques add; each sees what was trained."""
        sent = delta
        for upload in self.all("upload"):
            sent = add(sent, upload(delta))
        return sent

    def finish(self, delta: Tensors, tallies: Slots, memory: Slots) -> tuple[Slots, Slots]:
        """(slots that travel, the client's whole new memory)."""
        slots: Slots = {}
        whole = dict(memory)
        for name, hook in self.hooks.items():
            if hook.finish is not None:
                slot, remembered = hook.finish(delta, tallies.get(name, {}))
                if slot:
                    slots[name] = self.pack[name](slot) if name in self.pack else slot
                if remembered is not None:
                    whole[name] = remembered
        return slots, whole

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What settles how much the hooks compute: which of them there are, and the variant that they name."""
        return tuple(
            (name, hook.variant, *(getattr(hook, f.name) is None for f in fields(hook)))
            for name, hook in self.hooks.items()
        )


def _at_the_end(function: Callable[[Batch, Tensor], Tensor], batch: Batch) -> Tensor:
    return function(batch, batch.logits)


@dataclass(frozen=True, eq=False)
class Answers:
    """What techniques are told where they ask their view: about one client, or about all that are trained at once.

    Args:
        rng: a technique's name → its random stream.
        prepare: (technique, its view) → what its door `prepare` gives.
        draws: (technique, its view) → what gives the random numbers of a step.
        normal: (a technique's name, its random stream) → `ClientView.normal`.
        counts, outputs, observe, sum_rows, sizes, measure_gradients: as `ClientView` has them.
    """

    rng: Callable[[str], torch.Generator]
    prepare: Callable[[Technique, ClientView], Tensors]
    draws: Callable[[Technique, ClientView], Callable[[Batch], Tensors]]
    normal: Callable[[str, torch.Generator], Callable[[Sequence[int], torch.dtype], Tensor]]
    counts: Callable[[], Tensor]
    outputs: Callable[[str], Iterator[tuple[Tensor, Tensor]]]
    observe: Callable[[Mapping[str, Callable[[Tensor], None]]], None]
    sum_rows: Callable[[Tensor], tuple[Tensor, Tensor | int]]
    sizes: Callable[[], Tensor]
    measure_gradients: Callable[[int, Measure], Tensors]


def open_view(
    technique: Technique,
    method: Method,
    replica: ModelReplica,
    data: Examples,
    a: Assignment,
    memory: Slots,
    answers: Answers,
) -> ClientView:
    """What a technique may see during a visit."""
    rng = answers.rng(technique.name)
    return ClientView(
        model=replica.model,
        data=data,
        assignment=a,
        strata=replica.strata,
        slot=a.slots.get(technique.name, {}),
        memory=memory.get(technique.name, {}),
        kept=personal_params(a, memory),
        rng=rng,
        width=lambda: replica.width,
        counts=answers.counts,
        statistics=partial(clone, {} if method.buffers == "drop" else replica.buffers),
        outputs=answers.outputs,
        observe=answers.observe,
        sum_rows=answers.sum_rows,
        sizes=answers.sizes,
        normal=answers.normal(technique.name, rng),
        measure_gradients=answers.measure_gradients,
        prepare=partial(answers.prepare, technique),
        draws=partial(answers.draws, technique),
        base=replica.base,
    )


def build_hooks(
    method: Method, replica: ModelReplica, data: Examples, a: Assignment, memory: Slots, answers: Answers
) -> HookSet:
    """Every technique's hooks for a visit; what they pack is left to the caller where a view is not of one client."""
    views = {
        t: open_view(t, method, replica, data, a, memory, answers) for t in method.acting("local", a.is_after_training)
    }
    return HookSet({t.name: t.local(view) for t, view in views.items()}, kept=frozenset(personal_names(a)))


NO_HOOKS = HookSet({})
