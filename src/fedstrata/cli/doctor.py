"""`fedstrata doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from fedstrata.cli.checkup import Checkup, Remark, as_dict, check_up
from fedstrata.cli.options import Json
from fedstrata.core.extras import EXTRAS
from fedstrata.core.text import bytes_text, plural
from fedstrata.data.readers.archives import DATA_VARIABLE

_SIZES = ("memory", "free memory", "free disk", "shared memory")


def doctor(as_json: Json = False) -> None:
    """Say whether all is here that runs need, problems first, and what to install for what."""
    found = check_up()
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        print("\n".join(_lines(found)))
    if found.problems:
        raise typer.Exit(1)


def _lines(found: Checkup) -> Iterator[str]:
    yield from _remarks("Broken", found.problems)
    yield from _remarks("Could be better", found.advice)
    machine = {name: bytes_text(value) if name in _SIZES else value for name, value in found.machine.items()}
    yield from _section("This machine", machine)
    yield from _section("Versions", {name: version or "missing" for name, version in found.versions.items()})
    yield from _section("Extras", {name: _extra_text(name, there) for name, there in found.extras.items()})
    yield from _section("Data", _data_rows(found))
    if found.problems:
        yield f"{plural(len(found.problems), 'thing')} must be put right before runs work"
    else:
        yield "nothing is broken; `fedstrata demo` shows what fedstrata does"


def _remarks(title: str, remarks: list[Remark]) -> Iterator[str]:
    if remarks:
        yield title
        for remark in remarks:
            yield from (f"  {remark.what}", f"    → {remark.fix}")
        yield ""


def _section(title: str, rows: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, rows), default=0)
    yield title
    yield from (f"  {name:{width}}  {value}" for name, value in rows.items())
    yield ""


def _extra_text(name: str, there: Mapping[str, str | None]) -> str:
    """What an extra is for; its versions, or how to install it."""
    if all(there.values()):
        return f"{', '.join(f'{package} {version}' for package, version in there.items())}: {EXTRAS[name].help}"
    return f"not installed: {EXTRAS[name].help}: pip install 'fedstrata[{name}]'"


def _data_rows(found: Checkup) -> dict[str, str]:
    """Where data is looked for, and what seems to be there."""
    if not found.data["folder"]:
        return {DATA_VARIABLE: "not set: give --data-dir, or use datasets that need no files (digits, synthetic)"}
    there = found.data["found"] or {"(nothing known)": "`fedstrata data fetch NAME` downloads a dataset"}
    return {DATA_VARIABLE: found.data["folder"], **there}
