"""The site is built strictly, needs no other host, and every link on it leads somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import pytest
import typer.main

import fedstrata
from fedstrata.cli import main

from ..accessibility import violations
from .snippets import DOCS, ROOT

pytest.importorskip("material", reason="the site needs the extra docs")
pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VALUES = {"src", "href", "data", "poster", "srcset", "action"}
LOADED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "link"}
"""Elements whose addresses a browser follows by itself."""
VOID = {"img", "br", "hr", "input", "meta", "link", "path", "source", "wbr", "col"}
WIDTHS = (1400, 390)
LOOKED_AT = (
    "index",
    "get-started",
    "tutorials/index",
    "tutorials/01-my-hospitals",
    "tutorials/05-to-flower",
    "howto/own-data",
    "howto/from-a-loop",
    "concepts/strata",
    "methods",
    "reference/command-line",
    "reference/python/federation",
    "results/index",
    "results/hospitals",
)
"""Pages that are opened in a browser."""


class Page(HTMLParser):
    """What a page loads, where it links to, what can be linked to, and its paragraphs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        found = [values[name] for name in VALUES if name in values]
        (self.loads if tag in LOADED and values.get("rel") not in ("canonical", "prev", "next") else self.links).extend(
            found
        )
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag not in VOID:
            self._open.append(tag)
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "p" in self._open and "code" not in self._open:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: a warning fails."""
    built = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    told = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


@pytest.mark.slow
def test_every_page_is_there(pages: dict[Path, Page], site: Path) -> None:
    written = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert written <= {path.relative_to(site) for path in pages}
    assert {Path("contributing.html"), Path("changelog.html"), Path("reference/command-line.html")} <= {
        path.relative_to(site) for path in pages
    }


@pytest.mark.slow
def test_nothing_comes_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    for path, page in pages.items():
        assert not [address for address in page.loads if is_elsewhere(address)], path
        assert "mermaid" not in path.read_text(encoding="utf-8"), path  # for which the theme would load a script
    for path in site.rglob("*.css"):
        told = path.read_text(encoding="utf-8")
        assert not [a for a in re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")]+)", told) if is_elsewhere(a)], path


@pytest.mark.slow
def test_every_link_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    wrong = []
    for path, page in pages.items():
        for address in {*page.links, *page.loads}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            missing = not target.exists()
            if missing or (anchor and target in pages and anchor not in pages[target].anchors):
                wrong.append(f"{path.relative_to(site)}: {address}")
    assert not wrong


@pytest.mark.slow
def test_markdown_is_read_as_it_is_meant(pages: dict[Path, Page]) -> None:
    """Lists, tables and blocks of code that are none end up in paragraphs."""
    for path, page in pages.items():
        for text in page.paragraphs:
            assert not re.search(r"^(- |\d+\. |\|)|```|\]\(|\*\*", text, flags=re.MULTILINE), (path.name, text)


@pytest.mark.slow
def test_every_public_name_has_its_place(pages: dict[Path, Page], site: Path) -> None:
    found = set().union(*(page.anchors for path, page in pages.items() if path.parent == site / "reference" / "python"))
    assert {f"fedstrata.{name}" for name in fedstrata.__all__ if name != "__version__"} <= found
    assert {"fedstrata.flower.client_app", "fedstrata.compare.compare", "fedstrata.probes.measures.cka"} <= found


@pytest.mark.slow
def test_every_command_and_option_is_told(site: Path) -> None:
    told = (site / "reference" / "command-line.html").read_text(encoding="utf-8")

    def check(command: click.Command, name: str) -> None:
        assert f'id="{name.replace(" ", "-")}"' in told
        for option in command.params:
            if not isinstance(option, click.Argument) and option.name != "help":
                assert option.opts[0] in told, (name, option.opts)
        for below, inner in getattr(command, "commands", {}).items():
            check(inner, f"{name} {below}")

    top = typer.main.get_command(main.app)
    for below, inner in top.commands.items():  # type: ignore[attr-defined]
        check(inner, f"fedstrata {below}")


@pytest.mark.slow
def test_search_knows_the_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert len({entry["location"].partition("#")[0] for entry in index["docs"]}) > 60
    assert (site / "search" / "search_index.js").exists()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    if CHROMIUM is None:
        pytest.skip("the browser tests need Chromium")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen_load_nothing_else_and_are_open_to_all(browser: Any, site: Path, width: int) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if width < 1000 else "light"
    )
    page, asked, wrong = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for name in LOOKED_AT:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name
        page.wait_for_timeout(200)  # the theme goes on a while after the page is there
        assert violations(page) == [], name
    context.close()
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:", "about:"))]
    assert not wrong


@pytest.mark.slow
def test_search_works_without_a_server(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").press_sequentially("secure aggregation")  # the theme listens to keys
    page.wait_for_selector(".md-search-result__link[href*='flower']", state="attached", timeout=60_000)
    page.close()
