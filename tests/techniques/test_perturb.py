"""Noise on updates."""

from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.techniques.perturb import noise_like
from tests.techniques.worlds import federation, flat, parties


def test_the_noise_is_a_share_of_the_changes_own_deviation() -> None:
    """std(Δ) = 2 and a share of 0.5: noise of deviation 1, within five standard errors. None on one number."""
    delta = {"a": torch.tensor([-2.0, 2.0]).repeat(20_000), "b": torch.tensor([7.0])}
    noise = noise_like(delta, 0.5, torch.Generator().manual_seed(0))
    assert abs(float(noise["a"].std()) - 1) < 5 / (2 * 40_000) ** 0.5
    assert abs(float(noise["a"].mean())) < 5 / 40_000**0.5
    assert float(noise["b"]) == 0


def test_every_client_draws_its_own_and_the_mean_moves() -> None:
    plain, noisy, again = (
        federation(method, parties(), rounds=2) for method in ("fedavg", "perturb(noise=0.5)", "perturb(noise=0.5)")
    )
    for fed in (plain, noisy, again):
        fed.fit()
    assert abs(flat(noisy) - flat(plain)).max() > 1e-3
    assert (flat(noisy) == flat(again)).all()


def test_refusals() -> None:
    with pytest.raises(fs.UsageError, match="perturb's noise must be 0 or more, not -1"):
        fs.method("perturb(noise=-1.0)")
