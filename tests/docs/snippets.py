"""The code of a page of documentation, run as a reader would: in an empty folder, from the top to the bottom."""

from __future__ import annotations

import importlib
import itertools
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedstrata.cli import main
from fedstrata.probes import registry
from fedstrata.techniques import TECHNIQUES

PROBES: Any = registry.PROBES
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```(\w+)(?:[ ]+title=\"([^\"]+)\")?[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
CUT_SHORT = {
    "run": "--rounds 2 --steps 1",
    "compare": "--rounds 2 --steps 1",
    "tune": "--rounds 3 --steps 1 --trials 2",
    "--tune": "--tune 2",
    "reproduce": "--only trace",  # tests/reproduce has all parts
    "--probe": "--probe-clients 4 --probe-examples 64",
    "--try": "--try-seeds 1",  # tests/trials has several
    "ray": "--workers 1",  # tests/engines/test_ray.py has two
}
"""What is added to a line that has a word."""
TRAINING = {"run", "compare", "tune"}
"""Commands that train, in several processes by themselves: to start them takes longer than so few steps."""
ON_RAY = "run-on-ray"
"""The page whose lines are run on Ray."""
IN_PLACE = {"ray": "processes"}
"""What other pages' lines are run on instead: starting Ray takes longer than all the rest of them."""
FLOWER = {"flwr", "flower-superlink", "flower-supernode"}
ELSEWHERE = {"cd", "jupyter", "chmod", "export", "git", "make", "mkdir", "pip", "ray", "source", "tar"} | FLOWER
"""Programs of others, and what needs more than one machine: tests/flower runs a deployment, tests/engines a cluster."""


@dataclass(frozen=True)
class Snippet:
    """A block of code: its language, the file that it is (or ""), and its text."""

    language: str
    title: str
    text: str


def read_snippets(page: Path) -> list[Snippet]:
    """The blocks of a page in their order."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Snippet(language, title, textwrap.dedent(text)) for _, language, title, text in found]


def read_lines(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each line that a reader types; what is printed has no `$` before it."""
    for line in snippet.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            words = shlex.split(line[2:], comments=True)
            yield words[: words.index(">")] if ">" in words else words


def outs(words: list[str]) -> list[str]:
    """What a line makes: the words after --out and --plot."""
    return [word for option, word in itertools.pairwise(words) if option in ("--out", "--plot")]


def shorten(words: list[str]) -> list[str]:
    """A line of `fedstrata` with less to do, in one process where it does not ask for more."""
    alone = ["--workers", "1"] if words[0] in TRAINING and not {"--workers", "--engine", *ELSEWHERE} & {*words} else []
    return [*words, *(word for key, more in CUT_SHORT.items() if key in words for word in more.split()), *alone]


def run_line(words: list[str], place: Path) -> None:
    """Run a line, shortened, in this process; it must succeed and make what it says."""
    program, *arguments = words
    if program == "fedstrata":
        assert main._run_guarded(shorten(arguments), debug=True) == 0, words
        assert all((place / made).exists() for made in outs(arguments)), words
    elif program == "python":
        runpy.run_path(str(place / arguments[0]), run_name="__main__")
    else:
        assert program in ELSEWHERE, words


def run_page(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of a page in a folder; nothing is downloaded."""
    snippets = read_snippets(page)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr("fedstrata.data.fetch.fetch", lambda name, where, **settings: [])
    before = set(sys.modules)
    typed = " ".join(s.text for s in snippets if s.language in ("console", "python") and not s.title)
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        with mock.patch.dict(TECHNIQUES), mock.patch.dict(PROBES):  # to which a page may add its own
            for snippet in snippets:
                if snippet.title:
                    _write(snippet, place, typed)
                elif snippet.language == "python":
                    exec(compile(snippet.text, page.name, "exec", dont_inherit=True), names)
                elif snippet.language == "console":
                    for words in read_lines(snippet):
                        run_line(words if page.stem == ON_RAY else [IN_PLACE.get(word, word) for word in words], place)
    finally:
        for name in set(sys.modules) - before:
            if is_in(sys.modules[name], place):
                del sys.modules[name]


def _write(snippet: Snippet, place: Path, typed: str) -> None:
    """Write a file of the page; a module that no line of the page names is imported at once."""
    path = place / snippet.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(snippet.text, encoding="utf-8")
    if path.suffix == ".py" and not re.search(rf"\b{path.stem}\b", typed):
        importlib.invalidate_caches()
        importlib.import_module(".".join(Path(snippet.title).with_suffix("").parts))


def is_in(module: object, place: Path) -> bool:
    """Whether a module is a file of that folder, which the next page may have another one of."""
    file = getattr(module, "__file__", None)
    return bool(file) and Path(str(file)).is_relative_to(place)
