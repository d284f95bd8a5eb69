"""An engine that passes another engine's updates on, some of them changed: so faults work over every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fedstrata.core.stacks import Assignments, VisitBlock, Visits, expand
from fedstrata.core.tensors import all_finite, clone
from fedstrata.core.types import Assignment, Slots, Update, Visit, replace_fields
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.faults.fault import acts
from fedstrata.faults.plan import FaultPlan

if TYPE_CHECKING:
    from fedstrata.evaluation.evaluate import EvalRequest, Scores
    from fedstrata.system.timing import Clock


@dataclass(eq=False)
class FaultyEngine:
    """Trains as another engine does; what some clients send is not what they trained.

    Args:
        engine: trains the clients.
        plan: which faults hit whom.
    """

    engine: Engine
    plan: FaultPlan

    @property
    def workers(self) -> int:
        """Those of the engine."""
        return self.engine.workers

    @property
    def overlaps(self) -> bool:
        """As the engine does."""
        return self.engine.overlaps

    @property
    def spent(self) -> Clock:
        """By the engine's workers."""
        return self.engine.spent

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visits]:
        """The engine's visits in the same order, those of clients that are hit with what they send instead."""
        asked = Assignments.of(assignments)
        rounds = (asked.template(position).round for position in range(len(asked)))
        found = zip(asked.clients, rounds, strict=True)
        hit = {client: places for client, number in found if (places := self.plan.places_of(client, number))}
        visits = self.engine.run(assignments, partial(self._recall_trained, recall))
        if any(acts(self.plan.faults[place], "collude") for places in hit.values() for place in places):
            yield from self._change_together([_copy_visit(visit) for visit in expand(visits)], asked, hit, recall)
            return
        for item in visits:
            for part in _take_out(item, hit):
                yield part if isinstance(part, VisitBlock) else self._change(part, asked, hit, recall)

    def _recall_trained(self, recall: Recall, clients: Sequence[int]) -> Sequence[Slots]:
        """What clients remember of their training: without what faults remember."""
        found = recall(clients)
        return [self.plan.without_own(memory) for memory in found] if self.plan.remembers else found

    def _change(self, visit: Visit, asked: Assignments, hit: dict[int, tuple[int, ...]], recall: Recall) -> Visit:
        """A visit after all faults that hit it, from left to right."""
        places = hit.get(visit[0].client, ())
        read = self._decode(visit, asked) if places else None
        if read is None:
            return visit
        for place in places:
            read = self._change_by(place, read, asked, recall)
        return self.plan.encode(read, _own(asked, visit))

    def _decode(self, visit: Visit, asked: Assignments) -> Visit | None:
        """A visit as faults see it; None for one whose update nobody can read."""
        return self.plan.decode(visit, _own(asked, visit))

    def _change_by(self, place: int, visit: Visit, asked: Assignments, recall: Recall) -> Visit:
        """A visit after one fault."""
        own = _own(asked, visit)
        remembers = acts(self.plan.faults[place], "remember")
        return self.plan.change(place, visit, own, recall([own.client])[0] if remembers else {})

    def _change_together(
        self, sent: list[Visit], asked: Assignments, hit: dict[int, tuple[int, ...]], recall: Recall
    ) -> Iterator[Visit]:
        """A round's visits after all faults; those that are not hit as they came."""
        read = [self._decode(visit, asked) for visit in sent]
        changed = iter(self._change_in_turn([visit for visit in read if visit is not None], asked, hit, recall))
        for visit, readable in zip(sent, read, strict=True):
            after = visit if readable is None else next(changed)
            yield self.plan.encode(after, _own(asked, visit)) if readable and visit[0].client in hit else visit

    def _change_in_turn(
        self, visits: list[Visit], asked: Assignments, hit: dict[int, tuple[int, ...]], recall: Recall
    ) -> list[Visit]:
        """Visits after all faults, from left to right; some see what the others send."""
        for place, fault in enumerate(self.plan.faults):
            chosen = [place in hit.get(update.client, ()) for update, _ in visits]
            others = _finite_updates(visit for visit, is_hit in zip(visits, chosen, strict=True) if not is_hit)
            mates = _finite_updates(visit for visit, is_hit in zip(visits, chosen, strict=True) if is_hit)
            for at in (position for position, is_hit in enumerate(chosen) if is_hit):
                update, memory = visits[at]
                if not acts(fault, "collude"):
                    visits[at] = self._change_by(place, visits[at], asked, recall)
                elif others and isinstance(update, Update):
                    visits[at] = fault.collude(update, others, mates), memory
        return visits

    def evaluate(self, request: EvalRequest) -> Callable[[], Scores]:
        """By the engine."""
        return self.engine.evaluate(request)

    def take_events(self) -> tuple[str, ...]:
        """Of the engine."""
        return self.engine.take_events()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def with_faults(engine: Engine, plan: FaultPlan, has_own_data: bool = False) -> Engine:
    """An engine under a plan; the same where nobody's updates are hit.

    Raises:
        UsageError: for faults in data that the engine has itself, and not from the federation.
    """
    if has_own_data:
        plan.refuse_data_faults("which an engine of your own has itself")
    return FaultyEngine(engine, plan) if plan.changes_updates else engine


def _own(asked: Assignments, visit: Visit) -> Assignment:
    """What a visit answers."""
    found = asked.of_client(visit[0].client)
    assert found is not None
    return found


def _take_out(item: Visits, hit: dict[int, tuple[int, ...]]) -> Iterator[Visits]:
    """The same visits, with those of clients that are hit one by one."""
    if not isinstance(item, VisitBlock):
        yield item
        return
    rows: list[int] = []
    for row in item.rows:
        if item.stack.clients[row] not in hit:
            rows.append(row)
            continue
        if rows:
            yield VisitBlock(item.stack, rows)
            rows = []
        yield item.stack.visit(row)
    if rows:
        yield VisitBlock(item.stack, rows)


def _copy_visit(visit: Visit) -> Visit:
    """The same in memory of its own: an engine may use its memory again for the next visit."""
    update, memory = visit
    if not isinstance(update, Update):
        return visit
    slots = {name: clone(slot) for name, slot in update.slots.items()}
    copied = replace_fields(update, delta=clone(update.delta), buffers=clone(update.buffers), slots=slots)
    kept: Slots = {name: clone(slot) for name, slot in memory.items()}
    return copied, kept


def _finite_updates(visits: Iterator[Visit]) -> list[Update]:
    """The updates among visits that hold nothing but finite numbers."""
    there = [update for update, _ in visits if isinstance(update, Update)]
    return [update for update in there if update.finite or all_finite(update.delta.values())]
