"""FedLC, Zhang et al. 2022."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.techniques.fedlc import FedLC, without_label
from tests.techniques.worlds import (
    CLASSES,
    ClientData,
    Vector,
    agree,
    descend,
    differ,
    fedavg,
    flat,
    gradient,
    layer,
    linear,
    mean,
    parties,
    present,
    pulled_back,
    run,
    softmax,
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


def printed_gradient(w: Vector, party: ClientData, shift: Vector) -> Vector:
    """∇ of −log(e^{z_y} / Σ_{i≠y} e^{z_i}) for z = logits + shift: q − onehot, q the softmax over the others."""
    x, y = party
    own = np.eye(CLASSES)[y]
    return pulled_back((softmax(np.where(own == 1, -np.inf, layer(w, x) + shift)) - own) / len(y), x)


@pytest.mark.parametrize("tau", [1.0, 0.0])
def test_the_printed_denominator(tau: float) -> None:
    """−log(e^{z_y} / Σ_{i≠y} e^{z_i}) = log Σ_{i≠y} e^{z_i} − z_y: the gradient is −1 for z_y, q_i for the others.

    By hand, for logits 1, 2, 3 and label 0: log(e² + e³) − 1 = 2.31326, against log(e + e² + e³) − 1 = 2.40761 with the
    true class. The third client has a single class: it has no others and stays where it is.
    """
    logits, labels = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0])
    with_all = torch.nn.functional.cross_entropy(logits, labels)
    assert with_all.item() == pytest.approx(2.40761, abs=1e-5)
    assert (with_all + without_label(logits, labels)).item() == pytest.approx(2.31326, abs=1e-5)
    clients = parties()
    fed = run(f"fedlc(tau={tau}, denominator='others')", clients)
    w, other = flat(linear()), flat(linear())
    shifts = [shift(y, tau) for _, y in clients]
    for _ in range(3):
        pairs = list(zip(clients[:2], shifts, strict=False))
        ends = [descend(w, lambda v, c=c, s=s: printed_gradient(v, c, s)) for c, s in pairs]
        alike = [descend(other, lambda v, c=c, s=s: gradient(v, c, shift=s)) for c, s in pairs]
        sizes = [len(y) for _, y in clients]
        w, other = mean([*ends, w], sizes), mean([*alike, other], sizes)
    agree(fed, w, within=1e-6)
    differ(w, other)


def test_the_printed_denominator_for_many_clients_at_once() -> None:
    """Clients of unequal size, so that batches are padded, and of one class, which do not move."""
    clients = parties((0, 1, 2, 2, 1), (1, 1, 0), (2, 2))
    found, alone = (run("fedlc(denominator='others')", clients, engine=engine) for engine in ("vmap", "serial"))
    for name, value in alone.state.params.items():
        np.testing.assert_allclose(found.state.params[name].numpy(), value.numpy(), rtol=0, atol=1e-9)


def test_a_denominator_that_there_is_not() -> None:
    with pytest.raises(fs.UsageError, match="denominator"):
        FedLC(denominator="some")  # type: ignore[arg-type]


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
