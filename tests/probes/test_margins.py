"""Margins against NumPy: exact for a linear model, and an independent loop for one that is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata import probes
from fedstrata.errors import UsageError

CLASSES, INPUTS = 4, 3


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES)).double()


def examples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(count, 1, INPUTS))), torch.from_numpy(rng.integers(0, CLASSES, count))


def test_a_linear_models_margins_are_distances_to_its_boundaries() -> None:
    """min over j ≠ y of (z_y − z_j)/‖w_y − w_j‖, or 0; and no step shorter than that changes the class, but one along
    the nearest boundary's normal that is a little longer does.
    """
    model = linear()
    x, y = examples(600)  # more than go through the model at once
    weight, bias = (p.detach().numpy() for p in model[1].parameters())  # type: ignore[index]
    flat = x.flatten(1).numpy()
    z = flat @ weight.T + bias
    expected = np.zeros(len(y))
    nearest = np.zeros(len(y), dtype=int)
    for i, own in enumerate(y.tolist()):
        others = [j for j in range(CLASSES) if j != own]
        distances = [(z[i, own] - z[i, j]) / np.linalg.norm(weight[own] - weight[j]) for j in others]
        nearest[i] = others[int(np.argmin(distances))]
        expected[i] = max(min(distances), 0)
    found = probes.margins(model, x, y)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert 0.1 < (expected > 0).mean() < 0.9
    for factor, changed in ((0.999, False), (1.001, True)):
        for i in np.flatnonzero(expected)[:20]:
            away = weight[y[i]] - weight[nearest[i]]
            moved = flat[i] - factor * expected[i] * away / np.linalg.norm(away)
            assert ((weight @ moved + bias).argmax() != y[i]) == changed


def test_a_curved_models_margins_are_by_its_slopes() -> None:
    """Two tanh units in NumPy: ∇z_j = Σ_u v_ju (1 − t_u²) w_u. At a place, slopes are those from its features on."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(INPUTS, 2), nn.Tanh(), nn.Linear(2, CLASSES)).double()
    x, y = examples(30)
    x = x[:, 0]
    w, b, v, c = (p.detach().numpy() for p in model.parameters())
    t = np.tanh(x.numpy() @ w.T + b)
    z = t @ v.T + c
    slopes = np.einsum("ju,nu,ui->nji", v, 1 - t**2, w)
    for place, features, gradients in (
        (None, x, slopes),
        ("1", torch.from_numpy(t), np.broadcast_to(v, (30, *v.shape))),
    ):
        expected = []
        for i, own in enumerate(y.tolist()):
            distances = [
                (z[i, own] - z[i, j]) / np.linalg.norm(gradients[i, own] - gradients[i, j])
                for j in range(CLASSES)
                if j != own
            ]
            expected.append(max(min(distances), 0))
        np.testing.assert_allclose(probes.margins(model, features, y, place), expected, rtol=0, atol=1e-12)
        assert any(expected)


def test_the_terms_of_theorem_4_1() -> None:
    """Each mean from `margins` itself; D_m is the shared examples, weighed as the client's classes are."""
    models = [linear(), nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES)).double()]
    held = [examples(9, 2), examples(7, 3)]
    held[0] = held[0][0], held[0][1] % 2  # two classes, and not as many of each
    fresh = examples(50, 4)
    found = probes.margin_terms(models, held, fresh)
    assert found.others == pytest.approx(
        [float(probes.margins(models[0], *held[1]).mean()), float(probes.margins(models[1], *held[0]).mean())]
    )
    assert found.sample == pytest.approx(
        [float(probes.margins(m, *own).mean()) for m, own in zip(models, held, strict=True)]
    )
    values, labels = probes.margins(models[0], *fresh).numpy(), fresh[1].numpy()
    shares = np.bincount(held[0][1].numpy(), minlength=2) / 9
    whole = sum(share * values[labels == c].mean() for c, share in enumerate(shares))
    assert found.whole[0] == pytest.approx(whole)
    assert found.bound(0, 0.25) == pytest.approx(found.sample[0] - abs(whole - found.sample[0]) - 0.5)
    lacking = probes.margin_terms(models, held, (fresh[0][labels > 0], fresh[1][labels > 0]))
    assert lacking.whole[0] is None
    assert lacking.bound(0, 0.0) is None


def test_what_has_no_margin() -> None:
    """A model that ignores its input is right for ever, which no mean counts; batch statistics and ids are refused."""
    constant = nn.Linear(INPUTS, CLASSES)
    nn.init.zeros_(constant.weight)
    x, y = torch.randn(5, INPUTS), torch.full((5,), int(constant.bias.argmax()))
    assert probes.margins(constant, x, y).tolist() == [np.inf] * 5
    assert probes.margins(constant, x, (y + 1) % CLASSES).tolist() == [0.0] * 5
    assert probes.mean_margin(probes.margins(constant, x, y)) is None
    with pytest.raises(UsageError, match="real numbers"):
        probes.margins(constant, x.long(), y)
    norm = nn.Sequential(nn.BatchNorm1d(INPUTS, track_running_stats=False), constant)
    with pytest.raises(UsageError, match="batch's statistics"):
        probes.margins(norm, x, y)
    with pytest.raises(UsageError, match="two or more clients"):
        probes.margin_terms([constant], [(x, y)], (x, y))
