"""What a client keeps in a directory of its site: who may read it, and whose it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedstrata.core.types import Slots
from fedstrata.flower.site_store import ClientStore, SiteDirectoryStore


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """A process whose new files everybody may read and change, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def a_memory(value: float = 1.0) -> Slots:
    return {"scaffold": {"weight": torch.full((2,), value)}}


def test_nobody_else_may_read_memories(tmp_path: Path) -> None:
    keep = tmp_path / "site" / "memory"
    store = ClientStore(SiteDirectoryStore(keep), "run", 0)
    store.remember(0, a_memory())
    store.remember(0, a_memory(2.0))
    assert mode(keep) == 0o700
    assert [mode(path) for path in keep.iterdir()] == [0o600]
    found = store.memory(0)
    assert found is not None
    assert found["scaffold"]["weight"].tolist() == [2.0, 2.0]


def test_a_file_that_all_could_read_is_one_no_more_once_it_is_written_anew(tmp_path: Path) -> None:
    store = SiteDirectoryStore(tmp_path)
    store["x"] = b"old"
    (tmp_path / "x").chmod(0o644)
    store["x"] = b"new"
    assert mode(tmp_path / "x") == 0o600
    assert store["x"] == b"new"


def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """Its owner may have given it to a group; the files in it are closed all the same."""
    tmp_path.chmod(0o750)
    SiteDirectoryStore(tmp_path)["x"] = b"1"
    assert (mode(tmp_path), mode(tmp_path / "x")) == (0o750, 0o600)


def test_a_new_run_leaves_what_others_remember(tmp_path: Path) -> None:
    """Another run of the same client may be under way, or be resumed."""
    first, second = (ClientStore(SiteDirectoryStore(tmp_path), run, 3) for run in ("first", "second"))
    first.remember(4, a_memory(4.0))
    second.settle(held=-1, memory=-1, until=0)
    second.remember(0, a_memory())
    second.settle(held=-1, memory=-1, until=0)  # that was not accepted
    assert second.memory(0) is None
    found = first.memory(4)
    assert found is not None
    assert found["scaffold"]["weight"].tolist() == [4.0, 4.0]
