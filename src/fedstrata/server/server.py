"""The server's side of a round: `open` makes assignments, `close` turns updates into the next state.

Both are functions of a frozen ServerState, so an interrupted round leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedstrata import wire
from fedstrata.core.low_rank import cut_ranks
from fedstrata.core.method import Method
from fedstrata.core.results import Trained
from fedstrata.core.rng import derive, derive_each, seed_global
from fedstrata.core.stacks import Assignments, Memories, Visits
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add, all_finite, scale
from fedstrata.core.types import Assignment, Examples, Slots, Stratum, Turn, Update, Work, replace_fields
from fedstrata.server.accumulator import RoundAccumulator, pad_update
from fedstrata.server.budgets import NO_BUDGETS, Budgets, Part
from fedstrata.server.compatibility import client_memory_mismatch
from fedstrata.server.kinds import AssignmentKinds
from fedstrata.server.state import Architecture, Outcome, ServerState
from fedstrata.server.validation import UpdateValidator


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
        trusted: labelled examples that the server trusts, if it has any.
        budgets: what clients' devices can train.
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
        trusted: Examples | None = None,
        budgets: Budgets = NO_BUDGETS,
    ) -> None:
        self.method, self.architectures, self.population, self.seed = method, architectures, population, seed
        self.rounds, self.model, self.arch_of, self.public, self.trusted = rounds, model, arch_of, public, trusted
        self.budgets = budgets
        self._members = range(population) if members is None else members
        self.like = torch.empty(0) if like is None else like
        self.digest = method.digest
        self.validate = UpdateValidator(method, architectures)

    def start(self, params: Tensors, buffers: Tensors, setting: Setting) -> ServerState:
        """The state before the first round; the setting is that of the server's own model.

        Techniques begin with all parameters but those of a frozen base, which nobody trains.
        """
        whole = self.architectures[""]
        own = {n: p for n, p in params.items() if n not in whole.base} if whole.base else params
        return ServerState(
            round=0,
            params=params,
            buffers=buffers,
            techniques={t.name: t.init(own, setting) for t in self.method.techniques},
            changed=dict.fromkeys([*params, *buffers], -1),
            held=torch.full((self.population,), -1, dtype=torch.int32),
            remembers=torch.full((self.population,), -1, dtype=torch.int32),
            base=whole.digest,
        )

    def open(self, state: ServerState, clients: Sequence[int], work: Work) -> Assignments:
        """This round's assignments, one per client, in client order.

        Techniques are asked once for all clients of a kind; one that looks at a client's number is asked for each.
        """
        ordered = sorted(clients)
        seeds = derive_each(self.seed, "visit", state.round, last=ordered)
        kinds = AssignmentKinds(self, state, work)
        places, seeds = kinds.find(ordered, seeds)
        return Assignments(tuple(kinds.templates), places, ordered, seeds)

    def open_reference(self, state: ServerState, work: Work) -> Assignment:
        """What the server asks of itself: what it would ask of a client with the whole model that it never saw."""
        template = self.build_template(state, "", work)
        seed, buffers = derive(self.seed, "visit", state.round, "server"), state.buffers
        if self.method.buffers == "drop":
            buffers = {}
        asked = replace_fields(template, client=self.population, seed=seed, buffers=buffers)
        return self.complete(state, asked, holds_statistics=False)

    def complete(self, state: ServerState, assignment: Assignment, holds_statistics: bool) -> Assignment:
        """An assignment as techniques plan it, and with what they send along."""
        for technique in self.method.acting("plan", assignment.is_after_training):
            assignment = self._apply_plan(technique, assignment, state.techniques.get(technique.name, {}))
        frozen = assignment.update_buffers is not None and self.method.buffers == "local" and not assignment.buffers
        if frozen and not holds_statistics:  # it must use some, and has none of its own yet
            held = self.architectures[assignment.arch].buffers
            assignment = replace_fields(assignment, buffers={n: state.buffers[n] for n in held})
        senders = self.method.acting("send", assignment.is_after_training)
        slots = {t.name: t.send(state.techniques[t.name], assignment) for t in senders}
        if slots:
            cuts = self.architectures[assignment.arch].cuts
            slots = {name: cut_ranks(slot, cuts, scaled=False) for name, slot in slots.items()}
            assignment = replace_fields(assignment, slots={name: slot for name, slot in slots.items() if slot})
        return assignment

    def parts_of(self, round: int, clients: Sequence[int]) -> Sequence[Part | None]:
        """What each client's device can train in a round; None for the whole model."""
        return self.budgets.parts_of(round, clients)

    def is_after_training(self, state: ServerState) -> bool:
        """True if the next round is one of those after the last one."""
        return state.round >= self.rounds

    def build_template(self, state: ServerState, arch: str, work: Work) -> Assignment:
        """What all clients of an architecture are asked for, before techniques plan."""
        held = self.architectures[arch]
        last = self.is_after_training(state)
        sends = self.method.buffers == "average" or (last and self.method.buffers == "local")
        movable = tuple(n for n in held.params if n not in held.frozen)
        whole = arch == "" or len(held.params) == len(state.params)
        params = self._params_to_send(state)
        whole = whole and not held.cuts
        return Assignment(
            round=state.round,
            rounds=self.rounds,
            run_seed=self.seed,
            client=-1,
            arch=arch,
            params=params if whole else held.part_of(params),
            buffers={n: state.buffers[n] for n in held.buffers} if sends else {},
            trains=() if last and not self.method.tunes else movable,
            uploads=() if last else movable,
            upload_buffers=() if last else None,
            work=work,
            seed=0,
            method=self.digest,
        )

    def _params_to_send(self, state: ServerState) -> Tensors:
        """The parameters that clients begin with: where they go on by themselves, those that are handed out."""
        if not self.is_after_training(state) or not self.method.tunes:
            return state.params
        return self.method.deploy(state.techniques, state.params)

    def names_to_send(self, state: ServerState, since: int, template: Assignment) -> tuple[str, ...] | None:
        """What a client does not hold that holds the parameters of a round; None for everything.

        A frozen base it holds in any case, as far as no technique has changed it.
        """
        base = self.architectures[template.arch].base
        stale = {n for n in base if state.changed.get(n, -1) < 0 and template.params[n] is state.params[n]}
        if since >= 0 and self._params_to_send(state) is state.params:
            kept = (*template.params, *(template.buffers if self.method.buffers == "average" else ()))
            stale |= {n for n in kept if state.changed.get(n, since) < since}
        return tuple(n for n in (*template.params, *template.buffers) if n not in stale) if stale else None

    def _apply_plan(self, technique: Technique, before: Assignment, state: Tensors) -> Assignment:
        """A technique's plan, which may only narrow: plans intersect, whatever their order."""
        strata = self._movable if before.is_after_training else self._turns_of[technique.name]
        after = technique.plan(before, strata, state)
        trains, travels = set(before.trains).intersection(after.trains), set(after.uploads)
        held = self.architectures[before.arch].buffers
        return replace(
            after,
            trains=tuple(n for n in before.trains if n in trains),
            uploads=tuple(n for n in before.uploads if n in travels & trains),
            upload_buffers=_intersect(held, before.upload_buffers, after.upload_buffers)
            if self.method.buffers == "average" or before.is_after_training
            else None,
            update_buffers=_intersect(held, before.update_buffers, after.update_buffers),
            turns=_narrow_turns(after.turns, trains),
        )

    @cached_property
    def _movable(self) -> tuple[Stratum, ...]:
        """The strata of the server's model that have something to train, and that a gradient reaches."""
        whole = self.architectures[""]
        return tuple(s for s in whole.strata if not s.idle and not whole.frozen.issuperset(s.params))

    @cached_property
    def _turns_of(self) -> dict[str, tuple[Stratum, ...]]:
        """Technique → the strata that it plans with in the rounds: those of which no other one has fixed everything.

        What no device can train has no turn, either; what clients keep is told of all strata.
        """
        fixed = {t.name: t.fixed(self._movable) for t in self.method.at("fixed")}
        beyond = {n for s in self._movable if s.name in self.budgets.unaffordable for n in s.params}
        keeping = {t.name for t in self.method.at("kept")}
        found = {}
        for technique in self.method.techniques:
            still = {n for name, names in fixed.items() if name != technique.name for n in names}
            still |= beyond if technique.name not in keeping else set()
            still |= self.architectures[""].frozen if still else frozenset()
            found[technique.name] = tuple(s for s in self._movable if not still.issuperset(s.params))
        return found

    def close(
        self,
        state: ServerState,
        assignments: Sequence[Assignment],
        visits: Iterable[Visits],
        keep: Callable[[Sequence[int], Memories], None],
        reference: Update | None = None,
    ) -> tuple[ServerState, Outcome]:
        """Fold the updates in client order: (next state, what happened).

        A bad update is refused and reported; the round goes on without it, and its client remembers nothing of it. What
        an accepted client remembers is handed to `keep` at once, so that a round never holds more than one memory; it
        counts only when the next state, which names it, is taken up. A visit's tensors are read before the next visit
        is asked for, and never after. `reference` is the server's own update, for rules that compare with it.
        """
        asked, compared = Assignments.of(assignments), (self.architectures[""].strata, reference)
        folded = RoundAccumulator(self.method, asked, self.validate.against(state.buffers), keep, *compared)
        folded.pad = self._pad if any(held.cuts for held in self.architectures.values()) else None
        folded.take_all(visits)
        # Where few updates end a round, one bad client may be all of it: its update is refused, and the run goes on.
        after, diverged = state, folded.only_infinite and self.method.arrivals is None
        if folded.accepted:
            after = self._advance(state, folded)
            diverged = not all_finite(after.params.values())
        after = self._remember(after, state.round, folded.accepted, asked)
        return after, self._outcome(asked, folded, diverged)

    def _pad(self, asked: Assignment, update: Update) -> Update:
        """An update of a sub-model of a lower rank as one of the server's model: zeros where it holds nothing."""
        return pad_update(update, self.architectures[asked.arch].cuts)

    def _outcome(self, asked: Assignments, folded: RoundAccumulator, diverged: bool) -> Outcome:
        return Outcome(
            accepted=tuple(folded.accepted),
            diverged=diverged,
            clients=list(asked.clients),
            active=self._find_strata({a.trains for a in asked.templates}),
            trained=self._find_trained(asked),
            refused=[{"client": client, "why": why} for client, why in folded.refused],
            bytes_up=folded.bytes_up,
            bytes_down=wire.size_of_all(asked),
            slots_up=dict(folded.slots_up),
            flops=round(folded.flops),
            training_memory=round(folded.memory),
            train_loss=folded.mean_loss(),
            examples=folded.examples,
            steps=folded.steps,
        )

    def _find_strata(self, trains: Iterable[Sequence[str]]) -> list[str]:
        """The strata of which something is among these names."""
        trained = {n for names in trains for n in names}
        return [s.name for s in self.architectures[""].strata if not s.idle and not trained.isdisjoint(s.params)]

    def _find_trained(self, asked: Assignments) -> list[Trained]:
        """Which clients train which strata; nothing where all train the same."""
        kinds = [tuple(self._find_strata([template.trains])) for template in asked.templates]
        if len(set(kinds)) < 2:
            return []
        found: dict[tuple[str, ...], list[int]] = {}
        for kind, client in zip(asked.kinds, asked.clients, strict=True):
            found.setdefault(kinds[kind], []).append(client)
        return [Trained(strata=list(strata), clients=clients) for strata, clients in found.items()]

    def _advance(self, state: ServerState, folded: RoundAccumulator) -> ServerState:
        """The state after a round: the mean of its updates, as techniques apply it."""
        delta, sent = folded.aggregate()
        buffers = {**state.buffers, **sent}
        states = dict(state.techniques)
        if self.method.server_lr != 1:
            delta = scale(delta, self.method.server_lr)
        applies = tuple(self.method.acting("apply", self.is_after_training(state)))
        if applies:
            view = self._view(state, buffers, folded)
            seed_global(view.seed, torch.device("cpu"))  # the server's own data may have transforms that draw from it
            for technique in applies:
                delta, states[technique.name] = technique.apply(states[technique.name], delta, view)
        return replace(
            state,
            round=state.round + 1,
            params=add(state.params, delta),
            buffers=buffers,
            techniques=states,
            changed={**state.changed, **dict.fromkeys([*delta, *sent], state.round)},
        )

    def _view(self, state: ServerState, buffers: Tensors, folded: RoundAccumulator) -> RoundView:
        """What techniques may see of a round when it is closed."""
        answers = folded.answers
        return RoundView(
            number=state.round,
            rounds=self.rounds,
            params=state.params,
            buffers=buffers,
            strata=self.architectures[""].strata,
            updates=tuple(folded.updates),
            asked=tuple(answers),
            totals=folded.totals,
            weights=tuple(folded.weights),
            population=len(self._members),
            owners=self.owners,
            arrived=_count_senders(answers),
            model=self.model,
            like=self.like,
            public=self.public,
            seed=derive(self.seed, "server", state.round),
        )

    def _remember(
        self, state: ServerState, number: int, accepted: Mapping[int, bool], asked: Assignments
    ) -> ServerState:
        held, remembers = state.held.clone(), state.remembers.clone()
        held[list(accepted)] = number
        if any(template.round != number for template in asked.templates):
            for one in asked:  # some began with an earlier state
                held[one.client] = one.round if one.client in accepted else held[one.client]
        remembers[[client for client, writes in accepted.items() if writes]] = number
        return replace(state, round=number + 1, held=held, remembers=remembers)

    def check_memory(self, state: ServerState, client: int, memory: Slots) -> str | None:
        """Why a memory cannot be what a client remembers at a state, or None."""
        held = self.architectures[self.arch_of(client)]
        buffers = {n: state.buffers[n] for n in held.buffers}
        return client_memory_mismatch(self.method, memory, held.part_of(state.params), buffers)

    def params_of(self, state: ServerState, client: int) -> Tensors:
        """What a client's sub-model holds of the parameters of a state, as it holds it."""
        return self.architectures[self.arch_of(client)].part_of(state.params)

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


def _narrow_turns(turns: tuple[Turn, ...], trains: set[str]) -> tuple[Turn, ...]:
    """The turns as far as something trains in them."""
    found = (replace(turn, trains=tuple(n for n in turn.trains if n in trains)) for turn in turns)
    return tuple(turn for turn in found if turn.trains)


def _intersect(
    held: tuple[str, ...], before: tuple[str, ...] | None, after: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """The names that two plans both allow, None for all that are held."""
    chosen = [set(names) for names in (before, after) if names is not None]
    return tuple(n for n in held if all(n in names for names in chosen)) if chosen else None


def _count_senders(asked: Sequence[Assignment]) -> dict[str, int]:
    """Parameter name → how many of these were asked to send it."""
    alike: dict[tuple[str, ...], int] = {}
    for assignment in asked:
        alike[assignment.uploads] = alike.get(assignment.uploads, 0) + 1
    counts: dict[str, int] = {}
    for names, count in alike.items():
        for name in names:
            counts[name] = counts.get(name, 0) + count
    return counts
