"""A round's updates, folded in as they arrive, in client order: nothing of them is kept longer than it is needed.

Updates that come as a stack are checked, counted and folded together. Where something is wrong with one of them, all
are looked at one by one, so that it is told of whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, reduce
from itertools import compress, repeat
from operator import add

from torch import Tensor

from fedstrata import wire
from fedstrata.aggregation.mean import RunningMean
from fedstrata.aggregation.strata import reduce_updates
from fedstrata.core.low_rank import RankCuts, pad_ranks
from fedstrata.core.method import Method
from fedstrata.core.results import NOT_FINITE
from fedstrata.core.stacks import Assignments, Memories, UpdateStack, VisitBlock, Visits, pick
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Absence, Assignment, Reducer, Slots, Stratum, Update, replace_fields
from fedstrata.server.validation import NOT_CARRIED, RoundValidator, believable
from fedstrata.system.timing import timed


def pad_update(update: Update, cuts: RankCuts) -> Update:
    """An update of a sub-model of a lower rank as one of the server's model: zeros where it holds nothing."""
    if not cuts:
        return update
    slots = {name: pad_ranks(slot, cuts, scaled=False) for name, slot in update.slots.items()}
    return replace_fields(update, delta=pad_ranks(update.delta, cuts), slots=slots)


