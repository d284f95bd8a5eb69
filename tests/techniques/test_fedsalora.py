"""FedSA-LoRA in NumPy: the mean of A, and every client's own B."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedstrata as fs
from tests.techniques.adapted_worlds import adapted, by_hand, check, counts, means, run_adapted
from tests.techniques.worlds import differ, federation, parties


def test_three_rounds() -> None:
    """A visit begins with the mean of A and the client's last B_k; the server's B never moves."""
    clients = parties()
    fed = run_adapted("fedsalora", clients)
    start = by_hand(adapted())
    now, own = start, [start.b] * len(clients)
    for _ in range(3):
        ends = [replace(now, b=b).train(c) for c, b in zip(clients, own, strict=True)]
        now, own = replace(means(ends, counts(clients)), b=start.b), [one.b for one in ends]
    check(fed, now)
    for client, b in enumerate(own):
        kept = fed.memory(client)["(personal)"]
        assert all("lora_B" in n for n in kept)
        for n, value in b.items():
            np.testing.assert_allclose(kept[f"{n}.lora_B.default.weight"].numpy(), value, rtol=0, atol=1e-9)
    differ(own[0]["2"], own[1]["2"])


def test_what_else_stays() -> None:
    model = fs.adapt(fs.build_model("mlp(hidden=(4,))", (3,), 3, seed=0).double(), "lora(r=2)", seed=1)
    fed = federation("fedsalora(strata=('lora_B', 'head'))", parties(), model, rounds=1)
    kept = fed.method.kept(fed.strata)
    assert {n for n in kept if "lora_B" not in n} == {"head.weight", "head.bias"}
    with pytest.raises(fs.UsageError, match="fedsalora's strata: no stratum is called 'lora'"):
        federation("fedsalora(strata='lora')", parties(), model)
