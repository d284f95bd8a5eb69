"""Client memory: what was put is got, by version, and what no checkpoint needs is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedstrata.core.types import Slots
from fedstrata.runs.client_memory import DictStore, DirectoryStore
from fedstrata.runs.files import Damaged


def memory(value: float) -> Slots:
    return {
        "buffers": {"bn.mean": torch.full((2, 3), value), "bn.count": torch.tensor(int(value))},
        "another": {"c/d": torch.empty(0), "": torch.tensor([True])},
        "empty": {},
    }


def equal(left: Slots, right: Slots) -> bool:
    return (
        list(left) == list(right)
        and all(list(left[t]) == list(right[t]) for t in left)
        and all(torch.equal(v, right[t][n]) and v.dtype == right[t][n].dtype for t in left for n, v in left[t].items())
    )


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


@pytest.mark.parametrize("kind", ["dict", "directory"])
def test_put_and_get(tmp_path: Path, kind: str) -> None:
    store = DictStore() if kind == "dict" else DirectoryStore(tmp_path / "memory")
    assert store.get(3, -1) == {}
    store.put(3, 0, {"a": {"x": torch.ones(2)}}, before=-1)
    store.put(4, 0, {"a": {"x": torch.zeros(2)}}, before=-1)
    store.put(3, 5, {"a": {"x": torch.full((2,), 5.0)}}, before=0)
    assert store.get(3, 5)["a"]["x"].tolist() == [5, 5]
    assert store.get(4, 0)["a"]["x"].tolist() == [0, 0]
    store.forget(6)
    assert store.get(3, 5)["a"]["x"].tolist() == [5, 5]
    assert store.get(4, 0)["a"]["x"].tolist() == [0, 0]


def test_a_directory_gives_back_the_same_bits(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "memory").put(0, 7, {"a": {"x": torch.tensor([float("nan"), -0.0])}}, before=-1)
    assert DirectoryStore(tmp_path / "memory").get(0, 7)["a"]["x"].view(torch.int32).tolist() == (
        torch.tensor([float("nan"), -0.0]).view(torch.int32).tolist()
    )


def test_names_and_types(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "memory")
    store.put(1, 2, memory(3), before=-1)
    assert equal(store.get(1, 2), memory(3))
    assert not equal(store.get(1, 2), memory(4))


def test_old_versions_stay_until_no_checkpoint_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    store = DirectoryStore(path)
    store.put(1, 0, {"a": {}}, before=-1)
    store.put(1, 2, {"a": {}}, before=0)
    store.put(1, 3, {"a": {}}, before=2)
    assert files(path) == ["1-0.memory", "1-2.memory", "1-3.memory"]
    store.forget(2)  # the state after two rounds (0 and 1) still counts on what was written in round 0
    assert files(path) == ["1-0.memory", "1-2.memory", "1-3.memory"]
    store.forget(3)
    assert files(path) == ["1-2.memory", "1-3.memory"]
    store.forget(100)
    assert files(path) == ["1-3.memory"]


def test_sweep(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    store = DirectoryStore(path)
    for client, version in ((0, 0), (0, 2), (0, 3), (1, 1), (1, 9), (2, 4)):
        store.put(client, version, {"a": {}}, before=-1)
    (path / "a-b.memory").write_text("not ours")
    resumed = DirectoryStore(path)
    resumed.sweep([torch.tensor([3, 1, -1]), torch.tensor([2, 1, -1])])
    assert files(path) == ["0-2.memory", "0-3.memory", "1-1.memory", "a-b.memory"]
    resumed.forget(3)
    assert "0-2.memory" in files(path)
    resumed.forget(4)
    assert files(path) == ["0-3.memory", "1-1.memory", "a-b.memory"]
    resumed.sweep([])
    assert files(path) == ["a-b.memory"]


def test_sweep_without_any_memory(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "memory").sweep([torch.tensor([-1, -1])])
    assert files(tmp_path) == []


def test_a_damaged_or_missing_file_is_an_error(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "memory")
    store.put(1, 2, memory(1), before=-1)
    path = tmp_path / "memory" / "1-2.memory"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(Damaged, match=r"1-2\.memory is damaged, and with it what client 1 remembers"):
            store.get(1, 2)
    path.unlink()
    with pytest.raises(Damaged, match=r"1-2\.memory cannot be read: No such file or directory, and with it"):
        store.get(1, 2)
