"""Devices train what they can afford, in turns; with the same bits on all engines and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.errors import UsageError
from tests.engines.worlds import check_same

PIXELS = (1, 8, 8)


def model() -> nn.Module:
    """Five strata: four convolutions, the last three of which pass a gradient on, and a head."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 4), (4, 4), (4, 4), (4, 4)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def clients(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    return [(torch.rand(n, *PIXELS, generator=rng), torch.randint(0, 3, (n,), generator=rng)) for n in sizes]


def build(fleet: str | None, **how: Any) -> fs.Federation:
    given = {"rounds": 4, "batch_size": 8, "engine": "serial", "lr": 0.05, "fleet": fleet, **how}
    return fs.Federation(model(), clients(9, 12, 16, 8), clients(20)[0], **given)


def peak(method: str) -> int:
    """The most that a step takes of what a method trains."""
    return max(r.training_memory for r in build(None, method=method, rounds=1).fit().records)


FIRST = "fedpart(full_rounds=0, strata=('0',))"
SECOND = "fedpart(full_rounds=0, strata=('3',))"


def test_only_what_is_affordable_trains_and_travels() -> None:
    """With memory for all but the first stratum: it stays as it is, and what clients need stays below the budget."""
    budget = peak(SECOND) + 2000
    assert budget < peak(FIRST)
    fed = build(f"phone*4(memory={budget})")
    before = {n: t.clone() for n, t in fed.state.params.items()}
    whole = build(None, rounds=1).fit().records[0]
    (note,) = (n for n in fed.notes if "can train 0" in n)
    assert note == "no device of the fleet can train 0: it keeps its first values"
    assert "of the fleet, phone (4 clients) trains 4 of 5 strata: 3 – 14" in fed.notes
    records = fed.fit().records
    assert fed._facts()["unaffordable"] == ["0"]
    assert all(0 < r.training_memory <= budget for r in records)
    assert all(r.bytes_up < whole.bytes_up for r in records)
    moved = {n for n, t in fed.state.params.items() if not torch.equal(t, before[n])}
    assert moved == {n for n in before if not n.startswith(("0.", "1."))}
    assert {s for r in records for s in r.active} == {"3", "6", "9", "14"}


def test_devices_take_turns() -> None:
    """Groups by hand: three strata at most go into a phone, by the bytes that come up in time; a box trains all.

    A convolution of 4 channels has 4·4·9 + 4 numbers and its norm layer 8, and 9 more of statistics: 165 floats or so.
    """
    fed = build("phone*2(up='10kB/s'); box*2", deadline=0.33, stragglers="narrow", rounds=6)
    spans = fed._server.budgets
    phones = [spans.parts_of(r, [0, 1, 2, 3]) for r in range(4)]
    assert all(row[2] is None and row[3] is None for row in phones)
    parts = {part for row in phones for part in row[:2] if part is not None}
    assert len(parts) == 2
    assert all(row[0] is not row[1] for row in phones)  # two of them train both groups in every round
    assert all(phones[r][0] is phones[r + 1][1] for r in (0, 2))  # in rounds with the same z, one after the other
    records = fed.fit().records
    assert all(not r.late and not r.refused for r in records)
    assert all(len(r.active) == 5 for r in records)


@pytest.mark.parametrize(
    ("method", "room"), [("ditto", 1.5), ("scaffold", 1.15), ("fedrep(head_epochs=2)", 1.15), ("apfl + fednlr", 1.8)]
)
def test_who_is_to_be_in_time_reckons_with_what_techniques_add(method: str, room: float) -> None:
    """Time for plain training of everything, and some: with twice the passes, or bytes, only a part is done in time."""
    fleet = "phone*4(up='10kB/s', down='20kB/s', flops='2M/s')"
    (plain,) = build(fleet, rounds=1).fit().records
    how: dict[str, Any] = {"deadline": room * (plain.simulated_seconds or 0.0), "stragglers": "narrow", "rounds": 6}
    assert build(fleet, **how).notes == ()
    fed = build(fleet, method=method, **how)
    assert any("of the fleet, phone (4 clients) trains" in note for note in fed.notes)
    assert all(record.late == [] for record in fed.fit().records)
    assert len({name for record in fed.records for name in record.active}) == 5


