"""Double precision is double everywhere, under every engine; half precision is refused where it would lead astray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.client.visit_hooks import class_counts
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.techniques.fedavg import chain

SIZES = (20, 13, 7, 20)
WITHIN = 1e-13


class Tempered(nn.Module):
    """A model with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


class Mixed(nn.Module):
    """Single precision, and a double one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6).float(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x.float())).double())
        return out


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def federation(engine: str, dtype: torch.dtype, model: Any = dense, **settings: Any) -> fs.Federation:
    """A federation of four clients that has not run yet."""
    rng = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        built = model() if model is Mixed else model().to(dtype)
    clients = [(torch.randn(n, 8, generator=rng).to(dtype), torch.randint(4, (n,), generator=rng)) for n in SIZES]
    settings = {"rounds": 4, "batch_size": 4, "epochs": 2, "lr": 0.1, **settings}
    return fs.Federation(built, clients, engine=engine, **settings)


def run(engine: str, dtype: torch.dtype, model: Any = dense, **settings: Any) -> fs.Federation:
    fed = federation(engine, dtype, model, **settings)
    fed.fit()
    return fed


def apart(**settings: Any) -> float:
    """How far `vmap` ends from `serial`, in parameters and losses."""
    one, other = (run(engine, torch.float64, **settings) for engine in ("serial", "vmap"))
    params = [float((t - other.state.params[n]).abs().max()) for n, t in one.state.params.items()]
    assert all(t.dtype == other.state.params[n].dtype for n, t in one.state.params.items())
    losses = [abs(a.train_loss - b.train_loss) for a, b in zip(one.records, other.records, strict=True)]  # type: ignore[operator]
    return max(params + losses)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0.9, weight_decay=0.01)", "adam"])
def test_many_at_once_are_as_exact_as_one_by_one(optimizer: str) -> None:
    """A learning rate of 0.1 is no number of single precision: rounded to one it would be off by 1.5e-9."""
    assert apart(optimizer=optimizer) < WITHIN
    assert apart(optimizer=optimizer, schedule="cosine", clip=0.5) < WITHIN


@pytest.mark.parametrize(
    "method", ["fedlc", "fedrs", "scaffold", "feddyn", "fednova", "fedprox(mu=0.1)", "fedlc + scaffold"]
)
def test_techniques_are_as_exact(method: str) -> None:
    assert apart(method=method) < WITHIN


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
def test_a_parameter_that_is_a_single_number(method: str) -> None:
    assert apart(model=Tempered, method=method) < WITHIN
    one, other = (run(engine, torch.float32, Tempered, method=method) for engine in ("serial", "vmap"))
    for name, tensor in one.state.params.items():
        assert other.state.params[name].dtype == torch.float32
        torch.testing.assert_close(other.state.params[name], tensor, rtol=0, atol=1e-6)


def test_two_precisions_in_one_model() -> None:
    assert apart(model=Mixed) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_class_counts_are_of_the_models_precision(dtype: torch.dtype, exact: torch.dtype) -> None:
    """But of single precision at least: bfloat16 does not know 257."""
    model = nn.Linear(2, 3).to(dtype)
    data = TensorExamples(torch.zeros(300, 2, dtype=dtype), torch.tensor([0] * 257 + [2] * 43))
    replica = ClientContext(build=lambda arch: model, method=chain(), sample=torch.zeros(2, 2, dtype=dtype)).replica("")
    counts = class_counts(data, replica)
    assert counts.dtype == exact
    assert counts.tolist() == [257, 0, 43]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_many_at_once(dtype: torch.dtype) -> None:
    """`auto` takes another engine then, and one by one it trains."""
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(
        UsageError, match=f"the engine 'vmap' cannot train '0.weight' in {kind}: its results would drift"
    ):
        federation("vmap", dtype)
    assert federation("auto", dtype, rounds=300).engine == "serial"  # as many rounds as `auto` vectorises for
    assert federation("auto", torch.float32, rounds=300).engine == "vmap"
    assert run("serial", dtype).state.params["0.weight"].dtype == dtype