class RoundAccumulator:
    """What has come of a round's visits so far.

    Args:
        method: that the server runs.
        asked: what clients were asked for.
        validate: says why an update must be refused.
        keep: is handed what accepted clients remember, at once.
        strata: of the server's model, for rules that look at each by itself.
        reference: the server's own update, for rules that compare with it.
    """

    def __init__(
        self,
        method: Method,
        asked: Assignments,
        validate: RoundValidator,
        keep: Callable[[Sequence[int], Memories], None],
        strata: Sequence[Stratum] = (),
        reference: Update | None = None,
    ) -> None:
        self._method, self._asked, self._validate, self._keep = method, asked, validate, keep
        self._strata, self._reference, guards = strata, reference, method.reducer is not None
        self._rescales = tuple(method.at("rescale"))
        sums = tuple(method.at("accumulate"))
        self._accumulates, self._guarded = (sums[:0], sums) if guards else (sums, sums[:0])
        self._needs_buffers = any(t.needs_deltas for t in method.at("apply")) or method.reducer is not None
        self._needs_deltas = bool(self._rescales) or self._needs_buffers
        self._names = {t.name for t in method.techniques}
        self._delta_mean, self._buffer_mean = RunningMean(), RunningMean()
        self._kept: list[Update | tuple[UpdateStack, int]] = []
        self._losses: list[tuple[float, int]] = []
        self.weights: list[float] = []
        self.totals: Slots = {t.name: {} for t in self._accumulates}
        self.refused: list[tuple[int, str]] = []
        self.accepted: dict[int, bool] = {}
        """Client → it has something to remember."""
        self.bytes_up, self.flops, self.memory, self.examples, self.steps = 0, 0.0, 0.0, 0, 0
        self.slots_up: Counter[str] = Counter()
        self._not_finite, self._absent = 0, False
        self.pad: Callable[[Assignment, Update], Update] | None = None
        """Makes of what was asked and its update one of the server's model, where sub-models are of a lower rank."""

    def take_all(self, visits: Iterable[Visits]) -> None:
        """Fold all visits in; those that were asked and did not come are refused in the end."""
        answered: set[int] = set()
        for item in visits:
            if isinstance(item, VisitBlock):
                answered.update(item.clients)
                self._take_block(item)
                continue
            update, memory = item
            answered.add(update.client)
            if isinstance(update, Absence):
                self.refused.append((update.client, update.why))
                self._absent = True
            else:
                self._take(update, memory)
        self.refused += [(client, "it did not come") for client in self._asked.clients if client not in answered]

    def _take_block(self, block: VisitBlock) -> None:
        """Validate updates of a stack, count what they cost, and fold them in."""
        stack, rows, clients = block.stack, block.rows, block.clients
        with timed("check updates"):
            sound = self._is_sound(stack) and self.accepted.keys().isdisjoint(clients)
        if not sound:
            for row in rows:
                self._take(*stack.visit(row))
            return
        with timed("count bytes"):
            self.bytes_up += wire.size_of_rows(stack, rows)
            for name, size in wire.slot_sizes(stack).items():
                self.slots_up[name] += size * len(rows)
        self.flops = reduce(add, pick(stack.metrics["flops"], rows), self.flops)
        if "memory" in stack.metrics:
            self.memory = max(self.memory, *pick(stack.metrics["memory"], rows))
        with timed("fold updates"):
            self._fold_block(stack, rows)
        self.accepted.update(dict.fromkeys(clients, bool(stack.memory)))
        if stack.memory:
            with timed("keep memories"):
                self._keep(clients, stack.memories(rows))

    def _is_sound(self, stack: UpdateStack) -> bool:
        """True if nothing is wrong with any update of a stack; found once."""
        if stack.sound is None:
            distinct = len(set(stack.clients)) == len(stack)
            sound = distinct and self._validate.check_stack(self._asked, stack)
            stack.sound = sound and min(stack.metrics["flops"]) >= 0
        return stack.sound

    def _fold_block(self, stack: UpdateStack, rows: Sequence[int]) -> None:
        """Add accepted updates of a stack to the sums, in client order."""
        if self._needs_deltas or self._accumulates or stack.slots or self.pad is not None:
            for row in rows:
                self._fold(self._as_servers(stack.visit(row)[0]))
            return
        examples, steps = pick(stack.examples, rows), pick(stack.steps, rows)
        weights = [*map(self._weight, examples)]
        self._buffer_mean.add_rows(stack.buffers, rows, weights)
        self._delta_mean.add_rows(stack.delta, rows, weights)
        self._kept.extend(zip(repeat(stack.without_tensors()), rows, strict=False))
        self.weights += weights
        self.examples += sum(examples)
        self.steps += sum(steps)
        losses = zip(pick(stack.metrics["train_loss"], rows), examples, strict=True)
        self._losses += losses if all(steps) else compress(losses, steps)

    def _take(self, update: Update, memory: Slots) -> None:
        """Validate an update, count what it cost as it was sent, and fold it in."""
        sent = update
        with timed("check updates"):
            update, why = self._validate.read(self._asked.of_client(sent.client), sent)
        if update.client in self.accepted:
            why = "it was answered already"
        if why != NOT_CARRIED:
            with timed("count bytes"):
                self.bytes_up += wire.size(sent)
                sizes = wire.slot_sizes(sent)
                self.slots_up.update({name: size for name, size in sizes.items() if name in self._names})
            self.flops += believable(update, "flops")
            self.memory = max(self.memory, believable(update, "memory"))
        if why is not None:
            self.refused.append((update.client, why))
            self._not_finite += why == NOT_FINITE
            return
        with timed("fold updates"):
            self._fold(self._as_servers(update))
        self.accepted[update.client] = bool(memory)
        if memory:
            with timed("keep memories"):
                self._keep([update.client], Memories.of([memory]))

    def _as_servers(self, update: Update) -> Update:
        """An accepted update with tensors of the server's shapes."""
        asked = None if self.pad is None else self._asked.of_client(update.client)
        return update if asked is None or self.pad is None else self.pad(asked, update)

    def _weight(self, examples: int) -> float:
        return float(examples) if self._method.weight == "examples" else 1.0

    def _fold(self, update: Update) -> None:
        """Add an accepted update to the sums, and keep what is needed until the round is closed."""
        weight = self._weight(update.examples)
        if self._method.reducer is None:
            self._buffer_mean.add(update.buffers, weight)
        if not self._needs_deltas:
            self._delta_mean.add(update.delta, weight)
        self._accumulate(update, weight)
        self._kept.append(self._copy_needed(update))
        self.weights.append(weight)
        self.examples += update.examples
        self.steps += update.steps
        if update.steps:
            self._losses.append((update.metrics["train_loss"], update.examples))

    @cached_property
    def updates(self) -> list[Update]:
        """What is kept of the accepted updates, in client order; once all have come."""
        return [kept if isinstance(kept, Update) else kept[0].bare(kept[1]) for kept in self._kept]

    def _accumulate(self, update: Update, weight: float) -> None:
        """Let techniques add an update's slot or delta to their totals, which share no memory with it."""
        for technique in self._accumulates:
            slot = update.slots.get(technique.name, {})
            total = technique.accumulate(self.totals[technique.name], slot, update.delta, weight)
            theirs = {_address(t) for t in (*slot.values(), *update.delta.values())}
            self.totals[technique.name] = {n: t.clone() if _address(t) in theirs else t for n, t in total.items()}

    def _copy_needed(self, update: Update) -> Update:
        """What is kept of an accepted update until the round is closed: copies, for an engine may reuse its memory."""
        return replace_fields(
            update,
            delta=clone(update.delta) if self._needs_deltas else {},
            buffers=clone(update.buffers) if self._needs_buffers else {},
            slots={name: clone(slot) for name, slot in update.slots.items() if name not in self.totals},
        )

    @property
    def answers(self) -> list[Assignment]:
        """What each accepted update answers."""
        found = (self._asked.of_client(client) for client in self.accepted)
        return [asked for asked in found if asked is not None]

    @property
    def only_infinite(self) -> bool:
        """True if nobody's update could be used because what came was not finite."""
        return not self.accepted and self._not_finite > 0 and not self._absent

    def aggregate(self) -> tuple[Tensors, Tensors]:
        """(delta, buffers) of all accepted updates: rescaled, then the mean, or the rule that takes its place."""
        if not self._needs_deltas:
            return self._delta_mean.result(), self._buffer_mean.result()
        rescaled: Sequence[Update] = self.updates
        if self._method.reducer is not None:
            return self._reduce(self._method.reducer)
        for technique in self._rescales:
            rescaled = technique.rescale(rescaled, self.weights, self.answers)
        for update, weight in zip(rescaled, self.weights, strict=True):
            self._delta_mean.add(update.delta, weight)
        return self._delta_mean.result(), self._buffer_mean.result()

    def _reduce(self, reducer: Reducer) -> tuple[Tensors, Tensors]:
        """What a robust rule makes of all updates, and of the sums that techniques need."""
        updates: Sequence[Update] = self.updates
        for technique in self._guarded:
            parts = [u.delta if technique.sums == "delta" else u.slots.get(technique.name, {}) for u in updates]
            reduced, _ = self._reduce_parts(reducer, parts, [{}] * len(parts))
            self.totals[technique.name] = {n: t * sum(n in part for part in parts) for n, t in reduced.items()}
        for technique in self._rescales:
            updates = technique.rescale_guarded(updates, self.weights, self.answers)
        return self._reduce_parts(reducer, [u.delta for u in updates], [u.buffers for u in self.updates])

    def _reduce_parts(
        self, reducer: Reducer, deltas: Sequence[Tensors], buffers: Sequence[Tensors]
    ) -> tuple[Tensors, Tensors]:
        """What a robust rule makes of the clients' tensors, with the server's own before them if it compares."""
        own = self._reference
        if own is None:
            return reduce_updates(reducer, deltas, buffers, self.weights, self._strata)
        given = [own.delta, *deltas], [own.buffers, *buffers], [0.0, *self.weights]
        return reduce_updates(reducer, *given, self._strata)

    def mean_loss(self) -> float | None:
        """The clients' training loss, weighted by examples; None where nobody trained."""
        examples = sum(examples for _, examples in self._losses)
        return sum(loss * examples for loss, examples in self._losses) / examples if self._losses else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
