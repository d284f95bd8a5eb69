"""Top-k against NumPy loops in float64, with its error memory; its message against what is refused of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedstrata as fs
from fedstrata.core.encoding import Malformed
from fedstrata.techniques.topk import TopK, find_largest, is_mapped, pack_places, place_type, read_places
from tests.techniques.worlds import (
    SKEWED,
    Vector,
    agree,
    descend,
    differ,
    fedavg,
    flat,
    gradient,
    linear,
    mean,
    parties,
    present,
    returns,
    run,
)


def keep_largest(v: Vector, k: int) -> Vector:
    """The k numbers of largest size, zeros elsewhere; one by one, with no sort of the library's."""
    left, kept = list(range(len(v))), np.zeros_like(v)
    for _ in range(k):
        best = max(left, key=lambda place: abs(v[place]))
        kept[best] = v[best]
        left.remove(best)
    return kept


@pytest.mark.parametrize("feedback", [True, False])
def test_rounds_in_which_clients_sit_out_and_come_back(feedback: bool) -> None:
    """a_k = e_k + Δ_k; up travels C(a_k), of ⌈0.3·12⌉ = 4 numbers; e_k ← a_k − C(a_k), 0 without feedback.

    The model is one stratum of 12 numbers. Who does not take part keeps its e_k.
    """
    clients = parties()
    fed = run(f"topk(share=0.3, feedback={feedback})", clients, rounds=6, participation=2)
    assert returns(present(fed))
    w, errors = flat(linear()), [np.zeros(12)] * 3
    for took_part in present(fed):
        sent = []
        for k in took_part:
            change = descend(w, lambda v, c=clients[k]: gradient(v, c)) - w + errors[k]  # type: ignore[misc]
            sent.append(keep_largest(change, 4))
            errors[k] = (change - sent[-1]) * feedback
        w = w + mean(sent, [len(clients[k][1]) for k in took_part])
    agree(fed, w)
    differ(w, fedavg(clients, present(fed)))
    for k, error in enumerate(errors):
        found = fed.memory(k).get("topk", {})
        assert bool(found) is feedback
        if feedback:
            whole = np.concatenate([found[n].numpy().ravel() for n in ("weight", "bias")])
            np.testing.assert_allclose(whole, error, rtol=0, atol=1e-9)


