"""What clients keep to themselves, against loops in NumPy on a model of two numbers: f(x) = h·(b·x), body b and head h.

The loss of a client is the mean of (h·b·x − y)² over its examples, all of which are in every batch. With e = h·b·x − y
its derivatives are ∂/∂b = mean 2e·h·x and ∂/∂h = mean 2e·b·x. The loops below know nothing of the library: they hold b
and h as two floats, and were written from the papers' algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.types import BUFFERS, PERSONAL, Turn
from fedstrata.techniques.apfl import ALPHA
from fedstrata.wire.messages import decode_assignment, encode
from fedstrata.wire.packing import WireError

RATE, ROUNDS = 0.05, 3
B0, H0 = 0.7, -0.4
XS = (np.array([1.0, -0.5, 2.0]), np.array([0.25, 1.5]))
YS = (np.array([2.0, -1.25, 3.5]), np.array([-0.5, -2.0]))
SHARES = (3 / 5, 2 / 5)
"""Of the examples."""


def slopes(b: float, h: float, client: int) -> tuple[float, float]:
    """(∂/∂b, ∂/∂h) of a client's loss."""
    x, y = XS[client], YS[client]
    e = h * b * x - y
    return float(np.mean(2 * e * h * x)), float(np.mean(2 * e * b * x))


def mean(values: list[float]) -> float:
    return sum(share * value for share, value in zip(SHARES, values, strict=True))


def net() -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(1, 1, bias=False))
    model.add_module("head", nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.double().get_parameter("body.weight").fill_(B0)
        model.get_parameter("head.weight").fill_(H0)
    return model


def federation(method: str, **settings: Any) -> fs.Federation:
    clients = [(torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None]) for x, y in zip(XS, YS, strict=True)]
    common: dict[str, Any] = {"task": "regression", "rounds": ROUNDS, "batch_size": 3, "lr": RATE, "engine": "serial"}
    return fs.Federation(net(), clients, method=method, **{**common, **settings})


def run(method: str, **settings: Any) -> fs.Federation:
    fed = federation(method, **settings)
    fed.fit()
    return fed


def globals_of(fed: fs.Federation) -> tuple[float, float]:
    return fed.state.params["body.weight"].item(), fed.state.params["head.weight"].item()


def kept(fed: fs.Federation, client: int, kind: str = PERSONAL) -> dict[str, float]:
    return {n.removesuffix(".weight"): t.item() for n, t in fed.memory(client).get(kind, {}).items()}


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]:
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


def fedavg_rounds(steps: int = 1) -> tuple[float, float, list[tuple[float, float]]]:
    """(b, h, every round's beginning), by federated averaging."""
    b, h, before = B0, H0, []
    for _ in range(ROUNDS):
        before.append((b, h))
        ends = []
        for client in (0, 1):
            bk, hk = b, h
            for _ in range(steps):
                db, dh = slopes(bk, hk, client)
                bk, hk = bk - RATE * db, hk - RATE * dh
            ends.append((bk, hk))
        b, h = mean([e[0] for e in ends]), mean([e[1] for e in ends])
    return b, h, before


# --- what stays ------------------------------------------------------------------------------------------------------


def keep_loop(head: bool) -> tuple[float, list[float]]:
    """One part is shared and averaged, the other stays: (the shared one, what each client has)."""
    shared, own = (B0, [H0, H0]) if head else (H0, [B0, B0])
    for _ in range(ROUNDS):
        ends = []
        for client in (0, 1):
            b, h = (shared, own[client]) if head else (own[client], shared)
            db, dh = slopes(b, h, client)
            ends.append(shared - RATE * (db if head else dh))
            own[client] -= RATE * (dh if head else db)
        shared = mean(ends)
    return shared, own


