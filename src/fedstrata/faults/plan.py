"""Which clients each fault of a run hits, and what the federation asks of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fedstrata.aggregation.arithmetic import floor_share
from fedstrata.core.encoding import Encoding
from fedstrata.core.lazy import torch
from fedstrata.core.rng import derive, preserve_rng
from fedstrata.core.tensors import Tensors
from fedstrata.core.text import plural
from fedstrata.core.types import Absence, Assignment, Examples, Slots, Visit
from fedstrata.data.examples import sizes
from fedstrata.errors import UsageError
from fedstrata.faults import parse_faults
from fedstrata.faults.fault import SHARE, Fault, FaultSetting, VisitView, acts
from fedstrata.faults.spoilt_examples import SpoiltClients
from fedstrata.models.passes import preserve_model

if TYPE_CHECKING:
    from fedstrata.core.method import Method
    from fedstrata.server.setup import Setup

UPDATE_DOORS = ("change", "remember", "collude")
"""Where a fault acts on what a client sends."""


def memory_kind(place: int) -> str:
    """Where a client's memory keeps what the fault at a place of the plan remembers."""
    return f"(fault {place})"


@dataclass(frozen=True, eq=False)
class FaultPlan:
    """The faults of a run, in order, and whom each of them hits; without any, everything passes as it is.

    Faults see and change updates as they are before they are encoded; what is sent is encoded once more.
    """

    faults: tuple[Fault, ...] = ()
    hit: tuple[frozenset[int], ...] = ()
    setting: FaultSetting | None = None
    encoding: Encoding | None = None
    _places: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for place, (fault, clients) in enumerate(zip(self.faults, self.hit, strict=True)):
            for client in clients if acts(fault, *UPDATE_DOORS) else ():
                self._places[client] = (*self._places.get(client, ()), place)

    def spoil(self, clients: Sequence[Examples]) -> Sequence[Examples]:
        """Everybody's examples, as clients see them."""
        pairs = zip(self.faults, self.hit, strict=True)
        numbers = {client for fault, hit in pairs if acts(fault, "spoil") for client in hit}
        spoilt = {client: self.spoil_client(client, clients[client]) for client in sorted(numbers)}
        return SpoiltClients(clients, spoilt) if spoilt else clients

    def spoil_client(self, client: int, examples: Examples) -> Examples:
        """A client's examples, as it sees them."""
        for fault, hit in zip(self.faults, self.hit, strict=True):
            if client in hit and acts(fault, "spoil"):
                assert self.setting is not None
                examples = fault.spoil(examples, client, self.setting)
        return examples

    def places_of(self, client: int, number: int) -> tuple[int, ...]:
        """Places in the plan of the faults that act on what a client sends in a round, counted from 0."""
        return tuple(p for p in self._places.get(client, ()) if number >= self.faults[p].begin - 1)

    @property
    def changes_updates(self) -> bool:
        """True if anybody's updates are hit."""
        return bool(self._places)

    @property
    def remembers(self) -> bool:
        """True if a fault keeps something in its clients' memories."""
        return any(acts(fault, "remember") for fault in self.faults)

    def decode(self, visit: Visit, asked: Assignment) -> Visit | None:
        """A visit as faults see it; None for one whose update nobody can read."""
        update, memory = visit
        if self.encoding is None or isinstance(update, Absence):
            return visit
        read = self.encoding.try_decoding(update, asked)
        return None if read is None else (read, memory)

    def encode(self, visit: Visit, asked: Assignment) -> Visit:
        """A visit as it travels; what its client remembers stays as it is, and so does what answers something else."""
        update, memory = visit
        if self.encoding is None or isinstance(update, Absence) or update.delta.keys() != set(asked.uploads):
            return visit
        return self.encoding.encode(update, {}, asked)[0], memory

    def change(self, place: int, visit: Visit, asked: Assignment, before: Slots) -> Visit:
        """What comes of a visit by one fault; `before` is what the client remembered."""
        update, memory = visit
        fault = self.faults[place]
        if isinstance(update, Absence):
            return visit
        view = VisitView(fault.name, asked, before.get(memory_kind(place), {}))
        kept = fault.remember(update, view) if acts(fault, "remember") else None
        return fault.change(update, view), _add_memory(memory, before, place, kept)

    def change_all(self, visit: Visit, asked: Assignment, before: Slots) -> Visit:
        """What comes of a visit by all faults that hit its client, from left to right."""
        places = self.places_of(asked.client, asked.round)
        read = self.decode(visit, asked) if places else None
        if read is None:
            return visit
        for place in places:
            read = self.change(place, read, asked, before)
        return self.encode(read, asked)

    def without_own(self, memory: Slots) -> Slots:
        """A client's memory without what faults remember."""
        own = {memory_kind(place) for place in range(len(self.faults))}
        return {kind: tensors for kind, tensors in memory.items() if kind not in own}

    def check_memory(self, memory: Slots, params: Tensors) -> str | None:
        """Why what faults remember cannot be theirs, or None."""
        for place, fault in enumerate(self.faults):
            for name, tensor in memory.get(memory_kind(place), {}).items():
                like = params.get(name)
                if not acts(fault, "remember") or like is None:
                    return f"'{fault.name}' remembers nothing as '{name}'"
                if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                    return f"'{name}' of '{fault.name}' has another shape or type"
        return None

    def success_tests(self, test: Examples | None) -> dict[str, Examples]:
        """Fault → test examples whose targets are what it is after."""
        found: dict[str, Examples] = {}
        for fault in self.faults if test is not None else ():
            assert test is not None
            assert self.setting is not None
            examples = fault.tell_success(test, self.setting)
            if examples is not None:
                found[f"{fault.name} {len(found) + 1}" if fault.name in found else fault.name] = examples
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """Whom each fault hits, for those who want to find out."""
        told = [{"fault": str(f), "clients": sorted(c)} for f, c in zip(self.faults, self.hit, strict=True)]
        return {"faults": told} if told else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results must know."""
        told = [f"{fault} ({plural(len(hit), 'client')})" for fault, hit in zip(self.faults, self.hit, strict=True)]
        return (f"faults on purpose: {', '.join(told)}",) if told else ()

    def refuse_data_faults(self, why: str) -> None:
        """Refuse faults in data where they would do nothing."""
        for fault, clients in zip(self.faults, self.hit, strict=True):
            if clients and acts(fault, "spoil"):
                raise UsageError(f"'{fault.name}' spoils clients' data, {why}")


def _add_memory(memory: Slots, before: Slots, place: int, kept: Tensors | None) -> Slots:
    """What a client will remember, with what a fault does; {} still stands for what it remembered before."""
    kind = memory_kind(place)
    if kept is None:
        return {**memory, kind: before[kind]} if memory and kind in before else memory
    return {**before, **memory, kind: kept}


def plan_faults(text: str | None, setup: Setup, seed: int, method: Method, rounds: int | None = None) -> FaultPlan:
    """Say whom each fault hits, and that it can.

    Args:
        text: the faults, as a user wrote them; None for none.
        setup: what is hit; clients without examples are never hit by a share.
        seed: of the run.
        method: that is run; where one party holds everybody's examples, there are no clients' updates.
        rounds: of the run; None if that is not known.

    Raises:
        UsageError: for a fault that cannot be.
    """
    if text is None:
        return FaultPlan()
    faults = parse_faults(text)
    setting = FaultSetting(setup.task, setup.sample, cache(partial(_count_classes, setup)), seed)
    for fault in faults:
        if method.centralised and acts(fault, *UPDATE_DOORS):
            raise UsageError(f"'{fault.name}' needs clients' updates, and here one party holds everybody's examples")
        if rounds is not None and fault.begin > rounds:
            raise UsageError(f"'{fault.name}' begins in round {fault.begin}, and the run has {rounds}")
        fault.check(setting)
    size = sizes(setup.clients)
    present = [client for client in range(len(setup.clients)) if size(client)]
    hit = choose_clients(faults, len(setup.clients), present, seed)
    for fault, numbers in zip(faults, hit, strict=True):
        if acts(fault, "collude") and numbers.issuperset(present):
            raise UsageError(f"'{fault.name}' looks at others' updates, and there are none: it hits all clients")
    return FaultPlan(faults, hit, setting, method.encoding({n: a.strata for n, a in setup.architectures.items()}))


def _count_classes(setup: Setup) -> int:
    """How many classes labels are of."""
    if not setup.task.has_classes:
        return 2 if setup.task.has_labels else 0
    model = setup.models[""]
    with preserve_rng(), torch.no_grad(), preserve_model(model):
        return setup.task.width(model(setup.sample))


def choose_clients(
    faults: Sequence[Fault], population: int, present: Sequence[int], seed: int
) -> tuple[frozenset[int], ...]:
    """Whom each fault hits: the clients that it names, or the next ones of one order that the seed decides.

    Shares that come to more than everybody begin again with the first ones of the order.

    Raises:
        UsageError: if there is no such client, or a share comes to more clients than there are.
    """
    for fault in faults:
        for client in (c for c in fault.clients if c >= population):
            raise UsageError(f"{fault.name} names client {client}, and the clients are 0 to {population - 1}")
    named = {client for fault in faults for client in fault.clients}
    order = [client for client in present if client not in named]
    random.Random(derive(seed, "faults")).shuffle(order)
    hit, begin = [], 0
    for fault in faults:
        if fault.clients:
            hit.append(frozenset(fault.clients))
            continue
        count = max(1, floor_share(fault.share, len(present))) if fault.share else 0
        if count > len(order):
            raise UsageError(f"'{fault}' hits {count} clients, and only {len(order)} are left that no fault names")
        hit.append(frozenset((order + order)[begin : begin + count]))
        begin = (begin + count) % max(len(order), 1)
    return tuple(hit)


def parse_site_faults(text: str | None) -> tuple[Fault, ...]:
    """Read the faults of a site, where others' clients are out of sight.

    Raises:
        UsageError: for a fault that needs to see them.
    """
    faults = () if text is None else parse_faults(text)
    for fault in faults:
        if acts(fault, "collude"):
            raise UsageError(f"'{fault.name}' looks at others' updates, and no site sees them: try it in a simulation")
        if fault.share != SHARE:
            raise UsageError(f"{fault.name}'s share is of all clients, which no site knows: name its own, or none")
    return faults


def plan_site_faults(
    faults: tuple[Fault, ...], client: int, setting: FaultSetting, encoding: Encoding | None = None
) -> FaultPlan:
    """Say which faults of a site hit one of its clients: those that name it, or nobody."""
    for fault in faults:
        fault.check(setting)
    hit = tuple(frozenset({client} if not fault.clients or client in fault.clients else ()) for fault in faults)
    return FaultPlan(faults, hit, setting, encoding)


MemoryCheck = Callable[[Any, int, Slots], str | None]


def check_memories(plan: FaultPlan, params_of: Callable[[Any, int], Tensors], check: MemoryCheck) -> MemoryCheck:
    """What looks at a client's memory, with what the faults of a plan remember of it.

    `params_of` says what a client holds of a state's parameters.
    """

    def checked(state: Any, client: int, memory: Slots) -> str | None:
        return plan.check_memory(memory, params_of(state, client)) or check(state, client, plan.without_own(memory))

    return checked if plan.faults else check
