"""Probes during a run: which rounds and clients are measured, on copies, after a round was closed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from fedstrata.core.lazy import torch
from fedstrata.core.rng import derive, generator, preserve_rng, seed_global
from fedstrata.core.stacks import Assignments, VisitBlock, Visits, expand
from fedstrata.core.tensors import clone
from fedstrata.core.types import Assignment, Examples, Update, Work, replace_fields
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, one_line
from fedstrata.probes.context import ObservedVisit, ProbeContext
from fedstrata.probes.registry import NEED_CLASSES, PROBES, READ_UPDATES
from fedstrata.server.accumulator import pad_update
from fedstrata.system.timing import Clock, timed, use_clock

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.client.context import ClientContext
    from fedstrata.server.state import Architecture, Outcome, ServerState

DIGITS = 6
"""Significant digits of what is written."""


@dataclass(eq=False)
class UpdateRecorder:
    """Keeps copies of some clients' updates as they pass, decoded, without what techniques sent.

    Args:
        clients: whose updates are kept.
        decode: gives an update as the server will read it, None if it cannot.
        seen: client → its update.
    """

    clients: frozenset[int]
    decode: Callable[[Update], Update | None] = lambda update: update
    seen: dict[int, Update] = field(default_factory=dict)

    def see(self, update: Update) -> None:
        """Before the next update is asked for: its tensors may be gone then."""
        if update.client not in self.clients or update.client in self.seen:
            return
        read = self.decode(update)
        if read is not None:
            copies = {"delta": clone(read.delta), "buffers": clone(read.buffers)}
            self.seen[update.client] = replace_fields(read, slots={}, **copies)


def watch_visits(
    visits: Iterator[Visits], total: int, watch: UpdateRecorder | None, on_visit: Callable[[int, int], None] | None
) -> Iterator[Visits]:
    """The same visits; those of a round that is measured one by one, for what is looked at is copied."""
    done = 0
    for item in visits if watch is None else expand(visits):
        if watch is not None and isinstance(item, tuple) and isinstance(item[0], Update):
            watch.see(item[0])
        yield item
        done += len(item.rows) if isinstance(item, VisitBlock) else 1
        if on_visit is not None:
            on_visit(done, total)


class Limits(Protocol):
    """What a run's settings say of its probes."""

    @property
    def seed(self) -> int:
        """Of the run."""
        ...

    @property
    def rounds(self) -> int:
        """How many rounds are planned."""
        ...

    @property
    def threads(self) -> int:
        """How many threads torch computes with."""
        ...

    @property
    def probe_every(self) -> int:
        """The rounds from one that is measured to the next."""
        ...

    @property
    def probe_clients(self) -> int:
        """Clients that are measured in a round, at most."""
        ...

    @property
    def probe_examples(self) -> int:
        """Examples that a model is shown, at most."""
        ...


class ObservedRound(Protocol):
    """A round that is closed, some of whose updates were recorded."""

    @property
    def before(self) -> ServerState:
        """The state that it began with."""
        ...

    @property
    def after(self) -> ServerState:
        """The one that it ended with."""
        ...

    @property
    def outcome(self) -> Outcome:
        """Whose updates were used, among others."""
        ...

    @property
    def assignments(self) -> Sequence[Assignment]:
        """What was asked of the clients."""
        ...

    @property
    def watch(self) -> UpdateRecorder | None:
        """The recorded updates; None if nobody asked for any."""
        ...