@pytest.mark.parametrize("method", ["fedper", "keep", "keep(strata='head')", "keep(strata=('he*',))"])
def test_fedper_shares_the_body(method: str) -> None:
    """W_B ← Σ n_k/n W_B,k; W_P,k ← W_P,k − η∂F_k: the head that the server has never moves."""
    fed, (b, own) = run(method), keep_loop(head=True)
    agree(globals_of(fed), (b, H0))
    agree([kept(fed, c) for c in (0, 1)], [{"head": h} for h in own])


def test_lgfedavg_shares_the_head() -> None:
    fed, (h, own) = run("lgfedavg"), keep_loop(head=False)
    agree(globals_of(fed), (B0, h))
    agree([kept(fed, c) for c in (0, 1)], [{"body": b} for b in own])


def test_what_stays_is_not_sent() -> None:
    """Nor sent down a second time: the server's never changes."""
    first, *later = federation("fedper").rounds()
    whole = next(iter(federation("fedavg").rounds()))
    assert first.bytes_down >= whole.bytes_down
    assert first.bytes_up < whole.bytes_up
    assert {record.bytes_down for record in later} == {later[0].bytes_down}
    assert later[0].bytes_down < first.bytes_down


def test_a_client_that_comes_back_goes_on_with_its_own() -> None:
    """Also in rounds in which its part does not train: with one stratum at a time, the body's rounds use its head."""
    fed = run("fedper + fedpart(full_rounds=0, rounds_per_stratum=1)", rounds=3)
    b, own = B0, [H0, H0]
    for active in ("body", "head", "body"):
        ends = []
        for client in (0, 1):
            db, dh = slopes(b, own[client], client)
            ends.append(b - RATE * db)
            own[client] -= RATE * dh * (active == "head")
        b = mean(ends) if active == "body" else b
    agree(globals_of(fed), (b, H0))
    agree([kept(fed, c) for c in (0, 1)], [{"head": h} for h in own])


def test_corrections_are_for_what_travels() -> None:
    """FedProx pulls the body towards the server's; the head, of which nobody else has one, is not pulled."""
    fed, mu, steps = run("fedper + fedprox(mu=0.5)", steps=2), 0.5, 2
    b, own = B0, [H0, H0]
    for _ in range(ROUNDS):
        ends = []
        for client in (0, 1):
            bk, hk = b, own[client]
            for _ in range(steps):
                db, dh = slopes(bk, hk, client)
                bk, hk = bk - RATE * (db + mu * (bk - b)), hk - RATE * dh
            ends.append(bk)
            own[client] = hk
        b = mean(ends)
    agree(globals_of(fed), (b, H0))
    agree([kept(fed, c) for c in (0, 1)], [{"head": h} for h in own])


def test_fedrep_trains_the_head_and_then_the_body() -> None:
    """Two steps of the head with the received body, then one of the body with the new head."""
    fed = run("fedrep(head_epochs=2, body_epochs=1)")
    b, own = B0, [H0, H0]
    for _ in range(ROUNDS):
        ends = []
        for client in (0, 1):
            for _ in range(2):
                own[client] -= RATE * slopes(b, own[client], client)[1]
            ends.append(b - RATE * slopes(b, own[client], client)[0])
        b = mean(ends)
    agree(globals_of(fed), (b, H0))
    agree([kept(fed, c) for c in (0, 1)], [{"head": h} for h in own])
    assert fed.records[0].steps == 2 * (2 + 1)


def test_what_is_held_fixed_costs_no_backward_pass() -> None:
    """Turns of head and body together cost less than as many epochs of both."""
    both, turns = run("fedper", epochs=2).records[0].flops, run("fedrep(head_epochs=1, body_epochs=1)").records[0].flops
    assert turns < both


# --- after the last round --------------------------------------------------------------------------------------------


def tuned(b: float, h: float, client: int, epochs: int, rate: float, head: bool = False) -> dict[str, float]:
    for _ in range(epochs):
        db, dh = slopes(b, h, client)
        b, h = b - rate * db * (not head), h - rate * dh
    return {"head": h} if head else {"body": b, "head": h}


