"""How techniques become a Method: on top of a mean, in an order, unless they refuse each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, Protocol

from fedstrata.core.citation import Paper
from fedstrata.core.encoding import STEPS, Encoder, Encoding
from fedstrata.core.spec import non_default_fields
from fedstrata.core.technique import Buffers, Figures, Technique, overrides
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Reducer, Slots, Stratum, Weight
from fedstrata.errors import UsageError


class Base(Protocol):
    """The mean that a method stands on: `fedavg`, with its arguments, None for what the techniques decide."""

    @property
    def name(self) -> str:
        """As written in a method string."""
        ...

    @property
    def papers(self) -> tuple[Paper, ...]:
        """What to cite for it."""
        ...

    @property
    def weight(self) -> Weight | None:
        """How the mean weighs clients."""
        ...

    @property
    def buffers(self) -> Buffers | None:
        """What happens to running statistics."""
        ...

    @property
    def server_lr(self) -> float | None:
        """How far the server moves along the mean."""
        ...

    @property
    def reduce(self) -> str | None:
        """What takes the mean's place, as it was written."""
        ...

    @property
    def reducer(self) -> Reducer | None:
        """What takes the mean's place; None for the mean itself."""
        ...

    def with_buffers(self, buffers: Buffers) -> Base:
        """The same mean under another policy for running statistics."""
        ...

    def with_reducer(self, reduce: str) -> Base:
        """The same with another rule in the mean's place."""
        ...


