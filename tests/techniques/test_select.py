"""Select: strata chosen by scores, which are worked out again in NumPy from the clients' data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.flower.secure_aggregation import check_sums
from fedstrata.techniques.fedpart import FedPart
from fedstrata.techniques.keep import Keep
from fedstrata.techniques.select import Select, rank, take, turns_of
from tests.contract.test_matrix import federation as small
from tests.contract.test_matrix import run as run_small
from tests.contract.test_matrix import same_bits, weights
from tests.techniques.worlds import FIRST, Vector, flat, mean, parties, run, slopes, trained, two_layers

KEYS = ("0.weight", "2.weight")
EXAMPLES = [3, 5, 2]


def parts_of(values: Vector) -> tuple[Vector, Vector]:
    """The two strata."""
    return values[:FIRST], values[FIRST:]


def scores(fed: fs.Federation) -> list[float]:
    found = fed.method.publish(fed.state.techniques)["score"]
    return [found[key] for key in KEYS]


def change(w: Vector, deltas: Sequence[Vector]) -> list[float]:
    """‖Δ‖/‖w‖, Δ the mean weighted by examples."""
    moved = mean(deltas, EXAMPLES)
    return [float(np.linalg.norm(d) / np.linalg.norm(v)) for d, v in zip(parts_of(moved), parts_of(w), strict=True)]


def divergence(w: Vector, deltas: Sequence[Vector]) -> list[float]:
    """√(Σ p_k‖δ_k − δ̄‖²/d), straight from its definition."""
    away = np.average((np.array(deltas) - mean(deltas, EXAMPLES)) ** 2, axis=0, weights=EXAMPLES)
    return [float(np.sqrt(part.sum() / part.size)) for part in parts_of(away)]


@pytest.mark.parametrize(("score", "expected"), [("change", change), ("divergence", divergence)])
def test_scores_of_changes_decide_what_trains(score: str, expected: Any) -> None:
    """Round 1 trains both layers; rounds 2 and 3 that of the higher score, which gets a new one; the other's stays.

    Round 4 begins a cycle, and trains both again.
    """
    clients = parties()
    method = f"select(score='{score}', full_rounds=1, rounds_per_stratum=1, temperature=0)"
    for rounds in range(1, 5):
        fed = run(method, clients, two_layers(), rounds=rounds)
    w, told = flat(two_layers()), [0.0, 0.0]
    names = ["0", "2"]
    for record in fed.records:
        whole = record.round in (1, 4)
        chosen = int(np.argmax(told))
        active = slice(None) if whole else (slice(0, FIRST), slice(FIRST, None))[chosen]
        assert record.active == (names if whole else [names[chosen]])
        deltas = [trained(w, c, active) for c in clients]
        new = expected(w, deltas)
        told = new if whole else [new[i] if i == chosen else told[i] for i in range(2)]
        w = w + mean(deltas, EXAMPLES)
    np.testing.assert_allclose(flat(fed), w, atol=1e-12)
    np.testing.assert_allclose(scores(fed), told, rtol=1e-6)


@pytest.mark.parametrize("rescaled", ["", " + fednova", " + fedavg(server_lr=0.5)", " + fedadam"])
def test_divergence_is_of_what_clients_sent(rescaled: str) -> None:
    """Whatever is made of it afterwards."""
    clients, w = parties(), flat(two_layers())
    fed = run("select" + rescaled, clients, two_layers(), rounds=1)
    np.testing.assert_allclose(scores(fed), divergence(w, [trained(w, c, slice(None)) for c in clients]), rtol=1e-6)


@pytest.mark.parametrize("engine", ["serial", "vmap"])
def test_gradient_norms(engine: str) -> None:
    """Σ p_k‖ḡ_k‖ at the received model, over all of a client's examples, where a batch holds them all."""
    clients, w = parties(), flat(two_layers())
    fed = run("select(score='gradnorm')", clients, two_layers(), rounds=1, engine=engine)
    norms = [[float(np.linalg.norm(part)) for part in parts_of(slopes(w, c))] for c in clients]
    np.testing.assert_allclose(scores(fed), np.average(norms, axis=0, weights=EXAMPLES), rtol=1e-9)


