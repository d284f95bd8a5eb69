"""What clients' devices can train: each a group of strata that its memory and the deadline allow, in turns.

A device with room for the whole model trains all of it. Any other has groups of strata that lie next to each other, and
its clients train one of them in each round (`fedstrata.fleet.plans`). What techniques plan is narrowed by it, as by any
other plan.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch

from fedstrata import wire
from fedstrata.client.context import ClientContext
from fedstrata.client.forecast import VisitCost
from fedstrata.client.memory_forecast import MemoryForecast
from fedstrata.core.rng import preserve_rng
from fedstrata.core.tensors import Tensors
from fedstrata.core.text import bytes_text, plural
from fedstrata.core.types import Assignment, Stratum, Update, Work, replace_fields
from fedstrata.data.batching import batch_sizes
from fedstrata.errors import UsageError
from fedstrata.fleet.clock import visit_seconds
from fedstrata.fleet.devices import Device
from fedstrata.fleet.plans import Span, affordable_groups, covering, turn
from fedstrata.models.norms import normalises_batches
from fedstrata.server.setup import Setup
from fedstrata.server.state import Architecture

Kind = tuple[str, str]
"""A device's name and an architecture."""
LONG = 2**63
"""Stands for a number in a message: none takes more digits, so that what is planned is not late by a few bytes."""
SHOWN = 5
"""Groups, or strata, that a note names."""


@dataclass(frozen=True, eq=False)
class Part:
    """What a client may train of its model.

    Args:
        params: names of the parameters.
        buffers: names of the running statistics that travel with them; None where these do not travel.
    """

    params: frozenset[str]
    buffers: tuple[str, ...] | None

    def narrow(self, assignment: Assignment) -> Assignment:
        """An assignment of which only this part trains and travels."""
        trains = tuple(n for n in assignment.trains if n in self.params)
        uploads = tuple(n for n in assignment.uploads if n in self.params)
        narrowed = replace_fields(assignment, trains=trains, uploads=uploads)
        if self.buffers is None or assignment.upload_buffers is not None:
            return narrowed
        return replace_fields(narrowed, upload_buffers=self.buffers)


