"""The class × client picture: legible in any width and without colours; files complete or not at all."""

from __future__ import annotations

import errno
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from torch import Tensor

from fedstrata.data.partitions import describe, partition
from fedstrata.data.picture import RAMP, _luminance, level, plot, shade, terminal
from fedstrata.errors import UsageError


def table(classes: int, clients: int, most: int = 400, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, most + 1, (classes, clients)) * (rng.random((classes, clients)) < 0.6))


def show(renderable: Any, width: int = 80, encoding: str = "utf-8", colour: bool = False) -> str:
    file = type("File", (io.StringIO,), {"encoding": encoding})()
    Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
    ).print(renderable)
    return str(file.getvalue())


# -- terminal


def test_small_tables_show_their_numbers() -> None:
    counts = torch.tensor([[12, 0, 3], [0, 7, 100]])
    assert show(terminal(counts, ["cat", "dog"])).splitlines() == [
        "client    0    1    2   all",
        "cat      12    ·    3    15",
        "dog       ·    7  100   107",
        "all      12    7  103   122",
    ]


def test_large_tables_show_bars_and_a_legend() -> None:
    """Largest count 64: the bar of height h stands for up to h² examples."""
    counts = torch.zeros(2, 40, dtype=torch.int64)
    counts[0, :9] = torch.tensor([0, 1, 2, 4, 9, 16, 25, 36, 64])
    counts[1, 39] = 64
    lines = show(terminal(counts), width=72).splitlines()
    assert lines[0].startswith("client 0   ")
    assert lines[1].split()[1].startswith("·▁▂▂▃▄▅▆█··")
    assert lines[2].split()[1] == "·" * 39 + "█"
    assert lines[1].endswith("157")
    assert lines[3].endswith("221")
    assert "examples: · none   ▂ up to 4   ▄ up to 16   ▆ up to 36   █ up to 64" in lines
    assert "in the row 'all': █ up to 64" in lines


@pytest.mark.parametrize(("clients", "width", "shown"), [(100, 80, 64), (3000, 120, 100), (100, 200, 100)])
def test_what_is_left_out_is_said(clients: int, width: int, shown: int) -> None:
    text = show(terminal(table(10, clients)), width=width)
    assert (f"the first {shown} of {clients:,} clients are shown" in text) == (shown < clients)
    assert all(len(line) <= width for line in text.splitlines())


def test_limits_can_be_set() -> None:
    text = show(terminal(table(10, 9), max_clients=4, max_classes=3))
    assert "the first 4 of 9 clients are shown" in text
    assert "the first 3 of 10 classes are shown" in text
    assert len(text.splitlines()) == 1 + 3 + 1 + 2
    with pytest.raises(UsageError, match="at least 1 client"):
        terminal(table(2, 2), max_clients=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 100),
    st.integers(1, 120),
    st.integers(30, 160),
    st.sampled_from([0, 1, 9, 10**6]),
    st.booleans(),
    st.booleans(),
)
def test_it_fits_any_width(classes: int, clients: int, width: int, most: int, named: bool, ascii_only: bool) -> None:
    names = [f"name {'x' * (c % 30)}" for c in range(classes)] if named else ()
    text = show(terminal(table(classes, clients, most), names), width, "ascii" if ascii_only else "utf-8").splitlines()
    assert all(cell_len(line) <= width for line in text)
    assert not ascii_only or all(line.isascii() for line in text)
    body = text[: classes + 2]
    assert len({cell_len(line.rstrip()) for line in body}) == 1, "the columns line up"
    assert body[0].endswith("all")
    assert body[-1].startswith("all")


def test_colours_add_nothing_to_the_text() -> None:
    for clients in (10, 60):
        heat = terminal(table(10, clients))
        coloured = show(heat, colour=True)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == show(heat)


