"""The server's side of a round: what it asks for, what it refuses, and what it makes of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.aggregation.mean import RunningMean
from fedstrata.core.stacks import Memories
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Assignment, Slots, Stratum, Update, Work
from fedstrata.server.server import Server
from fedstrata.server.state import Architecture, Outcome, ServerState
from fedstrata.techniques.fedavg import chain
from fedstrata.wire.messages import encode

STRATA = (
    Stratum("a", "a", ("a.w", "a.b"), ("a.mean", "a.count")),
    Stratum("c", "c", ("c.w",), ()),
)
WHOLE = Architecture(("a.w", "a.b", "c.w"), ("a.mean", "a.count"), STRATA)
SHALLOW = Architecture(("a.w", "a.b"), ("a.mean", "a.count"), STRATA[:1])
METRICS = {"flops": 1.0, "train_loss": 0.5}


SETTING = Setting(nn.Identity(), WHOLE.strata, Work(), torch.zeros(1, 2), None)


def start() -> tuple[Tensors, Tensors]:
    params = {"a.w": torch.tensor([[1.0, 2.0]]), "a.b": torch.tensor([3.0]), "c.w": torch.tensor(4.0)}
    return params, {"a.mean": torch.tensor([0.5]), "a.count": torch.tensor(0)}


def server(*techniques: Technique, population: int = 4, seed: int = 0, **base: Any) -> tuple[Server, ServerState]:
    made = Server(chain(*techniques, **base), {"": WHOLE}, population, seed, lambda client: "", 9, nn.Identity)
    return made, made.start(*start(), SETTING)


def answer(a: Assignment, value: float = 1.0, examples: int = 1, **changes: Any) -> Update:
    """A sound update that moves everything that travels by `value`, with running statistics of its own."""
    buffers = {"a.mean": torch.tensor([value]), "a.count": torch.tensor(1)}
    update = Update(
        round=a.round,
        client=a.client,
        method=a.method,
        examples=examples,
        steps=1,
        delta={n: torch.full_like(a.params[n], value) for n in a.uploads},
        buffers=buffers if a.upload_buffers is None else {n: buffers[n] for n in a.upload_buffers},
        metrics=dict(METRICS),
    )
    return replace(update, **changes)


def keep_in(memories: dict[int, Slots]) -> Callable[[Sequence[int], Memories], None]:
    """What keeps clients' memories in a dict."""
    return lambda clients, remembered: memories.update(zip(clients, remembered, strict=True))


def close(
    made: Server, state: ServerState, assignments: Sequence[Assignment], updates: Sequence[Update]
) -> tuple[ServerState, Outcome, dict[int, Slots]]:
    """Close a round; every client would remember its number."""
    memories: dict[int, Slots] = {}
    visits = ((u, {"t": {"m": torch.tensor(u.client)}}) for u in updates)
    return *made.close(state, assignments, visits, keep_in(memories)), memories


def play(
    made: Server, state: ServerState, clients: Sequence[int], reply: Callable[[Assignment], Update] = answer
) -> tuple[ServerState, Outcome]:
    assignments = made.open(state, clients, Work())
    after, outcome, _ = close(made, state, assignments, [reply(a) for a in assignments])
    return after, outcome


def test_a_sound_update_has_no_fault():
    """Else the refusals below would prove nothing."""
    made, state = server()
    (asked,) = made.open(state, [2], Work())
    assert made.validate(asked, answer(asked), state.buffers) is None


# The mean ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["examples", "uniform"])
def test_the_weighted_mean(weight: str):
    """Against numpy's float64 average of three random deltas of clients with 1, 20 and 300 examples."""
    made, state = server(weight=weight)
    assignments = made.open(state, [0, 1, 3], Work())
    generator = torch.Generator().manual_seed(0)
    counts = [1, 20, 300]
    updates = [
        answer(a, examples=n, delta={m: torch.randn(p.shape, generator=generator) for m, p in a.params.items()})
        for a, n in zip(assignments, counts, strict=True)
    ]
    after, outcome, _ = close(made, state, assignments, updates)
    weights = counts if weight == "examples" else [1, 1, 1]
    for name, before in state.params.items():
        deltas = [u.delta[name].double().numpy() for u in updates]
        expected = before.double().numpy() + np.average(deltas, axis=0, weights=weights)
        np.testing.assert_allclose(after.params[name].numpy(), expected, rtol=1e-6)
    assert (outcome.examples, outcome.steps) == (321, 3)


