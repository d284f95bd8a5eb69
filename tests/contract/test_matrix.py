"""What every technique promises, asked of each one and of every pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.technique import ClientView, Figures, Hooks, Setting, Technique, overrides
from fedstrata.core.tensors import Tensors
from fedstrata.techniques import TECHNIQUES
from fedstrata.techniques.fedavg import FedAvg, chain, parse
from fedstrata.wire.messages import decode_update, encode
from fedstrata.wire.packing import unpack
from tests.contract.rows import ADAPTER_ROWS, ROWS, Row, devices_for

EACH = pytest.mark.parametrize("row", ROWS, ids=[r.technique.name for r in ROWS])


def combines(*techniques: Technique, **settings: Any) -> bool:
    """False where the techniques refuse each other."""
    try:
        chain(*techniques, **settings)
    except fs.UsageError:
        return False
    return True


def pairs(found: Iterable[tuple[Row, Row]]) -> pytest.MarkDecorator:
    """A test of each pair whose techniques combine; `test_refusals_name_both_whatever_the_order` has the others."""
    chosen = [(a, b) for a, b in found if combines(a.technique, b.technique)]
    names = [f"{a.technique.name}+{b.technique.name}" for a, b in chosen]
    return pytest.mark.parametrize(("one", "two"), chosen, ids=names)


EACH_NEUTRAL = pytest.mark.parametrize(
    "row", [r for r in ROWS if r.neutral is not None], ids=[r.technique.name for r in ROWS if r.neutral is not None]
)
OWN = [r for r in ROWS if not r.like]
PAIRS = pairs(itertools.combinations(OWN, 2))
NEIGHBOURS = pairs(itertools.pairwise([*OWN, OWN[0]]))
VECTORISED = pairs(itertools.combinations([r for r in OWN if not r.serial], 2))
TABLE = {**TECHNIQUES, **{r.technique.name: type(r.technique) for r in ROWS}}


SIZES = (9, 6, 5, 14, 4)
"""Of the clients: batches of 5 and of 4, and one example left over."""
FEW: dict[str, Any] = {"sizes": (9, 6, 14), "participation": 2, "weight": "examples", "eval_every": 3}
"""For tests of every pair: clients as different as those, of which one must come back in the second round."""


def federation(
    *techniques: Technique,
    rounds: int = 4,
    norm: Any = nn.BatchNorm1d,
    sizes: Sequence[int] = SIZES,
    **settings: Any,
) -> fs.Federation:
    """Clients of unequal size and skewed labels, three of them a round; the net has a norm layer.

    Its stage `second` has two layers of the same shape.
    """
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = nn.Sequential()
        net.add_module("first", nn.Linear(6, 8))
        net.add_module("norm", norm(8))
        net.add_module("relu", nn.ReLU())
        net.add_module("second", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        net.add_module("head", nn.Linear(8, 4))
        clients = []
        for client, size in enumerate(sizes):
            y = torch.randint(0, 2, (size,)) + client % 3
            clients.append((torch.randn(size, 6) + y[:, None], y))
        test = (torch.randn(40, 6), torch.randint(0, 4, (40,)))
    weight = settings.pop("weight", None)
    settings = {"participation": 3, "batch_size": 5, "lr": 0.05, "engine": "serial", **settings}
    settings |= devices_for(len(clients), *techniques)
    return fs.Federation(net, clients, test, method=chain(*techniques, weight=weight), rounds=rounds, **settings)


def weights(fed: fs.Federation) -> Tensors:
    """Everything that a run ends with: the server's state, and what clients have of their own."""
    states = {f"{t}:{n}": v for t, s in fed.state.techniques.items() for n, v in s.items()}
    own = range(len(fed.clients)) if fed.method.personalised else ()
    kept = {f"{c}:{kind}:{n}": v for c in own for kind, slot in fed.memory(c).items() for n, v in slot.items()}
    return {**fed.state.params, **fed.state.buffers, **states, **kept}


def same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def run(*techniques: Technique, **settings: Any) -> fs.Federation:
    fed = federation(*techniques, **settings)
    for _ in fed.rounds():  # as `fit`, but for a copy of the model that nobody here looks at
        pass
    return fed


