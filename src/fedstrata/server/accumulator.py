"""A round's updates, folded in one by one as they arrive: nothing of them is kept longer than it is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from fedstrata import wire
from fedstrata.aggregation.mean import RunningMean
from fedstrata.core.method import Method
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Absence, Assignment, Slots, Update, Visit, replace_fields
from fedstrata.server.validation import NOT_CARRIED, NOT_FINITE, believable_flops
from fedstrata.system.timing import timed


class RoundAccumulator:
    """What has come of a round's visits so far.

    Args:
        method: that the server runs.
        asked: client → its assignment.
        validate: (assignment or None, update) → why the update must be refused, or None.
        keep: is handed what an accepted client remembers, at once.
    """

    def __init__(
        self,
        method: Method,
        asked: Mapping[int, Assignment],
        validate: Callable[[Assignment | None, Update], str | None],
        keep: Callable[[int, Slots], None],
    ) -> None:
        self._method, self._asked, self._validate, self._keep = method, asked, validate, keep
        self._rescales, self._accumulates = tuple(method.at("rescale")), tuple(method.at("accumulate"))
        self._needs_buffers = any(t.needs_deltas for t in method.at("apply")) or method.reducer is not None
        self._needs_deltas = bool(self._rescales) or self._needs_buffers
        self._names = {t.name for t in method.techniques}
        self._delta_mean, self._buffer_mean = RunningMean(), RunningMean()
        self.updates: list[Update] = []
        """What is kept of the accepted updates, in client order."""
        self.weights: list[float] = []
        self.totals: Slots = {t.name: {} for t in self._accumulates}
        self.refused: list[tuple[int, str]] = []
        self.accepted: dict[int, bool] = {}
        """Client → it has something to remember."""
        self.bytes_up, self.flops = 0, 0.0
        self.slots_up: Counter[str] = Counter()
        self._not_finite, self._absent = 0, False

    def take_all(self, visits: Iterable[Visit]) -> None:
        """Fold all visits in; those that were asked and did not come are refused in the end."""
        answered: set[int] = set()
        for update, memory in visits:
            answered.add(update.client)
            if isinstance(update, Absence):
                self.refused.append((update.client, update.why))
                self._absent = True
            else:
                self._take(update, memory)
        self.refused += [(client, "it did not come") for client in self._asked if client not in answered]

    def _take(self, update: Update, memory: Slots) -> None:
        """Validate an update, count what it cost, and fold it in."""
        with timed("check updates"):
            why = self._validate(self._asked.get(update.client), update)
        if update.client in self.accepted:
            why = "it was answered already"
        if why != NOT_CARRIED:
            with timed("count bytes"):
                self.bytes_up += wire.size(update)
                sizes = wire.slot_sizes(update)
                self.slots_up.update({name: size for name, size in sizes.items() if name in self._names})
            self.flops += believable_flops(update)
        if why is not None:
            self.refused.append((update.client, why))
            self._not_finite += why == NOT_FINITE
            return
        self._fold(update)
        self.accepted[update.client] = bool(memory)
        if memory:
            with timed("keep memories"):
                self._keep(update.client, memory)

    def _fold(self, update: Update) -> None:
        """Add an accepted update to the sums, and keep what is needed until the round is closed."""
        weight = float(update.examples) if self._method.weight == "examples" else 1.0
        with timed("fold updates"):
            if self._method.reducer is None:
                self._buffer_mean.add(update.buffers, weight)
            if not self._needs_deltas:
                self._delta_mean.add(update.delta, weight)
            self._accumulate(update, weight)
            self.updates.append(self._copy_needed(update))
        self.weights.append(weight)

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
        return [self._asked[update.client] for update in self.updates]

    @property
    def only_infinite(self) -> bool:
        """True if nobody's update could be used because what came was not finite."""
        return not self.updates and self._not_finite > 0 and not self._absent

    def aggregate(self) -> tuple[Tensors, Tensors]:
        """(delta, buffers) of all accepted updates: rescaled, then the mean, or the rule that takes its place."""
        if not self._needs_deltas:
            return self._delta_mean.result(), self._buffer_mean.result()
        rescaled: Sequence[Update] = self.updates
        for technique in self._rescales:
            rescaled = technique.rescale(rescaled, self.weights, self.answers)
        if self._method.reducer is not None:
            return self._method.reducer([u.delta for u in rescaled], [u.buffers for u in self.updates], self.weights)
        for update, weight in zip(rescaled, self.weights, strict=True):
            self._delta_mean.add(update.delta, weight)
        return self._delta_mean.result(), self._buffer_mean.result()

    def mean_loss(self) -> float | None:
        """The clients' training loss, weighted by examples; None where nobody trained."""
        trained = [u for u in self.updates if u.steps]
        examples = sum(u.examples for u in trained)
        return sum(u.metrics["train_loss"] * u.examples for u in trained) / examples if trained else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