def test_a_name_is_averaged_over_the_updates_that_hold_it():
    """x: (1·2 + 3·5)/4 = 17/4 over both; y: the second one's alone; z: the first one's."""
    mean = RunningMean()
    mean.add({"x": torch.tensor(2.0), "z": torch.tensor([9.0])}, 1.0)
    mean.add({"y": torch.tensor([1.0, -1.0]), "x": torch.tensor(5.0)}, 3.0)
    mean.add({}, 100.0)
    result = mean.result()
    assert {n: t.tolist() for n, t in result.items()} == {"x": 4.25, "z": [9.0], "y": [1.0, -1.0]}
    assert RunningMean().result() == {}


def test_the_mean_does_not_write_to_what_it_is_given():
    one = {"x": torch.tensor([2.0]), "n": torch.tensor(1)}
    mean = RunningMean()
    mean.add(one, 3.0)
    mean.add(one, 3.0)
    assert one["x"].item() == 2.0
    assert mean.result()["x"].item() == 2.0
    assert mean.result()["x"].item() == 2.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_stay_integers(dtype: torch.dtype):
    """(1·10 + 3·13)/4 = 12.25 → 12; (1·1 + 3·3)/4 = 2.5, and halves go to the even number: 2."""
    mean = RunningMean()
    mean.add({"n": torch.tensor([10, 1], dtype=dtype)}, 1.0)
    mean.add({"n": torch.tensor([13, 3], dtype=dtype)}, 3.0)
    assert mean.result()["n"].dtype == dtype
    assert mean.result()["n"].tolist() == [12, 2]


def test_large_integers_are_not_squeezed_through_single_precision():
    """2²⁴ + 1 is no float32; weighed with itself it must come back."""
    mean = RunningMean()
    for weight in (1.0, 7.0):
        mean.add({"n": torch.tensor(2**24 + 1)}, weight)
    assert mean.result()["n"].item() == 2**24 + 1


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 10.0), (torch.bfloat16, 1.0)])
def test_the_mean_of_half_precision_tensors(dtype: torch.dtype, value: float):
    """The mean of equal values is that value: 10 000·10 is no float16, and 256 + 1 = 256 in bfloat16."""
    mean = RunningMean()
    for weight in [10_000.0] * 2 if dtype == torch.float16 else [1.0] * 512:
        mean.add({"x": torch.tensor([value], dtype=dtype)}, weight)
    assert mean.result()["x"].dtype == dtype
    assert mean.result()["x"].item() == value


def test_running_statistics_are_averaged_as_values():
    """Means 1 and 5 of clients with 1 and 3 examples: 4 (the server's own plays no part); counts 2 and 7: 5.75 → 6."""
    made, state = server()
    assignments = made.open(state, [0, 1], Work())
    updates = [
        answer(assignments[0], examples=1, buffers={"a.mean": torch.tensor([1.0]), "a.count": torch.tensor(2)}),
        answer(assignments[1], examples=3, buffers={"a.mean": torch.tensor([5.0]), "a.count": torch.tensor(7)}),
    ]
    after, _, _ = close(made, state, assignments, updates)
    assert after.buffers["a.mean"].tolist() == [4.0]
    assert after.buffers["a.count"].item() == 6
    assert after.buffers["a.count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("policy", "sent", "kept"), [("average", True, 2.0), ("local", False, 2.0), ("drop", False, 0.5)]
)
def test_policies_of_running_statistics(policy: str, sent: bool, kept: float):
    """average: sent down, averaged; local: averaged for evaluation, never sent; drop: neither, the first ones stay."""
    made, state = server(buffers=policy)
    buffers = {} if policy == "drop" else {"a.mean": torch.tensor([2.0]), "a.count": torch.tensor(1)}
    after, outcome = play(made, state, [0, 1], lambda a: answer(a, buffers=buffers))
    assert outcome.refused == []
    assert after.buffers["a.mean"].tolist() == [kept]
    (again,) = made.open(after, [0], Work())
    assert ("a.mean" in again.buffers) is sent
    if sent:
        assert again.buffers["a.mean"].tolist() == [2.0]


def test_server_lr():
    """w + 0.5·mean = w + 0.5·(1 + 3)/2 = w + 1."""
    made, state = server(server_lr=0.5)
    after, _ = play(made, state, [0, 1], lambda a: answer(a, value=1.0 + 2 * a.client))
    assert after.params["a.w"].tolist() == [[2.0, 3.0]]
    assert state.params["a.w"].tolist() == [[1.0, 2.0]]