@cache
def shared_run(*techniques: Technique, **settings: Any) -> fs.Federation:
    """A run that many tests compare with, made once; nobody may change it."""
    return run(*techniques, **settings)


def enough_rounds(one: Row, two: Row) -> int:
    """Rounds in which a pair does all it can: with two, clients come back to a state that is not the first one.

    With three, a plan changes twice, too.
    """
    return 3 if any(overrides(row.technique, "plan") for row in (one, two)) else 2


def test_every_technique_has_a_row() -> None:
    tested = {r.technique.name for r in (*ROWS, *ADAPTER_ROWS)}
    assert {name for name, made in TECHNIQUES.items() if made is not FedAvg} <= tested


@EACH
def test_it_does_something(row: Row) -> None:
    plain, changed = shared_run(), shared_run(row.technique)
    assert same_bits(plain.state.params, changed.state.params) is row.idle


@EACH_NEUTRAL
def test_neutral_setting_is_fedavg_bit_for_bit(row: Row) -> None:
    assert row.neutral is not None
    for buffers in ("average", "local"):
        plain, neutral = shared_run(buffers=buffers).state, shared_run(row.neutral, buffers=buffers).state
        assert same_bits({**plain.params, **plain.buffers}, {**neutral.params, **neutral.buffers})


@EACH
def test_what_it_publishes_is_plain_numbers_by_layer(row: Row) -> None:
    """After a run and before one, and under names that the model has."""
    technique, fed = row.technique, run(row.technique, rounds=2)
    assert technique.publish({}) == {} or overrides(technique, "publish")
    found = fed.method.publish(fed.state.techniques)
    assert bool(found) == overrides(technique, "publish")
    for by_layer in found.values():
        assert by_layer.keys() <= fed.state.params.keys()
        assert by_layer
        assert all(type(value) is float for value in by_layer.values())


def test_figures_of_several_techniques_are_published_together() -> None:
    """A stranger's technique whose state has keys like inco's publishes nothing unless it says so."""

    @dataclass(frozen=True, kw_only=True)
    class Keeper(Technique):
        name: ClassVar[str] = "keeper"
        figure: str = ""

        def publish(self, state: Tensors) -> Figures:
            return {self.figure: {n: float(t) for n, t in state.items()}} if self.figure else {}

    states = {"keeper": {"theta/a": torch.tensor(2.0)}, "inco": {"theta/b": torch.tensor(1.0)}}
    inco = TECHNIQUES["inco"]()
    nothing = chain(inco).publish({})
    assert {"theta", "beta"} <= nothing.keys()
    assert not any(nothing.values())
    assert chain(Keeper(), inco).publish(states) == {**nothing, "theta": {"b": 1.0}}
    assert chain(Keeper(figure="theta"), inco).publish(states) == {**nothing, "theta": {"theta/a": 2.0, "b": 1.0}}


@EACH
def test_string_round_trip(row: Row) -> None:
    for technique in (row.technique, row.neutral):
        if technique is not None:
            method = chain(technique, buffers="local", server_lr=None if technique.exclusive else 0.5)
            assert parse(str(method), TABLE) == method
            assert parse(str(chain(technique)), TABLE) == chain(technique)


@EACH
def test_no_attribute_can_change(row: Row) -> None:
    assert not row.technique.__dict__.keys() - {f.name for f in row.technique.__dataclass_fields__.values()}
    with pytest.raises(AttributeError):
        row.technique.anything = 1  # type: ignore[attr-defined]


@EACH
def test_serial_and_encoded_messages_give_the_same_bits(row: Row) -> None:
    serial, wire = shared_run(row.technique), run(row.technique, engine="wire")
    assert same_bits(weights(serial), weights(wire))
    for a, b in zip(serial.records, wire.records, strict=True):
        assert (a.loss, a.train_loss, a.bytes_up, a.bytes_down, a.flops) == (
            b.loss,
            b.train_loss,
            b.bytes_up,
            b.bytes_down,
            b.flops,
        )


def same_records(one: fs.Federation, two: fs.Federation) -> bool:
    """True if two runs recorded the same, but for time and memory."""
    shown = [[{**asdict(r), "seconds": 0, "memory": 0} for r in fed.records] for fed in (one, two)]
    return shown[0] == shown[1]


