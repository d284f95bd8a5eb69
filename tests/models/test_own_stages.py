"""Stages of an ordinary module: found by running it, or named; taps, the rest of the model, FedImpro and probes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.models.stages import find_stages, mark_stages, params_above, positions


class Ordinary(nn.Module):
    """Two stages with code of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)  # registered first, run last
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).relu()
        return self.head(x.mean((2, 3)))


class Around(Ordinary):
    """Something goes around the features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.features(x) + x).relu().mean((2, 3)))


X = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def test_stages_are_found_in_the_order_in_which_they_run() -> None:
    model = Ordinary()
    assert find_stages(model, X) == ("features", "head")
    assert find_stages(Around(), X) == ("stem", "head")
    marked = mark_stages(model, X)
    assert fs.stages(marked) == ("features", "head")
    assert positions(marked) == ("features.0", "features.1", "features.2", "features", "head")
    assert "_fedstrata_stages" not in model.state_dict()


@pytest.mark.parametrize("stage", ["features.0", "features", "head"])
def test_a_tap_and_the_rest_are_the_model(stage: str) -> None:
    """Against the modules called by hand."""
    model = mark_stages(Ordinary(), X)
    features = model.features
    by_hand = {"features.0": features[0](X), "features": features(X), "head": model(X)}
    there = fs.tap(model, X, stage)
    assert torch.equal(there, by_hand[stage])
    assert torch.equal(fs.run_from(model, there, stage), model(X))
    doubled = fs.run_from(model, 2 * by_hand["features"], "features")
    assert torch.equal(doubled, model.head((2 * features(X)).relu().mean((2, 3))))


def test_parameters_above() -> None:
    model = mark_stages(Ordinary(), X)
    assert set(params_above(model, "features")) == {"head.weight", "head.bias"}
    assert set(params_above(model, "features.0")) == {
        f"{n}.{k}" for n in ("features.2", "head") for k in ("weight", "bias")
    }
    assert params_above(model, "head") == ()


def clients() -> list[tuple[Tensor, Tensor]]:
    made = []
    for client in range(3):
        x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(client))
        made.append((x, (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long()))
    return made


def train(model: nn.Module, **settings: Any) -> fs.Federation:
    run = fs.Federation(model, clients(), clients()[0], rounds=2, lr=0.05, engine="serial", **settings)
    run.fit()
    return run


def test_fedimpro_is_that_of_the_same_model_in_a_sequential() -> None:
    """The ordinary module and the same layers in an nn.Sequential: the same bits under the same names."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().mean((2, 3))

    ordinary = Ordinary()
    staged = nn.Sequential()
    staged.add_module("features", ordinary.features)
    staged.add_module("mean", Mean())
    staged.add_module("head", ordinary.head)
    found = [train(model, method="fedimpro(split='features')") for model in (ordinary, staged)]
    params = [run.state.params for run in found]
    assert params[0].keys() == params[1].keys()
    assert all(torch.equal(params[0][n], params[1][n]) for n in params[0])


def test_probes_see_the_stages() -> None:
    row = train(Ordinary(), probe="all").probes[-1]
    assert row["cka"]["mean"].keys() == {"features", "head"}
    assert "drift" in row


def test_names_of_ones_own() -> None:
    named = fs.with_stages(Ordinary(), ("features",), X)
    assert fs.stages(named) == ("features",)
    assert train(named, method="fedimpro(split='features')").records
    with pytest.raises(fs.UsageError, match=r"has no child 'feature' \(did you mean 'features'\?\)"):
        fs.with_stages(Ordinary(), ("feature",), X)
    with pytest.raises(fs.UsageError, match=r"'features' is no stage: .*the model goes around it"):
        fs.with_stages(Around(), ("features",), X)
    with pytest.raises(fs.UsageError, match=r"has no stage 'feature' \(did you mean 'features'\?\)"):
        fs.tap(named, X, "feature")
