"""FLOPs: by hand for layers that torch fuses, and never at the price of a bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fedstrata as fs
from fedstrata.models.flops import FlopCount

MODELS = {
    "silu": lambda: nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4)),
    "many": lambda: nn.Sequential(
        nn.Linear(16, 32),
        nn.Mish(),
        nn.Hardswish(),
        nn.Softplus(),
        nn.ELU(),
        nn.GELU(),
        nn.LogSigmoid(),
        nn.Linear(32, 4),
    ),
    "rms norm": lambda: nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 4)),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)
    ),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(16, 4)
    ),
}


def gradients(model: nn.Module, mode: object) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    with mode:  # type: ignore[attr-defined]
        return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


@pytest.mark.parametrize("name", MODELS)
def test_counting_changes_no_bit(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    plain = gradients(copy.deepcopy(model), nullcontext())
    count = FlopCount()
    counted = gradients(copy.deepcopy(model), count)
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    assert count.total > 0


@pytest.mark.parametrize("name", ["silu", "many", "rms norm", "conv"])
def test_as_many_as_torch_counts(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    ours, torchs = FlopCount(), FlopCounterMode(display=False)
    gradients(model, ours)
    gradients(model, torchs)
    assert ours.total == torchs.get_total_flops()


class Reader(nn.Module):
    """A recurrent layer over 4 steps of 4 numbers, and its last output."""

    def __init__(self, layer: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 4, 4))[0][:, -1, :4]


def test_a_fused_lstm_by_hand() -> None:
    """32 inputs × 4 steps, 4 gates of 8: forward 2·128·(32·4 + 32·8) = 98,304, and twice that backward."""
    count = FlopCount()
    gradients(Reader(nn.LSTM), count)
    assert count.total == 3 * 98_304


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_of_such_a_model_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """A resumed run counts at another step than the one that was never stopped."""
    torch.manual_seed(0)
    model = MODELS[name]()
    clients = [(torch.randn(9, 16), torch.randint(0, 4, (9,))) for _ in range(2)]
    settings = {"rounds": 4, "batch_size": 4, "checkpoint_seconds": 0}
    whole = fs.Federation(model, clients, **settings)
    whole.fit()
    stopped = fs.Federation(model, clients, **settings, out=tmp_path / "run")
    rounds = stopped.rounds()
    next(rounds), next(rounds)
    rounds.close()
    resumed = fs.Federation(model, clients, **settings, out=tmp_path / "run", resume=True)
    resumed.fit()
    assert all(torch.equal(p, resumed.state.params[n]) for n, p in whole.state.params.items())
    assert [r.flops for r in whole.records] == [r.flops for r in resumed.records]


def test_counting_does_not_load_torchs_compiler() -> None:
    """It would take longer than a small run's first round."""
    code = """
import sys, torch, fedstrata as fs
data = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
fs.Federation(torch.nn.Linear(4, 3), [data], data, rounds=1, engine="serial").fit()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