@dataclass(frozen=True, eq=False)
class Budgets:
    """What every client trains in every round, as far as its device decides.

    Args:
        kinds: client → its kind, which is its device and its architecture.
        parts: kind → the parts that its clients train in turns; kinds that are not here train the whole model.
        notes: what a reader of the results must know.
        unaffordable: names of the strata that none of them can train.
        alone: True if a client's turn must not depend on who else is asked, since each is asked by itself.
        seed: of the run.
    """

    kinds: Mapping[int, Kind] = field(default_factory=dict)
    parts: Mapping[Kind, tuple[Part, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unaffordable: tuple[str, ...] = ()
    alone: bool = False
    seed: int = 0

    @property
    def facts(self) -> dict[str, list[str]]:
        """What a reader of the run's files has to know."""
        return {"unaffordable": list(self.unaffordable)} if self.unaffordable else {}

    def parts_of(self, round: int, clients: Sequence[int]) -> list[Part | None]:
        """What each of a round's clients trains, in their order; None for all of its model."""
        if not self.parts:
            return [None] * len(clients)
        places, there = self._everybody if self.alone else self._count(clients)
        found: list[Part | None] = []
        for client in clients:
            kind = self.kinds[client]
            parts = self.parts.get(kind)
            about = round, places[client], there[kind]
            found.append(None if parts is None else parts[turn(self.seed, *about, len(parts))])
        return found

    def _count(self, clients: Iterable[int]) -> tuple[dict[int, int], Counter[Kind]]:
        """(each client's place among those of its kind, how many of each kind there are)."""
        there, places = Counter[Kind](), {}
        for client in clients:
            places[client] = there[self.kinds[client]]
            there[self.kinds[client]] += 1
        return places, there

    @cached_property
    def _everybody(self) -> tuple[dict[int, int], Counter[Kind]]:
        """The same among all clients of the run."""
        return self._count(self.kinds)


NO_BUDGETS = Budgets()


class Limits(Protocol):
    """What a run's settings say of its clock."""

    @property
    def seed(self) -> int:
        """Of the run."""
        ...

    @property
    def deadline(self) -> float | None:
        """Simulated seconds of a round."""
        ...

    @property
    def stragglers(self) -> str:
        """What becomes of clients that need longer."""
        ...


def plan_budgets(
    setup: Setup,
    context: ClientContext,
    work: Work,
    limits: Limits,
    devices: Sequence[Device],
    asked: Sequence[int],
    overheads: Callable[[Sequence[int], Compare], Mapping[str, Overhead]],
) -> Budgets:
    """What a fleet's devices can train of these models; nothing is said of those that can train everything.

    Args:
        setup: models and data.
        context: what clients are trained with.
        work: how.
        limits: the deadline, and whether devices train less to keep it.
        devices: of all clients.
        asked: the clients that take part in rounds; what only others can train nobody trains.
        overheads: (these clients, what compares a visit with plain training) → how much more visits take, by
            architecture; asked for where they have to be in time.

    Raises:
        UsageError: if nobody of them can train anything.
    """
    deadline = limits.deadline if limits.stragglers == "narrow" else None
    if deadline is None and all(device.memory is None for device in devices):
        return NO_BUDGETS
    owner = next(client for client in range(len(setup.clients)) if len(setup.clients[client]))
    with preserve_rng():
        x, y = setup.clients[owner].batch(torch.arange(1))
    planner = _Planner(setup, context, MemoryForecast(context, work, x, y), deadline)
    if deadline is not None:
        planner = replace(planner, overheads=overheads(asked, planner.compare))
    members: dict[Kind, list[int]] = {}
    for client, device in enumerate(devices):
        members.setdefault((device.name, setup.arch_of(client)), []).append(client)
    by_name = {device.name: device for device in devices}
    spans = {kind: planner.spans(by_name[kind[0]], kind[1], clients) for kind, clients in members.items()}
    parts = {kind: planner.parts(kind[1], groups) for kind, groups in spans.items() if planner.is_less(kind[1], groups)}
    if not parts:
        return NO_BUDGETS
    takes_part = set(asked).intersection
    there = {kind: spans[kind] for kind, clients in members.items() if takes_part(clients)}
    if not any(there.values()):
        raise UsageError(planner.refusal(next(iter(there))[1]))
    kinds = {client: kind for kind, clients in members.items() for client in clients}
    alone = context.method.arrivals is not None
    unaffordable = planner.unaffordable(there)
    notes = planner.notes(members, there, unaffordable)
    return Budgets(dict(sorted(kinds.items())), parts, notes, unaffordable, alone, limits.seed)


@dataclass(frozen=True)
class Overhead:
    """What visits take beyond plain training of the same strata; never less than that.

    Args:
        down: factor of the bytes.
        flops: operations more for each row of each step, whatever strata train: passes over the whole model.
        up: factor of the bytes.
    """

    down: float = 1.0
    flops: float = 0.0
    up: float = 1.0


Compare = Callable[[Assignment, int, VisitCost], Overhead]
"""(what a client is asked for, its examples, what its visit takes) → what that is beyond plain training."""


@dataclass(frozen=True, eq=False)
class _Planner:
    """Knows what strata take.

    Args:
        setup: models and data.
        context: what clients are trained with.
        forecast: says what steps take.
        deadline: simulated seconds that a visit may take, if there is a limit.
        overheads: architecture → how much more than plain training a visit takes.
    """

    setup: Setup
    context: ClientContext
    forecast: MemoryForecast
    deadline: float | None
    overheads: Mapping[str, Overhead] = field(default_factory=dict)

    def strata(self, arch: str) -> list[Stratum]:
        """Those of a model that have something to train."""
        held = self.setup.architectures[arch]
        return [s for s in held.strata if not s.idle and not held.frozen.issuperset(s.params)]

    def names(self, arch: str, span: Span) -> tuple[str, ...]:
        """The parameters of a group that move."""
        frozen, strata = self.setup.architectures[arch].frozen, self.strata(arch)[span[0] : span[1] + 1]
        return tuple(n for s in strata for n in s.params if n not in frozen)

    def buffers(self, arch: str, span: Span) -> tuple[str, ...] | None:
        """The running statistics that travel with a group; None where they do not travel."""
        if self.context.method.buffers != "average":
            return None
        held: Architecture = self.setup.architectures[arch]
        mine = {n for s in self.strata(arch)[span[0] : span[1] + 1] for n in s.buffers}
        return tuple(n for n in held.buffers if n in mine)

    def spans(self, device: Device, arch: str, clients: Sequence[int]) -> tuple[Span, ...]:
        """The groups that a device trains in turns; the one with the most examples decides what is in time."""
        most = max(len(self.setup.clients[client]) for client in clients)
        sizes = batch_sizes(most, self.forecast.work, normalises_batches(self.setup.models[arch]))
        if not sizes:
            return ()
        more = self.overheads.get(arch, Overhead())
        count, rows, down = len(self.strata(arch)), max(sizes), self._bytes_down(arch) * more.down
        steps = sum(sizes) / rows  # the last one may be a short one

        def fits(first: int, last: int) -> bool:
            names = self.names(arch, (first, last))
            step = self.forecast.step(arch, names, rows)
            if device.memory is not None and step.memory > device.memory:
                return False
            if self.deadline is None:
                return True
            up = self._bytes_up(arch, names, self.buffers(arch, (first, last)) or ()) * more.up
            return visit_seconds(device, down, step.flops * steps + more.flops * sum(sizes), up) <= self.deadline

        if count and fits(0, count - 1):
            return ((0, count - 1),)
        return covering(affordable_groups(count, fits))

    def _bytes_down(self, arch: str) -> int:
        """Of a message to a client that holds nothing yet."""
        model, a = self.setup.models[arch], self.setup.architectures[arch]
        buffers = dict(model.named_buffers())
        params: Tensors = dict(model.named_parameters())
        sent = {n: buffers[n] for n in a.buffers} if self.context.method.buffers == "average" else {}
        method, work = self.context.method.digest, self.forecast.work
        return wire.size(Assignment(LONG, LONG, arch, params, sent, a.params, a.params, work, LONG, method))

    def compare(self, asked: Assignment, examples: int, cost: VisitCost) -> Overhead:
        """What a client's visit takes beyond plain training of what it is asked for."""
        sizes = batch_sizes(examples, self.forecast.work, normalises_batches(self.setup.models[asked.arch]))
        if not (sizes and asked.trains):  # a plan that lets nothing train says nothing
            return Overhead()
        held, travels = self.setup.architectures[asked.arch], self.context.method.buffers == "average"
        statistics = (held.buffers if asked.upload_buffers is None else asked.upload_buffers) if travels else ()
        flops = self.forecast.step(asked.arch, asked.trains, max(sizes)).flops * sum(sizes) / max(sizes)
        return Overhead(
            max(1.0, cost.down / self._bytes_down(asked.arch)),
            max(0.0, (cost.flops - flops) / sum(sizes)),
            max(1.0, cost.up / self._bytes_up(asked.arch, asked.uploads, statistics)),
        )

    def _bytes_up(self, arch: str, names: Iterable[str], statistics: Iterable[str]) -> int:
        """Of the answer of a client that has trained these parameters, without what techniques send."""
        model = self.setup.models[arch]
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        delta: Tensors = {n: params[n] for n in names}
        sent = {n: buffers[n] for n in statistics}
        metrics = dict.fromkeys(("train_loss", "flops", "memory"), -sys.float_info.min)
        return wire.size(Update(LONG, LONG, self.context.method.digest, LONG, LONG, delta, sent, metrics=metrics))

    def is_less(self, arch: str, spans: tuple[Span, ...]) -> bool:
        """True unless the whole model is one of the groups."""
        return (0, len(self.strata(arch)) - 1) not in spans

    def parts(self, arch: str, spans: Sequence[Span]) -> tuple[Part, ...]:
        """The groups by names; where there are none, nothing."""
        if not spans:
            return (Part(frozenset(), None if self.context.method.buffers != "average" else ()),)
        return tuple(Part(frozenset(self.names(arch, span)), self.buffers(arch, span)) for span in spans)

    def _rule_note(self) -> str:
        """That a rule looks at whole updates, of which here one holds other strata than another."""
        base, rule = self.context.method.base, self.context.method.reducer
        if rule is None or rule.per != "model" or "per" not in inspect.signature(type(rule)).parameters:
            return ""
        why = "looks at whole updates, and this fleet's clients send different strata"
        return f"reduce={base.reduce!r} {why}; per='stratum' looks at each by itself"

    def refusal(self, arch: str) -> str:
        """Why nothing can be trained."""
        rows = self.forecast.work.batch_size
        alone = range(len(self.strata(arch)))
        least = min(self.forecast.step(arch, self.names(arch, (s, s)), rows).memory for s in alone)
        in_time, longer = "", ""
        if self.deadline is not None:
            in_time, longer = f" within {self.deadline:g} simulated seconds", "a longer deadline, "
        return (
            f"no device of the fleet can train any stratum of this model{in_time}: a step with {rows} examples takes "
            f"{bytes_text(least)} at least; take {longer}a smaller batch_size or model, or other devices"
        )

    def unaffordable(self, spans: dict[Kind, tuple[Span, ...]]) -> tuple[str, ...]:
        """The strata that are in nobody's groups."""
        trained = {n for kind, groups in spans.items() for span in groups for n in self.names(kind[1], span)}
        return tuple(s.name for s in self.strata("") if trained.isdisjoint(s.params))

    def notes(
        self, members: dict[Kind, list[int]], spans: dict[Kind, tuple[Span, ...]], unaffordable: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Who trains what, and what nobody can train."""
        found = [self._note(kind, len(members[kind]), groups) for kind, groups in spans.items()]
        if unaffordable:
            more = len(unaffordable) - SHOWN
            shown = ", ".join(unaffordable[:SHOWN]) + (f" and {more} more" if more > 0 else "")
            keeps = "it keeps its" if len(unaffordable) == 1 else "they keep their"
            found.append(f"no device of the fleet can train {shown}: {keeps} first values")
        return tuple(filter(None, [*found, self._rule_note()]))

    def _note(self, kind: Kind, clients: int, spans: tuple[Span, ...]) -> str:
        """What one kind of device trains; nothing of one that trains everything."""
        (device, arch), strata = kind, self.strata(kind[1])
        who = f"{device} ({plural(clients, 'client')}{f', {arch}' if arch else ''})"
        if not spans:
            return f"of the fleet, {who} can train no stratum: it takes part without training"
        if not self.is_less(arch, spans):
            return ""
        held = sum(last - first + 1 for first, last in spans) - _overlap(spans)
        named = [strata[a].name if a == b else f"{strata[a].name} – {strata[b].name}" for a, b in spans[:SHOWN]]
        more = f"; and {len(spans) - SHOWN} more" if len(spans) > SHOWN else ""
        turns = ", in turns" if len(spans) > 1 else ""
        return f"of the fleet, {who} trains {held} of {len(strata)} strata{turns}: {'; '.join(named)}{more}"


def _overlap(spans: Sequence[Span]) -> int:
    """How many strata are in two groups that follow each other."""
    return sum(max(0, one[1] - other[0] + 1) for one, other in pairwise(spans))