@pytest.mark.parametrize("examples", [17, 19])
def test_a_short_batch_takes_less_time(examples: int) -> None:
    """After two batches of 8 one of 3, or none, for one example has no statistics: who has time trains everything."""
    how: dict[str, Any] = {"rounds": 1, "batch_size": 8, "engine": "serial", "fleet": "phone(flops='1M/s')"}
    (used,) = fs.Federation(model(), clients(examples), **how).fit().records
    tight = {**how, "stragglers": "narrow", "deadline": 1.01 * used.devices[0].seconds}
    fed = fs.Federation(model(), clients(examples), **tight)
    assert fed.notes == ()
    assert fed.fit().records[0].late == []


def test_a_client_that_can_take_no_step_trains_nothing() -> None:
    """One example has no statistics; the others are not held up by it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    fed = fs.Federation(network, clients(1, 12), fleet="watch(memory='1MB'); box", rounds=1, engine="serial")
    assert fed.notes == ("of the fleet, watch (1 client) can train no stratum: it takes part without training",)
    assert fed.fit().records[0].examples > 0


def test_a_technique_and_devices_take_turns_apart() -> None:
    """FedPart's period is four strata, the phones' two groups, and one phone takes part: all train in the end."""
    chosen = "fedpart(full_rounds=0, rounds_per_stratum=1, strata=('0', '3', '6', '14'))"
    how: dict[str, Any] = {"deadline": 0.33, "stragglers": "narrow", "participation": 1, "rounds": 24}
    fed = build("phone*4(up='10kB/s')", method=chosen, **how)
    assert [len(parts) for parts in fed._server.budgets.parts.values()] == [2]
    assert {s for r in fed.fit().records for s in r.active} == {"0", "3", "6", "14"}


@pytest.mark.parametrize("schedule", ["fedpart(", "select(score='cyclic', "])
def test_a_plan_of_a_technique_is_narrowed(schedule: str) -> None:
    """FedPart's active stratum trains at those who can afford it; one that nobody can afford has no turn."""
    budget, method = peak(SECOND) + 2000, f"{schedule}full_rounds=0, rounds_per_stratum=1)"
    fed = build(f"phone*4(memory={budget})", method=method, rounds=6)
    records = fed.fit().records
    assert [r.active for r in records] == [["3"], ["6"], ["9"], ["14"], ["3"], ["6"]]
    assert all(r.training_memory > 0 and r.steps > 0 and not r.refused for r in records)
    # A box that can afford it brings its turn back, and nothing moves at the phones in that round.
    fed = build(f"phone*3(memory={budget}); box", method=method, rounds=2)
    records = fed.fit().records
    assert [r.active for r in records] == [["0"], ["3"]]
    assert records[0].trainings[-1].clients == [3]


def test_what_clients_keep_is_told_of_all_strata() -> None:
    """Half of the five strata counted from the input, two, stay, whether devices can train them or not."""
    fed = build(f"phone*4(memory={peak(SECOND) + 2000})", method="lgfedavg", rounds=1)
    before = {n: t.clone() for n, t in fed.state.params.items()}
    fed.fit()
    moved = {n for n, t in fed.state.params.items() if not torch.equal(t, before[n])}
    stays = {n for n in before if n.startswith(("0.", "1.", "3.", "4."))}
    assert not moved & stays
    biases = {n for n in before if n.endswith("bias")}  # before a norm their gradient is zero, or what rounding leaves
    assert before.keys() - stays - biases <= moved


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"no device of the fleet can train any stratum of this model: a step with 8"):
        build("phone*4(memory='5kB')")
    with pytest.raises(UsageError, match=r"within 0.001 simulated seconds.*take a longer deadline"):
        build("phone*4(flops='1k/s')", deadline=0.001, stragglers="narrow")
    budget = peak(SECOND) + 2000
    for rule, told in (("krum(share=0.2)", True), ("median", False), ("krum(per='stratum')", False)):
        fed = build(f"phone*2(memory={budget}); box*2", method=f'fedavg(reduce="{rule}")', rounds=1)
        assert any("looks at whole updates" in note for note in fed.notes) == told
        fed.fit()
    fed = build("phone*2(memory='5kB'); box*2")
    assert fed.notes == ("of the fleet, phone (2 clients) can train no stratum: it takes part without training",)
    assert fed.fit().records[0].training_memory == peak("fedavg")
    assert build("phone*2(memory='1GB'); box*2").notes == ()


