"""Client memory: what was put is got, by version, and what no checkpoint needs is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedstrata.core.stacks import Memories
from fedstrata.core.types import Slots
from fedstrata.runs import client_memory
from fedstrata.runs.client_memory import DirectoryStore, RowStore, Store
from fedstrata.runs.files import Damaged


def memory(value: float) -> Slots:
    return {
        "buffers": {"bn.mean": torch.full((2, 3), value), "bn.count": torch.tensor(int(value))},
        "another": {"c/d": torch.empty(0), "": torch.tensor([True])},
        "empty": {},
    }


def put(store: Store, client: int, version: int, remembered: Slots, before: int) -> None:
    store.put([client], version, Memories.of([remembered]), [before])


def get(store: Store, client: int, version: int) -> Slots:
    return store.get([client], [version])[0]


def equal(left: Slots, right: Slots) -> bool:
    return (
        list(left) == list(right)
        and all(list(left[t]) == list(right[t]) for t in left)
        and all(torch.equal(v, right[t][n]) and v.dtype == right[t][n].dtype for t in left for n, v in left[t].items())
    )


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


@pytest.mark.parametrize("kind", ["rows", "directory"])
def test_put_and_get(tmp_path: Path, kind: str) -> None:
    store: Store = RowStore() if kind == "rows" else DirectoryStore(tmp_path / "memory")
    assert get(store, 3, -1) == {}
    put(store, 3, 0, {"a": {"x": torch.ones(2)}}, before=-1)
    put(store, 4, 0, {"a": {"x": torch.zeros(2)}}, before=-1)
    put(store, 3, 5, {"a": {"x": torch.full((2,), 5.0)}}, before=0)
    assert get(store, 3, 5)["a"]["x"].tolist() == [5, 5]
    assert get(store, 4, 0)["a"]["x"].tolist() == [0, 0]
    store.forget(6)
    assert get(store, 3, 5)["a"]["x"].tolist() == [5, 5]
    assert get(store, 4, 0)["a"]["x"].tolist() == [0, 0]


def test_a_directory_gives_back_the_same_bits(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path / "memory"), 0, 7, {"a": {"x": torch.tensor([float("nan"), -0.0])}}, before=-1)
    assert get(DirectoryStore(tmp_path / "memory"), 0, 7)["a"]["x"].view(torch.int32).tolist() == (
        torch.tensor([float("nan"), -0.0]).view(torch.int32).tolist()
    )


def test_names_and_types(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "memory")
    put(store, 1, 2, memory(3), before=-1)
    assert equal(get(store, 1, 2), memory(3))
    assert not equal(get(store, 1, 2), memory(4))


def test_old_versions_stay_until_no_checkpoint_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    store = DirectoryStore(path)
    put(store, 1, 0, {"a": {}}, before=-1)
    put(store, 1, 2, {"a": {}}, before=0)
    put(store, 1, 3, {"a": {}}, before=2)
    assert files(path) == ["1-0.memory", "1-2.memory", "1-3.memory"]
    store.forget(2)  # the state after two rounds (0 and 1) still counts on what was written in round 0
    assert files(path) == ["1-0.memory", "1-2.memory", "1-3.memory"]
    store.forget(3)
    assert files(path) == ["1-2.memory", "1-3.memory"]
    store.forget(100)
    assert files(path) == ["1-3.memory"]


def stacked(values: list[float]) -> Slots:
    return {"a": {"x": torch.tensor(values).unsqueeze(1).expand(-1, 3).clone(), "n": torch.tensor(values).long()}}


@pytest.mark.parametrize("kind", ["rows", "directory"])
def test_many_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a stack in any order, of two structures and of clients that remember nothing, over several chunks."""
    monkeypatch.setattr(client_memory, "FIRST_ROWS", 2)
    store: Store = RowStore() if kind == "rows" else DirectoryStore(tmp_path / "memory")
    other = {"a": {"x": torch.tensor([[8.0], [9.0]])}}
    memories = Memories((stacked([0, 1, 2, 3, 4]), other), [0, 1, 0, 0, 1, 0], [4, 1, 0, 3, 0, 2])
    store.put([10, 11, 12, 13, 14, 15], 3, memories, [-1] * 6)
    found = store.get([15, 11, 7, 10, 13, 14, 12], [3, 3, -1, 3, 3, 3, 3])
    assert [m["a"]["x"].flatten().tolist() if m else [] for m in found] == [
        *([2, 2, 2], [9], [], [4, 4, 4], [3, 3, 3], [8], [0, 0, 0]),
    ]
    alike = found.select([6, 0, 3, 4])
    assert len(set(alike.structures)) == 1
    whole = alike.gather()
    assert whole["a"]["x"][:, 1].tolist() == [0, 2, 4, 3]
    assert whole["a"]["n"].tolist() == [0, 2, 4, 3]
    stacks, kinds, rows = found.regroup(lambda stack: stack)
    assert all(equal(one, two) for one, two in zip(found, Memories(tuple(stacks), kinds, rows), strict=True))