def test_signal_to_noise() -> None:
    """‖ḡ‖²/(Σ_b‖g_b − ḡ‖²/(B − 1)): with as many parts as examples, ḡ and g_b are of single ones, in any order.

    The client with one example tells nothing, and the mean is over the others.
    """
    clients, w = parties((0, 1, 2, 0), (1, 2, 2, 1), (0,)), flat(two_layers())
    fed = run("select(score='snr', batches=4)", clients, two_layers(), rounds=1)
    told = []
    for x, y in clients[:2]:
        each = np.array([slopes(w, (x[i : i + 1], y[i : i + 1])) for i in range(4)])
        signal, noise = each.mean(0) ** 2, each.var(0, ddof=1)
        told.append([s.sum() / n.sum() for s, n in zip(parts_of(signal), parts_of(noise), strict=True)])
    np.testing.assert_allclose(scores(fed), mean(told), rtol=1e-6)


def test_the_pass_is_counted() -> None:
    """A pass forward and backward of all parameters on one batch: as many FLOPs as a full step of so many examples."""
    clients = parties((0, 1, 2, 0, 1, 2))
    plain, scored = (run(m, clients, two_layers(), rounds=1, steps=1) for m in ("fedavg", "select(score='gradnorm')"))
    twice = run("fedavg", clients, two_layers(), rounds=1, steps=2)
    assert scored.records[0].flops == twice.records[0].flops > plain.records[0].flops
    vectorised = run("select(score='gradnorm')", clients, two_layers(), rounds=1, steps=1, engine="vmap")
    assert vectorised.records[0].flops == scored.records[0].flops


def test_clients_choose_by_what_they_sent_themselves() -> None:
    """After a round of everything each client trains the layer of its own higher ‖δ_k‖/‖w‖, as it last told of it.

    What it never told goes by the last round in which anybody did: the mean weighted by examples.
    """
    clients, parts = parties(), (slice(0, FIRST), slice(FIRST, None))
    method = "select(score='change', per='client', full_rounds=1, rounds_per_stratum=3, temperature=0)"
    fed = run(method, clients, two_layers(), rounds=6, participation=2)
    w, own, last = flat(two_layers()), dict[int, dict[int, float]](), [0.0, 0.0]
    sent: set[str] = set()
    newcomers = 0
    for record in fed.records:
        start = w.copy()
        asked = {}
        for k in record.clients:
            row = [own.get(k, {}).get(i, last[i]) for i in range(2)]
            asked[k] = [0, 1] if record.round == 1 else [int(np.argmax(row))]
            newcomers += record.round > 1 and k not in own
        sent.add(str(sorted(asked.values())))
        deltas = {k: trained(start, clients[k], slice(None) if len(a) == 2 else parts[a[0]]) for k, a in asked.items()}
        for i, part in enumerate(parts):
            told = {k: np.linalg.norm(deltas[k][part]) / np.linalg.norm(start[part]) for k in asked if i in asked[k]}
            if told:
                shares = [EXAMPLES[k] for k in told]
                w[part] += np.average([deltas[k][part] for k in told], axis=0, weights=shares)
                last[i] = float(np.average(list(told.values()), weights=shares))
            for k, number in told.items():
                own.setdefault(k, {})[i] = float(number)
    np.testing.assert_allclose(flat(fed), w, atol=1e-9)
    np.testing.assert_allclose(scores(fed), last, rtol=1e-6)
    assert newcomers
    assert len(sent) > 2


# What is chosen -------------------------------------------------------------------------------------------


def test_highest_scores_come_first() -> None:
    assert rank([1.0, 3.0, 2.0, 3.0], 0.0, torch.Generator()) == [1, 3, 2, 0]
    assert take([1, 3, 2, 0], [4, 4, 4, 4], 2, None) == [1, 3]


def test_draws_are_without_replacement_by_softmax() -> None:
    """p(i first) = e^{s_i/(T s̄)}/Σ; p(j next | i) is the same among those left. 4,000 draws: within 4 deviations."""
    values, heat, draws = [1.0, 2.0, 4.0], 0.5, 4000
    powers = np.exp(np.array(values) / (heat * np.mean(values)))
    rng = torch.Generator().manual_seed(3)
    found = Counter(tuple(rank(values, heat, rng)[:2]) for _ in range(draws))
    for (i, j), count in found.items():
        p = powers[i] / powers.sum() * powers[j] / (powers.sum() - powers[i])
        assert abs(count - draws * p) < 4 * np.sqrt(draws * p * (1 - p))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("sizes", "count", "share", "expected"),
    [
        ([1, 1, 1, 1, 1], 2, None, [[0, 1], [2, 3], [4]]),
        ([1, 2, 3, 4], 1, 0.3, [[0, 1], [2], [3]]),
        ([9, 1, 1, 9], 1, 0.1, [[0], [1, 2], [3]]),
        ([5, 5], 1, 1.0, [[0, 1]]),
    ],
)
def test_turns(sizes: list[int], count: int, share: float | None, expected: list[list[int]]) -> None:
    assert turns_of(sizes, count, share) == expected