def test_what_a_round_counts():
    """Losses 1 and 4 of clients with 1 and 2 examples: (1 + 8)/3 = 3; FLOPs 10 + 20; steps 2 + 5."""
    made, state = server()
    assignments = made.open(state, [0, 1], Work(epochs=5))
    updates = [
        answer(assignments[0], examples=1, steps=2, metrics={"flops": 10.0, "train_loss": 1.0}),
        answer(assignments[1], examples=2, steps=5, metrics={"flops": 20.0, "train_loss": 4.0}),
    ]
    _, outcome, _ = close(made, state, assignments, updates)
    assert (outcome.train_loss, outcome.flops, outcome.steps, outcome.examples) == (3.0, 30.0, 7, 3)
    assert outcome.bytes_up == sum(len(encode(u)) for u in updates)
    assert outcome.bytes_down == sum(len(encode(a)) for a in assignments)
    assert outcome.active == ["a", "c"]
    assert outcome.accepted == (0, 1)
    assert not outcome.diverged


@pytest.mark.parametrize(("work", "most"), [(Work(epochs=2, batch_size=3), 8), (Work(steps=5), 5)])
def test_more_steps_than_were_asked_for_are_refused(work: Work, most: int):
    """Ten examples in batches of three are four steps per epoch; who claims more would count for more under FedNova."""
    made, state = server()
    for steps, refused in ((most, []), (most + 1, [0])):
        assignments = made.open(state, [0], work)
        _, outcome, _ = close(made, state, assignments, [answer(assignments[0], examples=10, steps=steps)])
        assert [row["client"] for row in outcome.refused] == refused


