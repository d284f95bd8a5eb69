"""The contract on a model with low-rank adapters: techniques that need them, and a choice of those that do not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.technique import Technique, overrides
from fedstrata.models.adapted import base_names
from fedstrata.techniques.fedavg import chain, parse
from fedstrata.techniques.feddyn import FedDyn
from fedstrata.techniques.fednlr import FedNLR
from fedstrata.techniques.fedpart import FedPart
from fedstrata.techniques.fedprox import FedProx
from fedstrata.techniques.inco import InCo
from fedstrata.techniques.keep import Keep
from fedstrata.techniques.quantise import Quantise
from fedstrata.techniques.scaffold import Scaffold
from fedstrata.techniques.select import Select
from fedstrata.techniques.topk import TopK
from tests.contract.rows import ADAPTER_ROWS, Row
from tests.contract.test_matrix import TABLE, same_bits, weights

pytest.importorskip("peft", reason="the extra peft is not installed")

EACH = pytest.mark.parametrize("row", ADAPTER_ROWS, ids=[r.technique.name for r in ADAPTER_ROWS])
OTHERS: list[Technique] = [
    FedPart(full_rounds=1, rounds_per_stratum=1),
    Select(full_rounds=1, rounds_per_stratum=1),
    FedNLR(),
    Scaffold(),
    FedDyn(alpha=0.5),
    FedProx(mu=0.5),
    Keep(strata="lora_B"),
    InCo(),
    TopK(share=0.3),
    TopK(share=0.3, feedback=False),
    Quantise(bits=8),
]
"""Techniques of the matrix that layer-wise work on adapters builds on."""
REDUCERS = ("median", "multi_krum(per='stratum')")


def adapted(rank: int, deep: bool = True) -> nn.Module:
    """The matrix's net with adapters on all layers but the head."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = nn.Sequential()
        net.add_module("first", nn.Linear(6, 8))
        net.add_module("norm", nn.LayerNorm(8))
        net.add_module("relu", nn.ReLU())
        if deep:
            net.add_module("second", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        net.add_module("head", nn.Linear(8, 4))
    return fs.adapt(net, f"lora(r={rank})", torch.zeros(2, 6), seed=1)


@cache
def world() -> tuple[nn.Module, list[Any], Any]:
    """A model with adapters, and clients of unequal size and skewed labels."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        clients = []
        for client, size in enumerate((9, 6, 5, 14)):
            y = torch.randint(0, 2, (size,)) + client % 3
            clients.append((torch.randn(size, 6) + y[:, None], y))
        test = (torch.randn(40, 6), torch.randint(0, 4, (40,)))
    return adapted(2), clients, test


def federation(*techniques: Technique, **settings: Any) -> fs.Federation:
    """Three clients a round; weights count examples, so that any two techniques agree on them."""
    settings = {"participation": 3, "batch_size": 5, "lr": 0.3, "rounds": 3, "engine": "serial", **settings}
    base = {name: settings.pop(name) for name in ("reduce",) if name in settings}
    return fs.Federation(*world(), method=chain(*techniques, weight="examples", **base), **settings)


def fits(*techniques: Technique) -> bool:
    """False where the techniques refuse each other, or one of them what another leaves of the adapters."""
    try:
        federation(*techniques)
    except fs.UsageError:
        return False
    return True


def run(*techniques: Technique, **settings: Any) -> fs.Federation:
    fed = federation(*techniques, **settings)
    for _ in fed.rounds():
        pass
    return fed


@cache
def shared_run(*techniques: Technique) -> fs.Federation:
    return run(*techniques)


def check(*techniques: Technique, changes_base: bool, **settings: Any) -> None:
    """Through messages the bits are the same; something is learnt; the base moves only where it may."""
    serial, wired = run(*techniques, **settings), run(*techniques, engine="wire", **settings)
    assert same_bits(weights(serial), weights(wired))
    assert [(r.loss, r.bytes_up, r.bytes_down) for r in serial.records] == [
        (r.loss, r.bytes_up, r.bytes_down) for r in wired.records
    ]
    before, base = dict(serial._given[0].named_parameters()), base_names(serial.model)
    moved = {n for n, p in serial.state.params.items() if not torch.equal(p, before[n])}
    assert bool(moved & base) is changes_base
    assert moved - base
    assert all(torch.isfinite(p).all() for p in serial.state.params.values())


def changes_base(technique: Technique) -> bool:
    """True if a technique adds something to frozen weights."""
    return technique.name in ("fedexlora", "flora")


@EACH
def test_alone(row: Row) -> None:
    check(row.technique, changes_base=changes_base(row.technique))
    assert not same_bits(shared_run().state.params, shared_run(row.technique).state.params)
    if row.neutral is not None:
        assert same_bits(shared_run().state.params, run(row.neutral).state.params)
    for technique in (row.technique, row.neutral):
        assert technique is None or parse(str(chain(technique)), TABLE) == chain(technique)


MIXING = [r.technique for r in ADAPTER_ROWS if r.technique.mixes_ranks]


@pytest.mark.parametrize("technique", MIXING, ids=[t.name for t in MIXING])
def test_clients_of_other_rank_and_depth(technique: Technique, tmp_path: Path) -> None:
    """One has adapters of rank 1, one no `second`; alone, with others, many at once, and resumed."""
    _, clients, _ = world()
    archs = {"low": adapted(1), "shallow": adapted(2, deep=False)}
    settings: dict[str, Any] = {"archs": archs, "arch_of": lambda c: {1: "low", 2: "shallow"}.get(c, "")}
    settings["participation"] = len(clients)
    beside = [t for t in (Scaffold(), FedPart(full_rounds=1), TopK(share=0.5, feedback=False)) if fits(technique, t)]
    check(technique, *beside, changes_base=changes_base(technique), **settings)
    many, one = weights(run(technique, engine="vmap", **settings)), run(technique, **settings)
    for name, value in weights(one).items():
        torch.testing.assert_close(many[name], value, rtol=0, atol=3e-5)
    assert {*one.records[-1].arch_accuracy} == {*archs}
    stopped = federation(technique, out=tmp_path / "run", checkpoint_seconds=0, **settings)
    rounds = stopped.rounds()
    next(rounds)
    rounds.close()
    resumed = run(technique, out=tmp_path / "run", checkpoint_seconds=0, resume=True, **settings)
    assert same_bits(weights(one), weights(resumed))


def test_other_ranks_in_worker_processes() -> None:
    """The bits of one after the other; and all probes can look at such clients."""
    settings: dict[str, Any] = {"archs": {"low": adapted(1)}, "arch_of": lambda c: "low" if c % 2 else "", "rounds": 2}
    techniques = next(t for t in MIXING if fits(t, Scaffold())), Scaffold()
    ours = run(*techniques, probe="all", **settings)
    theirs = run(*techniques, engine="processes", workers=2, **settings)
    assert same_bits(weights(ours), weights(theirs))
    assert len(ours.probes[-1]["clients"]) == 3
    assert {"cosine", "weightdiv", "cka", "drift", "divergence"} <= ours.probes[-1].keys()


@EACH
def test_resumed(row: Row, tmp_path: Path) -> None:
    stopped = federation(row.technique, out=tmp_path / "run", checkpoint_seconds=0)
    rounds = stopped.rounds()
    next(rounds), next(rounds)
    rounds.close()
    resumed = run(row.technique, out=tmp_path / "run", checkpoint_seconds=0, resume=True)
    assert same_bits(weights(shared_run(row.technique)), weights(resumed))


@EACH
def test_many_clients_at_once(row: Row) -> None:
    """By torch.func, up to rounding."""
    assert row.technique.vectorises or not overrides(row.technique, "local")
    ours, theirs = weights(run(row.technique, engine="vmap")), weights(shared_run(row.technique))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=3e-5)


@EACH
def test_a_model_without_adapters_is_refused(row: Row) -> None:
    _, clients, test = world()
    with pytest.raises(
        fs.UsageError, match=rf"'{row.technique.name}' is for low-rank adapters, and the model has none"
    ):
        fs.Federation(nn.Linear(6, 4), clients, test, method=chain(row.technique))


@EACH
def test_pairs(row: Row) -> None:
    """With all of the others that go together with it, and it is refused by name beside those that do not."""
    beside: list[Technique] = []
    for other in (*OTHERS, *(r.technique for r in ADAPTER_ROWS if r is not row)):
        if fits(row.technique, *beside, other):
            beside.append(other)
        elif not fits(row.technique, other):
            with pytest.raises(fs.UsageError, match=rf"'{row.technique.name}'|'{other.name}'"):
                federation(other, row.technique)
    assert len(beside) >= 5
    check(*beside, row.technique, changes_base=changes_base(row.technique), rounds=2)


@pytest.mark.parametrize("technique", OTHERS, ids=[t.name for t in OTHERS])
def test_techniques_of_the_matrix(technique: Technique) -> None:
    check(technique, changes_base=False)
    assert not same_bits(shared_run().state.params, shared_run(technique).state.params)


@pytest.mark.parametrize("reduce", REDUCERS)
def test_robust_reducers(reduce: str) -> None:
    check(changes_base=False, reduce=reduce)
    beside = [r.technique for r in ADAPTER_ROWS if not r.technique.needs_deltas]
    check(beside[0], changes_base=False, reduce=reduce)
    guarded = [r.technique for r in ADAPTER_ROWS if r.technique.needs_deltas]
    for technique in guarded:
        with pytest.raises(fs.UsageError, match=f"'{technique.name}'"):
            federation(technique, reduce=reduce)