def test_names_are_text_and_never_markup() -> None:
    names = ["[red]x[/red]", "鳥と魚と犬と猫と馬", "a very long name indeed", "a\x1b[31m\nb", ":smile:"]
    lines = show(terminal(torch.eye(5, dtype=torch.int64) * 3, names)).splitlines()
    assert len(lines) == 7
    assert lines[1].startswith("[red]x[/red] ")
    assert lines[3].startswith("a very long nam… ")
    assert lines[4].startswith("a?[31m?b ")
    assert lines[5].startswith(":smile: ")
    assert len({cell_len(line.rstrip()) for line in lines}) == 1


def test_levels_go_with_the_square_root() -> None:
    assert [level(n, 64) for n in (0, 1, 2, 4, 5, 49, 50, 64)] == [0, 1, 2, 2, 3, 7, 8, 8]
    assert level(1, 10**12) == 1


def test_the_ramp_only_ever_darkens() -> None:
    light = [_luminance(shade(step / 20)) for step in range(21)]
    assert light == sorted(light, reverse=True)
    assert shade(0).get_truecolor().hex == RAMP[0]
    assert shade(1).get_truecolor().hex == RAMP[-1]


# -- files


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_each_format_is_written_whole_and_always_alike(tmp_path: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    plot(table(10, 10), first, title="digits, dirichlet(alpha=0.1)")
    plot(table(10, 10), str(second), title="digits, dirichlet(alpha=0.1)")
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(tmp_path.iterdir()) == [first, second]


@pytest.mark.parametrize(
    ("classes", "clients", "most"),
    [(10, 100, 700), (100, 20, 500), (1, 1, 0), (2, 1, 10**7), (3, 8000, 5), (10, 5, 0)],
)
def test_all_sizes_are_drawn(tmp_path: Path, classes: int, clients: int, most: int) -> None:
    pytest.importorskip("matplotlib")
    plot(table(classes, clients, most), tmp_path / "a.png", [f"class {c}" for c in range(classes)])
    from PIL import Image

    with Image.open(tmp_path / "a.png") as image:
        assert max(image.size) < 5000
        assert min(image.size) > 200


def test_a_real_partition(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    labels = torch.arange(1437) % 10
    counts = describe(partition(labels, "dirichlet", 10), labels, 10).counts
    plot(counts, tmp_path / "a.svg", ["$\\frac{", "_", "^", "{}", "<b>&", "x" * 80, "é", "7", "8", "9"], "$")
    assert (tmp_path / "a.svg").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.png.txt", ".png"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"ends in \.png, \.svg or \.pdf"):
        plot(table(2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for place in ("nowhere/a.png", "file/a.png", "folder.png"):
        with pytest.raises(UsageError, match="cannot be written"):
            plot(table(2, 2), tmp_path / place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_broken_write_leaves_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    figures = pytest.importorskip("matplotlib.figure")

    def fail(self: Any, file: Any, **_: Any) -> None:
        file.write(b"half a pict")
        raise error

    monkeypatch.setattr(figures.Figure, "savefig", fail)
    (tmp_path / "a.png").write_text("old")
    expected = UsageError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        plot(table(2, 2), tmp_path / "a.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "old"


def test_without_matplotlib_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[report\]'"):
        plot(table(2, 2), tmp_path / "a.png")


@pytest.mark.parametrize(
    ("counts", "names", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), (), "classes × clients"),
        (torch.zeros(2, 2), (), "torch.float32"),
        (torch.zeros(0, 3, dtype=torch.int64), (), "classes × clients"),
        (torch.tensor([[-1]]), (), "classes × clients"),
        (torch.zeros(3, 2, dtype=torch.int64), ["a", "b"], "2 class names do not fit 3 classes"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, counts: Tensor, names: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        terminal(counts, names)
    with pytest.raises(UsageError, match=words):
        plot(counts, tmp_path / "a.png", names)


def test_matplotlib_is_imported_only_to_plot() -> None:
    code = "import sys, fedstrata.data.picture; print(sorted({'matplotlib', 'kornia', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
