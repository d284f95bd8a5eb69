"""TOML in and out: run.toml, and configurations that people write."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.core.spec import text_of
from fedstrata.errors import UsageError, one_line

SPECS = ("adapter", "dataset", "model", "partition", "optimizer", "schedule")
"""Fields that are a name with arguments, and may also be given as a table: `[model] name = "resnet8", width = 16`."""
MAX_DEPTH = 100
"""How deep lists and tables may be nested."""
LARGEST = 10**1000
"""Whole numbers go no further."""


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {lower_first(str(error))}") from None
    return flatten(values)


def parse_toml(text: str) -> dict[str, Any]:
    """What TOML says.

    Raises:
        ValueError: if it is no TOML, or holds what can be neither checked nor shown: Python writes no number of more
            than some thousand digits (hexadecimal ones it reads), and dotted keys nest without a limit.
    """
    deep, long = "its lists or tables are nested too deeply", "a number in it has too many digits"
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError:
        raise ValueError(long) from None
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        if any(isinstance(value, int) and abs(value) > LARGEST for value in level):
            raise ValueError(long)
        inner = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = [value for values_ in inner for value in values_]
    if level:
        raise ValueError(deep)
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of names with arguments as strings: {"model": {"name": "resnet8", "width": 16}} → "resnet8(width=16)"."""
    flat = dict(values)
    for field in SPECS:
        given = flat.get(field)
        if isinstance(given, Mapping):
            arguments = {k: plain_value(v) for k, v in given.items() if k != "name"}
            if not isinstance(given.get("name"), str):
                raise UsageError(f'the table [{field}] needs a name = "…"')
            flat[field] = text_of(given["name"], arguments)
    return flat


def plain_value(value: Any) -> Any:
    """Lists as tuples, at every depth, as arguments are read elsewhere."""
    return tuple(plain_value(v) for v in value) if isinstance(value, list) else value


def to_toml(values: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Flat values as TOML; None is left out."""
    lines = [f"# {one_line(line, 10_000)}" for line in header]
    lines += [f"{name} = {_write_value(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _write_value(value: Any) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character TOML escapes more
    return repr(value)


def lower_first(text: str) -> str:
    """The text with a small first letter, to go on in a sentence."""
    return text[:1].lower() + text[1:]