@EACH
def test_worker_processes_give_the_same_bits(row: Row) -> None:
    serial, workers = shared_run(row.technique), run(row.technique, engine="processes", workers=2)
    assert same_bits(weights(serial), weights(workers))
    assert same_records(serial, workers)


@NEIGHBOURS
def test_worker_processes_give_pairs_the_same_bits(one: Row, two: Row) -> None:
    """A sample of the pairs, in which every technique is twice."""
    techniques = (one.technique, two.technique)
    settings: dict[str, Any] = {"weight": "examples", "rounds": enough_rounds(one, two)}
    serial, workers = shared_run(*techniques, **settings), run(*techniques, engine="processes", workers=2, **settings)
    assert same_bits(weights(serial), weights(workers))
    assert same_records(serial, workers)


def vectorised_equals_serial(*techniques: Technique, **settings: Any) -> None:
    """Many clients at once give what one after the other gives, up to rounding. Batch norm is not for cohorts."""
    settings = {"norm": nn.LayerNorm, "weight": "examples", **settings}
    serial, cohort = run(*techniques, **settings), run(*techniques, engine="vmap", **settings)
    assert cohort.engine == "vmap"
    ours, theirs = weights(cohort), weights(serial)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=3e-5)  # feddf's Adam enlarges rounding
    for a, b in zip(cohort.records, serial.records, strict=True):
        assert (a.clients, a.active, a.steps, a.examples, a.bytes_down, a.flops) == (
            b.clients,
            b.active,
            b.steps,
            b.examples,
            b.bytes_down,
            b.flops,
        )
        assert (a.train_loss is None) == (b.train_loss is None)
        assert abs((a.train_loss or 0.0) - (b.train_loss or 0.0)) <= 1e-5


@EACH
def test_it_vectorises_or_says_that_it_does_not(row: Row) -> None:
    """Alone: equal to serial up to rounding; or refused by name, with a reason in the row."""
    technique = row.technique
    if technique.vectorises or not overrides(technique, "local"):
        assert not row.serial
        vectorised_equals_serial(technique)
        return
    assert row.serial
    with pytest.raises(fs.UsageError, match=f"the engine 'vmap' cannot run '{technique.name}'"):
        federation(technique, norm=nn.LayerNorm, engine="vmap")
    assert federation(technique, norm=nn.LayerNorm, engine="auto").engine == "serial"


@VECTORISED
def test_pairs_vectorise(one: Row, two: Row) -> None:
    vectorised_equals_serial(one.technique, two.technique, rounds=enough_rounds(one, two), **FEW)


def as_many_as_combine(techniques: Iterable[Technique], after: Sequence[Technique] = ()) -> list[Technique]:
    """Of techniques in order, each one that those before it do not refuse."""
    chosen: list[Technique] = []
    for technique in techniques:
        if combines(*after, *chosen, technique, weight="examples"):
            chosen.append(technique)
    return chosen


def test_all_that_vectorise_at_once() -> None:
    rows = [r for r in OWN if not r.serial]
    techniques = as_many_as_combine(r.technique for r in rows)
    assert len(techniques) > len(rows) / 2
    vectorised_equals_serial(*techniques)


@EACH
def test_resumed_run_has_the_same_bits(row: Row, tmp_path: Path) -> None:
    whole = shared_run(row.technique)
    stopped = federation(row.technique, out=tmp_path / "run", checkpoint_seconds=0)
    rounds = stopped.rounds()
    next(rounds), next(rounds)
    rounds.close()
    resumed = run(row.technique, out=tmp_path / "run", checkpoint_seconds=0, resume=True)
    assert same_bits(weights(whole), weights(resumed))


@EACH
def test_extended_run_has_the_same_bits_or_says_so(row: Row, tmp_path: Path) -> None:
    """Two rounds, and then two more, are the four that were asked for at once."""
    run(row.technique, rounds=2, out=tmp_path / "run")
    longer = run(row.technique, out=tmp_path / "run", resume=True)
    told = any("the result is not that of 4 at once" in note for note in longer.notes)
    assert told == bool(row.technique.whole_run)
    assert told or same_bits(weights(shared_run(row.technique)), weights(longer))


TURN = next(r.technique for r in ROWS if r.technique.name == "fedpart")
TURNING = [r for r in ROWS if r.technique is TURN or combines(r.technique, TURN)]