@pytest.mark.parametrize(
    ("arguments", "epochs", "rate", "head"),
    [("epochs=2", 2, RATE, False), ("epochs=3, lr=0.01", 3, 0.01, False), ("epochs=2, strata='head'", 2, RATE, True)],
)
def test_finetune_leaves_the_global_model_alone(arguments: str, epochs: int, rate: float, head: bool) -> None:
    fed = run(f"finetune({arguments})")
    b, h, _ = fedavg_rounds()
    agree(globals_of(fed), (b, h))
    agree([kept(fed, c) for c in (0, 1)], [tuned(b, h, c, epochs, rate, head) for c in (0, 1)])
    assert len(fed.records) == ROUNDS + 1
    assert fed.records[-1].bytes_up < fed.records[0].bytes_up


def test_only_fine_tuning_is_left_after_the_last_round() -> None:
    """FedProx, FedNLR and FedPart's turns are part of the federation, and not of what comes after it."""
    plain, fed = (
        run("finetune(epochs=2)"),
        run("fednlr(mu=1.0) + finetune(epochs=2) + fedprox(mu=0.0) + fedpart(cycles=0)"),
    )
    agree([kept(fed, c) for c in (0, 1)], [kept(plain, c) for c in (0, 1)])
    pulled = run("finetune(epochs=2) + fedprox(mu=5.0) + fednlr(mu=3.0)")
    b, h = globals_of(pulled)
    agree([kept(pulled, c) for c in (0, 1)], [tuned(b, h, c, 2, RATE) for c in (0, 1)])


def test_fedbabu_learns_the_body_under_the_first_head() -> None:
    fed = run("fedbabu(epochs=2)")
    b = B0
    for _ in range(ROUNDS):
        b = mean([b - RATE * slopes(b, H0, client)[0] for client in (0, 1)])
    agree(globals_of(fed), (b, H0))
    agree([kept(fed, c) for c in (0, 1)], [tuned(b, H0, c, 2, RATE) for c in (0, 1)])


@pytest.mark.parametrize(
    "schedule",
    [
        "fedpart(full_rounds=1)",
        "fedpart(full_rounds=1, order='random')",
        "select(score='cyclic', full_rounds=1)",
        "select(score='random', full_rounds=1)",
        "fedldf(share=0.5)",
    ],
)
def test_a_head_that_nobody_trains_has_no_turn(schedule: str) -> None:
    """Whichever is written first; after the last round it is tuned."""
    for method in (f"fedbabu + {schedule}", f"{schedule} + fedbabu"):
        fed = run(method, rounds=6)
        assert [record.active for record in fed.records] == [*[["body"]] * 6, ["body", "head"]]


# --- a model of its own beside the global one ------------------------------------------------------------------------


def test_ditto_is_pulled_towards_what_was_received() -> None:
    """v ← v − η(∇F(v) + λ(v − w)), w as it was received, for every local step; the global model is FedAvg's."""
    fed, pull, steps = run("ditto(lambda_=0.5)", steps=2), 0.5, 2
    b, h, before = fedavg_rounds(steps)
    agree(globals_of(fed), (b, h))
    for client in (0, 1):
        vb, vh = B0, H0
        for wb, wh in before:
            for _ in range(steps):
                db, dh = slopes(vb, vh, client)
                vb, vh = vb - RATE * (db + pull * (vb - wb)), vh - RATE * (dh + pull * (vh - wh))
        agree(kept(fed, client, "ditto"), {"body": vb, "head": vh})


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl_mixes_and_learns_how(adaptive: bool) -> None:
    """v̄ = αv + (1 − α)w_k; v ← v − ηα∇F(v̄); α ← α − η⟨v − w_k, ∇F(v̄)⟩; w_k as it is before its own step."""
    fed, steps = run(f"apfl(alpha=0.25, adaptive={adaptive})", steps=3), 3
    b, h, before = fedavg_rounds(steps)
    agree(globals_of(fed), (b, h))
    for client in (0, 1):
        vb, vh, alpha = B0, H0, 0.25
        for wb, wh in before:
            for _ in range(steps):
                db, dh = slopes(alpha * vb + (1 - alpha) * wb, alpha * vh + (1 - alpha) * wh, client)
                apart = vb - wb, vh - wh
                vb, vh = vb - RATE * alpha * db, vh - RATE * alpha * dh
                if adaptive:
                    alpha = min(max(alpha - RATE * (apart[0] * db + apart[1] * dh), 0.0), 1.0)
                wb, wh = (w - RATE * d for w, d in zip((wb, wh), slopes(wb, wh, client), strict=True))
        agree(kept(fed, client, "apfl"), {"body": vb, "head": vh, ALPHA: alpha})


