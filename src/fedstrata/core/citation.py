"""Papers as data, and as BibTeX: what somebody who used a method has to cite."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

_ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030c": "v ", "\u0327": "c "}
_SKIPPED = {"a", "an", "the", "on", "of", "in", "can", "why"}
"""Words with which a key does not end."""


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        authors: with their first names, joined by " and ", as in BibTeX; a last name of several words with ties (`~`).
        title: as it was published.
        venue: in short, such as `ICML`; `arXiv` for a preprint.
        year: of publication.
        arxiv: its number there, for a preprint.
        kind: of publication.
    """

    authors: str
    title: str
    venue: str
    year: int
    arxiv: str = ""
    kind: Literal["conference", "journal"] = "conference"

    @property
    def surnames(self) -> list[str]:
        """The authors' last names."""
        return [name.rpartition(" ")[2].replace("~", " ") for name in self.authors.split(" and ")]

    @property
    def key(self) -> str:
        """By what it is cited: first author, year, and the title's first word of weight, in plain letters."""
        words = [word for word in re.findall(r"\w+", _plain(self.title).lower()) if word not in _SKIPPED]
        return re.sub(r"\W", "", f"{_plain(self.surnames[0]).lower()}{self.year}{words[0]}")

    def bibtex(self) -> str:
        """The entry."""
        fields = {
            "author": " and ".join(map(_bibtex_name, self.authors.split(" and "))),
            "title": f"{{{escape_latex(self.title)}}}",
        }
        if self.arxiv:
            kind, where = "misc", {"eprint": self.arxiv, "archiveprefix": "arXiv"}
        elif self.kind == "journal":
            kind, where = "article", {"journal": escape_latex(self.venue)}
        else:
            kind, where = "inproceedings", {"booktitle": escape_latex(self.venue)}
        return bibtex_entry(kind, self.key, {**fields, **where, "year": str(self.year)})


def _bibtex_name(name: str) -> str:
    """A name, its last one in braces if it has several words: else BibTeX would take the last word alone."""
    first, space, last = name.rpartition(" ")
    text = escape_latex(last.replace("~", " "))
    return f"{escape_latex(first)}{space}{f'{{{text}}}' if '~' in last else text}"


def bibtex_entry(kind: str, key: str, fields: dict[str, str]) -> str:
    """An entry of a bibliography; fields are written as they are."""
    width = max(map(len, fields))
    lines = [f"  {name:<{width}} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def escape_latex(text: str) -> str:
    """A text as LaTeX prints it, in plain characters: `Müller & Co` → `M{\\"u}ller \\& Co`."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | _SIGNS
    found: list[str] = []
    for sign in unicodedata.normalize("NFD", text):
        if sign in _ACCENTS and found:
            found[-1] = f"{{\\{_ACCENTS[sign]}{found[-1]}}}"
        else:
            found.append(special.get(sign, sign if sign.isascii() else "?"))
    return "".join(found)


_SIGNS = {
    "±": r"$\pm$",
    "–": "--",
    "—": "---",
    "−": r"$-$",
    "×": r"$\times$",
    "²": r"$^{2}$",
    "…": r"\ldots{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "τ": r"$\tau$",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "ø": r"{\o}",
    "ß": r"{\ss}",
}
"""Signs that are no letters with an accent."""


def _plain(text: str) -> str:
    """The same letters without accents."""
    return "".join(sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign))