def test_who_is_left_out_trains_nothing() -> None:
    """The box alone could train the first stratum, and everything, but it is never asked."""
    budget = peak(SECOND) + 2000
    fed = build(f"phone*3(memory={budget}); box", without="3")
    assert "no device of the fleet can train 0: it keeps its first values" in fed.notes
    assert not any("nothing" in n or "no device" in n for n in build(f"phone*3(memory={budget}); box").notes)
    with pytest.raises(UsageError, match=r"no device of the fleet can train any stratum"):
        build("phone*3(memory='5kB'); box", without="3")


@pytest.mark.parametrize("engine", ["processes", "wire"])
def test_same_on_every_engine(engine: str, tmp_path: Path) -> None:
    budget = peak(SECOND) + 2000
    how: dict[str, Any] = {"rounds": 3, "method": "scaffold", "participation": 3}
    fleet = f"phone*3(memory={budget}); box"
    fed = build(fleet, **how)
    fed.fit()
    if engine == "wire":  # and after a resume
        begun = build(fleet, out=tmp_path / "run", **how)
        rounds = begun.rounds()
        next(rounds)
        rounds.close()
        again = build(fleet, out=tmp_path / "run", resume=True, **how)
        again.fit()
        check_same(again, fed)
    other = build(fleet, engine=engine, **({"workers": 2} if engine == "processes" else {}), **how)
    other.fit()
    check_same(other, fed)


def test_each_by_itself_where_updates_arrive_one_by_one() -> None:
    """Under FedBuff a client is asked alone when it begins: it then trains what its seconds were reckoned with."""
    dense = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    how: dict[str, Any] = {"method": "fedbuff(buffer=2)", "rounds": 3, "optimizer": "adam", "engine": "serial"}
    # Adam takes five times a layer's 16.6 kB: two of three large ones fit beside the 51 kB of all.
    fed = fs.Federation(
        nn.Sequential(nn.Flatten(), *dense), clients(9, 12, 16, 8), fleet="phone*4(memory='220kB', flops='1M/s')", **how
    )
    budgets = fed._server.budgets
    for number in range(3):
        together = budgets.parts_of(number, [0, 1, 2, 3])
        assert together == [budgets.parts_of(number, [client])[0] for client in range(4)]
        assert len(set(together)) > 1
    assert all(r.training_memory > 0 for r in fed.fit().records)


def test_sub_models_have_budgets_of_their_own() -> None:
    small = nn.Sequential(*list(model())[:6], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    renamed = nn.Sequential()
    for name, layer in zip(("0", "1", "2", "3", "4", "5", "12", "13", "14"), small, strict=True):
        renamed.add_module(name, layer)
    fed = fs.Federation(
        model(),
        clients(9, 12),
        clients(20)[0],
        archs={"small": renamed},
        arch_of=lambda client: "small" if client == 0 else "",
        rounds=1,
        batch_size=8,
        engine="serial",
        fleet=f"phone*2(memory={peak(SECOND) + 2000})",
    )
    found = {kind: len(parts) for kind, parts in fed._server.budgets.parts.items()}
    assert found.keys() == {("phone", "")}  # the small model fits as a whole
    fed.fit()