# --- who is judged by what -------------------------------------------------------------------------------------------


def loss(b: float, h: float, client: int) -> float:
    return float(np.mean((h * b * XS[client] - YS[client]) ** 2))


OWN: dict[str, Callable[[fs.Federation, int], tuple[float, float]]] = {
    "fedper": lambda fed, c: (globals_of(fed)[0], kept(fed, c)["head"]),
    "lgfedavg": lambda fed, c: (kept(fed, c)["body"], globals_of(fed)[1]),
    "finetune(epochs=2)": lambda fed, c: (kept(fed, c)["body"], kept(fed, c)["head"]),
    "ditto": lambda fed, c: (kept(fed, c, "ditto")["body"], kept(fed, c, "ditto")["head"]),
}


@pytest.mark.parametrize("method", OWN)
def test_global_and_own_models_are_judged_apart(method: str) -> None:
    """Each on the client's own test examples, here those that it trains on."""
    pairs = [(torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None]) for x, y in zip(XS, YS, strict=True)]
    common: dict[str, Any] = {"task": "regression", "rounds": ROUNDS, "batch_size": 3, "lr": RATE, "engine": "serial"}
    fed = fs.Federation(net(), [(pair, pair) for pair in pairs], method=method, **common)
    record = fed.fit().records[-1]
    assert record.own_metrics is not None
    assert (record.client_metrics is None) == fed.method.incomplete  # of a model that lacks what clients keep
    for client in (0, 1):
        assert record.own_metrics[client]["loss"] == pytest.approx(loss(*OWN[method](fed, client), client))
        if record.client_metrics is not None:
            assert record.client_metrics[client]["loss"] == pytest.approx(loss(*globals_of(fed), client))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("keep(strata='nothing')", "keep's strata: no stratum is called 'nothing'"),
        ("keep(strata=('body', 'head'))", "keep leaves nothing to travel: every client alone is the method 'local'"),
        ("keep(strata='norm')", "keep's strata: the model has no norm layer"),
        ("keep(strata=(3,))", r"method 'keep', argument 'strata': \(3,\) does not fit"),
        ("fedrep(head_epochs=0)", "fedrep's head_epochs must be a whole number, 1 or more, not 0"),
        ("lgfedavg(share=1.5)", "lgfedavg's share must lie between 0 and 1, not 1.5"),
        ("finetune(epochs=-1)", "finetune's epochs must be a whole number, 0 or more, not -1"),
        ("finetune(lr=0.0)", "finetune's lr must be above 0, not 0.0"),
        ("finetune + fedbabu", "'fedbabu' and 'finetune' cannot be combined: fedbabu fine-tunes by itself"),
        ("ditto(lambda_=-1.0)", "ditto's lambda_ must be 0 or more, not -1.0"),
        ("apfl(alpha=2.0)", "apfl's alpha must lie between 0 and 1, not 2.0"),
        ("fedper + feddf(noise=True)", "'fedper' and 'feddf' cannot be combined: clients keep parts of the model"),
    ],
)
def test_mistakes_get_one_sentence(method: str, says: str) -> None:
    with pytest.raises(fs.UsageError, match=says):
        federation(method)


