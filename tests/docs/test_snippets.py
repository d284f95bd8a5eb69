"""Whatever the guides, the concepts and the first pages show was run: every block of code, every line of a terminal."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import typer.main

from fedstrata.cli import main
from fedstrata.config.schema import RunConfig, validate_values

from .snippets import ELSEWHERE, ROOT, read_lines, read_snippets, run_page

DOCS = ROOT / "docs"
RUN = sorted({DOCS / "index.md", DOCS / "get-started.md", DOCS / "tour.md", *DOCS.glob("howto/*.md"), *DOCS.glob("concepts/*.md")})
"""Pages of which everything is run."""
PAGES = sorted(path for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"))
OPTIONAL = {"deploy-with-flower": "flwr", "run-on-ray": "ray", "tour": "ray"}
"""Page → the package that it is about, of an extra."""
LANGUAGES = {"python", "console", "toml", "text", "csv", "json"}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=[path.stem for path in RUN])
def test_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, in their order; runs of the command are cut short."""
    if page.stem in OPTIONAL:
        pytest.importorskip(OPTIONAL[page.stem])
    run_page(page, tmp_path, monkeypatch)


def test_pages_that_are_run_have_something_to_run() -> None:
    guides = [path for path in RUN if path.parent.name == "howto" and path.stem != "index"]
    assert len(guides) >= 12
    for path in guides:
        assert any(s.language in ("python", "console") for s in read_snippets(path)), path


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_every_line_is_understood(page: Path) -> None:
    """Of all pages: options exist, and what a run is told could be run."""
    for snippet in read_snippets(page):
        assert snippet.language in LANGUAGES, snippet.language
        for words in read_lines(snippet) if snippet.language == "console" else ():
            if words[0] == "fedstrata":
                _understand(words[1:])
            else:
                assert words[0] in (*ELSEWHERE, "python"), words


def _understand(words: list[str]) -> None:
    """Read a line as the command does, without doing anything."""
    command, rest = typer.main.get_command(main.app), main._join_values(words)
    context = click.Context(command, info_name="fedstrata")
    while isinstance(command, click.Group):
        command = command.commands[rest[0]]
        context, rest = click.Context(command, parent=context, info_name=rest[0]), rest[1:]
    command.parse_args(context, list(rest))
    if context.info_name == "run":
        given = {name: context.params[name] for name in RunConfig.model_fields if context.params.get(name) is not None}
        validate_values(RunConfig, given)
