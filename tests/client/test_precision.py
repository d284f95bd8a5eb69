"""Double precision is double everywhere, under every engine; half precision is refused where it would lead astray.

Mixed precision (`precision = "bf16"`) computes forward passes alone in bfloat16.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata import wire
from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.client.visit import count_classes
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Assignment, Work
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
    counts = count_classes(data, replica)
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


# Mixed precision: `precision = "bf16"` -------------------------------------------------------------------------


def distance(one: fs.Federation, other: fs.Federation) -> float:
    return max(float((t - other.state.params[n]).abs().max()) for n, t in one.state.params.items())


def same_bits(one: fs.Federation, other: fs.Federation) -> bool:
    params = all(torch.equal(t, other.state.params[n]) for n, t in one.state.params.items())
    return params and [r.train_loss for r in one.records] == [r.train_loss for r in other.records]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedspeed", "moon", "fedlc + fedprox(mu=0.1)"])
def test_bf16_differs_from_fp32_and_is_near_it(method: str) -> None:
    """8 bits of mantissa: a product is off by 2⁻⁹ at most; the parameters move by about 0.2 in these rounds."""
    full, mixed = (run("serial", torch.float32, method=method, precision=p) for p in ("fp32", "bf16"))
    assert 0 < distance(full, mixed) < 0.02
    for one, other in zip(full.records, mixed.records, strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=0.02)
        assert other.flops == one.flops


def test_fp32_enters_no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    plain = run("serial", torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", refuse)
        assert same_bits(run("serial", torch.float32, precision="fp32"), plain)
        with pytest.raises(AssertionError):
            run("serial", torch.float32, precision="bf16")


@pytest.mark.parametrize("method", ["fedavg", "fedspeed", "fedpart(full_rounds=1, rounds_per_stratum=1)"])
def test_bf16_has_the_same_bits_under_every_engine_of_single_clients(method: str) -> None:
    settings: dict[str, Any] = {"method": method, "precision": "bf16", "clip": 1.0}
    serial = run("serial", torch.float32, **settings)
    assert same_bits(run("processes", torch.float32, workers=2, **settings), serial)
    assert same_bits(run("wire", torch.float32, **settings), serial)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedspeed"])
def test_bf16_many_at_once_is_as_near_as_bf16_is_to_fp32(method: str) -> None:
    many, one = (run(engine, torch.float32, method=method, precision="bf16") for engine in ("vmap", "serial"))
    assert distance(many, one) < 0.02
    assert not same_bits(many, run("vmap", torch.float32, method=method))
    assert [r.flops for r in many.records] == [r.flops for r in one.records]


def test_a_cached_prefix_is_computed_in_the_same_precision() -> None:
    plan = "fedpart(full_rounds=0, rounds_per_stratum=1, freeze_norm=True, cache_prefix={})"
    cached, whole = (run("serial", torch.float32, method=plan.format(c), precision="bf16") for c in (True, False))
    assert same_bits(cached, whole)
    assert sum(r.flops for r in cached.records) < sum(r.flops for r in whole.records)


def test_bf16_leaves_all_but_the_forward_pass_in_single_precision() -> None:
    """Parameters, gradients, the delta and the loss are float32; the layer inside computes in bfloat16."""
    model, seen = dense(), set()

    def tally(so_far: Tensors, grads: Tensors, batch: Batch) -> Tensors:
        seen.update(("gradient", g.dtype) for g in grads.values())
        seen.update(("parameter", p.dtype) for p in batch.params.values())
        seen.add(("logits", batch.logits.dtype))
        return so_far

    @dataclass(frozen=True, kw_only=True)
    class Look(Technique):
        name: ClassVar[str] = "look"

        def local(self, view: ClientView) -> Hooks:
            return Hooks(tally=tally)

    context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain(Look()), sample=torch.zeros(2, 8))
    params = clone(dict(model.named_parameters()))
    names = tuple(params)
    work = Work(optimizer="sgd(momentum=0.9)", precision="bf16")
    asked = Assignment(0, 0, "", params, {}, names, names, work, 5, context.method.digest)
    update, _ = train_client(context, asked, TensorExamples(torch.randn(6, 8), torch.arange(6) % 4), {})
    assert seen == {("gradient", torch.float32), ("parameter", torch.float32), ("logits", torch.bfloat16)}
    assert {t.dtype for t in update.delta.values()} == {torch.float32}
    assert {p.dtype for p in context.replica("").params.values()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^precision = 'fp8' does not fit: input should be 'fp32' or 'bf16'$"):
        run("serial", torch.float32, precision="fp8")


def test_messages_name_the_precision_only_where_it_is_unusual() -> None:
    """Fp32 costs no byte more than before there was a choice; bf16 costs the 19 of `,"precision":"bf16"`."""
    params = {"w": torch.zeros(3)}
    plain = Assignment(0, 0, "", params, {}, ("w",), ("w",), Work(), 1, "m")
    mixed = replace(plain, work=Work(precision="bf16"))
    assert b"precision" not in wire.encode(plain)
    assert b'"precision":"bf16"' in wire.encode(mixed)
    assert wire.decode_assignment(wire.encode(plain)).work == Work()
    assert wire.decode_assignment(wire.encode(mixed)).work == Work(precision="bf16")
    assert wire.size(mixed) == len(wire.encode(mixed)) == wire.size(plain) + 19
    with pytest.raises(wire.WireError):
        wire.decode_assignment(wire.encode(mixed).replace(b'"bf16"', b'"fp16"'))
