"""What clients of a round are asked for, kind by kind: those of one kind differ in number and seed alone."""

from __future__ import annotations

from typing import Any, Protocol

from fedstrata.core.types import Assignment, Work, replace_fields
from fedstrata.server.state import ServerState


class Opener(Protocol):
    """What makes assignments: the server."""

    def arch_of(self, client: int) -> str:
        """The architecture of a client."""
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

    def _refuse(self, *others: object) -> Any:
        raise TypeError("a technique has looked at a client where it is asked once for all of a kind")

    __index__ = __int__ = __float__ = __bool__ = __hash__ = __str__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


_ANY: Any = _AnyClient()


class AssignmentKinds:
    """The kinds of assignments of a round: clients of one differ in number and seed alone."""

    def __init__(self, opener: Opener, state: ServerState, work: Work) -> None:
        self._opener, self._state, self._work = opener, state, work
        self.templates: list[Assignment] = []
        self._held, self._remembers = state.held.numpy(), state.remembers.numpy()
        self._common: dict[str, Assignment] = {}
        self._oldest: dict[str, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._per_client = False

    def find(self, client: int, seed: int) -> int:
        """The place of a client's template."""
        arch = self._opener.arch_of(client)
        if arch not in self._common:
            self._begin(arch)
        since = int(self._held[client])  # a tenth of the time that indexing the tensor takes
        to_send = None
        if since > self._oldest[arch]:
            to_send = self._opener.names_to_send(self._state, since, self._common[arch])
        key = (arch, to_send, bool(self._remembers[client] >= 0))
        if self._per_client:
            return self._add(replace_fields(self._common[arch], client=client, seed=seed, to_send=to_send), key[2])
        if key not in self._known:
            try:
                self._known[key] = self._add(replace_fields(self._common[arch], to_send=to_send), key[2])
            except Exception:  # it looked at the client, or something is wrong, which comes up again
                self._per_client = True
                return self.find(client, seed)
        return self._known[key]

    def _begin(self, arch: str) -> None:
        """Make what all clients of an architecture are asked for; nobody who holds an older round lacks anything."""
        common = self._opener.build_template(self._state, arch, self._work)
        self._common[arch] = replace_fields(common, client=_ANY, seed=_ANY)
        self._oldest[arch] = min(
            (self._state.changed.get(n, -1) for n in (*common.params, *common.buffers)), default=-1
        )

    def _add(self, asked: Assignment, holds_statistics: bool) -> int:
        made = self._opener.complete(self._state, asked, holds_statistics)
        self.templates.append(replace_fields(made, client=-1, seed=0) if made.client is _ANY else made)
        return len(self.templates) - 1
