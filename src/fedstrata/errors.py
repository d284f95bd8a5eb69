"""The errors that users meet: each is one clear sentence, and the command ends with its exit code."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path


class FedstrataError(Exception):
    """Base of every error raised on purpose; `str(error)` is the sentence shown to the user."""

    exit_code = 1


class UsageError(FedstrataError, ValueError):
    """The input is wrong: an unknown name, an impossible value, missing data, a full disk."""

    exit_code = 2


class NobodyThere(UsageError):
    """No client is ever there again: a run that has rounds ends with these."""


class Diverged(FedstrataError):
    """Training left the finite numbers; the last good state was kept."""

    @classmethod
    def in_round(cls, number: int, out: Path | None, why: str) -> Diverged:
        """In which round, why, and where the last good state is."""
        where = f"; the last good state is in {out}" if out else ""
        return cls(f"training diverged in round {number}: {why}{where}; a smaller lr may help")


class Stopped(FedstrataError):
    """The user stopped the run, which can go on later."""

    exit_code = 130


def not_negative(what: str, **values: float) -> None:
    """Refuse a number below 0, an infinite one, and none at all."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise UsageError(f"{what}'s {name} must be 0 or more, not {value}")


def positive(what: str, **values: float) -> None:
    """Refuse a number that is not above 0, and an infinite one."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UsageError(f"{what}'s {name} must be above 0, not {value}")


def whole_number(what: str, least: int, **values: int) -> None:
    """Refuse settings that are not whole numbers of at least so much."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{what}'s {name} must be a whole number, {least} or more, not {value!r}")


def one_of(what: str, choices: Sequence[str], **values: object) -> None:
    """Refuse a word that is not among the choices."""
    for name, value in values.items():
        if value not in choices:
            raise UsageError(f"{what}'s {name} must be one of {', '.join(choices)}, not {value!r}")


def one_line(text: str, limit: int = 600) -> str:
    """The text for one line of a terminal: no line breaks, no control characters, and a long one without its middle."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 3 :]}"


def did_you_mean(word: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """` (did you mean 'x'?)` for the nearest known word, or where none is near the whole list, if not a shorter one."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f" (did you mean '{near[0]}'?)"
    return f" (known: {', '.join(words if listed is None else sorted(listed))})"
