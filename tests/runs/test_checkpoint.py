"""Checkpoints: a state is read back as it was; a damaged file is noticed, and the one before it is used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import UsageError
from fedstrata.runs import checkpoint
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.files import Damaged
from fedstrata.server.state import Flight, ServerState, Version
from tests.small_runs import full_disk


def state(round: int, value: float = 1.5) -> ServerState:
    return ServerState(
        round=round,
        params={"head.weight": torch.full((2, 2), value), "a/b": torch.tensor([float("-0.0")])},
        buffers={"bn.count": torch.tensor(2**40 + round), "bn.mean": torch.tensor([value], dtype=torch.float64)},
        techniques={"scaffold": {"c/head.weight": torch.ones(3)}, "nothing": {}},
        changed={"head.weight": round - 1, "a/b": -1},
        held=torch.tensor([round - 1, -1], dtype=torch.int32),
        remembers=torch.tensor([-1, 0], dtype=torch.int32),
    )


def same(left: ServerState, right: ServerState) -> bool:
    def bits(s: ServerState) -> list[tuple[str, torch.dtype, torch.Size, bytes]]:
        named = {**s.params, **s.buffers, "held": s.held, "remembers": s.remembers}
        named |= {f"{t}:{n}": v for t, slot in s.techniques.items() for n, v in slot.items()}
        return [(n, t.dtype, t.shape, t.contiguous().numpy().tobytes()) for n, t in named.items()]

    plain = [(s.round, list(s.params), list(s.buffers), list(s.techniques), dict(s.changed)) for s in (left, right)]
    return plain[0] == plain[1] and bits(left) == bits(right)


def test_save_and_load(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state(3))
    assert path.name == "round-000003.checkpoint"
    assert same(checkpoint.load(path), state(3))
    assert not same(checkpoint.load(path), state(3, value=2))
    assert os.listdir(tmp_path) == [path.name]


def test_visits_under_way_that_cannot_be(tmp_path: Path) -> None:
    """Somebody may have edited a file and sealed it again: no client is under way twice, or was done before."""
    begun, now = Version.of(state(1)), replace(state(3), clock=5.0)
    sound = replace(now, flights=(Flight(0, 1, 5.0), Flight(1, 1, 7.0)), versions=(begun,))
    found = checkpoint.load(checkpoint.save(tmp_path, sound))
    assert (found.flights, found.clock, [v.round for v in found.versions]) == (sound.flights, 5.0, [1])
    assert same(found.at(1), sound.at(1))
    twice = replace(sound, flights=(Flight(1, 1, 6.0), Flight(1, 1, 7.0)))
    past = replace(sound, flights=(Flight(0, 1, 4.0),))
    for other in (twice, past, replace(sound, versions=())):
        with pytest.raises(Damaged):
            checkpoint.load(checkpoint.save(tmp_path, other))


def test_every_byte_counts(tmp_path: Path) -> None:
    """Flip each byte and cut at each length of the newest file: it is never taken for whole."""
    checkpoint.save(tmp_path, state(1))
    path = checkpoint.save(tmp_path, state(2))
    content = path.read_bytes()
    changed = [content[:n] for n in range(len(content))]
    changed += [content[:n] + bytes([content[n] ^ 1 << n % 8]) + content[n + 1 :] for n in range(len(content))]
    assert len(changed) > 1000
    for other in changed:
        path.write_bytes(other)
        whole, damaged = checkpoint.load_all(tmp_path)
        assert [s.round for s in whole] == [1]
        assert damaged == [path]


@given(st.data())
def test_any_edit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("edit")
    path = checkpoint.save(directory, state(2))
    content = path.read_bytes()
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    edited = content[:begin] + data.draw(st.binary(max_size=40)) + content[end:]
    path.write_bytes(edited)
    if edited == content:
        checkpoint.load(path)
    else:
        with pytest.raises(Damaged):
            checkpoint.load(path)
    path.unlink()


def test_another_rounds_file_under_this_name(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state(2))
    path.rename(tmp_path / "round-000009.checkpoint")
    with pytest.raises(Damaged):
        checkpoint.load(tmp_path / "round-000009.checkpoint")


def test_order(tmp_path: Path) -> None:
    for number in (5, 999_999, 1_000_000, 40):
        checkpoint.save(tmp_path, state(number))
    for name in ("round-5 (copy).checkpoint", "round-.checkpoint", "round--3.checkpoint", "notes.txt"):
        (tmp_path / name).write_text("")
    assert [s.round for s in checkpoint.load_all(tmp_path)[0]] == [1_000_000, 999_999, 40, 5]
    assert checkpoint.load_all(tmp_path)[1] == []
    assert checkpoint.load_all(tmp_path / "nothing") == ([], [])


def test_a_run_directory_keeps_the_last_two(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("method = 'fedavg'\n")
    oldest = [directory.save(state(number)) for number in (1, 2, 5)]
    assert oldest == [1, 1, 2]
    assert [p.name for p in checkpoint.paths(directory.checkpoints)] == [
        "round-000005.checkpoint",
        "round-000002.checkpoint",
    ]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("method = 'fedavg'\n")
    directory.save(state(1))
    size = checkpoint.paths(directory.checkpoints)[0].stat().st_size
    for room in (0, 100, size - 1):
        with full_disk(room), pytest.raises(UsageError, match="file too large"):
            directory.save(state(2))
        assert os.listdir(directory.checkpoints) == ["round-000001.checkpoint"]
        assert same(checkpoint.load(checkpoint.paths(directory.checkpoints)[0]), state(1))


# --- making the directory --------------------------------------------------------------------------------------------


def test_create_and_refuse(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "my run")
    directory.create("x = 1\n")
    assert {p.name for p in directory.path.iterdir()} == {
        ".lock",
        "run.toml",
        "versions.json",
        "metrics.jsonl",
        "checkpoints",
    }
    with pytest.raises(UsageError, match=r"holds a run already; go on with it: fedstrata resume '.*my run'"):
        RunDirectory(directory.path).create("x = 2\n")
    (directory.path / "summary.json").write_text("{}")
    with pytest.raises(UsageError, match=r"my run holds a finished run already: choose another --out$"):
        RunDirectory(directory.path).create("x = 2\n")
    assert directory.config.read_text() == "x = 1\n"


def test_an_empty_directory_will_do_and_what_a_killed_start_left_too(tmp_path: Path) -> None:
    for number, names in enumerate([[], [".run.toml.123.tmp", ".lock"]]):
        path = tmp_path / str(number)
        path.mkdir()
        for name in names:
            (path / name).write_text("x")
        RunDirectory(path).create("x = 1\n")
        assert (path / "run.toml").exists()
    path = tmp_path / "full"
    path.mkdir()
    (path / "letter").write_text("")
    with pytest.raises(UsageError, match="exists and is not empty"):
        RunDirectory(path).create("x = 1\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="exists and is not empty"):
        RunDirectory(tmp_path / "file").create("x = 1\n")


@pytest.mark.parametrize("room", [0, 3, 30])
def test_a_full_disk_leaves_no_directory(tmp_path: Path, room: int) -> None:
    """With no room for run.toml, for a part of it, and for all of it but not for versions.json."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "shared").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "run", tmp_path / "shared" / "run"):
        with full_disk(room), pytest.raises(UsageError, match="file too large"):
            RunDirectory(path).create("method = 'fedavg'\n")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["empty", "shared"]
