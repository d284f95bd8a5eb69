"""Visits that come as a stack: the same bits, bytes and refusals as one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from fedstrata.core.stacks import Assignments, UpdateStack, VisitBlock, expand
from fedstrata.core.technique import Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots, Stratum, Update, Work
from fedstrata.server.server import Server
from fedstrata.server.state import Outcome, ServerState
from fedstrata.techniques.fedavgm import FedAvgM
from fedstrata.techniques.feddyn import FedDyn
from fedstrata.techniques.fednova import FedNova
from fedstrata.techniques.scaffold import Scaffold
from fedstrata.wire.messages import encode
from fedstrata.wire.sizes import size_of_all, size_of_rows
from tests.server.test_server import answer, server

Visit = tuple[Update, Slots]


def visits_of(assignments: Sequence[Assignment], remembers: bool) -> list[Visit]:
    """Random updates of clients with different numbers of examples and steps."""
    rng = torch.Generator().manual_seed(5)
    made = []
    for place, a in enumerate(assignments):
        delta = {n: torch.randn(a.params[n].shape, generator=rng) for n in a.uploads}
        slots = {
            name: {n: torch.randn(t.shape, generator=rng) for n, t in slot.items()} for name, slot in a.slots.items()
        }
        memory = {"keep": {"m": torch.randn(3, generator=rng)}} if remembers else {}
        metrics = {"flops": 10.0**place, "train_loss": 1 / (place + 3)}
        made.append((answer(a, examples=7 * place + 1, delta=delta, slots=slots, metrics=metrics), memory))
    return made


def stack(visits: Sequence[Visit]) -> UpdateStack:
    return UpdateStack.of([(update, memory) for update, memory in visits if isinstance(update, Update)])


def in_blocks(visits: Sequence[Visit], parts: Sequence[Sequence[int]]) -> list[VisitBlock]:
    """The visits in order, as rows of stacks of which each holds some of them."""
    stacks = {id(part): stack([visits[p] for p in part]) for part in parts}
    place = {position: (stacks[id(part)], row) for part in parts for row, position in enumerate(part)}
    blocks: list[tuple[UpdateStack, list[int]]] = []
    for position in range(len(visits)):
        of, row = place[position]
        if not blocks or blocks[-1][0] is not of:
            blocks.append((of, []))
        blocks[-1][1].append(row)
    return [VisitBlock(of, rows) for of, rows in blocks]


def close(made: Server, state: ServerState, asked: Assignments, visits: Any) -> tuple[ServerState, Outcome, Any]:
    kept: dict[int, Slots] = {}
    copy = lambda slots: {name: {n: t.clone() for n, t in slot.items()} for name, slot in slots.items()}  # noqa: E731
    after, outcome = made.close(
        state, asked, visits, lambda clients, memories: kept.update(zip(clients, map(copy, memories), strict=True))
    )
    return after, outcome, kept


def check_equal(found: tuple[ServerState, Outcome, Any], expected: tuple[ServerState, Outcome, Any]) -> None:
    for ours, theirs in ((found[0].params, expected[0].params), (found[0].buffers, expected[0].buffers)):
        assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    for name, slot in expected[0].techniques.items():
        assert all(torch.equal(found[0].techniques[name][n], t) for n, t in slot.items())
    assert torch.equal(found[0].held, expected[0].held)
    assert torch.equal(found[0].remembers, expected[0].remembers)
    assert found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    for client, memory in expected[2].items():
        assert all(torch.equal(found[2][client][name][n], t) for name, s in memory.items() for n, t in s.items())


PARTS = {
    "one": [[0, 1, 2, 3, 4]],
    "two": [[0, 1], [2, 3, 4]],
    "interleaved": [[0, 2, 4], [3, 1]],
    "reversed": [[4, 3, 2, 1, 0]],
}
METHODS: dict[str, tuple[Technique, ...]] = {
    "fedavg": (),
    "accumulates": (Scaffold(),),
    "accumulates deltas": (FedDyn(),),
    "needs deltas": (FedNova(), FedAvgM()),
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("remembers", [True, False])
def test_a_stack_equals_one_by_one(parts: str, method: str, remembers: bool) -> None:
    """Parameters, technique states, memories and everything that is counted, to the bit."""
    made, state = server(*METHODS[method], population=5)
    asked = made.open(state, [0, 1, 2, 3, 4], Work(epochs=9))
    visits = visits_of(asked, remembers)
    expected = close(made, state, asked, visits)
    assert expected[1].refused == []
    check_equal(close(made, state, asked, in_blocks(visits, PARTS[parts])), expected)


@pytest.mark.parametrize("reduce", ["median", "krum(share=0.2)"])
def test_robust_rules_see_every_update(reduce: str) -> None:
    made, state = server(population=5, reduce=reduce)
    asked = made.open(state, [0, 1, 2, 3, 4], Work(epochs=9))
    visits = visits_of(asked, False)
    check_equal(close(made, state, asked, in_blocks(visits, PARTS["interleaved"])), close(made, state, asked, visits))


def change(visits: list[Visit], which: int, **fields: Any) -> list[Visit]:
    return [(replace(u, **fields) if u.client == which else u, memory) for u, memory in visits]


def poison(visits: list[Visit], client: int, value: float) -> list[Visit]:
    bad = torch.tensor([[1.0, value]])
    return [(replace(u, delta={**u.delta, "a.w": bad}) if u.client == client else u, m) for u, m in visits]


FAULTS: dict[str, tuple[Callable[[list[Visit]], list[Visit]], int]] = {
    "not a number": (lambda visits: poison(visits, 2, float("nan")), 1),
    "infinite": (lambda visits: poison(visits, 2, float("inf")), 1),
    "no steps": (lambda visits: change(visits, 2, steps=0), 1),
    "too many steps": (lambda visits: change(visits, 2, steps=10**6), 1),
    "no examples": (lambda visits: change(visits, 2, examples=0), 1),
    "loss": (lambda visits: change(visits, 2, metrics={"flops": 1.0, "train_loss": float("inf")}), 1),
    "negative flops": (lambda visits: change(visits, 2, metrics={"flops": -1.0, "train_loss": 0.5}), 0),
    "not asked for": (lambda visits: change(visits, 2, client=4), 2),
    "answered already": (lambda visits: change(visits, 2, client=1), 2),
    "another method": (lambda visits: [(replace(u, method="other"), memory) for u, memory in visits], 4),
    "another round": (lambda visits: [(replace(u, round=7), memory) for u, memory in visits], 4),
    "no metrics": (lambda visits: [(replace(u, metrics={"train_loss": 1.0}), memory) for u, memory in visits], 4),
    "shape": (lambda visits: [(replace(u, delta={**u.delta, "a.b": torch.ones(2)}), m) for u, m in visits], 4),
}
"""What is wrong with client 2, or with all → how many are refused, those that did not come among them."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_of_a_stack_is_refused_alone(fault: str) -> None:
    """As one by one: whose it is, why, what was counted of it, and what the others came to."""
    made, state = server(population=5)
    asked = made.open(state, [0, 1, 2, 3], Work(epochs=9))
    spoil, refused = FAULTS[fault]
    visits = spoil(visits_of(asked, True))
    expected = close(made, state, asked, visits)
    assert len(expected[1].refused) == refused
    check_equal(close(made, state, asked, in_blocks(visits, [[0, 1, 2, 3]])), expected)


