"""Updates that come before their turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.types import Absence, Update
from fedstrata.flower.reorder_buffer import ReorderBuffer
from tests.small_runs import full_disk


@pytest.mark.parametrize("few", [0, 1, 2])
def test_an_early_update_comes_back_as_it_was(few: int) -> None:
    updates = [Update(0, n, "0", 5, 1, {"w": torch.randn(n + 2)}, {}, {"t": {"s": torch.ones(1)}}) for n in range(3)]
    with ReorderBuffer(few, None) as early:
        for update in updates:
            early.put(update.client, (update, {"m": {"v": torch.ones(2)}}))
        early.put(3, (Absence(3, "gone"), {}))
        assert early.pop(3) == (Absence(3, "gone"), {})
        for update in reversed(updates):
            found, memory = early.pop(update.client)
            assert isinstance(found, Update)
            assert wire.encode(found) == wire.encode(update)
            assert list(memory) == ["m"]
            assert update.client not in early


def test_no_room_for_updates_that_come_before_their_turn(tmp_path: Path) -> None:
    update = Update(0, 3, "0", 5, 1, {"w": torch.ones(1000)})
    with ReorderBuffer(0, tmp_path) as early:
        with full_disk(1000), pytest.raises(fs.UsageError, match=f"cannot write {tmp_path}: file too large"):
            early.put(3, (update, {}))
        assert 3 not in early
