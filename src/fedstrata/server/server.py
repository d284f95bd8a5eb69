"""The server's side of a round: `open` makes assignments, `close` turns updates into the next state.

Both are functions of a frozen ServerState, so an interrupted round leaves nothing half done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedstrata import wire
from fedstrata.aggregation.mean import RunningMean
from fedstrata.core.method import Method
from fedstrata.core.rng import derive, seed_global
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add, all_finite, clone, mismatch, scale
from fedstrata.core.types import Absence, Assignment, Examples, Slots, Stratum, Update, Visit, Work, replace_fields
from fedstrata.server.state import Architecture, Outcome, ServerState
from fedstrata.system.timing import timed

NOT_FINITE = "it holds NaN or infinite numbers"


NOT_CARRIED = "its slots hold a type of numbers that messages do not carry"


COUNT_LIMIT = 2**53
"""Largest number of examples or steps that is believed: every whole number up to it is a float."""


METRIC_LIMIT = 1e38
"""Largest metric that is believed; the sum of any number of them is finite."""


class Server:
    """Opens and closes rounds for one method.

    Args:
        method: what to run.
        architectures: sub-models by name; "" is the server's own model, which holds every name.
        population: number of clients.
        seed: of the run.
        arch_of: client → the name of its architecture.
        rounds: number of rounds of the run; in those after them nobody trains.
        model: (parameters, buffers, architecture) → a model, for techniques that compute on the server.
        like: a batch of no inputs, for their shape and type.
        members: the clients that can take part, if not all.
        public: the server's unlabelled data, if it has any.
    """

    def __init__(
        self,
        method: Method,
        architectures: Mapping[str, Architecture],
        population: int,
        seed: int,
        arch_of: Callable[[int], str],
        rounds: int,
        model: Callable[[Tensors, Tensors, str], nn.Module],
        like: Tensor | None = None,
        members: Sequence[int] | None = None,
        public: Examples | None = None,
    ) -> None:
        self.method, self.architectures, self.population, self.seed = method, architectures, population, seed
        self.rounds, self.model, self.arch_of, self.public = rounds, model, arch_of, public
        self._members = range(population) if members is None else members
        self.like = torch.empty(0) if like is None else like
        self.digest = method.digest
        self._rescales, self._applies = tuple(method.at("rescale")), tuple(method.at("apply"))
        self._accumulates, self._validates = tuple(method.at("accumulate")), tuple(method.at("validate"))
        self._names = {t.name for t in method.techniques}
        self._reducer = method.reducer
        self._needed = any(t.needs_deltas for t in self._applies) or self._reducer is not None
        self._keeps = bool(self._rescales) or self._needed

    def start(self, params: Tensors, buffers: Tensors, setting: Setting) -> ServerState:
        """The state before the first round; the setting is that of the server's own model."""
        return ServerState(
            round=0,
            params=params,
            buffers=buffers,
            techniques={t.name: t.init(params, setting) for t in self.method.techniques},
            changed=dict.fromkeys([*params, *buffers], -1),
            held=torch.full((self.population,), -1, dtype=torch.int32),
            remembers=torch.full((self.population,), -1, dtype=torch.int32),
        )

    def open(self, state: ServerState, clients: Sequence[int], work: Work) -> list[Assignment]:
        """This round's assignments, one per client, in client order."""
        templates: dict[str, Assignment] = {}
        assignments = []
        plans, sends = tuple(self.method.at("plan")), tuple(self.method.at("send"))
        for client in sorted(clients):
            arch = self.arch_of(client)
            template = templates.get(arch)
            if template is None:
                template = templates[arch] = self._template(state, arch, work)
            assignment = replace_fields(
                template,
                client=client,
                seed=derive(self.seed, "visit", state.round, client),
                to_send=self._fresh(state, client, template),
            )
            for technique in plans:
                assignment = self._planned(technique, assignment)
            if assignment.update_buffers is not None and self.method.buffers == "local" and not assignment.buffers:
                assignment = self._first_statistics(state, assignment)
            if sends:
                slots = {t.name: t.send(state.techniques[t.name], assignment) for t in sends}
                assignment = replace_fields(assignment, slots={name: slot for name, slot in slots.items() if slot})
            assignments.append(assignment)
        return assignments

    def _template(self, state: ServerState, arch: str, work: Work) -> Assignment:
        held = self.architectures[arch]
        last = state.round >= self.rounds
        sends = self.method.buffers == "average" or (last and self.method.buffers == "local")
        trains = () if last else tuple(n for n in held.params if n not in held.frozen)
        whole = arch == "" or len(held.params) == len(state.params)
        return Assignment(
            round=state.round,
            rounds=self.rounds,
            run_seed=self.seed,
            client=-1,
            arch=arch,
            params=state.params if whole else {n: state.params[n] for n in held.params},
            buffers={n: state.buffers[n] for n in held.buffers} if sends else {},
            trains=trains,
            uploads=trains,
            work=work,
            seed=0,
            method=self.digest,
        )

    def _first_statistics(self, state: ServerState, assignment: Assignment) -> Assignment:
        """With the server's statistics, for a client that must use some and has none of its own yet."""
        if int(state.remembers.numpy()[assignment.client]) >= 0:
            return assignment
        return replace_fields(
            assignment, buffers={n: state.buffers[n] for n in self.architectures[assignment.arch].buffers}
        )

    def _fresh(self, state: ServerState, client: int, template: Assignment) -> tuple[str, ...] | None:
        since = int(state.held.numpy()[client])  # a tenth of the time that indexing the tensor takes
        if since < 0:
            return None
        kept = (*template.params, *(template.buffers if self.method.buffers == "average" else ()))
        stale = {n for n in kept if state.changed.get(n, since) < since}
        return tuple(n for n in (*template.params, *template.buffers) if n not in stale) if stale else None

    def _planned(self, technique: Technique, before: Assignment) -> Assignment:
        """A technique's plan, which may only narrow: plans intersect, whatever their order."""
        after = technique.plan(before, self._movable)
        trains, travels = set(after.trains), set(after.uploads)
        held = self.architectures[before.arch].buffers
        return replace(
            after,
            trains=tuple(n for n in before.trains if n in trains),
            uploads=tuple(n for n in before.uploads if n in travels & trains),
            upload_buffers=_narrowed(held, before.upload_buffers, after.upload_buffers)
            if self.method.buffers == "average"
            else None,
            update_buffers=_narrowed(held, before.update_buffers, after.update_buffers),
        )

    @cached_property
    def _movable(self) -> tuple[Stratum, ...]:
        """The strata of the server's model that have something to train, and that a gradient reaches."""
        whole = self.architectures[""]
        return tuple(s for s in whole.strata if not s.idle and not whole.frozen.issuperset(s.params))

    def close(
        self,
        state: ServerState,
        assignments: Sequence[Assignment],
        visits: Iterable[Visit],
        keep: Callable[[int, Slots], None],
    ) -> tuple[ServerState, Outcome]:
        """Fold the updates in client order: (next state, what happened).

        A bad update is refused and reported; the round goes on without it, and its client remembers nothing of it. What
        an accepted client remembers is handed to `keep` at once, so that a round never holds more than one memory; it
        counts only when the next state, which names it, is taken up. A visit's tensors are read before the next visit
        is asked for, and never after.
        """
        asked = {a.client: a for a in assignments}
        delta_mean, buffer_mean = RunningMean(), RunningMean()
        kept: list[Update] = []
        totals: Slots = {t.name: {} for t in self._accumulates}
        weights: list[float] = []
        refused: list[tuple[int, str]] = []
        accepted: dict[int, bool] = {}  # client → it has something to remember
        answered: set[int] = set()
        bytes_up = finite_failures = 0
        absent = False
        slots_up: Counter[str] = Counter()
        flops = 0.0
        for update, memory in visits:
            answered.add(update.client)
            if isinstance(update, Absence):
                refused.append((update.client, update.why))
                absent = True
                continue
            with timed("check updates"):
                why = self.validate(asked.get(update.client), update, state.buffers)
            if update.client in accepted:
                why = "it was answered already"
            if why != NOT_CARRIED:
                with timed("count bytes"):
                    bytes_up += wire.size(update)
                    slots_up.update({n: size for n, size in wire.slot_sizes(update).items() if n in self._names})
                flops += _cost(update)
            if why is not None:
                refused.append((update.client, why))
                finite_failures += why == NOT_FINITE
                continue
            weight = float(update.examples) if self.method.weight == "examples" else 1.0
            with timed("fold updates"):
                if self._reducer is None:
                    buffer_mean.add(update.buffers, weight)
                if not self._keeps:
                    delta_mean.add(update.delta, weight)
                kept.append(self._let_go(update, totals, weight))
            weights.append(weight)
            accepted[update.client] = bool(memory)
            if memory:
                with timed("keep memories"):
                    keep(update.client, memory)
        refused += [(client, "it did not come") for client in asked if client not in answered]
        after, diverged = state, not kept and finite_failures > 0 and not absent
        if kept:
            answers = [asked[u.client] for u in kept]
            if self._keeps:
                delta, buffers = self._reduced(kept, weights, answers, delta_mean, buffer_mean)
            else:
                delta, buffers = delta_mean.result(), buffer_mean.result()
            after = self._advance(state, delta, buffers, kept, totals, weights, answers)
            diverged = not all_finite(after.params.values())
        after = self._remember(after, state.round, accepted)
        outcome = Outcome(
            accepted=tuple(accepted),
            refused=tuple(refused),
            active=self._active(assignments),
            bytes_up=bytes_up,
            bytes_down=sum(wire.size(a) for a in assignments),
            slots_up=dict(slots_up),
            examples=sum(u.examples for u in kept),
            steps=sum(u.steps for u in kept),
            flops=flops,
            train_loss=_mean_loss(kept),
            diverged=diverged,
        )
        return after, outcome

    def _reduced(
        self,
        kept: Sequence[Update],
        weights: Sequence[float],
        asked: Sequence[Assignment],
        delta_mean: RunningMean,
        buffer_mean: RunningMean,
    ) -> tuple[Tensors, Tensors]:
        """(delta, buffers) of all updates: rescaled by who gathers them, then the mean, or what takes its place."""
        gathered = kept
        for technique in self._rescales:
            gathered = technique.rescale(gathered, weights, asked)
        if self._reducer is not None:
            return self._reducer([u.delta for u in gathered], [u.buffers for u in kept], weights)
        for update, weight in zip(gathered, weights, strict=True):
            delta_mean.add(update.delta, weight)
        return delta_mean.result(), buffer_mean.result()

    def _let_go(self, update: Update, totals: Slots, weight: float) -> Update:
        """What is kept of an accepted update until the round is closed: copies, for an engine may reuse its memory."""
        for technique in self._accumulates:
            slot = update.slots.get(technique.name, {})
            folded = technique.accumulate(totals[technique.name], slot, update.delta, weight)
            theirs = {_memory_of(t) for t in (*slot.values(), *update.delta.values())}
            totals[technique.name] = {n: t.clone() if _memory_of(t) in theirs else t for n, t in folded.items()}
        return replace_fields(
            update,
            delta=clone(update.delta) if self._keeps else {},
            buffers=clone(update.buffers) if self._needed else {},
            slots={name: clone(slot) for name, slot in update.slots.items() if name not in totals},
        )

    def _active(self, assignments: Sequence[Assignment]) -> tuple[str, ...]:
        trained = {n for trains in {a.trains for a in assignments} for n in trains}
        return tuple(s.name for s in self.architectures[""].strata if not s.idle and not trained.isdisjoint(s.params))

    def _advance(
        self,
        state: ServerState,
        delta: Tensors,
        buffers: Tensors,
        kept: Sequence[Update],
        totals: Slots,
        weights: Sequence[float],
        asked: Sequence[Assignment],
    ) -> ServerState:
        told = tuple(buffers)
        buffers = {**state.buffers, **buffers}
        view = RoundView(
            number=state.round,
            rounds=self.rounds,
            params=state.params,
            buffers=buffers,
            strata=self.architectures[""].strata,
            updates=tuple(kept),
            asked=tuple(asked),
            totals=totals,
            weights=tuple(weights),
            population=len(self._members),
            owners=self.owners,
            arrived=_arrived(asked),
            model=self.model,
            like=self.like,
            public=self.public,
            seed=derive(self.seed, "server", state.round),
        )
        states = dict(state.techniques)
        if self._applies:
            seed_global(view.seed, torch.device("cpu"))  # the server's own data may have transforms that draw from it
        if self.method.server_lr != 1:
            delta = scale(delta, self.method.server_lr)
        for technique in self._applies:
            delta, states[technique.name] = technique.apply(states[technique.name], delta, view)
        return replace(
            state,
            round=state.round + 1,
            params=add(state.params, delta),
            buffers=buffers,
            techniques=states,
            changed={**state.changed, **dict.fromkeys([*delta, *told], state.round)},
        )

    def _remember(self, state: ServerState, number: int, accepted: Mapping[int, bool]) -> ServerState:
        held, remembers = state.held.clone(), state.remembers.clone()
        held[list(accepted)] = number
        remembers[[client for client, writes in accepted.items() if writes]] = number
        return replace(state, round=number + 1, held=held, remembers=remembers)

    @cached_property
    def _owners(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for client in self._members:
            arch = self.arch_of(client)
            counts[arch] = counts.get(arch, 0) + 1
        holds = {arch: set(self.architectures[arch].params) for arch in counts}
        names = self.architectures[""].params
        return {n: sum(count for arch, count in counts.items() if n in holds[arch]) for n in names}

    def owners(self, name: str) -> int:
        """How many of the population's sub-models hold a parameter."""
        return self._owners[name]

    def validate(self, assignment: Assignment | None, update: Update, buffers: Mapping[str, Tensor]) -> str | None:
        """Why an update must be refused, or None if it is sound; `buffers` show the shapes of running statistics."""
        if assignment is None:
            return "it was not asked for"
        if update.method != self.digest:
            return f"it ran another method ({update.method[:40]} instead of {self.digest})"
        if update.round != assignment.round:
            return f"it answers round {str(update.round)[:20]} in round {assignment.round}"
        least = 1 if assignment.trains else 0  # a plan may ask for a visit without training
        if not (1 <= update.examples <= COUNT_LIMIT and least <= update.steps <= COUNT_LIMIT):
            return f"it took {str(update.steps)[:20]} steps on {str(update.examples)[:20]} examples"
        most = _most_steps(update.examples, assignment.work)
        if update.steps > most:
            return f"it took {str(update.steps)[:20]} steps, and {str(most)[:20]} were asked for"
        if not {"flops", "train_loss"} <= update.metrics.keys():
            return "its metrics are incomplete"
        none = self.method.buffers == "drop" or not assignment.trains
        values = () if none else self._reported(assignment)
        wrong = mismatch(assignment.uploads, assignment.params, update.delta)
        wrong = wrong or mismatch(values, buffers, update.buffers)
        if wrong:
            return wrong
        if not all(wire.carries(t) for slot in update.slots.values() for t in slot.values()):
            return NOT_CARRIED
        strangers = update.slots.keys() - self._names
        if strangers:
            return f"it has a slot for '{min(strangers)[:100]}', which is not in the method"
        if not (update.finite or _all_finite(update)) or not all(
            abs(value) <= METRIC_LIMIT for value in update.metrics.values()
        ):
            return NOT_FINITE
        slots = ((t, update.slots.get(t.name, {})) for t in self._validates)
        return next((why for t, slot in slots if (why := t.validate(slot, assignment))), None)

    def _reported(self, assignment: Assignment) -> tuple[str, ...]:
        names = assignment.upload_buffers
        return self.architectures[assignment.arch].buffers if names is None else names


def _narrowed(
    held: tuple[str, ...], before: tuple[str, ...] | None, after: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """The names that two plans both allow, None for all that are held."""
    chosen = [set(names) for names in (before, after) if names is not None]
    return tuple(n for n in held if all(n in names for names in chosen)) if chosen else None


def _most_steps(examples: int, work: Work) -> int:
    """How many steps a client with so many examples may take."""
    return work.epochs * -(-examples // work.batch_size) if work.steps is None else work.steps


def _arrived(asked: Sequence[Assignment]) -> dict[str, int]:
    """Parameter name → how many of these were asked to send it."""
    alike: dict[tuple[str, ...], int] = {}
    for assignment in asked:
        alike[assignment.uploads] = alike.get(assignment.uploads, 0) + 1
    counts: dict[str, int] = {}
    for names, count in alike.items():
        for name in names:
            counts[name] = counts.get(name, 0) + count
    return counts


def _mean_loss(updates: Sequence[Update]) -> float | None:
    """The clients' training loss, weighted by examples; None where nobody trained."""
    trained = [u for u in updates if u.steps]
    examples = sum(u.examples for u in trained)
    return sum(u.metrics["train_loss"] * u.examples for u in trained) / examples if trained else None


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _all_finite(update: Update) -> bool:
    tensors = [*update.delta.values(), *update.buffers.values()]
    return all_finite([*tensors, *(t for slot in update.slots.values() for t in slot.values())])


def _cost(update: Update) -> float:
    """FLOPs that an update says it took, refused or not; 0 where it says nothing that can be believed."""
    flops = update.metrics.get("flops", 0.0)
    return flops if 0 <= flops <= METRIC_LIMIT else 0.0
