"""Markdown as GitHub reads it, made ready for Python-Markdown, and links that lead out of docs/."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path

FENCE = re.compile(r"(`{3,}|~{3,})")
ITEM = re.compile(r"([-*+]|\d{1,9}[.)]) +(?=\S)")
BOX = re.compile(r"(!!!|\?\?\?\+?|===!?) ")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PAGES = {"CONTRIBUTING.md": "docs/contributing.md", "CHANGELOG.md": "docs/changelog.md", "README.md": "docs/index.md"}
"""Files of the repository → the page that shows them."""
NOTEBOOK = re.compile(r"^examples/(\w+)\.ipynb$")
DRAWING = re.compile(r'<img alt="([^"]*)" src="(?:[^"]*/)?img/(drawing-[\w-]+\.svg)"[^>]*>')


def widen_lists(text: str) -> str:
    """Lists that are indented by the width of their markers, as on GitHub, indented by four columns.

    A list that follows a paragraph directly gets the blank line between them that Python-Markdown wants.
    """
    return "\n".join(_Widener().widen(text.splitlines())) + "\n"


class _Widener:
    """Lines, one after the other; `inside` are the columns at which the open items' contents begin."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.fence = ""
        self.lines: list[str] = []

    def widen(self, lines: list[str]) -> list[str]:
        for line in lines:
            body = line.lstrip(" ")
            if self.fence:
                self._keep(line)
                self.fence = "" if body.startswith(self.fence) and not body.strip("`~ ") else self.fence
            elif not body:
                self.lines.append("")
            else:
                self._take(line, body)
        return self.lines

    def _take(self, line: str, body: str) -> None:
        column = len(line) - len(body)
        marker = ITEM.match(body)
        fence = FENCE.match(body)
        if marker or fence or not (self.lines and self.lines[-1]):
            while self.inside and column < self.inside[-1]:
                self.inside.pop()
        code = column - (self.inside[-1] if self.inside else 0) >= 4
        if fence and not code:
            self.fence = fence[1]
        if marker and not code:
            self._separate()
            self.lines.append("    " * len(self.inside) + f"{marker[1]} {body[marker.end() :]}")
            self.inside.append(column + marker.end())
        else:
            self._keep(line)
            if BOX.match(body) and not code:
                self.inside.append(column + 4)

    def _keep(self, line: str) -> None:
        column = len(line) - len(line.lstrip(" "))
        self.lines.append("    " * len(self.inside) + line[min(column, self.inside[-1] if self.inside else 0) :])

    def _separate(self) -> None:
        """A blank line before the first item of a list."""
        before = self.lines[-1] if self.lines else ""
        if not before or ITEM.match(before.lstrip(" ")):
            return
        depth = "    " * len(self.inside)
        for line in reversed(self.lines):  # an earlier item of the same list, of more than one line?
            if not line:
                break
            if line.startswith(depth) and ITEM.match(line[len(depth) :]):
                return
        self.lines.append("")


def move_links(text: str, source: str, place: str, root: Path) -> str:
    """Links of a file of the repository, as they lead from its page of the site.

    Args:
        source: the file, from the root of the repository on.
        place: its page, from docs/ on.
        root: the repository. What is in it but not on the site is named, without a link.
    """

    def move(link: re.Match[str]) -> str:
        label, target = link[1], link[2]
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        where = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        where = NOTEBOOK.sub(lambda found: f"docs/tutorials/{found[1].replace('_', '-')}.md", where)
        if where == "docs/results" or where in PAGES:
            where = PAGES.get(where, "docs/results/index.md")
        elif not where.startswith("docs/"):
            return label if (root / where).exists() else link[0]
        moved = posixpath.relpath(where.removeprefix("docs/"), posixpath.dirname(place) or ".")
        return f"[{label}]({moved}{'#' * bool(anchor)}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(move, part) for i, part in enumerate(parts))


def inline_drawings(page: str, folder: Path) -> str:
    """`<img>`s of drawings replaced by the drawings."""

    def replace(image: re.Match[str]) -> str:
        drawing = (folder / image[2]).read_text(encoding="utf-8").strip()
        label = html.escape(html.unescape(image[1]), quote=True)
        named = drawing.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        return f'<span class="drawing-box" tabindex="0">{named}</span>'

    return DRAWING.sub(replace, page)