@dataclass(frozen=True)
class Method:
    """Techniques on top of a mean; made by `chain` or read from a string by `fedstrata.method`."""

    techniques: tuple[Technique, ...]
    base: Base

    def __post_init__(self) -> None:
        self._check_pairs()
        self._check_kinds()
        for key in ("weight", "buffers", "server_lr"):
            self._setting(key, None)
        self._check_base()
        if self.reducer is not None:
            self._check_reducer(self.reducer)

    def _check_pairs(self) -> None:
        """Refuse a technique that is named twice, and techniques that refuse each other."""
        seen: set[str] = set()
        for technique in self.techniques:
            if technique.name in seen:
                raise UsageError(f"the method names '{technique.name}' twice")
            seen.add(technique.name)
        for one in self.techniques:
            others = [t.name for t in self.techniques if t.name != one.name]
            refused = [*one.refuses.items(), *((other, one.exclusive) for other in others if one.exclusive)]
            for other, why in refused:
                if other in seen:
                    raise UsageError(f"'{one.name}' and '{other}' cannot be combined: {why}")

    def _check_kinds(self) -> None:
        """Refuse techniques that cannot stand together because of what they are, whatever their names."""
        for takes, waits in product(self.techniques, repeat=2):
            if takes.arrivals is not None and waits.synchronous:
                raise UsageError(f"'{takes.name}' and '{waits.name}' cannot be combined: {waits.synchronous}")
        for lacks, needs in product(self.techniques, repeat=2):
            if lacks.incomplete and needs.needs_whole:
                raise UsageError(
                    f"'{lacks.name}' and '{needs.name}' cannot be combined: clients keep parts of the model to "
                    f"themselves, and '{needs.name}' computes with whole models on the server"
                )
        for renews, keeps in product(self.techniques, self.encoders):
            if renews.renews and keeps.feedback:
                raise UsageError(
                    f"'{renews.name}' and '{keeps.name}(feedback=True)' cannot be combined: {renews.renews}; "
                    "feedback=False remembers nothing"
                )
        for one, two in pairwise(self.encoders):
            if one.step == two.step:
                raise UsageError(f"'{one.name}' and '{two.name}' cannot be combined: {STEPS[one.step]}")

    def _check_base(self) -> None:
        """Refuse arguments of the mean that have no meaning for a technique that stands alone."""
        for one in (t for t in self.techniques if t.exclusive):
            for key, value in non_default_fields(self.base).items():
                if key in ("server_lr", "reduce") or (one.personalised and value == "average"):
                    raise UsageError(f"'{one.name}' and fedavg({key}={value!r}) cannot be combined: {one.exclusive}")

    def _check_reducer(self, reducer: Reducer) -> None:
        """Refuse techniques that take something from the clients past the rule in the mean's place."""
        for technique in self.techniques:
            if technique.incomplete and reducer.trusts:
                raise UsageError(
                    f"'{technique.name}' and reduce={self.base.reduce!r} cannot be combined: the server has no whole "
                    "model to train for comparison"
                )
            if technique.branches and not reducer.by_name:
                raise UsageError(
                    f"'{technique.name}' and reduce={self.base.reduce!r} cannot be combined: it chooses among all "
                    "clients, and groups would no longer be apart"
                )
            sums = ("delta",) if reducer.trusts else ("slot", "delta")  # the server has no slots to compare with
            unguarded = overrides(technique, "accumulate") and technique.sums not in sums
            unguarded |= overrides(technique, "rescale") and not overrides(technique, "rescale_guarded")
            unguarded |= technique.per_client and overrides(technique, "apply")  # liars would choose who sends what
            if unguarded or technique.needs_deltas:
                raise UsageError(
                    f"'{technique.name}' and reduce={self.base.reduce!r} cannot be combined: what '{technique.name}' "
                    "takes from the clients does not pass through the mean, so nothing guards it"
                )

    def _setting(self, key: str, otherwise: Any) -> Any:
        """An argument of the mean: as given, or else as all techniques that have a wish want it."""
        chosen = getattr(self.base, key)
        if chosen is not None:
            return chosen
        wishes = {t.name: t.defaults[key] for t in self.techniques if key in t.defaults}
        if len(set(wishes.values())) > 1:
            said = ", ".join(f"{name} {value!r}" for name, value in wishes.items())
            raise UsageError(f"the techniques want different values of '{key}' ({said}); say fedavg({key}=…)")
        return next(iter(wishes.values()), otherwise)

    @cached_property
    def weight(self) -> Weight:
        """How the mean weighs clients: all alike where some may lie, for they would claim many examples."""
        weight: Weight = self._setting("weight", "examples" if self.reducer is None else "uniform")
        return weight

    @cached_property
    def buffers(self) -> Buffers:
        """What happens to running statistics."""
        buffers: Buffers = self._setting("buffers", "average")
        return buffers

    @cached_property
    def server_lr(self) -> float:
        """How far the server moves along the mean."""
        return float(self._setting("server_lr", 1.0))

    @cached_property
    def reducer(self) -> Reducer | None:
        """What takes the mean's place; None for the mean itself."""
        return self.base.reducer

    @cached_property
    def encoders(self) -> tuple[Encoder, ...]:
        """The techniques that encode what travels, in the order in which they do."""
        found = (t for t in self.techniques if isinstance(t, Encoder))
        return tuple(sorted(found, key=lambda encoder: [*STEPS].index(encoder.step)))

    def encoding(self, strata: Mapping[str, Sequence[Stratum]]) -> Encoding | None:
        """What they make of changes of models with these strata, by architecture; None if there are none."""
        return Encoding(self.encoders, strata) if self.encoders else None

    @property
    def epilogue(self) -> int:
        """Rounds after the last one, in which nobody trains."""
        return max((t.epilogue for t in self.techniques), default=0)

    @property
    def epochs_per_visit(self) -> int | None:
        """Passes over a client's data in a visit; None if they are the run's epochs or steps."""
        return next((t.epochs_per_visit for t in self.techniques if t.epochs_per_visit is not None), None)

    @property
    def arrivals(self) -> int | None:
        """How many updates end a round, in the order in which they arrive; None if all that were asked are awaited."""
        return next((t.arrivals for t in self.techniques if t.arrivals is not None), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results must know, each once."""
        return tuple(dict.fromkeys(t.caveat for t in self.techniques if t.caveat))

    @property
    def papers(self) -> tuple[Paper, ...]:
        """What to cite for it: the mean's, the reducer's and the techniques', each once; none for plain training."""
        if any(t.exclusive for t in self.techniques):
            return ()
        parts = (self.base, self.reducer, *self.techniques)
        return tuple(dict.fromkeys(paper for part in parts for paper in getattr(part, "papers", ())))

    @property
    def centralised(self) -> bool:
        """True if one party holds everybody's examples."""
        return any(t.centralised for t in self.techniques)

    @property
    def branches(self) -> bool:
        """True if clients of one architecture share their parameters with nobody else."""
        return any(t.branches for t in self.techniques)

    @property
    def personalised(self) -> bool:
        """True if every client has a model of its own."""
        return any(t.personalised for t in self.techniques)

    @property
    def incomplete(self) -> bool:
        """True if clients keep parts of the model to themselves, so that the server has no whole one."""
        return any(t.incomplete for t in self.techniques)

    def kept(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """The parameters and running statistics that clients keep to themselves."""
        return frozenset(name for technique in self.techniques for name in technique.kept(strata))

    @property
    def tunes(self) -> bool:
        """True if clients train in the rounds after the last one, and keep what they train there."""
        return any(t.tunes for t in self.techniques)

    def at(self, door: str) -> Iterator[Technique]:
        """The techniques that do something at this door, left to right."""
        return (t for t in self.techniques if overrides(t, door))

    def keeps_statistics(self, after_training: bool) -> bool:
        """True if clients remember the running statistics that a visit in which they train ends with."""
        owned = after_training or any(self.at("own"))
        return self.buffers == "local" or (self.buffers == "average" and owned)

    @property
    def remembers_statistics(self) -> bool:
        """True if clients may remember running statistics."""
        return self.keeps_statistics(after_training=self.tunes)

    def acting(self, door: str, after_training: bool) -> Iterator[Technique]:
        """Those of them that do it in a round: after the last one only those with an epilogue."""
        return (t for t in self.at(door) if t.epilogue or not after_training)

    def own(self, memory: Slots, params: Tensors) -> Tensors:
        """A client's own model, by what it remembers, by all techniques from left to right."""
        for technique in self.at("own"):
            params = technique.own(memory.get(technique.name, {}), params)
        return params

    def deploy(self, states: Slots, params: Tensors) -> Tensors:
        """The parameters that are evaluated and handed out, by all techniques from left to right."""
        for technique in self.at("deploy"):
            params = technique.deploy(states.get(technique.name, {}), params)
        return params

    def publish(self, states: Slots) -> Figures:
        """What the techniques publish of their states after a round: figure → layer → number."""
        found: dict[str, dict[str, float]] = {}
        for technique in self.at("publish"):
            for figure, by_layer in technique.publish(states.get(technique.name, {})).items():
                found.setdefault(figure, {}).update(by_layer)
        return found

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that identify the method on the wire."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def with_buffers(self, buffers: Buffers | None) -> Method:
        """The same method under another buffer policy; None, and the policy that it has, change nothing."""
        return (
            self if buffers is None or buffers == self.buffers else replace(self, base=self.base.with_buffers(buffers))
        )

    def with_reducer(self, reduce: str) -> Method:
        """The same method with another rule in the mean's place.

        Raises:
            UsageError: if a technique takes something from the clients past the rule.
        """
        return replace(self, base=self.base.with_reducer(reduce))

    def __str__(self) -> str:
        shown = [str(t) for t in self.techniques]
        if non_default_fields(self.base) or not shown:
            shown.insert(0, str(self.base))
        return " + ".join(shown)
