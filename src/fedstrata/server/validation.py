"""Is an update what was asked for? Everything that a client may send is looked at here before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from fedstrata import wire
from fedstrata.core.encoding import Encoding, Malformed
from fedstrata.core.method import Method
from fedstrata.core.results import NOT_FINITE
from fedstrata.core.stacks import Assignments, UpdateStack
from fedstrata.core.tensors import all_finite, mismatch
from fedstrata.core.types import Assignment, Slots, Update, Work
from fedstrata.server.state import Architecture

NOT_CARRIED = "its slots hold a type of numbers that messages do not carry"
COUNT_LIMIT = 2**53
"""Largest number of examples or steps that is believed: every whole number up to it is a float."""
METRIC_LIMIT = 1e38
"""Largest metric that is believed; the sum of any number of them is finite."""


class UpdateValidator:
    """Says why an update must be refused.

    Args:
        method: that the server runs.
        architectures: sub-models by name; "" is the server's own.
    """

    def __init__(self, method: Method, architectures: Mapping[str, Architecture]) -> None:
        self._method, self._architectures = method, architectures
        self._validates = tuple(method.at("validate"))
        self._names = {t.name for t in method.techniques}
        self._encoding = method.encoding({name: held.strata for name, held in architectures.items()})

    def __call__(self, assignment: Assignment | None, update: Update, buffers: Mapping[str, Tensor]) -> str | None:
        """Why an update must be refused, or None if it is sound; `buffers` show the shapes of running statistics."""
        return self.read(assignment, update, buffers)[1]

    def read(
        self, assignment: Assignment | None, update: Update, buffers: Mapping[str, Tensor]
    ) -> tuple[Update, str | None]:
        """(an update, decoded as far as it can be; why it must be refused, or None if it is sound)."""
        if assignment is None:
            return update, "it was not asked for"
        why = self._check_answer(assignment, update)
        if why is None and self._encoding is not None:
            update, why = self._decode(self._encoding, assignment, update)
        return update, (
            why or self._check_tensors(assignment, update, buffers) or self._check_slots(assignment, update)
        )

    def _decode(self, encoding: Encoding, assignment: Assignment, update: Update) -> tuple[Update, str | None]:
        """(an update decoded, if it can be; else why not)."""
        if not _is_carried(update):
            return update, NOT_CARRIED
        if not (update.finite or _all_finite(update)):
            return update, NOT_FINITE
        try:
            return encoding.decode(update, assignment), None
        except Malformed as error:
            return update, str(error)

    def against(self, buffers: Mapping[str, Tensor]) -> RoundValidator:
        """The same for a round, of whose running statistics these show the shapes."""
        return RoundValidator(self, buffers)

    def check_stack(self, asked: Assignments, stack: UpdateStack, buffers: Mapping[str, Tensor]) -> bool:
        """True if all updates of a stack are sound; where one may not be, each has to be looked at by itself."""
        if self._encoding is not None:
            return False
        if not stack.finite:
            stack.finite = all_finite(stack.tensors())
        kinds = {kind: row for row, kind in enumerate(asked.kinds_of(stack.clients))}
        one_each = [(asked.of_client(stack.clients[row]), stack.update(row)) for row in kinds.values()]
        if not stack.finite or any(self(own, update, buffers) is not None for own, update in one_each):
            return False
        if not all(map(METRIC_LIMIT.__ge__, map(abs, chain.from_iterable(stack.metrics.values())))):
            return False
        counts = set(zip(stack.examples, stack.steps, strict=True))
        works = [own for own, _ in one_each if own is not None]
        if any(_check_counts(own, *numbers) for own in works for numbers in counts):
            return False
        return not self._validates or all(
            self._validate_slots(own, stack.slots_of(row)) is None
            for row, own in enumerate(map(asked.of_client, stack.clients))
            if own is not None
        )

    def _check_answer(self, assignment: Assignment, update: Update) -> str | None:
        """Method, round, counts and metrics."""
        if update.method != self._method.digest:
            return f"it ran another method ({update.method[:40]} instead of {self._method.digest})"
        if update.round != assignment.round:
            return f"it answers round {str(update.round)[:20]} in round {assignment.round}"
        why = _check_counts(assignment, update.examples, update.steps)
        if why is not None:
            return why
        return None if {"flops", "train_loss"} <= update.metrics.keys() else "its metrics are incomplete"

    def _check_tensors(self, assignment: Assignment, update: Update, buffers: Mapping[str, Tensor]) -> str | None:
        """Names, shapes and types of the delta and of the running statistics."""
        none = self._method.buffers == "drop" or not assignment.trains
        names = assignment.upload_buffers
        held = self._architectures[assignment.arch].buffers if names is None else names
        wrong = mismatch(assignment.uploads, assignment.params, update.delta)
        return wrong or mismatch(() if none else held, buffers, update.buffers)

    def _check_slots(self, assignment: Assignment, update: Update) -> str | None:
        """What techniques send, and that all numbers are finite."""
        if not _is_carried(update):
            return NOT_CARRIED
        strangers = update.slots.keys() - self._names
        if strangers:
            return f"it has a slot for '{min(strangers)[:100]}', which is not in the method"
        if not (update.finite or _all_finite(update)) or not all(
            abs(value) <= METRIC_LIMIT for value in update.metrics.values()
        ):
            return NOT_FINITE
        return self._validate_slots(assignment, update.slots)

    def _validate_slots(self, assignment: Assignment, slots: Slots) -> str | None:
        """What techniques say of what was sent to them."""
        if not self._validates:
            return None
        found = ((t, slots.get(t.name, {})) for t in self._method.acting("validate", assignment.is_after_training))
        return next((why for t, slot in found if (why := t.validate(slot, assignment))), None)


@dataclass(frozen=True, eq=False)
class RoundValidator:
    """Looks at the updates of one round.

    Args:
        validator: of the run.
        buffers: show the shapes of running statistics.
    """

    validator: UpdateValidator
    buffers: Mapping[str, Tensor]

    def read(self, assignment: Assignment | None, update: Update) -> tuple[Update, str | None]:
        """(an update, decoded as far as it can be; why it must be refused, or None if it is sound)."""
        return self.validator.read(assignment, update, self.buffers)

    def check_stack(self, asked: Assignments, stack: UpdateStack) -> bool:
        """True if all updates of a stack are sound."""
        return self.validator.check_stack(asked, stack, self.buffers)


def _check_counts(assignment: Assignment, examples: int, steps: int) -> str | None:
    """Why a client cannot have taken so many steps on so many examples, or None."""
    least = 1 if assignment.trains else 0  # a plan may ask for a visit without training
    if not (1 <= examples <= COUNT_LIMIT and least <= steps <= COUNT_LIMIT):
        return f"it took {str(steps)[:20]} steps on {str(examples)[:20]} examples"
    most = sum(_most_steps(examples, work) for work in assignment.works)
    if steps > most:
        return f"it took {str(steps)[:20]} steps, and {str(most)[:20]} were asked for"
    return None


def _most_steps(examples: int, work: Work) -> int:
    """How many steps a client with so many examples may take."""
    return work.epochs * -(-examples // work.batch_size) if work.steps is None else work.steps


def _is_carried(update: Update) -> bool:
    """True if messages carry the change and what techniques send."""
    slots = (t for slot in update.slots.values() for t in slot.values())
    return all(map(wire.carries, (*update.delta.values(), *slots)))


def _all_finite(update: Update) -> bool:
    tensors = [*update.delta.values(), *update.buffers.values()]
    return all_finite([*tensors, *(t for slot in update.slots.values() for t in slot.values())])


def believable(update: Update, cost: str) -> float:
    """A cost that an update says it had, refused or not; 0 where it says nothing that can be believed."""
    said = update.metrics.get(cost, 0.0)
    return said if 0 <= said <= METRIC_LIMIT else 0.0
