"""Quantisation against NumPy loops in float64, alone and behind top-k; its packing; what no client can have sent."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.encoding import Encoder, Step, VectorForm
from fedstrata.core.rng import derive, generator
from fedstrata.core.stacks import Memories
from fedstrata.core.types import Update, Work
from fedstrata.flower.differential_privacy import Privacy
from fedstrata.flower.secure_aggregation import check_sums
from fedstrata.techniques.quantise import pack_halves, quantise, read_halves
from tests.techniques.test_topk import chain, keep_largest
from tests.techniques.worlds import (
    LR,
    Vector,
    agree,
    descend,
    federation,
    flat,
    gradient,
    linear,
    mean,
    parties,
    present,
    run,
    tensors,
)


def rounded(v: Vector, levels: int, noise: Vector | None) -> Vector:
    """s·q."""
    s = max(abs(x) for x in v) / levels
    return s * (np.rint(v / s) if noise is None else np.floor(v / s + noise))


def noise_of(number: int, client: int, count: int) -> Vector:
    """The uniform numbers of a visit, from the stream that its seed names."""
    seed = derive(0, "visit", number, client)
    return torch.rand(count, generator=generator(seed, "quantise", "encode"), dtype=torch.float64).numpy()


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_rounds_of_stochastic_rounding(bits: int, levels: int) -> None:
    """w ← w + mean of s·⌊Δ_k/s + u⌋, s = max|Δ_k|/levels, of 12 numbers; nothing is remembered."""
    clients = parties()
    fed = run(f"quantise(bits={bits})", clients, participation=2)
    w = flat(linear())
    for number, took_part in enumerate(present(fed)):
        changes = [descend(w, lambda v, c=clients[k]: gradient(v, c)) - w for k in took_part]  # type: ignore[misc]
        sent = [rounded(d, levels, noise_of(number, k, 12)) for k, d in zip(took_part, changes, strict=True)]
        w = w + mean(sent, [len(clients[k][1]) for k in took_part])
    agree(fed, w)
    assert not any(fed.memory(k) for k in range(3))


def test_rounds_behind_topk_with_both_errors() -> None:
    """d_0 = Δ + e + ε, d_1 = its 6 largest, d_2 = these to the nearest of 15 levels; e ← d_0 − d_1, ε ← d_1 − d_2.

    In whatever order they are written.
    """
    clients = parties()
    methods = ["topk(share=0.5)", "quantise(bits=4, rounding='nearest', feedback=True)"]
    fed, other = (run(" + ".join(some), clients, rounds=4) for some in (methods, methods[::-1]))
    w, left, lost = flat(linear()), [np.zeros(12)] * 3, [np.zeros(12)] * 3
    for _ in range(4):
        sent = []
        for k, client in enumerate(clients):
            d = descend(w, lambda v, c=client: gradient(v, c)) - w + left[k] + lost[k]  # type: ignore[misc]
            chosen = keep_largest(d, 6)
            sent.append(rounded(chosen, 7, None))
            left[k], lost[k] = d - chosen, chosen - sent[-1]
        w = w + mean(sent, [len(y) for _, y in clients])
    agree(fed, w)
    agree(other, w)
    for k in range(3):
        for name, expected in (("topk", left[k]), ("quantise", lost[k])):
            found = np.concatenate([t.numpy().ravel() for t in (fed.memory(k)[name][n] for n in ("weight", "bias"))])
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_its_mean_is_the_number_itself() -> None:
    """Of 20,000 draws of numbers between two levels: within 5 standard errors of the mean, s/2 each at most."""
    v, draws = torch.linspace(-1, 1, 23, dtype=torch.float64), 20_000
    codes, scale = quantise(v.repeat(draws), 7, torch.rand(23 * draws, generator=generator(1), dtype=torch.float64))
    found = (codes * scale).view(draws, 23).mean(0)
    assert ((found - v).abs() < 5 * (1 / 7) / 2 / draws**0.5).all()
    nearest, scale = quantise(v, 7, None)
    assert ((nearest * scale - v).abs() > 0.05).any()  # which it is not for the nearest level


@pytest.mark.parametrize("count", [1, 2, 15, 16])
def test_two_numbers_per_byte(count: int) -> None:
    codes = (torch.arange(count) % 15 - 7).to(torch.int8)
    packed = pack_halves(codes)
    assert (packed.dtype, len(packed)) == (torch.uint8, (count + 1) // 2)
    assert torch.equal(read_halves(packed, count), codes)
    assert pack_halves(torch.tensor([-7, 7], dtype=torch.int8)).tolist() == [1 + 16 * 15]


def test_a_change_of_zeros_and_one_that_is_not_finite() -> None:
    codes, scale = quantise(torch.zeros(3), 7, torch.full((3,), 0.999))
    assert (codes.tolist(), scale.tolist()) == ([0, 0, 0], [0.0])
    for bad in (float("nan"), float("inf")):
        assert not quantise(torch.tensor([1.0, bad]), 7, None)[1].isfinite().any()


def test_bytes_are_those_of_the_encoded_message() -> None:
    """28, 40 and 18 numbers in four bits, but the last stratum in eight: 14 + 20 + 18 bytes, and a float64 each."""
    data = [tensors(party) for party in parties()]
    settings: dict[str, Any] = {"rounds": 1, "steps": 2, "batch_size": 100, "lr": LR, "engine": "serial"}
    method = "quantise(bits=4, rates=(('head', 8),))"
    fed = fs.Federation(chain(), data, method=method, **settings)
    sent: list[Update] = []
    original = fed._engine.run

    def noted(assignments: Any, recall: Any) -> Any:
        for update, memory in original(assignments, recall):
            sent.append(update)
            yield update, memory

    fed._engine.run = noted  # type: ignore[method-assign]
    (record,) = fed.fit().records
    assert [{n: t.nbytes for n, t in u.delta.items()} for u in sent] == 3 * [{"0": 14, "2": 20, "4": 18}]
    assert record.bytes_up == sum(len(wire.encode(update)) for update in sent)
    assert record.slots_up == {"quantise": 3 * 3 * 8}


def test_the_first_rate_that_fits_counts() -> None:
    """The middle stratum travels as it is."""
    fed = federation("quantise(bits=8, feedback=True, rates=(('2', 32), ('*', 4)))", parties(), chain(), rounds=1)
    fed.fit()
    errors = fed.memory(0)["quantise"]
    assert {n for n, e in errors.items() if not e.any()} == {"2.weight", "2.bias"}


HOSTILE: dict[str, Any] = {
    "another stratum": (lambda d, t, q: d.update(x=d.pop("4")), "its encoded change lacks the stratum '4'"),
    "one too many": (lambda d, t, q: d.update(x=d["4"]), "has an unexpected 'x'"),
    "no places": (lambda d, t, q: t.pop("4"), "part of 'topk' lacks the stratum '4'"),
    "numbers as they are": (lambda d, t, q: d.update({"4": torch.ones(9)}), r"float32 \[9\] instead of int8 \[9\]"),
    "too few": (lambda d, t, q: d.update({"4": d["4"][1:]}), r"int8 \[8\] instead of int8 \[9\]"),
    "a matrix": (lambda d, t, q: d.update({"4": d["4"].view(3, 3)}), r"int8 \[3, 3\] instead of int8 \[9\]"),
    "places of another type": (lambda d, t, q: t.update({"4": t["4"].int()}), "are int32"),
    "too many bits": (lambda d, t, q: t.update({"4": t["4"] | 255}), "places are 24 instead of 9, in '4'"),
    "a place beyond the end": (lambda d, t, q: t.update({"4": _bits(*range(8), 23)}), "beyond the 18 numbers"),
    "a place twice": (
        lambda d, t, q: t.update({"0": torch.tensor([5, 5, 6], dtype=torch.uint8)}),
        "one is there twice",
    ),
    "places out of order": (
        lambda d, t, q: t.update({"0": torch.tensor([6, 5, 7], dtype=torch.uint8)}),
        "out of order",
    ),
    "a place beyond all": (
        lambda d, t, q: t.update({"0": torch.tensor([5, 6, 28], dtype=torch.uint8)}),
        "beyond the 28",
    ),
    "no scale": (lambda d, t, q: q.update({"4": torch.empty(0)}), r"scales of '4' are float32 \[0\] instead"),
    "a scale below 0": (lambda d, t, q: q.update({"4": -q["4"]}), "the scale of '4' is below 0"),
    "a scale that is no number": (lambda d, t, q: q["4"].fill_(float("nan")), "NaN or infinite"),
    "a product that is no number": (lambda d, t, q: (q["4"].fill_(1e308), d["4"].fill_(127)), "NaN or infinite"),
}


def _bits(*places: int) -> Tensor:
    """A map of 24 bits."""
    value = sum(1 << place for place in places)
    return torch.tensor([value >> 8 * byte & 255 for byte in range(3)], dtype=torch.uint8)


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_client_can_have_encoded_is_refused_in_a_sentence(kind: str) -> None:
    """One client's of three; the round goes on, and nothing of it is kept."""
    spoil, says = HOSTILE[kind]
    fed = federation("topk(share=0.1, rates=(('4', 0.5),)) + quantise", parties(), chain())
    asked = fed._server.open(fed.state, [0, 1, 2], Work(steps=2, batch_size=100))
    visits = list(fed._engine.run(asked, lambda clients: Memories.of([{} for _ in clients])))
    update = visits[1][0]
    delta, slots = dict(update.delta), {name: dict(slot) for name, slot in update.slots.items()}
    spoil(delta, slots["topk"], slots["quantise"])
    bad = replace(update, delta=delta, slots=slots)
    visits[1] = (wire.decode_update(wire.encode(bad)), visits[1][1])
    kept: list[int] = []
    after, outcome = fed._server.close(fed.state, asked, visits, lambda clients, memories: kept.extend(clients))
    assert outcome.accepted == tuple(kept) == (0, 2)
    (refused,) = outcome.refused
    assert refused["client"] == 1
    assert re.search(says, refused["why"])
    assert all(p.isfinite().all() for p in after.params.values())