def test_a_share_is_of_bytes() -> None:
    """30 % of 20: the first whatever its size, then each that fits into what is left."""
    assert take([0, 1, 2, 3], [9, 1, 1, 9], 1, 0.3) == [0]
    assert take([1, 0, 2, 3], [9, 1, 1, 9], 1, 0.3) == [1, 2]
    assert take([1, 2, 3, 0], [2, 3, 3, 12], 1, 0.3) == [1, 2]


# Runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "count"), [(1, 1), (2, 1), (2, 3)])
def test_cyclic_is_fedpart_bit_for_bit(held: int, count: int) -> None:
    """Over two cycles of four strata, one with a norm layer: parameters, statistics, bytes and FLOPs."""
    about: dict[str, Any] = {"full_rounds": 2, "rounds_per_stratum": held}
    rounds = 2 * (2 + held * -(-4 // count))
    one = run_small(Select(score="cyclic", strata=count, **about), rounds=rounds)
    two = run_small(FedPart(group=count, **about), rounds=rounds)
    assert same_bits(weights(two), {n: v for n, v in weights(one).items() if not n.startswith("select:")})
    told = [[(r.active, r.bytes_up, r.flops, r.loss) for r in fed.records] for fed in (one, two)]
    assert told[0] == told[1]


def test_random_turns_and_cyclic_ones_by_client() -> None:
    """A random choice is held for a turn; cyclic ones by client begin at another stratum for each."""
    about: dict[str, Any] = {"full_rounds": 0, "rounds_per_stratum": 2}
    found = [r.active for r in run_small(Select(score="random", **about), rounds=16).records]
    assert all(len(active) == 1 for active in found)
    assert found[::2] == found[1::2]
    assert len({active[0] for active in found}) > 2
    cyclic = small(Select(score="cyclic", per="client", **about), rounds=3, participation=5)
    names = [s.params[0] for s in cyclic.strata]
    asked = cyclic._server.open(cyclic.state, range(5), cyclic._work(0))
    assert [a.uploads[0] for a in asked] == [names[client % 4] for client in range(5)]


def test_the_same_everywhere_and_after_a_stop(tmp_path: Path) -> None:
    """One client after the other, worker processes, encoded messages; and stopped and resumed between two choices."""
    technique = Select(score="snr", per="client", full_rounds=1, rounds_per_stratum=2, share=0.6)
    whole = run_small(technique, rounds=5)
    assert {len(r.active) for r in whole.records} > {4}
    for engine in ({"engine": "processes", "workers": 2}, {"engine": "wire"}):
        assert same_bits(weights(whole), weights(run_small(technique, rounds=5, **engine)))
    stopped = small(technique, rounds=5, out=tmp_path / "run", checkpoint_seconds=0)
    rounds = stopped.rounds()
    for _ in range(3):
        next(rounds)
    rounds.close()
    resumed = run_small(technique, rounds=5, out=tmp_path / "run", checkpoint_seconds=0, resume=True)
    assert same_bits(weights(whole), weights(resumed))
    other = run_small(technique, rounds=5, seed=1)
    assert [r.active for r in other.records] != [r.active for r in whole.records]


@pytest.mark.parametrize("score", ["change", "gradnorm"])
def test_what_clients_keep_trains_in_every_round(score: Any) -> None:
    """The server never has a score of it: it is chosen beside the others, of which one at a time is.

    Clients' gradients are of all parameters, and those of the head the largest: that says nothing of what travels.
    """
    fed = run_small(Select(score=score, full_rounds=1, rounds_per_stratum=1, temperature=0), Keep(), rounds=4)
    assert all("head" in r.active for r in fed.records)
    assert [len(r.active) for r in fed.records] == [4, 2, 2, 2]


@pytest.mark.parametrize("per", ["round", "client"])
@pytest.mark.parametrize("score", ["gradnorm", "change"])
def test_no_round_is_for_what_nobody_trains(score: str, per: str) -> None:
    """FedBABU's head has the largest gradients, and no turn."""
    text = f"fedbabu + select(score='{score}', full_rounds=1, temperature=0, per='{per}')"
    fed = run(text, parties(), two_layers(), rounds=4)
    assert [r.active for r in fed.records[:-1]] == [["0"]] * 4


def test_clients_asked_alike_are_asked_once() -> None:
    """A choice for the round makes one template; one by client makes one for each, but not in rounds of everything."""
    for per, count in (("round", 1), ("client", 5)):
        fed = small(Select(per=per, full_rounds=1, rounds_per_stratum=1), rounds=3, participation=5)
        counts = [len(fed._server.open(fed.state, range(5), fed._work(0)).templates)]
        next(fed.rounds())
        counts.append(len(fed._server.open(fed.state, range(5), fed._work(1)).templates))
        assert counts == [1, count]


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("select(strata=1, share=0.3)", "leave one out"),
        ("select(strata=0)", "select's strata must be a whole number, 1 or more, not 0"),
        ("select(share=0)", "select's share must be above 0 and at most 1, not 0"),
        ("select(share=30)", "select's share must be above 0 and at most 1, not 30"),
        ("select(score='best')", "'best' does not fit"),
        ("select(per='stratum')", "'stratum' does not fit"),
        ("select(temperature=-1)", "select's temperature must be 0 or more"),
        ("select(score='cyclic', temperature=1)", "temperature is for scores"),
        ("select(full_rounds=0)", "nothing to begin with"),
        ("select(score='random', full_rounds=-1)", "select's full_rounds must be a whole number, 0 or more"),
        ("select(score='change', batches=2)", "batches are for gradnorm and snr"),
        ("select(score='snr', batches=1)", "select's batches must be a whole number, 2 or more"),
        ("select + fedpart", "both say which strata train"),
        ("select + groupavg", "groupavg has one for each group"),
        ("select + fedavg(reduce='median')", "does not pass through the mean"),
        ("fedldf + select", "both say which strata train"),
        ("progressive + fedldf", "both say which strata train"),
        ("fedldf(share=0)", "fedldf's share must be above 0"),
        ("fedldf(refresh=0)", "fedldf's refresh must be a whole number, 1 or more"),
        ("progressive(window=1)", "progressive's window must be a whole number, 2 or more"),
        ("progressive(threshold=2)", "progressive's threshold must be between 0 and 1"),
    ],
)
def test_refusals(text: str, why: str) -> None:
    with pytest.raises(fs.UsageError, match=why):
        fs.method(text)


