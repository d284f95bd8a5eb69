"""FedRS, Li and Zhan 2021."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    CLASSES,
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
    run,
    tensors,
)


@pytest.mark.parametrize("alpha", [0.5, 0.0])
def test_three_rounds(alpha: float) -> None:
    """The restricted softmax: exp(α_c z_c)/Σ_j exp(α_j z_j), with α_c = 1 for classes that the client has, else α.

    The gradient of the logits is then α_c·(p_c − 1[c = y]). The third client has a single class.
    """
    clients = parties()
    fed = run(f"fedrs(alpha={alpha})", clients)
    w = flat(linear())
    scales = [np.where(np.bincount(y, minlength=CLASSES) > 0, 1.0, alpha) for _, y in clients]
    for _ in range(3):
        ends = [descend(w, lambda v, c=c, s=s: gradient(v, c, scale=s)) for c, s in zip(clients, scales, strict=True)]
        w = mean(ends, [len(y) for _, y in clients])
    agree(fed, w)
    differ(w, fedavg(clients, present(fed)))


def test_evaluation_is_not_restricted() -> None:
    """The test loss is that of the plain softmax."""
    test = parties((0, 1, 2, 2))[0]
    fed = run("fedrs", parties(), test=tensors(test))
    logits = fed.model(tensors(test)[0]).detach().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert fed.records[-1].loss == pytest.approx(-np.log(p[np.arange(4), test[1]]).mean(), abs=1e-9)
