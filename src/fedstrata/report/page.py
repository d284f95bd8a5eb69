"""One HTML file that holds everything it shows: tables as HTML, figures as data, and Plotly.js to draw them.

Plotly.js is packed, and unpacked by the browser after header and tables are painted. Nothing is loaded from
anywhere, and a Content-Security-Policy forbids it; the same policy lets no script run but the two that the page
was written with, whatever a method, a class or a note is called.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedstrata._version import __version__
from fedstrata.errors import UsageError
from fedstrata.report.figures import dark_colours
from fedstrata.report.formatting import NONE, escape
from fedstrata.report.opening import setting_text, values_text
from fedstrata.report.run_groups import PALETTE, RunGroup, group_runs
from fedstrata.report.sections import Section, sections
from fedstrata.report.tables import swatch
from fedstrata.report.verdict import verdict
from fedstrata.runs.files import write_atomic
from fedstrata.runs.reader import SavedRun


def page(runs: Sequence[SavedRun], title: str | None = None, live: bool = False, learnt: Sequence[str] = ()) -> str:
    """A report of one run, or of several side by side, as one HTML file.

    Args:
        runs: those that differ only in their seed are averaged into one line.
        title: of the page; by default what was run on which data.
        live: whether the page asks its server for news; see `fedstrata.report.watch`.
        learnt: sentences that it opens with.

    Raises:
        UsageError: if there are no runs.
    """
    if not runs:
        raise UsageError("a report needs at least one run")
    groups = group_runs(runs)
    name = title or _title(groups)
    found = [*_learnt(learnt), *sections(groups)]
    return document(name, _header(groups, name), found, groups, live)


def document(title: str, header: str, found: Sequence[Section], groups: Sequence[RunGroup], live: bool = False) -> str:
    """A whole page.

    Args:
        title: of the page.
        header: what stands above the list of sections, as HTML.
        found: the sections.
        groups: those whose lines a reader can hide; none where figures are of something else.
        live: whether the page asks its server for news.
    """
    script, (packed, source_hash) = _asset("report.js"), packed_plotly()
    policy = _policy([_hash(script.encode()), source_hash], live)
    return "".join(
        [
            f'<!doctype html>\n<html lang="en"{" data-live" if live else ""}><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f'<meta name="generator" content="fedstrata {__version__}"><title>{escape(title)}</title>',
            f"<style>{_colours()}{_asset('report.css')}</style></head><body>",
            '<a class="skip" href="#main">Skip to the results</a>',
            f'<div class="toolbar" role="region" aria-label="All figures">{_toolbar(groups)}</div>',
            "<noscript><style>.toolbar,.controls,.copy{display:none!important}</style>",
            '<p class="notice">Figures need JavaScript; the tables are here without it.</p></noscript>',
            f'<header class="top">{header}{_contents(found)}</header>',
            f'<main id="main">{"".join(section.html() for section in found)}</main>',
            f"<footer><p>Made by fedstrata {__version__}. This page holds all it shows and loads nothing.</p></footer>",
            '<p class="status" role="status" aria-live="polite"></p>',
            f'<script type="application/json" id="data">{embed_json(_data(groups, found))}</script>',
            f'<script type="text/plain" id="plotly">{packed}</script>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def write(runs: Sequence[SavedRun], path: Path, title: str | None = None, learnt: Sequence[str] = ()) -> Path:
    """Write a report; returns its path."""
    write_atomic(path, page(runs, title, learnt=learnt))
    return path


def _learnt(sentences: Sequence[str]) -> list[Section]:
    """What a page opens with, if somebody has something to say of its runs."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return [Section("learnt", "What was learnt", "", body=f"<ul>{items}</ul>")] if items else []


def news(runs: Sequence[SavedRun]) -> str:
    """What a live page needs to become the page of these runs, as JSON."""
    groups = group_runs(runs)
    found = sections(groups)
    shown = {
        "header": _header(groups, _title(groups)),
        "contents": _contents(found),
        "sections": [{"name": section.name, "html": section.html(), "part": section.body} for section in found],
    }
    return json.dumps({**_data(groups, found), **shown}, allow_nan=False, separators=(",", ":"))