def test_a_note_is_told_once() -> None:
    assert fs.method("fedper + fedrep").notes == fs.method("fedper").notes


def test_statistics_of_kept_norm_layers_cannot_be_averaged() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    clients = [(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))] * 2
    with pytest.raises(fs.UsageError, match=r"keep keeps norm layers.*say fedavg\(buffers='local'\)"):
        fs.Federation(model, clients, method="keep(strata='norm')")
    fed = fs.Federation(model, clients, method="fedbn", rounds=2, engine="serial")
    before = {n: p.clone() for n, p in fed.state.params.items()}
    fed.fit()
    moved = {n for n, p in fed.state.params.items() if not torch.equal(p, before[n])}
    assert {"0.weight", "2.weight", "2.bias"} <= moved
    assert moved.isdisjoint({"1.weight", "1.bias"})
    assert fed.memory(0)[PERSONAL].keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize("method", ["fedavg", "finetune(epochs=2)", "fedbabu(epochs=2)"])
def test_newcomers_get_the_global_part_and_what_is_stated(method: str) -> None:
    """One client of two sits out all rounds: the model is the other's, and so is `fairness`; at the end it is tuned."""
    pairs = [(torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None]) for x, y in zip(XS, YS, strict=True)]
    common: dict[str, Any] = {"task": "regression", "rounds": ROUNDS, "batch_size": 3, "lr": RATE, "engine": "serial"}
    fed = fs.Federation(net(), [(pair, pair) for pair in pairs], method=method, newcomers=0.5, **common)
    (late,) = fed.sampler.newcomers
    record = fed.fit().records[-1]
    assert all(r.clients == [1 - late] for r in fed.records[:ROUNDS])
    b, h = B0, H0
    for _ in range(ROUNDS):
        db, dh = slopes(b, h, 1 - late)
        b, h = b - RATE * db, h - RATE * dh * ("fedbabu" not in method)
    agree(globals_of(fed), (b, h))
    assert record.newcomers["global"] == pytest.approx(loss(b, h, late) ** 0.5)
    assert record.fairness is not None
    assert record.fairness.clients == 1
    if method != "fedavg":
        own = tuned(b, h, late, 2, RATE)
        assert record.clients == [0, 1]
        assert record.newcomers["own"] == pytest.approx(loss(own["body"], own["head"], late) ** 0.5)
        assert fed.history().summary["newcomers"] == record.newcomers


def test_newcomers_are_drawn_by_the_seed_and_leave_somebody() -> None:
    clients = [(torch.zeros(2, 1), torch.zeros(2, 1))] * 10
    common: dict[str, Any] = {"task": "regression", "rounds": 2, "newcomers": 0.3}
    drawn = [fs.Federation(net().float(), clients, seed=seed, **common).sampler for seed in (0, 0, 1)]
    assert drawn[0].newcomers == drawn[1].newcomers != drawn[2].newcomers
    assert sorted({*drawn[0].everybody, *drawn[0].newcomers}) == list(range(10))
    assert list(drawn[0].sample(2)) == list(range(10))
    for mistake, says in (
        ({"newcomers": 0.99}, r"newcomers = 0.99 leaves none of 10 clients to train the model"),
        ({"newcomers": 1.5}, r"newcomers = 1.5 does not fit"),
        ({"method": "centralised"}, "newcomers need clients"),
    ):
        with pytest.raises(fs.UsageError, match=says):
            fs.Federation(net().float(), clients, **{**common, **mistake})


def test_a_record_tells_the_rate_that_its_round_trained_with() -> None:
    fed = run("finetune(epochs=1, lr=0.01)", lr=0.05)
    assert [record.lr for record in fed.records] == [0.05] * ROUNDS + [0.01]


