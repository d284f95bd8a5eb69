"""Files are whole or absent: on a full disk, after an error, after any change from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.errors import UsageError, one_line
from fedstrata.runs.files import (
    LOCK,
    Damaged,
    append_line,
    claim,
    disk_errors,
    leftovers,
    read_sealed,
    write_atomic,
    write_sealed,
)
from tests.small_runs import full_disk


def test_write_atomic(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    write_atomic(path, b"\x00" * 10)
    assert path.read_bytes() == b"\x00" * 10
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("limit", [0, 1, 4095, 4096, 99_999])
def test_write_atomic_on_a_full_disk(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with full_disk(limit), pytest.raises(UsageError) as refused:
        write_atomic(path, b"x" * 100_000)
    assert str(refused.value) == f"cannot write {path}: file too large"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_write_atomic_where_nothing_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path / "no" / "a", "no such file or directory"),
        (tmp_path / "file" / "a", "not a directory"),
    ):
        with pytest.raises(UsageError, match=f"cannot write {path}: {why}"):
            write_atomic(path, "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        write_atomic(tmp_path / "folder", "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def interrupted(*args: object) -> None:
        assert leftovers(tmp_path)
        raise KeyboardInterrupt

    for place in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                write_atomic(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]


def test_append_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    append_line(path, "one")
    append_line(path, "zwö")
    assert path.read_text(encoding="utf-8") == "one\nzwö\n"


@pytest.mark.parametrize("room", [0, 1, 5, 9])
def test_append_line_on_a_full_disk(tmp_path: Path, room: int) -> None:
    path = tmp_path / "a"
    path.write_text("old\n")
    with full_disk(4 + room), pytest.raises(UsageError, match="file too large"):
        append_line(path, "123456789")
    assert path.read_text() == "old\n"
    append_line(path, "123456789")
    assert path.read_text() == "old\n123456789\n"


def test_append_line_to_a_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(UsageError, match="cannot write /dev/full: no space left on device"):
        append_line(Path("/dev/full"), "x")


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))], ids=len)
def test_every_change_of_a_sealed_file_is_noticed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a"
    write_sealed(path, data)
    assert read_sealed(path) == data
    content = path.read_bytes()
    changed = [content[:n] for n in range(len(content))]
    changed += [
        content[:n] + bytes([content[n] ^ bit]) + content[n + 1 :] for n in range(len(content)) for bit in (1, 128)
    ]
    changed += [content + b"\x00", content + content, b"\x00" + content, content[1:]]
    for other in changed:
        path.write_bytes(other)
        with pytest.raises(Damaged, match="is damaged"):
            read_sealed(path)
    path.unlink()
    with pytest.raises(Damaged, match="cannot be read"):
        read_sealed(path)


def test_leftovers(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "nothing") == []
    for name in (".a.12.tmp", "a.tmp", ".a", "a"):
        (tmp_path / name).write_text("")
    assert leftovers(tmp_path) == [tmp_path / ".a.12.tmp"]


def test_disk_errors_lets_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), disk_errors(tmp_path):
        1 / 0  # noqa: B018


def test_a_claim_keeps_other_processes_out(tmp_path: Path) -> None:
    """Another process cannot lock until this one lets go, nor this one until the other does."""
    lock = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def other_may() -> bool:
        return subprocess.run([sys.executable, "-c", lock, tmp_path / LOCK], capture_output=True).returncode == 0

    mine, again = claim(tmp_path), claim(tmp_path / ".." / tmp_path.name)
    assert mine is again
    assert not other_may()
    del mine
    assert not other_may()
    del again
    assert other_may()
    arguments = [sys.executable, "-c", f"{lock}; print(flush=True); input()", tmp_path / LOCK]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match="another process is at work in"):
            claim(tmp_path)
        other.kill()
    assert claim(tmp_path)


def test_one_line() -> None:
    assert one_line("a\n b\tc\x1b[31m") == "a b c?[31m"
    assert one_line("né 🙂") == "né 🙂"
    long = one_line("start " + "x" * 5000 + " end")
    assert len(long) < 600
    assert long.startswith("start ")
    assert long.endswith(" end")
    assert " … " in long