def test_bytes_are_those_of_the_messages() -> None:
    made, state = server(Scaffold(), population=2000)
    after = replace(
        state, round=3, held=torch.where(torch.arange(2000) % 3 == 0, 2, -1), changed={**state.changed, "c.w": 0}
    )
    asked = made.open(after, [0, 9, 10, 99, 100, 1234], Work())
    assert len(asked.templates) == 2
    assert size_of_all(asked) == sum(len(encode(a)) for a in asked)
    visits = visits_of(asked, False)
    assert size_of_rows(stack(visits), range(6)) == sum(len(encode(update)) for update, _ in visits)
    assert size_of_rows(stack(visits), [4, 1]) == sum(len(encode(visits[row][0])) for row in (4, 1))


def test_updates_of_a_stack_are_what_was_put_in() -> None:
    made, state = server(Scaffold())
    visits = visits_of(made.open(state, [0, 1, 3], Work()), True)
    for (update, memory), (found, kept) in zip(visits, expand([VisitBlock(stack(visits), range(3))]), strict=True):
        assert isinstance(found, Update)
        assert encode(found) == encode(update)
        assert torch.equal(kept["keep"]["m"], memory["keep"]["m"])


# Assignments ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sends(Technique):
    """Sends a number; counts how often it is asked."""

    name: ClassVar[str] = "sends"
    asked: ClassVar[list[Any]] = []

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        self.asked.append("plan")
        return replace(assignment, uploads=assignment.uploads[:1])

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        self.asked.append("send")
        return {"n": torch.tensor(1.0)}