def count_rows(store: RowStore) -> tuple[int, int]:
    """(rows that there is room for, rows that are free)."""
    chunks = [chunk for chunks in store._chunks.values() for chunk in chunks]
    return sum(chunk.rows for chunk in chunks), sum(len(chunk.free) for chunk in chunks)


def test_rows_are_for_those_who_took_part_and_are_used_again() -> None:
    """Eight of ever so many clients in each round, forty of whom take part: forty rows, and eight in between."""
    store, last = RowStore(), dict[int, int]()
    for version in range(100):
        clients = [10**9 + (version * 8 + i) % 40 for i in range(8)]
        values = [float(version * 100 + i) for i in range(8)]
        store.put(clients, version, Memories((stacked(values),), [0] * 8, range(8)), [last.get(c, -1) for c in clients])
        last.update(dict.fromkeys(clients, version))
        room, free = count_rows(store)
        assert room - free <= len(last) + 8
        store.forget(version + 1)
        assert count_rows(store)[0] - count_rows(store)[1] == len(last)
    assert count_rows(store)[0] <= 16 + 32
    found = store.get(list(last), list(last.values()))
    expected = [version * 100 + (client - 10**9 - version * 8) % 40 for client, version in last.items()]
    assert [int(m["a"]["x"][0]) for m in found] == expected


def test_memories_that_change_their_shape_leave_no_room_behind() -> None:
    store = RowStore()
    for version in range(20):
        memory = {"t": {"w": torch.full((version + 1,), float(version))}}
        store.put((3,), version, Memories.of([memory]), [version - 1])
        store.forget(version)
    assert torch.equal(store.get((3,), (19,))[0]["t"]["w"], torch.full((20,), 19.0))
    assert len(store._chunks) <= 2


def test_a_round_that_is_done_again_takes_the_same_rows() -> None:
    store = RowStore()
    put(store, 1, 0, memory(1.0), before=-1)
    for value in (2.0, 3.0):
        put(store, 1, 1, memory(value), before=0)
        assert equal(get(store, 1, 1), memory(value))
        assert equal(get(store, 1, 0), memory(1.0))
    assert [room - free for room, free in [count_rows(store)]] == [2]
    store.forget(2)
    assert [room - free for room, free in [count_rows(store)]] == [1]
    assert equal(get(store, 1, 1), memory(3.0))


def test_what_is_remembered_still_is_copied() -> None:
    """A visit may hand back the very tensors that it was given."""
    store = RowStore()
    store.put([1, 2], 0, Memories((stacked([5, 6]),), [0, 0], [0, 1]), [-1, -1])
    store.put([2, 1], 1, store.get([2, 1], [0, 0]), [0, 0])
    store.forget(2)
    put(store, 3, 2, {name: {n: t[0] for n, t in slot.items()} for name, slot in stacked([7]).items()}, before=-1)
    assert [int(m["a"]["n"]) for m in store.get([1, 2, 3], [1, 1, 2])] == [5, 6, 7]


def test_a_large_memory_has_a_chunk_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never much more room than what is held."""
    monkeypatch.setattr(client_memory, "CHUNK_BYTES", 100)
    store = RowStore()
    for client in range(5):
        put(store, client, 0, {"a": {"x": torch.full((30,), float(client))}}, before=-1)
    assert count_rows(store) == (5, 0)
    assert [int(m["a"]["x"][29]) for m in store.get(range(5), [0] * 5)] == [0, 1, 2, 3, 4]


def test_sweep(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    store = DirectoryStore(path)
    for client, version in ((0, 0), (0, 2), (0, 3), (1, 1), (1, 9), (2, 4)):
        put(store, client, version, {"a": {}}, before=-1)
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
    put(store, 1, 2, memory(1), before=-1)
    path = tmp_path / "memory" / "1-2.memory"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(Damaged, match=r"1-2\.memory is damaged, and with it what client 1 remembers"):
            get(store, 1, 2)
    path.unlink()
    with pytest.raises(Damaged, match=r"1-2\.memory cannot be read: No such file or directory, and with it"):
        get(store, 1, 2)
