"""The README, the first pages and the concepts were run; lines of all other pages are understood by the command."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import typer.main

from fedstrata.cli import main
from fedstrata.cli.options import parse_numbers
from fedstrata.config.schema import RunConfig, validate_values
from fedstrata.errors import UsageError

from .snippets import DOCS, ELSEWHERE, ROOT, Snippet, read_lines, read_snippets, run_page

README = ROOT / "README.md"
FIRST = [README, DOCS / "index.md", DOCS / "get-started.md", DOCS / "tour.md", *sorted(DOCS.glob("concepts/*.md"))]
EXTRAS = {"README": ("transformers", "peft"), "tour": ("ray", "flwr", "cryptography", "matplotlib")}
"""Page → the packages of extras that it shows."""
PAGES = sorted((*DOCS.rglob("*.md"), README, ROOT / "CONTRIBUTING.md"))
LANGUAGES = {"python", "console", "toml", "text", "csv", "json", "py"}
"""Of blocks; `py` is code of other libraries, which is not run."""


@pytest.mark.slow
@pytest.mark.parametrize("page", FIRST, ids=[str(path.relative_to(ROOT)) for path in FIRST])
def test_first_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in EXTRAS.get(page.stem, ()):
        pytest.importorskip(package)
    if page == README:
        _write_pre_trained(tmp_path)
    run_page(page, tmp_path, monkeypatch)


def _write_pre_trained(place: Path) -> None:
    """A tiny model and a few sentences, in the places of those that the README names."""
    from tests.tiny_transformers import write_bert

    write_bert(place / "models/minilm")
    (place / "data/sst-2").mkdir(parents=True)
    for part, rows in (("train", 1000), ("test", 10)):
        lines = [f"w{row % 60} w{row % 7}\t{row % 2}" for row in range(rows)]
        (place / f"data/sst-2/{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))


def test_the_readme_is_for_two_minutes() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) < 700
    assert all(word in text for word in ("make demo", "make test", "make docs"))
    assert [s for s in read_snippets(README) if s.language == "python"]
    for snippet in read_snippets(README):
        assert snippet.language != "python" or sum(bool(line.strip()) for line in snippet.text.splitlines()) <= 15


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_every_line_is_understood(page: Path) -> None:
    """Options exist, and what `run` is told are settings that could be run."""
    for snippet in read_snippets(page):
        assert snippet.language in LANGUAGES, snippet
        for words in read_lines(snippet) if snippet.language == "console" else ():
            if words[0] == "fedstrata":
                understand(words[1:])
            else:
                assert words[0] in {*ELSEWHERE, "python"}, words


def understand(words: list[str]) -> None:
    """Read a line as the command does, without doing anything."""
    command, rest = typer.main.get_command(main.app), main._join_values(words)
    context = click.Context(command, info_name="fedstrata", **command.context_settings)  # its help option is kept
    while isinstance(command, click.Group):
        command = command.commands[rest[0]]
        context, rest = click.Context(command, parent=context, info_name=rest[0]), rest[1:]
    command.parse_args(context, list(rest))
    if context.info_name == "run":
        given = {name: context.params[name] for name in RunConfig.model_fields if context.params.get(name) is not None}
        validate_values(RunConfig, parse_numbers(given))


@pytest.mark.parametrize("line", ["run --rouns 3", "run --lr -1", "run --method fedavgg", "runn", "diagnose --tri"])
def test_a_wrong_line_is_not(line: str) -> None:
    with pytest.raises((click.ClickException, UsageError, KeyError)):
        understand(line.split())


def test_a_page_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "```python\nwidth = 3\n```\n\n- here\n\n    ```python\n    assert width == 4\n    ```\n"
    )
    assert read_snippets(tmp_path / "page.md")[1] == Snippet("python", "", "assert width == 4\n")
    with pytest.raises(AssertionError):
        run_page(tmp_path / "page.md", tmp_path, monkeypatch)
