"""Where engines could part ways unseen: layouts, alignment, modes, names, and what is left of a round given up."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.engines.tensor_store import SharedMemory, TensorStore
from tests.engines.worlds import SIZES, check_close, check_same, convnet, federation, mlp, paced, pictures, run, seeded
from tests.following import OnVisit


def test_every_tensor_in_shared_memory_is_aligned() -> None:
    """Products of what does not lie at the beginning of a cache line may round differently."""
    memory = SharedMemory()
    given = {
        "a": torch.arange(3.0),
        "b": torch.tensor(5.0),
        "c": torch.arange(34.0).view(2, 17),
        "d": torch.tensor([1, 2, 3]),
        "e": torch.empty(0),
        "f": torch.arange(7, dtype=torch.uint8),
    }
    layout, end = memory.write(3, given, 128)
    back = memory.read(3, layout)
    assert list(back) == list(given)
    assert all(torch.equal(back[n], t) and back[n].shape == t.shape for n, t in given.items())
    assert all(t.data_ptr() % 64 == 0 for t in back.values() if t.numel())
    assert end % 64 == 0
    memory.close()


def test_the_store_knows_tensors_by_name_too() -> None:
    memory = SharedMemory()
    store = TensorStore(memory, 0)
    one, two = torch.ones(2), torch.zeros(3)
    first, second = store.put({"a": one, "b": two}), store.put({"c": one, "d": two})
    assert list(memory.read(*first)) == ["a", "b"]
    assert list(memory.read(*second)) == ["c", "d"]
    memory.close()


@dataclass(frozen=True, kw_only=True)
class Anchored(fs.Technique):
    """Sends the first parameters under other names: the very tensors of the first round's assignment."""

    name: ClassVar[str] = "anchored"
    vectorises: ClassVar[bool] = True

    def init(self, params: Tensors, setting: Any) -> Tensors:
        return {f"anchor:{n}": p for n, p in params.items()}

    def send(self, state: Tensors, assignment: fs.Assignment) -> Tensors:
        return state

    def local(self, view: fs.ClientView) -> fs.Hooks:
        terms = view.slot

        def loss(batch: fs.Batch) -> Tensor:
            return (
                0.1 * torch.stack([(batch.params[n] - terms[f"anchor:{n}"]).square().sum() for n in batch.params]).sum()
            )

        return fs.Hooks(loss=loss)


@pytest.mark.parametrize("engine", ["processes", "vmap"])
def test_slots_that_are_the_parameters_under_other_names(engine: str) -> None:
    settings: dict[str, Any] = {"method": fs.chain(Anchored()), "rounds": 3}
    check = check_same if engine == "processes" else check_close
    check(run(**settings, engine=engine, workers=2), run(**settings, engine="serial"))


@dataclass(frozen=True, kw_only=True)
class Normed(fs.Technique):
    """Remembers gradients of convolutions, and steps by the sum of what it remembers: sums depend on the layout."""

    name: ClassVar[str] = "normed"

    def local(self, view: fs.ClientView) -> fs.Hooks:
        size = {n: 1 + m.abs().sum() for n, m in view.memory.items()}

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return tally, tally

        return fs.Hooks(scale=size, tally=lambda total, grads, batch: grads, finish=finish)


def test_memory_has_the_same_layout_wherever_it_was(tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        "model": convnet(),
        "clients": [pictures(n, s) for s, n in enumerate(SIZES)],
        "test": pictures(9, 9),
        "method": fs.chain(Normed()),
        "rounds": 4,
        "lr": 0.01,
    }
    serial = run(**settings, engine="serial")
    check_same(run(**settings, engine="processes", workers=2), serial)
    check_same(run(**settings, engine="serial", out=tmp_path / "run"), serial)


class Moody(nn.Module):
    """A layer that does more while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x if self.training else x


def test_a_model_trains_in_training_mode_after_an_evaluation() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), Moody(), nn.Linear(8, 4)))
    check_close(run(model, engine="vmap", rounds=4), run(model, engine="serial", rounds=4))


class Constant(nn.Module):
    """A layer with a persistent buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.shift


class Mixing(nn.Module):
    """A layer in which the rows of a batch see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Constant, r"keeps a buffer \('0.shift'\)"),
        (Mixing, "rows of a batch change each other's outputs"),
        (nn.RReLU, "cannot train this model"),
    ],
)
def test_what_vmap_refuses_and_auto_leaves_alone(layer: Any, why: str) -> None:
    model = seeded(lambda: nn.Sequential(layer(), nn.Linear(6, 4)))
    with pytest.raises(fs.UsageError, match=why):
        federation(model, engine="vmap")
    assert federation(model, rounds=1000).engine == "serial"


def test_a_technique_that_reads_the_learning_rate_of_a_schedule() -> None:
    """The second round's is another one. Compiled: tests/client/test_compiling.py."""
    check_close(run(**paced(), engine="vmap"), run(**paced(), engine="serial"))


class Late:
    """A client that fails in a later visit."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.calls == 0:
            raise ValueError("no more")
        self.calls -= 1
        return torch.ones(6), i % 4


def test_an_error_in_a_round_trained_ahead_leaves_the_round_before() -> None:
    """As in serial: the rounds before the error are done, evaluated and recorded."""
    done = []
    for engine in ("serial", "processes"):
        fed = federation(clients=[Late(1 + 4 * 2)], engine=engine, rounds=5, batch_size=4, participation=1.0)
        with pytest.raises(ValueError, match="no more"):
            fed.fit()
        done.append((fed.state.round, len(fed.records)))
    assert done[0] == done[1]


@pytest.mark.slow
def test_a_round_given_up_does_not_disturb_the_next_when_it_is_let_go() -> None:
    """The traceback of an error keeps the old round alive until it is dropped, in the middle of a new one."""
    fed = federation(engine="processes", workers=2, rounds=4)
    kept: list[BaseException] = []

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    try:
        fed.fit(OnVisit(interrupt))
    except KeyboardInterrupt as error:
        kept.append(error)

    def drop(done: int, total: int) -> None:
        if kept:
            kept.clear()
            gc.collect()

    assert kept
    fed.fit(OnVisit(drop))
    assert not kept
    check_same(fed, run(engine="serial", rounds=4))


def test_a_model_of_dense_layers_alone() -> None:
    """A batch of one example goes through another kernel of torch's: the bits must still not depend on the workers."""
    settings: dict[str, Any] = {"model": mlp(), "batch_size": 1, "engine": "vmap", "rounds": 2}
    check_same(run(**settings, workers=2), run(**settings, workers=1))