def embed_json(data: Any) -> str:
    """Encode data as JSON that stays inside its script element, whatever its strings hold."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return plain


def _data(groups: Sequence[RunGroup], found: Sequence[Section]) -> dict[str, Any]:
    controls = {control.name: control for section in found for control in section.controls}
    return {
        "lines": [{"name": group.name, "colour": f"var(--line{group.index % len(PALETTE)})"} for group in groups],
        "dark": dark_colours(),
        "controls": {
            name: {"label": c.label, "values": c.values, "slides": c.slides, "start": c.start}
            for name, c in controls.items()
        },
        "figures": {figure.name: figure.as_dict() for section in found for figure in section.figures},
    }


def _title(groups: Sequence[RunGroup]) -> str:
    data = values_text(groups, "dataset")
    what = groups[0].name if len(groups) == 1 else f"{len(groups)} runs compared"
    if len(groups) > 1 and len({group.shown_run.method for group in groups}) == len(groups):
        what = f"{len(groups)} methods"
    return f"{what} on {data}" if data != NONE else what


def _header(groups: Sequence[RunGroup], title: str) -> str:
    first, *rest = verdict(groups) or ["Nothing was evaluated."]
    return (
        f'<div data-part="header"><p class="brand">fedstrata report</p><h1>{escape(title)}</h1>'
        f'<p class="setting">{escape(setting_text(groups))}</p>'
        f'<p class="verdict"><strong>{escape(first)}</strong> {escape(" ".join(rest))} {_diagnosed(groups)}</p></div>'
    )


def _diagnosed(groups: Sequence[RunGroup]) -> str:
    """The diagnosis of one run in a sentence, which leads to it."""
    found = groups[0].diagnosis
    if len(groups) > 1 or isinstance(found, Exception) or not (groups[0].rounds and (found.looked or found.findings)):
        return ""
    return f'<a href="#diagnosis">{escape(found.verdict)}</a>'


def _toolbar(groups: Sequence[RunGroup]) -> str:
    """As report.js makes it, so that nothing moves when it does."""
    boxes = "".join(
        f'<label><input type="checkbox" checked disabled>{swatch(group.index)}'
        f'<span class="name">{escape(group.name)}</span></label>'
        for group in groups
    )
    methods = f"<fieldset><legend>Methods shown in all figures</legend>{boxes}</fieldset>" if len(groups) > 1 else ""
    log = '<label><input type="checkbox" disabled>Log axes</label>'
    return f'<div class="inner">{methods}{log}<button type="button" disabled>Dark</button></div>'


def _contents(found: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{section.name}">{escape(section.heading)}</a></li>' for section in found)
    return f'<nav class="contents" aria-label="Sections"><ul>{links}</ul></nav>'


def _policy(hashes: Sequence[str], live: bool) -> str:
    allowed = " ".join(f"'sha256-{found}'" for found in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )


def _hash(source: bytes) -> str:
    return base64.b64encode(hashlib.sha256(source).digest()).decode()


def _colours() -> str:
    """The colours of the groups, for the style sheet."""
    light, dark = ("".join(f"--line{at}:{both[i]};" for at, both in enumerate(PALETTE)) for i in (0, 1))
    return (
        f":root{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    )


@cache
def _asset(name: str) -> str:
    return (files("fedstrata.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def packed_plotly() -> tuple[str, str]:
    """Plotly.js, packed, as base64, and the hash by which a browser knows the unpacked script.

    Raises:
        UsageError: if the package plotly is missing.
    """
    spec = importlib.util.find_spec("plotly")  # finding it loads none of its Python
    homes = [Path(home) for home in (spec.submodule_search_locations or [])] if spec else []
    source = next((f for home in homes if (f := home / "package_data" / "plotly.min.js").is_file()), None)
    if source is None:
        raise UsageError("a report needs the package plotly: pip install plotly")
    script = source.read_bytes()
    return base64.b64encode(gzip.compress(script, 6, mtime=0)).decode(), _hash(script)
