"""What clients of a round are asked for, kind by kind: those of one kind differ in number and seed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedstrata.core.types import Assignment, Work, replace_fields
from fedstrata.server.budgets import Part
from fedstrata.server.state import ServerState


class Opener(Protocol):
    """What makes assignments: the server."""

    def arch_of(self, client: int) -> str:
        """The architecture of a client."""
        ...

    def parts_of(self, round: int, clients: Sequence[int]) -> Sequence[Part | None]:
        """What each client's device can train in a round; None for the whole model."""
        ...

    def build_template(self, state: ServerState, arch: str, work: Work) -> Assignment:
        """What all clients of an architecture are asked for, before techniques plan."""
        ...

    def names_to_send(self, state: ServerState, since: int, template: Assignment) -> tuple[str, ...] | None:
        """What a client does not hold that holds the parameters of a round; None for everything."""
        ...

    def complete(self, state: ServerState, assignment: Assignment, holds_statistics: bool) -> Assignment:
        """An assignment as techniques plan it, and with what they send along."""
        ...


class _AnyClient:
    """Stands for a client's number, or its seed, in a template: it can be passed on, but not looked at."""

    def __init__(self) -> None:
        self.looked_at = False

    def _refuse(self, *others: object) -> Any:
        self.looked_at = True
        raise TypeError("a technique has looked at a client where it is asked once for all of a kind")

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __str__ = __repr__ = __format__ = __reduce_ex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __and__ = __or__ = __xor__ = _refuse
    __add__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = __pow__ = __lshift__ = __rshift__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rmod__ = __rfloordiv__ = __rtruediv__ = __rpow__ = __rxor__ = _refuse


Key = tuple[str, tuple[str, ...] | None, bool, Part | None]
"""What decides about a client's kind: its architecture, what it is to be sent, whether it has statistics of its own,
and what its device can train."""
About = tuple[str, int, bool, Part | None]
"""Architecture, round that a client holds, whether it remembers, what its device can train."""


class _Filled(dict[About, Key]):
    """What is known about a client → what decides about its kind; found once."""

    def __init__(self, find: Callable[[About], Key]) -> None:
        self._find = find

    def __missing__(self, about: About) -> Key:
        self[about] = self._find(about)
        return self[about]


class AssignmentKinds:
    """The kinds of assignments of a round: clients of one differ in number and seed alone."""

    def __init__(self, opener: Opener, state: ServerState, work: Work) -> None:
        self._opener, self._state, self._work = opener, state, work
        self.templates: list[Assignment] = []
        self._held, self._remembers = state.held.numpy(), state.remembers.numpy()
        self._common: dict[str, Assignment] = {}
        self._oldest: dict[str, int] = {}
        self._keys = _Filled(self._key_of)
        self._known: dict[Key, int] = {}
        self._per_client = False

    def find(self, clients: Sequence[int], seeds: Sequence[int]) -> tuple[list[int], list[int]]:
        """(the places of clients' templates, their seeds: a plan may have given them others)."""
        archs = map(self._opener.arch_of, clients)
        held, remembers = self._held[clients].tolist(), (self._remembers[clients] >= 0).tolist()
        parts = self._opener.parts_of(self._state.round, clients)
        keys = map(self._keys.__getitem__, zip(archs, held, remembers, parts, strict=True))
        found = [self._find_one(*about) for about in zip(keys, clients, seeds, strict=True)]
        return [place for place, _ in found], [seed for _, seed in found]

    def _find_one(self, key: Key, client: int, seed: int) -> tuple[int, int]:
        """(the place of a client's template, its seed)."""
        if key in self._known:
            return self._known[key], seed
        if not self._per_client:
            self._per_client = not self._add_template(key)
            if not self._per_client:
                return self._known[key], seed
        asked = self._ask(key, client=client, seed=seed)
        self.templates.append(self._opener.complete(self._state, asked, key[2]))
        return len(self.templates) - 1, self.templates[-1].seed

    def _ask(self, key: Key, **named: Any) -> Assignment:
        """What clients of a kind are asked for, before techniques plan."""
        arch, to_send, _, part = key
        asked = replace_fields(self._common[arch], to_send=to_send, **named)
        return asked if part is None else part.narrow(asked)

    def _key_of(self, about: About) -> Key:
        """What decides about a client's kind."""
        arch, since, holds_statistics, part = about
        if arch not in self._common:
            self._begin(arch)
        to_send = None
        if since >= self._oldest[arch]:
            to_send = self._opener.names_to_send(self._state, since, self._common[arch])
        return arch, to_send, holds_statistics, part

    def _add_template(self, key: Key) -> bool:
        """Ask techniques once for all clients of a kind; False if they have to be asked for each."""
        client: Any = _AnyClient()
        seed: Any = _AnyClient()
        try:
            made = self._opener.complete(self._state, self._ask(key, client=client, seed=seed), key[2])
        except Exception:  # somebody looked at the client; or something is wrong, and will be told for a client
            return False
        if client.looked_at or seed.looked_at or made.client is not client or made.seed is not seed:
            return False
        self._known[key] = len(self.templates)
        self.templates.append(replace_fields(made, client=-1, seed=0))
        return True

    def _begin(self, arch: str) -> None:
        """Make what all clients of an architecture are asked for; nobody who holds an older round lacks anything."""
        common = self._opener.build_template(self._state, arch, self._work)
        self._common[arch] = common
        self._oldest[arch] = min(
            (self._state.changed.get(n, -1) for n in (*common.params, *common.buffers)), default=-1
        )
