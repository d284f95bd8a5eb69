"""A run's files, spoilt: seeded changes of JSON, TOML, plain bytes, and sealed files that are sealed again."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedstrata.config.toml import to_toml
from fedstrata.runs.files import read_sealed, write_sealed
from fedstrata.wire.packing import pack, unpack

DEEP = 200_000
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e308, -1e308, 10**400, float("nan"), float("inf"), 2**31, 2**63),
    *("", "x", "é\x00\n", "1", [], {}, [[]], [None], ["x"], [0.5, "x"], {"a": 1}, {"": None}, [{"a": []}]),
)
"""What stands where something else should."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def spoilt(value: Any, rng: random.Random) -> Any:
    """A JSON value with one thing in it changed, taken away or put in."""
    value = copy.deepcopy(value)
    path = rng.choice(_some(value, rng))
    if not path:
        return copy.deepcopy(rng.choice(WRONG))
    home = value
    for key in path[:-1]:
        home = home[key]
    kind = rng.random()
    if kind < 0.1:
        del home[path[-1]]
    elif kind < 0.2 and isinstance(home, dict):
        home[rng.choice(["", "round", "é", "x" * 300])] = home.pop(path[-1])
    elif kind < 0.3 and isinstance(home, list):
        home.insert(path[-1], copy.deepcopy(rng.choice(WRONG)))
    else:
        home[path[-1]] = copy.deepcopy(rng.choice(WRONG))
    return value


def _some(value: Any, rng: random.Random) -> list[tuple[Any, ...]]:
    """The paths of one depth: else a matrix of numbers would take almost all the changes."""
    every = list(places(value))
    depth = rng.choice(sorted({len(path) for path in every}))
    return [path for path in every if len(path) == depth]


def spoil_json(path: Path, rng: random.Random) -> None:
    path.write_text(json.dumps(spoilt(json.loads(path.read_text()), rng)))


def spoil_lines(path: Path, rng: random.Random) -> None:
    rows = path.read_text().splitlines()
    at = rng.randrange(len(rows))
    rows[at] = json.dumps(spoilt(json.loads(rows[at]), rng))
    path.write_text("\n".join(rows) + "\n")


def spoil_toml(path: Path, rng: random.Random) -> None:
    """A setting of another kind, gone, or unknown."""
    import tomllib

    values = tomllib.loads(path.read_text())
    name = rng.choice(list(values))
    lines = to_toml({n: v for n, v in values.items() if n != name}).splitlines()
    said = rng.choice(
        ['"x"', "-1", "0", "1e400", "nan", "[]", "{}", "true", "1979-05-27", "[[1, 'a']]", '"\\u0000"', "9" * 400]
    )
    lines.insert(
        rng.randrange(len(lines)) if said != "{}" else 0, f"{rng.choice([name, name, name, 'unknown'])} = {said}"
    )
    path.write_text("\n".join(lines) + "\n")


def spoil_bytes(path: Path, rng: random.Random) -> None:
    """Cut, nested, emptied, not text, or with a hole."""
    data = path.read_bytes()
    at = rng.randrange(max(len(data), 1))
    path.write_bytes(
        rng.choice(
            [
                data[:at],
                b"[" * DEEP + b"\n",
                b'{"a":' * DEEP + b"\n",
                b"a = " + b"[" * DEEP + b"\n",
                b"",
                b"\xff\xfe" + data,
                b"\x00" * 100,
                data[:at] + b"\x00" + data[at + 1 :],
                b"9" * 10_000 + b"\n",
                data + data,
                b"null\n",
            ]
        )
    )


def spoil_sealed(path: Path, rng: random.Random) -> None:
    """A checkpoint or a memory whose head or tensors are changed, and which is whole all the same."""
    head, tensors = unpack(read_sealed(path))
    if rng.random() < 0.4:
        changed = spoilt(head, rng)
        head = changed if isinstance(changed, dict) else {"round": changed}
    elif tensors:
        name = rng.choice(list(tensors))
        tensors = CHANGES[rng.choice(list(CHANGES))](dict(tensors), name)
    write_sealed(path, pack(head, tensors))


CHANGES: dict[str, Callable[[dict[str, torch.Tensor], str], dict[str, torch.Tensor]]] = {
    "gone": lambda tensors, name: {n: t for n, t in tensors.items() if n != name},
    "renamed": lambda tensors, name: {f"{n}x" if n == name else n: t for n, t in tensors.items()},
    "in another section": lambda tensors, name: {f"x{n}" if n == name else n: t for n, t in tensors.items()},
    "of another type": lambda tensors, name: {**tensors, name: tensors[name].to(torch.float64)},
    "whole numbers": lambda tensors, name: {**tensors, name: tensors[name].to(torch.int64)},
    "true and false": lambda tensors, name: {**tensors, name: tensors[name] > 0},
    "of another shape": lambda tensors, name: {**tensors, name: tensors[name].new_zeros(3, 1)},
    "empty": lambda tensors, name: {**tensors, name: tensors[name].new_zeros(0)},
    "one axis more": lambda tensors, name: {**tensors, name: tensors[name][None].clone()},
    "no axes": lambda tensors, name: {**tensors, name: tensors[name].new_zeros(())},
    "large": lambda tensors, name: {**tensors, name: torch.full_like(tensors[name], 100)},
    "negative": lambda tensors, name: {**tensors, name: torch.full_like(tensors[name], -100)},
    "one more": lambda tensors, name: {**tensors, "state:x/y": torch.zeros(1)},
}


def spoil(path: Path, rng: random.Random) -> None:
    """Change a run's file in some way that its kind allows."""
    kinds: dict[str, Callable[[Path, random.Random], None]] = {
        ".json": spoil_json,
        ".jsonl": spoil_lines,
        ".toml": spoil_toml,
        ".checkpoint": spoil_sealed,
        ".memory": spoil_sealed,
    }
    change = kinds.get(path.suffix, spoil_bytes)
    (spoil_bytes if rng.random() < 0.15 else change)(path, rng)
