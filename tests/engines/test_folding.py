"""Slots that are folded as they arrive are not kept; the others are, and outlive the memory that they came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedstrata as fs
from fedstrata.core.technique import ClientView, Hooks, RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.engines import pool
from tests.engines.worlds import federation, flat

ENGINES = pytest.mark.parametrize(
    ("engine", "workers"), [("serial", 1), ("wire", 1), ("vmap", 1), ("processes", 2), ("vmap", 2)]
)


@dataclass(frozen=True, kw_only=True)
class Kept(Technique):
    """Sends the counts of its client's classes, for `apply` to find in the updates."""

    name: ClassVar[str] = "kept"
    vectorises: ClassVar[bool] = True

    def local(self, view: ClientView) -> Hooks:
        counts = view.counts()
        return Hooks(finish=lambda delta, tally: ({"counts": counts}, None))

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        assert "kept" not in round.totals
        return delta, {"rows": torch.stack([u.slots["kept"]["counts"] for u in round.updates])}


@dataclass(frozen=True, kw_only=True)
class Folded(Kept):
    """Sends the same, and puts one row below the other as they arrive, with the weights beside them."""

    name: ClassVar[str] = "folded"

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        row = torch.cat([slot["counts"], torch.tensor([weight])])[None]
        return {"rows": torch.cat([total["rows"], row]) if total else row}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        assert all("folded" not in u.slots for u in round.updates)
        assert all(not u.delta for u in round.updates)
        return delta, dict(round.totals["folded"])


@ENGINES
@pytest.mark.parametrize("weight", ["examples", "uniform"])
def test_slots_are_folded_in_client_order_and_not_kept(engine: str, workers: int, weight: Any) -> None:
    """Clients of decreasing size, so that workers would finish, and groups be formed, in another order."""
    data = flat(30, 4, 22, 3, 17, 2)
    method = fs.chain(Folded(), Kept(), weight=weight)
    fed = federation(clients=data, method=method, engine=engine, workers=workers, participation=1.0, rounds=2)
    for _ in fed.rounds():
        counts = torch.stack([torch.bincount(y, minlength=4).float() for _, y in data])
        weights = torch.tensor([float(len(y)) if weight == "examples" else 1.0 for _, y in data])
        assert torch.equal(fed.state.techniques["folded"]["rows"], torch.cat([counts, weights[:, None]], dim=1))
        assert torch.equal(fed.state.techniques["kept"]["rows"], counts)


def test_a_refused_update_is_not_folded() -> None:
    data = flat(9, 8, 7)
    data[1] = (torch.full_like(data[1][0], 3e38), data[1][1])
    fed = federation(
        clients=data, method=fs.chain(Folded()), engine="processes", workers=2, participation=1.0, rounds=1
    )
    fed.fit()
    assert [r["client"] for r in fed.records[0].refused] == [1]
    assert fed.state.techniques["folded"]["rows"][:, -1].tolist() == [9.0, 7.0]


def test_a_round_of_refusals_has_no_totals() -> None:
    """Nobody is accepted in the first round, so there is nothing to apply, and no state."""
    data = [(torch.full_like(x, 3e38), y) for x, y in flat(9, 8)]
    fed = federation(clients=data, method=fs.chain(Folded()), engine="serial", participation=1.0, rounds=1)
    with pytest.raises(fs.Diverged):
        fed.fit()
    assert fed.state.techniques["folded"] == {}


@dataclass(frozen=True, kw_only=True)
class First(Kept):
    """Keeps the first slot that arrives: the very tensors, or a view of them."""

    name: ClassVar[str] = "first"
    view: bool = False

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        return total or {n: t[None] if self.view else t for n, t in slot.items()}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        return delta, {"rows": round.totals["first"]["counts"].reshape(-1)}


@pytest.mark.parametrize("view", [False, True], ids=["itself", "a view of it"])
@pytest.mark.parametrize(("engine", "workers"), [("processes", 1), ("processes", 2), ("vmap", 2)])
def test_a_slot_that_fold_returns_outlives_its_update(
    view: bool, engine: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty clients in a narrow window, so that where the first update lay, others have lain when the round closes."""
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    data = flat(20, *[1 + client % 4 for client in range(60)])
    method = fs.chain(First(view=view))
    fed = federation(clients=data, method=method, engine=engine, workers=workers, participation=1.0, rounds=1)
    fed.fit()
    assert torch.equal(fed.state.techniques["first"]["rows"], torch.bincount(data[0][1], minlength=4).float())
