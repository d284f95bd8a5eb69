"""What mkdocs asks while it builds the site: pages that are made, not written, and Markdown as GitHub reads it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from website import listings, markdown, notebooks  # noqa: E402

DOCS = ROOT / "docs"
WRITTEN = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site → files beside docs/ that they are."""
MADE = {
    "reference/command-line.md": listings.command_line,
    "reference/settings.md": listings.settings,
    "reference/names.md": listings.names,
    "reference/python/techniques.md": listings.techniques,
}
"""Pages of the site → what writes them."""
RESULTS = "<!-- results that are not in a table above -->"
NOTEBOOKS = "<!-- notebooks -->"
"""Where a page wants a list that nobody writes by hand."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Tutorials, results and pages that nobody has put in a place yet get one."""
    nav: list[dict[str, Any]] = config.nav or []
    named = set(re.findall(r"[\w/-]+\.md", str(nav))) | set(WRITTEN) | set(MADE)
    _section(nav, "Tutorials").extend(sorted(notebooks.pages(ROOT / "examples")))
    _section(nav, "Results").extend(_left(named, "results/*.md"))
    _section(nav, "How-to").extend(_left(named, "howto/*.md"))
    others = _left(named, "*.md")
    if others:
        _section(nav, "Reference").append({"More": others})
    return config


def _section(nav: list[dict[str, Any]], name: str) -> list[Any]:
    found: list[Any] = next(part[name] for part in nav if name in part)
    return found


def _left(named: set[str], pattern: str) -> list[str]:
    """Pages that the navigation does not name."""
    found = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(pattern))
    return [path for path in found if path not in named]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that are made join those that are written."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in WRITTEN.items()}
    made |= {page: write() for page, write in MADE.items()}
    made |= notebooks.pages(ROOT / "examples")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page as Python-Markdown reads it, with links that lead to pages of the site."""
    place = page.file.src_uri
    if place not in MADE:
        home = "examples/notebook" if place in notebooks.pages(ROOT / "examples") else f"docs/{place}"
        text = markdown.move_links(text, WRITTEN.get(place, home), place, ROOT)
    if RESULTS in text:
        text = text.replace(RESULTS, _other_results(text))
    if NOTEBOOKS in text:
        text = text.replace(NOTEBOOKS, _tutorials())
    return markdown.widen_lists(text)


def _tutorials() -> str:
    """Links to the notebooks' pages, and how long each notebook ran."""
    seconds, made = notebooks.seconds(ROOT / "examples"), sorted(notebooks.pages(ROOT / "examples").items())
    times = {page: " | ".join(f"{each:.0f}" for each in seconds[page]) for page, _ in made}
    rows = [f"| [{_title(text)}]({page.removeprefix('tutorials/')}) | {times[page]} |" for page, text in made]
    return (
        "\n".join(["| notebook | seconds | processor seconds |", "|---|--:|--:|", *rows])
        if rows
        else "There is none yet."
    )


def _other_results(text: str) -> str:
    """Links to the pages of results that a page does not link to yet."""
    left = [path for path in sorted((DOCS / "results").glob("*.md")) if f"]({path.name})" not in text]
    lines = [f"- [{_title(path.read_text('utf-8'))}]({path.name})" for path in left if path.name != "index.md"]
    return "\n".join(["## More", "", *lines]) if lines else ""


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").strip()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drawings stand in the page itself, so that they follow its colours; a head of a table without words is none."""
    return markdown.inline_drawings(html, DOCS / "img").replace("<th></th>", "<td></td>")


_NESTED = re.compile(
    r'aria-labelledby="(__nav_[\d_]+)_label"([^>]*>\s*<label class="md-nav__title" for="\1">.*?</label>)', re.S
)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme's search and lists of pages get the names that a screen reader needs."""
    named = _NESTED.sub(lambda nav: f'aria-label="{_words(nav[2])}"{nav[2]}', output)
    return named.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def _words(html: str) -> str:
    """The text in the label of a list of pages."""
    return " ".join(re.sub(r"<[^>]*>", " ", html.partition(">")[2]).split())