@dataclass(frozen=True, kw_only=True)
class SendsEach(Sends):
    """Sends something else to every client."""

    name: ClassVar[str] = "sends_each"
    reads: str = "client"

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        self.asked.append("send")
        number = getattr(assignment, self.reads)
        return {"n": torch.arange(10.0)[number] if self.reads == "client" else torch.tensor(float(number % 1000))}


def test_techniques_are_asked_once_for_clients_of_a_kind() -> None:
    made, state = server(Sends(), population=50)
    Sends.asked.clear()
    assignments = made.open(state, range(50), Work())
    assert sorted(Sends.asked) == ["plan", "send"]
    assert [a.client for a in assignments] == list(range(50))
    assert {a.uploads for a in assignments} == {("a.w",)}
    assert len({id(a.slots["sends"]["n"]) for a in assignments}) == 1


@pytest.mark.parametrize("reads", ["client", "seed"])
def test_a_technique_that_looks_at_the_client_is_asked_for_each(reads: str) -> None:
    made, state = server(SendsEach(reads=reads), population=9)
    assignments = made.open(state, [2, 3, 7], Work())
    expected = [2.0, 3.0, 7.0] if reads == "client" else [float(a.seed % 1000) for a in assignments]
    assert [a.slots["sends_each"]["n"].item() for a in assignments] == expected
    assert [a.client for a in assignments] == [2, 3, 7]
    after, outcome, _ = close(made, state, assignments, in_blocks(visits_of(assignments, False), [[0, 1, 2]]))
    assert outcome.refused == []
    assert after.round == 1


@dataclass(frozen=True, kw_only=True)
class PlansEach(Technique):
    """Plans by what it makes of the client, in ways in which one may look at it."""

    name: ClassVar[str] = "plans_each"
    way: str = "repr"

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        if self.way == "seed":
            return replace(assignment, seed=7)
        if self.way == "caught":
            try:
                even = assignment.client % 2 == 0
            except TypeError:
                even = True
        else:
            text = repr((assignment.client, "x")) if self.way == "repr" else f"{assignment.client!r}"
            even = int(text.strip("(").partition(",")[0]) % 2 == 0
        return replace(assignment, uploads=assignment.uploads[:1]) if even else assignment


@pytest.mark.parametrize("way", ["repr", "format", "caught"])
def test_however_a_plan_looks_at_a_client_it_sees_the_right_one(way: str) -> None:
    made, state = server(PlansEach(way=way), population=9)
    assert [len(a.uploads) for a in made.open(state, [1, 2, 4, 7], Work())] == [3, 1, 1, 3]


def test_a_plan_may_give_a_seed() -> None:
    made, state = server(PlansEach(way="seed"), population=9)
    assert [a.seed for a in made.open(state, [1, 2, 4], Work())] == [7, 7, 7]


@dataclass(frozen=True, kw_only=True)
class RefusesEven(Technique):
    """Refuses what clients of even numbers send."""

    name: ClassVar[str] = "refuses_even"

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        return None if assignment.client % 2 else "it is even"


def test_techniques_validate_every_clients_own_assignment() -> None:
    made, state = server(RefusesEven(), population=9)
    asked = made.open(state, [1, 2, 3, 4], Work(epochs=9))
    visits = visits_of(asked, False)
    found, expected = close(made, state, asked, in_blocks(visits, [[0, 1, 2, 3]])), close(made, state, asked, visits)
    assert [row["client"] for row in expected[1].refused] == [2, 4]
    check_equal(found, expected)


def test_some_of_a_rounds_assignments() -> None:
    made, state = server(population=9)
    asked = made.open(state, [1, 2, 5, 8], Work())
    some = asked.select([3, 1])
    assert [a.client for a in some] == [8, 2]
    assert [a.seed for a in some] == [asked[3].seed, asked[1].seed]
    assert [a.client for a in asked[1:3]] == [2, 5]
    found = asked.of_client(5)
    assert found is not None
    assert (found.client, found.seed) == (5, asked[2].seed)
    assert asked.of_client(4) is None
    assert [a.client for a in Assignments.of(list(asked))] == [1, 2, 5, 8]
