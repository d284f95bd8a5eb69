"""Noise on updates."""

from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.techniques.perturb import deviation
from tests.techniques.worlds import federation, flat, parties


def test_the_noise_is_a_share_of_the_changes_own_deviation() -> None:
    """std(Δ) = 2 and a share of 0.5: noise of deviation 1, within five standard errors. None on one number."""
    many, one, none = torch.tensor([-2.0, 2.0]).repeat(20_000).view(200, 200), torch.tensor([7.0]), torch.tensor(3.0)
    noise = 0.5 * deviation(many, 2) * torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    assert abs(float(noise.std()) - 1) < 5 / (2 * 40_000) ** 0.5
    assert abs(float(noise.mean())) < 5 / 40_000**0.5
    assert float(deviation(one, 1)) == float(deviation(none, 0)) == 0
    assert deviation(torch.stack([many, 3 * many]), 2).flatten().tolist() == [2.0, 6.0]


def test_many_clients_at_once_draw_what_each_draws_alone() -> None:
    found, alone = (federation("perturb(noise=0.5)", parties(), rounds=2, engine=e) for e in ("vmap", "serial"))
    for fed in (found, alone):
        fed.fit()
    assert abs(flat(found) - flat(alone)).max() < 1e-9


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