@pytest.mark.parametrize("row", TURNING, ids=[r.technique.name for r in TURNING])
def test_nothing_outside_the_plan_moves_or_travels(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stratum at a time, the others keep their bits, no update holds them, what a client has stays put."""
    techniques = (TURN,) if row.technique is TURN else (row.technique, TURN)
    fed = federation(*techniques)
    before, held, changed = dict(fed.state.params), fed.state.held, fed.state.changed
    messages: list[tuple[Any, Any]] = []
    original = fed._engine.run

    def overheard(assignments: Any, recall: Any) -> Any:
        for assignment, (update, memory) in zip(assignments, original(assignments, recall), strict=True):
            messages.append((assignment, update))
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", overheard)
    for record in fed.rounds():
        active = {n for s in fed.strata if s.name in record.active for n in s.params}
        moved = {n for n in before if not torch.equal(before[n], fed.state.params[n])}
        assert moved <= active | row.refits
        assert moved or row.technique.personalised  # what is active may be the clients' own
        for assignment, update in messages:
            assert set(decode_update(encode(update)).delta) <= active | set(record.active)  # if encoded
            since = int(held[update.client])
            down = {n.removeprefix("param/") for n in unpack(encode(assignment))[1] if n.startswith("param/")}
            assert since < 0 or down == {n for n in before if changed[n] >= since}
        messages.clear()
        before, held, changed = dict(fed.state.params), fed.state.held, fed.state.changed


@EACH
def test_memory_of_clients_that_sit_out_is_untouched(row: Row) -> None:
    fed = federation(row.technique)
    memories: dict[int, Any] = {}
    for record in fed.rounds():
        for client in range(len(fed.clients)):
            now = fed._recorder.store.get([client], [int(fed.state.remembers[client])])[0]
            if client not in record.clients:
                old = memories.get(client, {})
                assert now.keys() == old.keys()
                assert all(same_bits(now[t], old[t]) for t in now)
            memories[client] = {t: {n: v.clone() for n, v in slot.items()} for t, slot in now.items()}


WITH_CLIENTS = [r for r in ROWS if not r.technique.centralised]  # else there is one party alone


@pytest.mark.parametrize("row", WITH_CLIENTS, ids=[r.technique.name for r in WITH_CLIENTS])
def test_a_bad_update_leaves_no_trace(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose updates are NaN is refused each time: no memory of it, and the others' round goes on."""
    fed = federation(row.technique, participation=5)
    engine = fed._engine
    original = engine.run

    def poisoned(assignments: Any, recall: Any) -> Any:
        for update, memory in original(assignments, recall):
            if update.client == 2:
                for tensor in update.delta.values():
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)
                update.metrics["train_loss"] = math.nan
            yield update, memory

    monkeypatch.setattr(engine, "run", poisoned)
    for record in fed.rounds():
        assert [r["client"] for r in record.refused] == [2]
        assert int(fed.state.remembers[2]) == -1
    assert all(torch.isfinite(p).all() for p in fed.state.params.values())


@EACH
def test_under_adam_and_momentum(row: Row) -> None:
    for optimizer in ("adam", "sgd(momentum=0.9, weight_decay=0.001)"):
        fed = run(row.technique, optimizer=optimizer, lr=0.01)
        assert all(torch.isfinite(p).all() for p in fed.state.params.values())


@EACH
@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_under_every_buffer_policy(row: Row, buffers: str) -> None:
    if row.technique.defaults.get("buffers") == "local" and buffers == "average":
        with pytest.raises(fs.UsageError, match=rf"{row.technique.name}.*fedavg\(buffers='average'\)"):
            federation(row.technique, buffers=buffers)
        return
    fed = shared_run(row.technique) if buffers == "average" else run(row.technique, buffers=buffers)
    assert fed.method.buffers == buffers
    assert all(torch.isfinite(p).all() for p in fed.state.params.values())
    assert fed.state.buffers["norm.num_batches_tracked"].dtype == torch.int64