@pytest.mark.parametrize("method", ["fedrep(head_epochs=2)", "fednlr + finetune", "apfl + keep"])
def test_own_parts_survive_a_resume_and_worker_processes(method: str, tmp_path: Path) -> None:
    whole = run(method, rounds=4)
    stopped = federation(method, rounds=4, out=tmp_path / "run", checkpoint_seconds=0)
    rounds = stopped.rounds()
    next(rounds)
    rounds.close()
    resumed = run(method, rounds=4, out=tmp_path / "run", checkpoint_seconds=0, resume=True)
    spread = run(method, rounds=4, engine="processes", workers=2)
    for other in (resumed, spread):
        for client in (0, 1):
            mine, theirs = whole.memory(client), other.memory(client)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(t, theirs[kind][n]) for kind, slot in mine.items() for n, t in slot.items())


def test_turns_travel_and_are_checked() -> None:
    """As part of the message; turns of what does not train, or of no length, are refused."""
    fed = federation("fedrep(head_epochs=2)")
    asked = fed._server.open(fed.state, [0], fed._work(0))[0]
    assert [(turn.trains, turn.epochs) for turn in asked.turns] == [(("head.weight",), 2), (("body.weight",), 1)]
    assert decode_assignment(encode(asked)).turns == asked.turns
    plain = federation("fedper")
    assert b"turn" not in encode(plain._server.open(plain.state, [0], plain._work(0))[0])
    for turns in ((Turn(("head.weight", "head.weight"), 1),), (Turn(("head.weight",), -1),), (Turn(("other",), 1),)):
        with pytest.raises(WireError):
            decode_assignment(encode(replace(asked, turns=turns)))


# --- what a fresh eye found ------------------------------------------------------------------------------------------