def test_what_needs_nothing_of_clients_goes_beside_reducers() -> None:
    for score in ("change", "random", "cyclic"):
        fs.method(f"select(score='{score}') + fedavg(reduce='median')")


def test_models_and_sums_that_it_cannot_work_with() -> None:
    with pytest.raises(fs.UsageError, match="strata=9 are more than the 4 that the model has to train"):
        small(Select(strata=9))
    small(Select(strata=4))
    for text in ("select", "select(score='cyclic', per='client')", "fedldf"):
        with pytest.raises(fs.UsageError, match="only their sum is seen"):
            check_sums(fs.method(text), 1)
    check_sums(fs.method("select(score='change') + fedavg(weight='uniform')"), 1)


@pytest.mark.parametrize("text", ["fedldf", "select(per='client')", "select(score='snr', per='client')"])
def test_nobody_who_may_lie_says_who_sends_what_beside_a_reducer(text: str) -> None:
    """Two liars of nine, who claim to diverge most, would be the only ones to send a layer: their median is a lie."""
    for reduce in ("median", "krum", "geometric_median"):
        with pytest.raises(fs.UsageError, match="takes from the clients does not pass through the mean"):
            fs.method(f"fedavg(reduce='{reduce}') + {text}")
    for score in ("random", "cyclic"):
        fs.method(f"fedavg(reduce='median') + select(score='{score}', per='client')")


def test_one_client_cannot_make_scores_infinite() -> None:
    """In double precision a score may be as large as 1.8e308, and its weighted sum is not finite."""
    fed = small(Select(score="gradnorm"))
    (asked, *_) = fed._server.open(fed.state, [0], fed._work(0))
    slot = {"head.weight": torch.tensor(1.7e308, dtype=torch.float64)}
    assert "none is believed above 1e+30" in (Select().validate(slot, asked) or "")


@pytest.mark.parametrize("value", [torch.tensor(-2.0), torch.ones(2), torch.tensor(1)])
def test_a_score_that_is_none_is_refused(value: torch.Tensor) -> None:
    fed = small(Select(score="gradnorm"))
    (asked, *_) = fed._server.open(fed.state, [0], fed._work(0))
    assert Select().validate({"head.weight": torch.tensor(0.5)}, asked) is None
    assert "head.weight" in (Select().validate({"head.weight": value}, asked) or "")
    assert "no part of the model" in (Select().validate({"tail": torch.tensor(0.5)}, asked) or "")
