"""Markdown as GitHub reads it becomes what Python-Markdown reads; notebooks become pages; links lead to files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from website.markdown import LINK, inline_drawings, move_links, widen_lists
from website.notebooks import as_markdown, pages

from .snippets import DOCS, ROOT

MADE = {"command-line.md", "settings.md", "names.md", "techniques.md"}
"""Pages that there are on the site alone."""
FILES = sorted((*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("- a\n  b\n- c\n", "- a\n    b\n- c\n"),
        ("text:\n- a\n- b\n", "text:\n\n- a\n- b\n"),
        ("1. a\n\n   b\n2. c\n", "1. a\n\n    b\n\n2. c\n"),
        ("- a\n  - b\n    c\n- d\n", "- a\n    - b\n        c\n- d\n"),
        (
            "1. a\n\n   ```python\n   if x:\n       y\n   ```\n\nend\n",
            "1. a\n\n    ```python\n    if x:\n        y\n    ```\n\nend\n",
        ),
        ("- a\n\n  | b |\n  |---|\n", "- a\n\n    | b |\n    |---|\n"),
        ("- a\nlazy\n\nend\n", "- a\n    lazy\n\nend\n"),
        ("text\n\n    - code\n    1. code\n", "text\n\n    - code\n    1. code\n"),
        ("```text\n- a\n  - b\n```\n", "```text\n- a\n  - b\n```\n"),
        ("!!! note\n    text:\n    - a\n", "!!! note\n    text:\n\n    - a\n"),
    ],
)
def test_lists_are_widened(written: str, read: str) -> None:
    assert widen_lists(written) == read


def test_links_lead_to_pages() -> None:
    text = "[a](../CONTRIBUTING.md#x) [b](runs.md) [c](results/) [`d`](../Makefile) [e](https://a.b/c) [f](#g)"
    assert move_links(text, "docs/speed.md", "speed.md", ROOT) == (
        "[a](contributing.md#x) [b](runs.md) [c](results/index.md) `d` [e](https://a.b/c) [f](#g)"
    )
    assert move_links("[a](docs/runs.md#b)", "CONTRIBUTING.md", "contributing.md", ROOT) == "[a](runs.md#b)"
    notebook = move_links("[a](../examples/01_my_data.ipynb#b)", "docs/speed.md", "speed.md", ROOT)
    assert notebook == "[a](tutorials/01-my-data.md#b)"
    assert move_links("[a](nowhere.md)", "docs/runs.md", "runs.md", ROOT) == "[a](nowhere.md)"  # mkdocs refuses it
    block = "```text\n[a](../CONTRIBUTING.md)\n```\n"
    assert move_links(block, "docs/speed.md", "speed.md", ROOT) == block


def test_drawings_stand_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "drawing-a.svg").write_text('<svg viewBox="0 0 1 1"></svg>\n')
    found = inline_drawings('<p><img alt="a &amp; b" src="../img/drawing-a.svg" /></p>', tmp_path)
    assert '<svg role="img" aria-label="a &amp; b" viewBox="0 0 1 1"></svg>' in found
    assert "<img" not in found
    photo = '<img alt="a" src="../img/report.png" />'
    assert inline_drawings(photo, tmp_path) == photo


def test_notebooks_are_pages(tmp_path: Path) -> None:
    assert pages(tmp_path / "nowhere") == {}
    cells = [
        {"cell_type": "markdown", "source": ["# My data\n", "\n", "Text."]},
        {
            "cell_type": "code",
            "source": "print('```')",
            "outputs": [
                {"output_type": "stream", "text": ["one\n", "two\n"]},
                {"output_type": "execute_result", "data": {"text/html": "<b>3</b>\n\n<i>4</i>", "text/plain": "3"}},
                {"output_type": "display_data", "data": {"image/png": "AA\nBB", "text/plain": "figure"}},
                {"output_type": "error", "ename": "ValueError", "evalue": "no"},
            ],
        },
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    (tmp_path / "01_my_data.ipynb").write_text(json.dumps({"cells": cells}))
    ((name, text),) = pages(tmp_path).items()
    assert name == "tutorials/01-my-data.md"
    assert text == as_markdown(json.dumps({"cells": cells}))
    assert text.startswith("# My data\n\nText.\n\n````python\nprint('```')\n````\n\n```text\none\ntwo\n```\n")
    assert '<div class="output">\n<b>3</b>\n<i>4</i>\n</div>' in text
    assert 'src="data:image/png;base64,AABB"' in text
    assert "ValueError: no" in text


@pytest.mark.parametrize("file", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_links_of_files_lead_to_files(file: Path) -> None:
    """As on a code host; anchors are looked at on the site."""
    text = re.sub(r"^ *```.*?^ *```$", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in (link[2].partition("#")[0] for link in LINK.finditer(text)):
        if target and not re.match(r"[a-z]+:", target) and Path(target).name not in MADE:
            assert (file.parent / target).exists(), target