class Other(Encoder):
    """Chooses numbers, too."""

    name: ClassVar[str] = "other"
    step: ClassVar[Step] = "select"
    feedback = False

    def count_encoded(self, form: VectorForm) -> int:
        return 1


def test_there_is_one_technique_for_each_step() -> None:
    from fedstrata.techniques.topk import TopK

    with pytest.raises(fs.UsageError, match="'other' and 'topk' cannot be combined: both choose which numbers"):
        fs.chain(Other(), TopK())


def test_who_cannot_read_it() -> None:
    """Secure aggregation adds up before anybody reads; and a bound on a change says nothing of what is held back."""
    method = fs.method("topk + fedavg(weight='uniform')")
    with pytest.raises(fs.UsageError, match="'topk' lets every client send its change in a form of its own"):
        check_sums(method, 1)
    with pytest.raises(fs.UsageError, match="'topk' sends something else than the change that dp_clip bounds"):
        Privacy(clip=1.0).check(method, 1)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("quantise(bits=3)", "argument 'bits': 3 does not fit"),
        ("quantise(rates=(('head', 2),))", "bits must be 8, 4 or 32, not 2"),
        ("quantise(rates=(('head', True),))", "are pairs of a name pattern"),
        ("quantise(rounding='up')", "argument 'rounding'"),
        ("centralised + quantise", "cannot be combined"),
    ],
)
def test_what_it_refuses(method: str, says: str) -> None:
    with pytest.raises(fs.UsageError, match=says):
        fs.method(method)