def shifted(norm: bool = True) -> tuple[nn.Module, list[Any]]:
    """A classifier with a batch norm, and two clients whose inputs lie apart; each is judged by what it trains on."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Linear(4, 2))
        clients = []
        for shift in (-3.0, 3.0):
            x = torch.randn(12, 2) + shift
            clients.append((x, (x[:, 0] > shift).long()))
    return model, [(pair, pair) for pair in clients]


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
@pytest.mark.parametrize("method", ["finetune(epochs=3)", "fedbabu(epochs=3)"])
def test_statistics_are_tuned_with_the_model_and_stay(method: str, buffers: Any) -> None:
    """Nothing of the global model moves after the last round, and a client is judged with the statistics of its own."""
    model, clients = shifted()
    common: dict[str, Any] = {"rounds": 2, "engine": "serial", "buffers": buffers, "seed": 1}
    fed = fs.Federation(model, clients, method=method, **common)
    rounds = fed.rounds()
    for _ in range(2):
        before = next(rounds)
    state = {n: t.clone() for n, t in {**fed.state.params, **fed.state.buffers}.items()}
    (after,) = rounds
    assert all(torch.equal(t, state[n]) for n, t in {**fed.state.params, **fed.state.buffers}.items())
    assert after.client_metrics == before.client_metrics
    own = fed.memory(0)
    assert (BUFFERS in own) == (buffers != "drop")
    if buffers != "drop":
        tuned_model = fed.model
        tuned_model.load_state_dict({**tuned_model.state_dict(), **own[PERSONAL], **own[BUFFERS]})
        x, y = clients[0][0]
        share = (tuned_model.eval()(x).argmax(1) == y).float().mean().item()
        assert after.own_metrics is not None
        assert after.own_metrics[0]["accuracy"] == pytest.approx(share)


def test_a_model_beside_the_global_one_is_judged_with_statistics_of_the_client() -> None:
    """With λ = 0 and everybody's own statistics, Ditto's v_k is the model of `local`, from the same batches."""
    model, clients = shifted()
    common: dict[str, Any] = {"rounds": 1, "engine": "serial", "seed": 1, "batch_size": 12}
    ditto = fs.Federation(model, clients, method="ditto(lambda_=0.0)", **common)
    alone = fs.Federation(model, clients, method="local", **common)
    mine, theirs = ditto.fit().records[-1].own_metrics, alone.fit().records[-1].own_metrics
    assert mine == theirs


def test_everybody_else_is_silent_after_the_last_round() -> None:
    """FedImpro sends no statistics then and wants none; nothing is refused."""
    clients = [(torch.randn(8, 6), torch.arange(8) % 2) for _ in range(2)]
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    fed = fs.Federation(net, clients, method="fedimpro(split='0') + finetune(epochs=1)", rounds=2, engine="serial")
    records = fed.fit().records
    assert [record.refused for record in records] == [[], [], []]
    assert fed.memory(0)[PERSONAL].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_clients_tune_the_model_that_is_handed_out() -> None:
    """FedDyn judged by its clients' mean hands out w + h/α: after a hair's breadth of tuning it is still theirs."""
    fed = run("feddyn(judge='clients') + finetune(epochs=1, lr=1e-15)")
    handed_out = dict(fed.model.named_parameters())
    for client in (0, 1):
        agree(kept(fed, client), {n.removesuffix(".weight"): p.item() for n, p in handed_out.items()})
    assert handed_out["body.weight"].item() != fed.state.params["body.weight"].item()


def test_moon_remembers_what_a_client_keeps_as_it_left_it() -> None:
    """Features are those of the body, which it keeps: as it left it and as the next visit begins with it.

    So z_prev equals z_glob, both sides of the contrast are the same, and μ changes nothing; with the body of an earlier
    visit they would differ.
    """
    model, clients = shifted(norm=False)
    how: dict[str, Any] = {"rounds": 4, "lr": 0.2, "engine": "serial"}
    runs = [fs.Federation(model, clients, method=f"lgfedavg + moon(mu={mu})", **how) for mu in (0.0, 5.0)]
    plain, contrasted = (fed.fit() and fed.memory(0)[PERSONAL] for fed in runs)
    for name, tensor in plain.items():
        torch.testing.assert_close(contrasted[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("ditto + finetune", "both give every client a model of its own"),
        ("apfl + ditto", "both give every client a model of its own"),
        ("fedbabu + apfl", "both give every client a model of its own"),
        ("groupavg + fedper", "parts are named in one model"),
        ("fedbabu + groupavg", "parts are named in one model"),
        ("fedrep + fednova", "steps of the head are none of what travels"),
        ("lgfedavg + fedimpro", "lower layers of their own are not alike"),
        ("fedavg(reduce='fltrust') + fedper", "the server has no whole model to train for comparison"),
        ("fedbabu(head='*')", "fedbabu's head is all that trains"),
    ],
)
def test_company_that_has_no_meaning_is_refused(method: str, says: str) -> None:
    with pytest.raises(fs.UsageError, match=says):
        federation(method)


def test_features_are_not_shared_by_clients_with_lower_layers_of_their_own() -> None:
    """What stays may lie above the cut, or be norm layers, which make features more alike."""
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.Linear(3, 2))
    clients = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))] * 2
    for who, okay in (("keep(strata='0')", False), ("keep(strata=('0', '4'))", False), ("keep", True), ("fedbn", True)):
        method = f"fedavg(buffers='local') + {who} + fedimpro(split='2')"
        if okay:
            fs.Federation(model, clients, method=method)
            continue
        says = "lower layers of their own are not alike"
        with pytest.raises(fs.UsageError, match=f"clients keep .0. below it .* {says}"):
            fs.Federation(model, clients, method=method)


def test_what_is_frozen_does_not_count_as_what_travels() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    clients = [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))] * 2
    for method, says in (("fedper", "leaves nothing to travel"), ("fedbabu", "no body to learn")):
        with pytest.raises(fs.UsageError, match=says):
            fs.Federation(model, clients, method=method)
    with pytest.raises(fs.UsageError, match="keeps nothing that trains"):
        fs.Federation(model, clients, method="keep(strata='0')")
    with pytest.raises(fs.UsageError, match="leaves nothing to travel"):
        fs.Federation(nn.Sequential(nn.Linear(2, 2)), clients, method="lgfedavg")