# Techniques -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gathers(Technique):
    """Multiplies each update by (client + 1) before the mean; the weights it is given are noted."""

    noted: list[list[float]] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "gathers"

    def rescale(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        self.noted.append(list(weights))
        return [replace(u, delta={n: d * (u.client + 1) for n, d in u.delta.items()}) for u in updates]


@dataclass(frozen=True, kw_only=True)
class Shifts(Gathers):
    """Adds 10 to each update before the mean."""

    name: ClassVar[str] = "shifts"

    def rescale(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        return [replace(u, delta={n: d + 10 for n, d in u.delta.items()}) for u in updates]


def test_gather_comes_before_the_mean():
    """Deltas 1 of clients 0 and 1 become 1 and 2; weighed by 1 and 3 examples: (1 + 6)/4 = 1.75."""
    technique = Gathers()
    made, state = server(technique)
    after, _ = play(made, state, [0, 1], lambda a: answer(a, examples=1 + 2 * a.client))
    assert after.params["c.w"].item() == 4.0 + 1.75
    assert technique.noted == [[1.0, 3.0]]


def test_gathers_follow_each_other():
    """(1·(c + 1) + 10) or (1 + 10)·(c + 1), for client 1: 12 or 22."""
    for techniques, expected in (((Gathers(), Shifts()), 12.0), ((Shifts(), Gathers()), 22.0)):
        made, state = server(*techniques)
        after, _ = play(made, state, [1])
        assert after.params["c.w"].item() == 4.0 + expected


def applying(
    name: str, function: Callable[[Tensors, Tensors, RoundView], tuple[Tensors, Tensors]], needs: bool = False
):
    """A technique with an `apply` and a state that begins with n = 0."""

    @dataclass(frozen=True, kw_only=True)
    class Applies(Technique):
        needs_deltas: ClassVar[bool] = needs

        def init(self, params: Tensors, setting: Any) -> Tensors:
            return {"n": torch.zeros(())}

        def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
            return function(state, delta, round)

    Applies.name = name
    return Applies()


def test_apply_is_folded_from_left_to_right_after_the_servers_step():
    """The mean is 1, times server_lr 0.5: (0.5 + 1)·3 = 4.5 or 0.5·3 + 1 = 2.5."""
    plus = applying("plus", lambda s, d, r: ({n: t + 1 for n, t in d.items()}, s))
    thrice = applying("thrice", lambda s, d, r: ({n: 3 * t for n, t in d.items()}, s))
    for techniques, expected in (((plus, thrice), 4.5), ((thrice, plus), 2.5)):
        made, state = server(*techniques, server_lr=0.5)
        after, _ = play(made, state, [0, 1])
        assert after.params["c.w"].item() == 4.0 + expected


def test_each_technique_has_its_own_state():
    """`left` counts rounds by 1, `right` by 10; neither sees the other's."""
    left = applying("left", lambda s, d, r: (d, {"n": s["n"] + 1}))
    right = applying("right", lambda s, d, r: (d, {"n": s["n"] + 10}))
    made, state = server(left, right)
    for _ in range(3):
        state, _ = play(made, state, [0])
    assert state.techniques["left"]["n"].item() == 3
    assert state.techniques["right"]["n"].item() == 30


def test_what_apply_adds_to_the_change_counts_as_changed():
    """Only a.b travels, but the technique also moves c.w by 2: both are fresh for the client next time, a.w is not."""
    narrow = planning("narrow", lambda a: replace(a, trains=("a.b",), uploads=("a.b",)))
    moves = applying("moves", lambda s, d, r: ({**d, "c.w": torch.tensor(2.0)}, s))
    made, state = server(moves)
    state, _ = play(made, state, [0])
    made, _ = server(moves, narrow)
    state, _ = play(made, state, [0])
    assert state.params["c.w"].item() == 4.0 + 2.0 + 2.0
    (again,) = made.open(state, [0], Work())
    assert again.to_send == ("a.b", "c.w", "a.mean", "a.count")


@pytest.mark.parametrize("needs", [True, False])
def test_what_apply_may_see(needs: bool):
    views: list[RoundView] = []
    look = applying("look", lambda s, d, r: (views.append(r) or d, s), needs=needs)
    narrow = planning("narrow", lambda a: replace(a, trains=("a.w", "a.b"), uploads=("a.b",)))
    made, state = server(look, narrow, population=7, seed=3)
    assignments = made.open(state, [5, 2], Work())
    updates = [answer(a, value=float(a.client), examples=a.client) for a in assignments]
    updates[0] = replace(updates[0], slots={"look": {"s": torch.tensor(1.0)}})
    close(made, state, assignments, updates)
    (view,) = views
    assert view.number == 0
    assert view.params is state.params
    assert view.strata == STRATA
    assert [u.client for u in view.updates] == [2, 5]
    assert view.weights == (2.0, 5.0)
    assert view.population == 7
    assert view.owners("a.w") == 7
    assert view.arrived == {"a.b": 2}
    assert [a.client for a in view.asked] == [2, 5]
    assert view.updates[0].slots["look"]["s"].item() == 1.0
    assert [list(u.delta) for u in view.updates] == ([["a.b"], ["a.b"]] if needs else [[], []])


def test_keeping_the_deltas_changes_no_bit():
    results = []
    for needs in (True, False):
        made, state = server(applying("look", lambda s, d, r: (d, s), needs=needs))
        generator = torch.Generator().manual_seed(1)
        after, _ = play(
            made,
            state,
            [0, 1, 2],
            lambda a, g=generator: answer(
                a, examples=3 + a.client, delta={n: torch.randn(p.shape, generator=g) for n, p in a.params.items()}
            ),
        )
        results.append(after.params)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def planning(name: str, function: Callable[[Assignment], Assignment]) -> Technique:
    @dataclass(frozen=True, kw_only=True)
    class Plans(Technique):
        def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
            assert strata == STRATA
            return function(assignment)

    Plans.name = name
    return Plans()


def test_plans_intersect_whatever_their_order():
    """{a.w, a.b} ∩ {a.b, c.w} = {a.b}; a plan that asks for more than it was given gets no more."""
    left = planning("left", lambda a: replace(a, trains=("a.w", "a.b"), uploads=("a.w", "a.b")))
    right = planning("right", lambda a: replace(a, trains=("c.w", "a.b"), uploads=("c.w", "a.b")))
    all_ = planning("all", lambda a: replace(a, trains=WHOLE.params, uploads=WHOLE.params))
    for techniques in ((left, right), (right, left), (left, right, all_), (all_, right, left)):
        made, state = server(*techniques)
        (asked,) = made.open(state, [0], Work())
        assert asked.trains == ("a.b",)
        assert asked.uploads == ("a.b",)


def test_plans_keep_the_models_order_and_only_what_trains_travels():
    made, state = server(planning("p", lambda a: replace(a, trains=("c.w", "a.w"), uploads=("c.w", "a.b"))))
    (asked,) = made.open(state, [0], Work())
    assert asked.trains == ("a.w", "c.w")
    assert asked.uploads == ("c.w",)
    assert list(asked.params) == list(WHOLE.params)


def test_a_plan_may_change_the_work():
    made, state = server(planning("p", lambda a: replace(a, work=replace(a.work, epochs=a.client + 3))))
    assert [a.work.epochs for a in made.open(state, [0, 2], Work(lr=0.7))] == [3, 5]
    assert made.open(state, [0], Work(lr=0.7))[0].work.lr == 0.7


def test_only_the_active_strata_are_named_and_change():
    made, state = server(planning("p", lambda a: replace(a, trains=("c.w",), uploads=("c.w",))))
    after, outcome = play(made, state, [0, 1])
    assert outcome.active == ["c"]
    assert after.params["a.w"] is state.params["a.w"]
    assert after.params["c.w"].item() == 5.0


def test_who_trains_what_is_told_where_clients_differ():
    """Client 1 trains the last stratum alone, 0 and 2 everything; where all do the same, nothing more is said."""
    narrow = {"trains": ("c.w",), "uploads": ("c.w",)}
    made, state = server(planning("p", lambda a: replace(a, **narrow) if a.client == 1 else a))
    state, outcome = play(made, state, [0, 1, 2])
    assert [(part.strata, part.clients) for part in outcome.trained] == [(["a", "c"], [0, 2]), (["c"], [1])]
    assert outcome.active == ["a", "c"]
    _, alike = play(made, state, [0, 2])
    assert alike.trained == []
    assert [(part.strata, part.clients) for part in alike.trainings] == [(["a", "c"], [0, 2])]


def test_send_puts_each_techniques_tensors_into_its_own_slot():
    """What is empty does not travel; the plan is made before."""

    @dataclass(frozen=True, kw_only=True)
    class Sends(Technique):
        name: ClassVar[str] = "sends"

        def init(self, params: Tensors, setting: Any) -> Tensors:
            return {"c": params["c.w"] * 2}

        def send(self, state: Tensors, assignment: Assignment) -> Tensors:
            return {"c": state["c"] + assignment.client, "trains": torch.tensor(len(assignment.trains))}

    @dataclass(frozen=True, kw_only=True)
    class Silent(Technique):
        name: ClassVar[str] = "silent"

        def send(self, state: Tensors, assignment: Assignment) -> Tensors:
            return {}

    narrow = planning("narrow", lambda a: replace(a, trains=("c.w",)))
    made, state = server(Sends(), Silent(), narrow)
    first, second = made.open(state, [0, 3], Work())
    assert list(first.slots) == ["sends"]
    assert first.slots["sends"]["c"].item() == 8.0
    assert second.slots["sends"]["c"].item() == 11.0
    assert first.slots["sends"]["trains"].item() == 1


# Opening ----------------------------------------------------------------------------------------------------


def test_assignments_come_in_client_order_with_seeds_of_their_own():
    made, state = server()
    assignments = made.open(state, [3, 0, 2], Work(lr=0.3))
    assert [a.client for a in assignments] == [0, 2, 3]
    assert len({a.seed for a in assignments}) == 3
    assert all(a.work.lr == 0.3 and a.round == 0 and a.method == made.method.digest for a in assignments)
    assert made.open(state, [2], Work())[0].seed == assignments[1].seed
    after, _ = play(made, state, [2])
    assert made.open(after, [2], Work())[0].seed != assignments[1].seed
    other, begun = server(seed=1)
    assert other.open(begun, [2], Work())[0].seed != assignments[1].seed


def test_opening_and_closing_change_no_state():
    made, state = server()
    params, held = clone(state.params), state.held.clone()
    play(made, state, [0, 1])
    assert all(torch.equal(state.params[n], params[n]) for n in params)
    assert torch.equal(state.held, held)
    assert state.round == 0


# What really travels down -----------------------------------------------------------------------------------


def test_fresh_is_what_changed_since_the_clients_last_accepted_round():
    """Three strata in turn: round 0 trains all, 1 trains a.w, 2 trains a.b, 3 trains a.w.

    A client of round r holds the parameters as they were when r opened: it lacks what r itself changed, and all after.
    """
    turns = {1: ("a.w",), 2: ("a.b",), 3: ("a.w",)}
    statistics = {1: (), 2: ("a.mean",), 3: ()}

    def plan(a: Assignment) -> Assignment:
        names = turns.get(a.round, a.trains)
        return replace(a, trains=names, uploads=names, upload_buffers=statistics.get(a.round))

    made, state = server(planning("turns", plan))

    def fresh(now: ServerState, client: int) -> tuple[str, ...] | None:
        return made.open(now, [client], Work())[0].to_send

    assert fresh(state, 0) is None
    state, _ = play(made, state, [0, 1])
    assert fresh(state, 0) is None  # round 0 changed everything after client 0 had got it
    state, _ = play(made, state, [0])
    assert fresh(state, 0) == ("a.w",)
    assert fresh(state, 1) is None
    state, _ = play(made, state, [0, 1])
    assert fresh(state, 0) == ("a.b", "a.mean")
    assert fresh(state, 1) == ("a.b", "a.mean")
    state, _ = play(made, state, [0])
    assert fresh(state, 0) == ("a.w",)
    assert fresh(state, 1) == ("a.w", "a.b", "a.mean")  # it missed round 3, and has not seen what round 2 made of a.b
    assert fresh(state, 2) is None


def test_fewer_fresh_parameters_are_fewer_bytes():
    """A second partial round: 12 bytes of a.w and a.b stay at home, and so do their names."""
    made, state = server(planning("c", lambda a: replace(a, trains=("c.w",), uploads=("c.w",))))
    state, first = play(made, state, [0, 1])
    _, second = play(made, state, [0, 1])
    assert second.bytes_down < first.bytes_down - 2 * 12
    assert second.bytes_up == first.bytes_up


def test_a_refused_client_is_sent_everything_again():
    """Its last accepted round is what counts, not its last visit."""
    made, state = server()
    bad = {"a.w": torch.full((1, 2), math.nan), "a.b": torch.ones(1), "c.w": torch.ones(())}
    state, _ = play(made, state, [0, 1], lambda a: answer(a, delta=bad) if a.client else answer(a))
    assert state.held.tolist() == [0, -1, -1, -1]
    assert made.open(state, [1], Work())[0].to_send is None


def test_a_round_in_which_nothing_arrived_changes_nothing():
    """All updates are of another method: the round passes, and clients that hold everything need nothing."""
    made, state = server()
    state, _ = play(made, state, [0])
    after, outcome = play(made, state, [0, 1], lambda a: answer(a, method="another"))
    assert after.round == 2
    assert after.params is state.params
    assert len(outcome.refused) == 2
    assert not outcome.diverged
    assert after.held.tolist() == [0, -1, -1, -1]


# Sub-models -------------------------------------------------------------------------------------------------


def two_depths() -> tuple[Server, ServerState]:
    """Clients 0 and 1 are shallow, 2, 3 and 4 hold the whole model."""
    made = Server(chain(), {"": WHOLE, "shallow": SHALLOW}, 5, 0, lambda c: "shallow" if c < 2 else "", 9, nn.Identity)
    return made, made.start(*start(), SETTING)


def test_owners():
    made, _ = two_depths()
    assert [made.owners(n) for n in WHOLE.params] == [5, 5, 3]


def test_sub_models_get_and_give_their_own_names_only():
    """a.b: deltas 1, 3 and 8 of clients with 1, 2 and 5 examples: (1 + 6 + 40)/8; c.w: client 2's alone."""
    made, state = two_depths()
    assignments = made.open(state, [0, 1, 2], Work())
    assert [list(a.params) for a in assignments] == [["a.w", "a.b"], ["a.w", "a.b"], ["a.w", "a.b", "c.w"]]
    assert [a.arch for a in assignments] == ["shallow", "shallow", ""]
    given = ((1.0, 1), (3.0, 2), (8.0, 5))
    updates = [answer(a, value, n) for a, (value, n) in zip(assignments, given, strict=True)]
    after, outcome, _ = close(made, state, assignments, updates)
    assert outcome.refused == []
    assert after.params["a.b"].item() == pytest.approx(3.0 + 47 / 8)
    assert after.params["c.w"].item() == 4.0 + 8.0
    _, only = play(made, after, [0, 1])
    assert only.active == ["a"]


# Refusals ---------------------------------------------------------------------------------------------------


def without(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    return {n: t for n, t in tensors.items() if n != name}


def poisoned(update: Update, where: str, value: float) -> Update:
    bad = torch.tensor([[1.0, value]])
    if where == "delta":
        return replace(update, delta={**update.delta, "a.w": bad})
    if where == "buffers":
        return replace(update, buffers={**update.buffers, "a.mean": torch.tensor([value])})
    if where == "slots":
        return replace(update, slots={"look": {"s": bad}})
    return replace(update, metrics={**update.metrics, where: value})


FAULTS: dict[str, tuple[Callable[[Update], Update], str]] = {
    "missing": (lambda u: replace(u, delta=without(u.delta, "a.b")), "lacks 'a.b'"),
    "empty": (lambda u: replace(u, delta={}), "lacks 'a.b'"),
    "extra": (lambda u: replace(u, delta={**u.delta, "z": torch.ones(1)}), "unexpected 'z'"),
    "renamed": (lambda u: replace(u, delta={**without(u.delta, "a.b"), "z": torch.ones(1)}), "lacks 'a.b'"),
    "misshapen": (lambda u: replace(u, delta={**u.delta, "a.w": torch.ones(2, 1)}), "float32 [2, 1] instead of"),
    "flattened": (
        lambda u: replace(u, delta={**u.delta, "a.w": torch.ones(2)}),
        "float32 [2] instead of float32 [1, 2]",
    ),
    "one too many axes": (lambda u: replace(u, delta={**u.delta, "c.w": torch.ones(1)}), "'c.w' is float32 [1]"),
    "emptied": (lambda u: replace(u, delta={**u.delta, "a.b": torch.ones(0)}), "'a.b' is float32 [0]"),
    "double": (lambda u: replace(u, delta={**u.delta, "a.w": torch.ones(1, 2).double()}), "float64 [1, 2] instead of"),
    "half": (lambda u: replace(u, delta={**u.delta, "a.w": torch.ones(1, 2).half()}), "float16 [1, 2]"),
    "integer": (lambda u: replace(u, delta={**u.delta, "a.w": torch.ones(1, 2).long()}), "int64 [1, 2]"),
    "missing buffer": (lambda u: replace(u, buffers=without(u.buffers, "a.count")), "lacks 'a.count'"),
    "no buffers": (lambda u: replace(u, buffers={}), "lacks 'a.count'"),
    "extra buffer": (lambda u: replace(u, buffers={**u.buffers, "z": torch.ones(1)}), "unexpected 'z'"),
    "float counter": (
        lambda u: replace(u, buffers={**u.buffers, "a.count": torch.tensor(1.0)}),
        "'a.count' is float32",
    ),
    "misshapen buffer": (
        lambda u: replace(u, buffers={**u.buffers, "a.mean": torch.ones(2)}),
        "'a.mean' is float32 [2]",
    ),
    "earlier round": (lambda u: replace(u, round=0), "answers round 0 in round 1"),
    "later round": (lambda u: replace(u, round=2), "answers round 2 in round 1"),
    "method": (lambda u: replace(u, method="0123456789abcdef"), "another method (0123456789abcdef"),
    "no method": (lambda u: replace(u, method=""), "another method"),
    "unasked": (lambda u: replace(u, client=3), "not asked for"),
    "no such client": (lambda u: replace(u, client=-1), "not asked for"),
    "no steps": (lambda u: replace(u, steps=0), "0 steps"),
    "negative steps": (lambda u: replace(u, steps=-1), "-1 steps"),
    "no examples": (lambda u: replace(u, examples=0), "0 examples"),
    "negative examples": (lambda u: replace(u, examples=-5), "-5 examples"),
    "no flops": (lambda u: replace(u, metrics={"train_loss": 1.0}), "metrics are incomplete"),
    "no loss": (lambda u: replace(u, metrics={"flops": 1.0}), "metrics are incomplete"),
    "strange slot": (lambda u: replace(u, slots={"stranger": {"s": torch.ones(1)}}), "slot for 'stranger'"),
    **{
        f"{value} in {where}": (lambda u, w=where, v=value: poisoned(u, w, v), "NaN or infinite")
        for where in ("delta", "buffers", "slots", "flops", "train_loss", "more")
        for value in (math.nan, math.inf, -math.inf)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_bad_update_is_refused_and_the_round_goes_on(fault: str, keeps: bool):
    """Client 1's is bad; client 0 (delta 1, one example) and client 2 (delta 4, two) count: (1 + 8)/3 = 3."""
    spoil, says = FAULTS[fault]
    made, state = server(applying("look", lambda s, d, r: (d, s), needs=keeps))
    state, _ = play(made, state, [0, 1, 2, 3], lambda a: answer(a, value=0.0))
    assignments = made.open(state, [0, 1, 2], Work())
    updates = [answer(a, value=[1.0, 1e6, 4.0][a.client], examples=[1, 1, 2][a.client]) for a in assignments]
    updates[1] = spoil(updates[1])
    after, outcome, memories = close(made, state, assignments, updates)

    assert len(outcome.refused) == (2 if updates[1].client != 1 else 1)  # then client 1 itself did not come
    assert outcome.refused[0]["client"] == updates[1].client
    assert says in outcome.refused[0]["why"]
    assert outcome.accepted == (0, 2)
    assert (outcome.examples, outcome.steps, outcome.train_loss) == (3, 2, 0.5)
    assert 2.0 <= outcome.flops <= 3.0  # what a refused update took was spent all the same
    assert not outcome.diverged
    assert after.params["c.w"].item() == 4.0 + 3.0
    assert after.buffers["a.mean"].item() == 3.0
    assert sorted(memories) == [0, 2]
    assert after.remembers.tolist() == [1, 0, 1, 0]
    assert after.held.tolist() == [1, 0, 1, 0]
    assert after.round == 2


def test_a_long_name_is_cut():
    """A refusal ends up in logs: what a client wrote is shown, but not megabytes of it."""
    made, state = server()
    (asked,) = made.open(state, [0], Work())
    for bad in (
        answer(asked, delta={**answer(asked).delta, "x" * 10**6: torch.ones(1)}),
        answer(asked, method="x" * 10**6),
        answer(asked, slots={"x" * 10**6: {}}),
    ):
        why = made.validate(asked, bad, state.buffers)
        assert why is not None
        assert len(why) < 300


def test_under_drop_no_running_statistics_may_arrive():
    made, state = server(buffers="drop")
    _, outcome = play(made, state, [0, 1], lambda a: answer(a, buffers={} if a.client else answer(a).buffers))
    assert [row["client"] for row in outcome.refused] == [0]
    assert "unexpected" in outcome.refused[0]["why"]


def test_a_partial_update_must_hold_what_travels_and_no_more():
    made, state = server(planning("p", lambda a: replace(a, trains=("a.b",), uploads=("a.b",))))
    more = {n: torch.zeros_like(p) for n, p in state.params.items()}
    after, outcome = play(made, state, [0, 1], lambda a: answer(a, delta=more) if a.client else answer(a))
    assert [row["client"] for row in outcome.refused] == [1]
    assert after.params["a.b"].item() == 4.0


def test_all_updates_not_finite_is_divergence():
    made, state = server()
    _, outcome = play(made, state, [0, 1], lambda a: poisoned(answer(a), "delta", math.nan))
    assert outcome.diverged
    assert outcome.accepted == ()
    others = {True: lambda a: answer(a, method="another"), False: answer}
    for diverged, other in others.items():
        _, outcome = play(
            made, state, [0, 1], lambda a, o=other: o(a) if a.client else poisoned(answer(a), "delta", math.nan)
        )
        assert outcome.diverged is diverged


def test_a_model_that_leaves_the_finite_numbers_is_divergence():
    """3e38 + 3e38 is no float32."""
    made, state = server()
    state, outcome = play(made, state, [0], lambda a: answer(a, value=3e38))
    assert not outcome.diverged
    _, outcome = play(made, state, [0], lambda a: answer(a, value=3e38))
    assert outcome.diverged


def test_bytes_of_refused_updates_count():
    made, state = server()
    assignments = made.open(state, [0, 1], Work())
    updates = [answer(assignments[0]), answer(assignments[1], method="another")]
    _, outcome, _ = close(made, state, assignments, updates)
    assert outcome.bytes_up == sum(len(encode(u)) for u in updates)


def test_a_client_without_memory_writes_none():
    made, state = server()
    assignments = made.open(state, [0, 1], Work())
    visits: list[tuple[Update, Slots]] = [(answer(assignments[0]), {}), (answer(assignments[1]), {"t": {}})]
    memories: dict[int, Slots] = {}
    after, _ = made.close(state, assignments, visits, keep_in(memories))
    assert memories == {1: {"t": {}}}
    assert after.remembers.tolist() == [-1, 0, -1, -1]
    assert after.held.tolist() == [0, 0, -1, -1]


def test_a_lost_update_is_reported():
    made, state = server()
    assignments = made.open(state, [0, 1], Work())
    after, outcome, _ = close(made, state, assignments, [answer(assignments[1], value=2.0)])
    assert outcome.accepted == (1,)
    assert outcome.refused == [{"client": 0, "why": "it did not come"}]
    assert after.params["c.w"].item() == 6.0
    assert after.held.tolist() == [-1, 0, -1, -1]
    assert outcome.bytes_down == sum(len(encode(a)) for a in assignments)


def test_an_update_counts_once():
    """Delta 1 twice from client 0, delta 4 from client 1: (1 + 4)/2, and the repetition is refused."""
    made, state = server()
    assignments = made.open(state, [0, 1], Work())
    first, second = answer(assignments[0], value=1.0), answer(assignments[1], value=4.0)
    after, outcome, _ = close(made, state, assignments, [first, first, second])
    assert after.params["c.w"].item() == 6.5
    assert [row["client"] for row in outcome.refused] == [0]


@pytest.mark.parametrize("weight", ["examples", "uniform"])
def test_a_number_of_examples_beyond_all_reason(weight: str):
    made, state = server(weight=weight)
    _, outcome = play(made, state, [0, 1], lambda a: answer(a, examples=10**400 if a.client else 1))
    assert [row["client"] for row in outcome.refused] == [1]


def test_what_a_round_counts_is_finite():
    made, state = server()
    _, outcome = play(made, state, [0, 1], lambda a: answer(a, metrics={"flops": 1.7e308, "train_loss": 1.7e308}))
    assert [row["client"] for row in outcome.refused] == [0, 1]
    _, outcome = play(made, state, [0, 1], lambda a: answer(a, metrics={"flops": 1e38, "train_loss": 1e38}))
    assert not outcome.refused
    assert math.isfinite(outcome.flops)
    assert outcome.train_loss is not None
    assert math.isfinite(outcome.train_loss)