def test_refusals_name_both_whatever_the_order() -> None:
    """Every pair that does not combine; the tests of pairs have those that do."""
    refused = 0
    for pair in itertools.permutations([row.technique for row in ROWS], 2):
        if combines(*pair):
            assert combines(*pair[::-1])
            continue
        with pytest.raises(fs.UsageError) as refusal:
            chain(*pair)
        assert all(f"'{technique.name}'" in str(refusal.value) for technique in pair)
        refused += 1
    assert 0 < refused < len(ROWS) * (len(ROWS) - 1) / 2


@PAIRS
def test_pairs_combine(one: Row, two: Row) -> None:
    """In either order, and encoded."""
    settings = {**FEW, "rounds": enough_rounds(one, two)}
    forward = run(one.technique, two.technique, **settings)
    assert same_bits(weights(forward), weights(run(one.technique, two.technique, engine="wire", **settings)))
    assert all(torch.isfinite(p).all() for p in forward.state.params.values())
    if one.order_free or two.order_free:
        backward = run(two.technique, one.technique, **settings)
        for name, value in forward.state.params.items():
            torch.testing.assert_close(backward.state.params[name], value, rtol=1e-4, atol=1e-5)


@EACH
def test_neutral_partners_change_nothing(row: Row) -> None:
    """With as many as combine, until each was beside it once; where bits differ, it is asked which of them did it."""
    settings: dict[str, Any] = {"weight": "examples", "rounds": 2}
    alone = shared_run(row.technique, **settings).state.params

    def changes(*partners: Technique) -> bool:
        return not same_bits(alone, run(row.technique, *partners, **settings).state.params)

    left = [r.neutral for r in ROWS if r is not row and r.neutral and combines(row.technique, r.neutral)]
    while left:
        beside = as_many_as_combine(left, after=[row.technique])
        assert not changes(*beside), (
            f"not neutral beside {row.technique}: {[t for t in beside if changes(t)]} of {beside}"
        )
        left = [t for t in left if t not in beside]


def test_all_of_them_at_once() -> None:
    techniques = as_many_as_combine(r.technique for r in OWN)
    assert len(techniques) > len(OWN) / 2
    serial, wire = run(*techniques, weight="examples"), run(*techniques, weight="examples", engine="wire")
    assert same_bits(weights(serial), weights(wire))
    workers = run(*techniques, weight="examples", engine="processes", workers=3)
    assert same_bits(weights(serial), weights(workers))
    assert parse(str(serial.method), TABLE) == serial.method


@EACH
def test_clients_of_different_depth(row: Row) -> None:
    """Two clients hold a sub-model without `second`: its change comes from the others only, and everything runs."""
    with torch.random.fork_rng():
        shallow = nn.Sequential()
        shallow.add_module("first", nn.Linear(6, 8))
        shallow.add_module("norm", nn.BatchNorm1d(8))
        shallow.add_module("relu", nn.ReLU())
        shallow.add_module("head", nn.Linear(8, 4))
    settings: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda c: "shallow" if c in (1, 3) else ""}
    serial = run(row.technique, participation=5, **settings)
    assert same_bits(weights(serial), weights(run(row.technique, participation=5, engine="wire", **settings)))
    if not row.technique.centralised:
        holders = [
            serial._server.owners(n) for n in serial.state.params if n.endswith(("second.0.weight", "first.weight"))
        ]
        assert holders == ([3, 3, 2] if row.technique.branches else [5, 3])
    assert all(torch.isfinite(p).all() for p in serial.state.params.values())


class Peek(Technique):
    """Does in `local` what it should not: a pass in training mode, evaluation mode, and a changed parameter."""

    name = "peek"

    def local(self, view: ClientView) -> Hooks:
        view.model(view.data.batch(torch.arange(4))[0])
        view.model.eval()
        with torch.no_grad():
            next(view.model.parameters()).zero_()
        return Hooks()


def test_what_a_technique_does_to_the_model_before_training_is_undone() -> None:
    plain, peeked = shared_run(), run(Peek())
    assert same_bits(weights(plain), weights(peeked))


class Picky(Technique):
    """Cannot work with a model of more than two strata."""

    name = "picky"

    def check(self, setting: Setting) -> None:
        if len(setting.strata) > 2:
            raise fs.UsageError(f"picky wants two strata, not {len(setting.strata)}")


def test_a_technique_may_refuse_a_model_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(fs.UsageError, match="two strata, not 4"):
        federation(Picky(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
