"""FLASC in NumPy: clients begin with the largest numbers of each factor, train all, and send the largest changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.types import Assignment
from fedstrata.wire.messages import decode_assignment, encode
from fedstrata.wire.packing import WireError, pack, unpack
from tests.techniques.adapted_worlds import SHAPES, adapted, by_hand, check, counts, run_adapted
from tests.techniques.worlds import Vector, differ, federation, parties


def largest(values: Vector, share: float) -> Vector:
    """The ⌈share·d⌉ numbers of largest size; no two are alike here."""
    flat = values.ravel().copy()
    flat[np.argsort(-np.abs(flat))[math.ceil(share * flat.size) :]] = 0
    return flat.reshape(values.shape)


def test_three_rounds() -> None:
    """P ← P + Σ p_k top_up(P_k − top_down(P)), up of A and B of a layer together, down of each by itself."""
    clients, up, down = parties(), 0.4, 0.6
    fed = run_adapted(f"flasc(up={up}, down={down})", clients)
    now = start = by_hand(adapted())
    for _ in range(3):
        a, b = ({n: largest(v, down) for n, v in factors.items()} for factors in (now.a, now.b))
        begun, changes = replace(now, a=a, b=b), {n: [] for n in SHAPES}
        for client in clients:
            end = begun.train(client)
            for n in SHAPES:
                both = np.concatenate([(end.a[n] - a[n]).ravel(), (end.b[n] - b[n]).ravel()])
                changes[n].append(largest(both, up))
        means = {n: np.average(found, axis=0, weights=counts(clients)) for n, found in changes.items()}
        parts = {n: np.split(mean, [now.a[n].size]) for n, mean in means.items()}
        new_a = {n: now.a[n] + one.reshape(now.a[n].shape) for n, (one, _) in parts.items()}
        now = replace(now, a=new_a, b={n: now.b[n] + two.reshape(now.b[n].shape) for n, (_, two) in parts.items()})
    check(fed, now)
    differ(now.whole(), start.whole())
    differ(now.whole(), by_hand(run_adapted("fedavg", clients).state.params).whole())


def test_bytes_both_ways() -> None:
    """Of 8,448 numbers in adapters a tenth travels, and a bit for each that says whether it does."""
    model = fs.adapt(fs.build_model("mlp(hidden=(512,))", (512,), 2, seed=0), "lora(r=8, targets='linear')", seed=1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p.data, generator=torch.Generator().manual_seed(0))
    clients = [(torch.randn(4, 512, generator=torch.Generator().manual_seed(k)), torch.arange(4) % 2) for k in (0, 1)]
    numbers, head = 8 * 1024, 2 * 512 + 2
    found = {}
    for method in ("fedavg", "flasc(up=0.1, down=0.1)", "flasc(up=0.1, down=0.1) + quantise(bits=8)"):
        fed = fs.Federation(model, clients, method=method, rounds=2, lr=0.1, engine="wire")
        found[method] = fed.fit().records[1]
    plain, sparse, rounded = found.values()
    for whole, part in ((plain.bytes_up, sparse.bytes_up), (plain.bytes_down, sparse.bytes_down)):
        saved = 2 * (4 * 0.9 * numbers - numbers / 8)
        assert abs(whole - part - saved) < 0.02 * saved
    assert sparse.bytes_up - rounded.bytes_up == pytest.approx(2 * 3 * (0.1 * numbers + head), rel=0.05)


def sent() -> Assignment:
    """What a client is asked for, with a factor of which most is zero."""
    fed = federation("flasc(down=0.3)", parties(), adapted())
    return fed._server.open(fed.state, [0], fed._work(0))[0]


def test_what_is_sparse_comes_back_whole() -> None:
    asked = sent()
    assert wire.size(asked) == len(encode(asked))
    base = {n: p for n, p in asked.params.items() if n not in asked.to_send}
    read = decode_assignment(encode(asked), None, lambda arch: base)
    assert read.sparse == asked.sparse
    assert len(read.sparse) == 4
    assert all(torch.equal(read.params[n], p) for n, p in asked.params.items())
    assert sum(int((asked.params[n] != 0).sum()) for n in asked.sparse) < 0.5 * sum(
        asked.params[n].numel() for n in asked.sparse
    )


@pytest.mark.parametrize("wrong", ["shape", "places", "values", "names", "large"])
def test_sparse_numbers_that_do_not_fit_are_refused(wrong: str) -> None:
    asked = sent()
    head, tensors = unpack(encode(asked))
    name = head["sparse"][0]
    if wrong == "shape":
        head["shapes"][0] = [7, 7]
    if wrong == "large":
        head["shapes"][0] = [2**40, 2**20]
    if wrong == "names":
        head["sparse"][0] = "other"
    if wrong == "places":
        tensors[f"place/{name}"] = torch.full_like(tensors[f"place/{name}"], 255)
    if wrong == "values":
        tensors[f"nonzero/{name}"] = tensors[f"nonzero/{name}"][1:]
    with pytest.raises(WireError):
        decode_assignment(pack(head, tensors), None, lambda arch: asked.params)


def test_settings_are_checked() -> None:
    for wrong in ("up=0", "down=1.5"):
        with pytest.raises(fs.UsageError, match="must be above 0 and at most 1"):
            fs.method(f"flasc({wrong})")
    with pytest.raises(fs.UsageError, match="both choose which numbers of a change travel"):
        fs.method("flasc + topk")