@dataclass(frozen=True, eq=False)
class Prober:
    """Measures a run's rounds.

    Args:
        probes: names in PROBES.
        settings: the run's: its seed, its rounds, and how often and how much is measured.
        context: builds models.
        architectures: by name; "" is the server's own.
        clients: their examples.
        test: of which all models are shown some; where there is none, of the clients' own.
    """

    probes: tuple[str, ...]
    settings: Limits
    context: ClientContext
    architectures: Mapping[str, Architecture]
    clients: Sequence[Examples]
    test: Examples | None

    def due(self, number: int) -> bool:
        """Whether a round is to be measured: every `probe_every`-th, and the last one that is planned."""
        every = (number + 1) % self.settings.probe_every == 0 or number + 1 == self.settings.rounds
        return bool(self.probes) and every and number < self.settings.rounds

    def watch(self, asked: Sequence[Assignment]) -> UpdateRecorder:
        """Choose the clients of a round that is to be measured: at random, equally many of every architecture."""
        lot = torch.randperm(len(asked), generator=generator(self.settings.seed, "probes", asked[0].round)).tolist()
        groups: dict[str, list[int]] = {}
        for at in lot:
            groups.setdefault(asked[at].arch, []).append(asked[at].client)
        in_turn = (client for several in zip_longest(*groups.values()) for client in several if client is not None)
        return UpdateRecorder(frozenset(islice(in_turn, self.settings.probe_clients)), partial(self._decode, asked))

    def _decode(self, asked: Sequence[Assignment], update: Update) -> Update | None:
        """An update as the server will read it; None if it cannot."""
        encoding = self.context.method.encoding({name: held.strata for name, held in self.architectures.items()})
        own = Assignments.of(asked).of_client(update.client)
        if own is None:
            return update
        read = update if encoding is None else encoding.try_decoding(update, own)
        return None if read is None else pad_update(read, self.architectures[own.arch].cuts)

    def measure(self, watched: ObservedRound, clock: Clock | None = None) -> dict[str, Any]:
        """A line of probes.jsonl: what each probe found, its seconds, and why some could not measure anything."""
        before, asked = watched.before, watched.assignments
        arch = {assignment.client: assignment.arch for assignment in asked}
        seen = {} if watched.watch is None else watched.watch.seen
        visits = [
            observe_visit(update, arch[client])
            for client, update in sorted(seen.items())
            if client in watched.outcome.accepted and len(self.clients[client]) > 1
        ]
        row: dict[str, Any] = {"round": before.round + 1, "clients": [v.client for v in visits], "seconds": {}}
        missed: dict[str, str] = {}
        with preserve_rng(), self.context.computing(self.settings.threads), use_clock(clock), timed("probe"):
            seed_global(derive(self.settings.seed, "probes", before.round), torch.device("cpu"))
            context = self._build_context(before, watched.after, visits, asked[0].work) if visits else None
            for name in self.probes:
                start = time.perf_counter()
                try:
                    if context is None:
                        raise UsageError("no client's update was used")
                    if name in NEED_CLASSES and not self.context.task.has_classes:
                        raise UsageError(f"it needs classes, and the task '{self.context.task.name}' has none")
                    found = PROBES[name](context)
                except Exception as error:  # a user's model may raise anything on what it is shown here
                    missed[name] = str(error) if isinstance(error, UsageError) else one_line(repr(error), 200)
                else:
                    row |= {name: to_json(found)} if found else {}
                row["seconds"][name] = round(time.perf_counter() - start, 4)
        seen.clear()
        return {**row, "missed": missed} if missed else row

    def _build_context(
        self, before: ServerState, after: ServerState, visits: Sequence[ObservedVisit], work: Work
    ) -> ProbeContext:
        """What the probes may see of a round."""
        remote = READ_UPDATES.issuperset(self.probes)  # nobody asks for clients' examples, which may be elsewhere
        looked = [] if remote else [visit.client for visit in visits]
        data = {client: self._choose_examples(self.clients[client], client) for client in looked}
        held = {c: self.clients[c] if isinstance(self.clients[c], TensorExamples) else some for c, some in data.items()}
        labelled = held if self.context.task.has_classes else {}
        return ProbeContext(
            before=before,
            after=after,
            visits=visits,
            last=after.round >= self.settings.rounds,
            work=work,
            data=data,
            classes={client: frozenset(examples.labels().tolist()) for client, examples in labelled.items()},
            shared=self._shared_examples(data) if data else (torch.empty(0), torch.empty(0)),
            strata=self.architectures[""].strata,
            architectures=self.architectures,
            context=self.context,
        )

    def _shared_examples(self, data: Mapping[int, Examples]) -> tuple[Tensor, Tensor]:
        """(inputs, labels) that all models are shown: of the test set or, where there is none, of the clients' data."""
        if self.test is not None:
            some = self._choose_examples(self.test, "shared")
            return some.batch(torch.arange(len(some)))
        each = max(self.settings.probe_examples // len(data), 1)
        parts = [held.batch(torch.arange(min(each, len(held)))) for held in data.values()]
        x, y = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(y)

    def _choose_examples(self, examples: Examples, *salt: int | str) -> TensorExamples:
        """A choice of examples that is the same in every round, as tensors."""
        order = torch.randperm(len(examples), generator=generator(derive(self.settings.seed, "probes", *salt)))
        return TensorExamples(*examples.batch(order[: self.settings.probe_examples].sort().values))


def observe_visit(update: Update, arch: str) -> ObservedVisit:
    """A client's update as probes see it."""
    loss = update.metrics.get("train_loss") if update.steps else None
    return ObservedVisit(update.client, arch, update.delta, update.buffers, loss, update.examples, update.steps)


def to_json(found: Any) -> Any:
    """What JSON has: a few digits, None for what is not a finite number."""
    if isinstance(found, Mapping):
        return {str(name): to_json(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [to_json(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}") if math.isfinite(found) else None
    return found
