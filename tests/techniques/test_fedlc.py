"""FedLC, Zhang et al. 2022."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    CLASSES,
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
    run,
    tensors,
)


def shift(labels: Vector, tau: float) -> Vector:
    """−τ·n_c^(−1/4); −∞ where n_c = 0."""
    counts = np.bincount(labels, minlength=CLASSES)
    return np.array([-tau * n**-0.25 if n else -np.inf for n in counts])


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_three_rounds(tau: float) -> None:
    """The calibrated loss is −log(e^{z_y − τ n_y^{−1/4}} / Σ_c e^{z_c − τ n_c^{−1/4}}).

    For n_c → 0 the exponent goes to −∞: a class that the client lacks has probability 0 and no gradient. The third
    client has a single class, whose probability is 1: it does not move at all.
    """
    clients = parties()
    fed = run(f"fedlc(tau={tau})", clients)
    w = flat(linear())
    shifts = [shift(y, tau) for _, y in clients]
    for _ in range(3):
        ends = [descend(w, lambda v, c=c, s=s: gradient(v, c, shift=s)) for c, s in zip(clients, shifts, strict=True)]
        np.testing.assert_array_equal(ends[2], w)
        w = mean(ends, [len(y) for _, y in clients])
    agree(fed, w, within=1e-6)
    differ(w, fedavg(clients, present(fed)))


def test_a_class_that_all_lack_keeps_its_row() -> None:
    """Nobody has class 2: its weights and its bias stay where they were."""
    fed = run("fedlc", parties((0, 0, 1), (1, 0, 1)))
    before = dict(linear().named_parameters())
    for name, after in fed.state.params.items():
        np.testing.assert_array_equal(after[2].numpy(), before[name][2].detach().numpy())


def test_evaluation_is_not_calibrated() -> None:
    """The test loss is that of the plain softmax over all classes."""
    test = parties((0, 1, 2, 2))[0]
    fed = run("fedlc", parties(), test=tensors(test))
    logits = fed.model(tensors(test)[0]).detach().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert fed.records[-1].loss == pytest.approx(-np.log(p[np.arange(4), test[1]]).mean(), abs=1e-9)