def opposed(pull: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A client of f(w) = ½((2·w_1 − pull)² + (w_2 − 1)²), of two examples."""
    return torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([[pull], [1.0]]).double()


def test_with_feedback_it_converges_on_a_quadratic_on_which_it_does_not_without() -> None:
    """Both clients' largest number is always the first, in which they cancel: only errors let the second one travel.

    The optimum of the mean is (0, 1). Without feedback the model stays at (0, 0) for ever. Steps become smaller, as in
    the paper's theorem: what a client holds back is worth a few of them.
    """
    ends = {}
    for feedback in (True, False):
        net = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(net.weight)
        method = f"topk(share=0.5, feedback={feedback})"
        how: dict[str, Any] = {"rounds": 60, "steps": 1, "batch_size": 2, "lr": 0.1}
        how |= {"task": "regression", "schedule": "cosine", "engine": "serial"}
        fed = fs.Federation(net, [opposed(1.0), opposed(-1.0)], method=method, **how)
        fed.fit()
        ends[feedback] = fed.state.params["weight"].flatten().tolist()
    assert ends[False] == [0.0, 0.0]
    assert math.dist(ends[True], (0.0, 1.0)) < 0.02


def chain() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_shares_of_strata_and_what_a_schedule_leaves_alone() -> None:
    """Strata of 28, 40 and 18 numbers, of which ⌈0.1·28⌉ = 3, ⌈0.2·40⌉ = 8 and all travel, one stratum per round.

    What is remembered of a stratum stays as it is while others train.
    """
    method = "topk(share=0.1, rates=(('head', 1.0), ('2', 0.2))) + fedpart(full_rounds=0, rounds_per_stratum=1)"
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parties()]
    fed = fs.Federation(chain(), data, method=method, rounds=7, steps=3, lr=0.3, batch_size=100, engine="serial")
    before, memory, counts = dict(fed.state.params), {k: {} for k in range(3)}, {"0": 3, "2": 8, "4": 18}
    for record in fed.rounds():
        (active,) = record.active
        moved = {n: fed.state.params[n] != p for n, p in before.items()}
        assert all(n.startswith(f"{active}.") for n, where in moved.items() if where.any())
        assert sum(int(where.sum()) for where in moved.values()) <= 3 * counts[active]
        for k in range(3):
            now = fed.memory(k)["topk"]
            assert all(torch.equal(now[n], e) for n, e in memory[k].items() if not n.startswith(f"{active}."))
            left = sum(int((now[n] != 0).sum()) for n in now if n.startswith(f"{active}."))
            assert left == {"0": 28, "2": 40, "4": 18}[active] - counts[active]
            memory[k] = now
        before = dict(fed.state.params)


def test_the_server_reads_the_numbers_that_were_sent() -> None:
    """Of ties the first ones travel; −0, NaN and infinities are no trouble."""
    assert find_largest(torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5]), 2).tolist() == [1, 2]
    assert find_largest(torch.tensor([0.0, -0.0, 0.0]), 2).tolist() == [0, 1]
    assert find_largest(torch.tensor([1.0, math.nan, -math.inf, 5.0]), 2).tolist() == [1, 2]
    assert find_largest(torch.tensor([1.0, 3.0, 2.0]).bfloat16(), 1).tolist() == [1]


@pytest.mark.parametrize(
    ("length", "k", "size"),
    [
        (9, 9, 0),
        (256, 3, 3),
        (256, 32, 32),
        (257, 3, 6),
        (257, 17, 33),
        (65536, 9, 18),
        (65537, 9, 36),
        (65537, 5000, 8193),
    ],
)
def test_places_take_the_fewest_bytes(length: int, k: int, size: int) -> None:
    """One byte each up to 256 numbers, two up to 65,536, four beyond; ⌈d/8⌉ for a map; none where all travel."""
    places = torch.randperm(length, generator=torch.Generator().manual_seed(k))[:k].sort().values
    places[-1] = length - 1  # the largest one there is
    packed = pack_places(places, length)
    assert packed.nbytes == size
    assert torch.equal(read_places(packed, length, k), places)


@given(st.integers(1, 70), st.data())
@settings(max_examples=200, deadline=None)
def test_hostile_places(length: int, data: st.DataObject) -> None:
    """Whatever bytes come: k different places, in order, or a refusal."""
    k = data.draw(st.integers(1, length))
    size = 0 if k == length else -(-length // 8) if is_mapped(length, k) else k
    packed = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size)), dtype=torch.uint8)
    try:
        places = read_places(packed, length, k).tolist()
    except Malformed:
        return
    assert places == sorted(set(places))
    assert len(places) == k
    assert set(places) <= set(range(length))
    assert torch.equal(pack_places(torch.tensor(places), length), packed)


def test_the_choice_between_a_map_and_places() -> None:
    """200 numbers: a map has 25 bytes, as 25 places have."""
    assert [is_mapped(200, k) for k in (24, 25)] == [False, True]
    assert [place_type(d) for d in (256, 257, 2**16 + 1, 2**32 + 1)] == [
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    ]


def test_a_share_is_rounded_up_as_it_is_written() -> None:
    """0.07·100 is 7.000000000000001 in binary: seven numbers, not eight. One at least."""
    from fedstrata.core.encoding import VectorForm
    from fedstrata.core.types import Stratum

    stratum = Stratum("a", "a", ("a.w",), ())
    forms = [VectorForm(stratum, length, torch.float32) for length in (100, 101, 3, 1)]
    assert [TopK(share=0.07).count_encoded(form) for form in forms] == [7, 8, 1, 1]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("topk(share=0)", "above 0 and at most 1, not 0"),
        ("topk(1.5)", "above 0 and at most 1, not 1.5"),
        ("topk(rates=(('head', 2.0),))", "above 0 and at most 1, not 2.0"),
        (
            "topk(rates=('head', 0.5))",
            r"are pairs of a name pattern and a number, such as \(\('head', 0.5\),\), not \('head'",
        ),
        ("topk + topk", "names 'topk' twice"),
        ("topk + local", "'local' and 'topk' cannot be combined|'topk' and 'local' cannot be combined"),
    ],
)
def test_what_it_refuses(method: str, says: str) -> None:
    with pytest.raises(fs.UsageError, match=says):
        fs.method(method)


def test_rates_for_strata_that_are_not_there() -> None:
    with pytest.raises(fs.UsageError, match=r"topk's rates: no stratum is called 'layer9\*'"):
        run("topk(rates=(('layer9*', 0.5),))", parties())


@pytest.mark.parametrize(
    ("reduce", "fault"), [("median", "signflip"), ("krum", "alie"), ("fltrust", "stuck"), ("mean", "nan")]
)
def test_reducers_faults_and_probes_see_what_was_encoded_as_if_it_had_not_been(reduce: str, fault: str) -> None:
    """Where everything travels, encoded and read again, nothing changes but bytes; FLTrust's own update never is."""
    how: dict[str, Any] = {"rounds": 3, "steps": 2, "lr": 0.3, "engine": "serial", "faults": f"{fault}(clients=(1,))"}
    how |= {"probe": ["divergence", "cosine"], "probe_every": 1}
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parties(*SKEWED, *SKEWED)]
    how["trusted"] = data[1] if reduce == "fltrust" else None
    runs = []
    for technique in ("", " + topk(share=1.0) + quantise(bits=32)"):
        fed = fs.Federation(chain(), data, method=f"fedavg(reduce='{reduce}'){technique}", **how)
        fed.fit()
        runs.append(fed)
    plain, encoded = runs
    assert all(torch.equal(p, encoded.state.params[n]) for n, p in plain.state.params.items())
    assert [r.refused for r in plain.records] == [r.refused for r in encoded.records]
    for one, two in zip(plain.probes, encoded.probes, strict=True):
        assert [one[name] for name in ("divergence", "cosine")] == [two[name] for name in ("divergence", "cosine")]
    assert [r.bytes_up for r in plain.records] != [r.bytes_up for r in encoded.records]


def test_what_techniques_remember_on_a_client_is_of_what_it_trained() -> None:
    """FedDyn's h_k is made of the client's own change, SCAFFOLD's c_k of its gradients: the same bits as without.

    What FedDyn's server sums up, h, is made of what came.
    """
    plain, encoded = (run(f"feddyn + scaffold{more}", parties(), rounds=1) for more in ("", " + topk(share=0.2)"))
    for k in range(3):
        for name in ("feddyn", "scaffold"):
            one, two = plain.memory(k)[name], encoded.memory(k)[name]
            assert all(torch.equal(one[n], two[n]) for n in one)
    states = [fed.state.techniques["feddyn"]["weight"] for fed in (plain, encoded)]
    assert not torch.equal(*states)
