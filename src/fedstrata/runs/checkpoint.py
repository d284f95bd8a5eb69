"""Checkpoints: a ServerState in one sealed file each; a damaged one is noticed, and the one before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedstrata.core.tensors import Tensors
from fedstrata.errors import FedstrataError
from fedstrata.runs.files import Damaged, read_sealed, write_sealed
from fedstrata.server.state import Flight, ServerState, Version
from fedstrata.wire.packing import pack, sections, slots_of, unpack


class _Flight(BaseModel):
    """A visit under way."""

    model_config = ConfigDict(strict=True)
    client: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    ends: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Head(BaseModel):
    """What is no tensor; fields of a later version are passed over."""

    model_config = ConfigDict(strict=True)
    round: int
    techniques: list[str]
    changed: dict[str, int]
    clock: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    flights: list[_Flight] = []
    versions: dict[str, dict[str, int]] = {}
    base: str = ""


def _path(directory: Path, round: int) -> Path:
    return directory / f"round-{round:06d}.checkpoint"


def number(path: Path) -> int:
    """The number of rounds done that a checkpoint's name tells, −1 for other files."""
    digits = path.stem.removeprefix("round-")
    return int(digits) if digits.isdecimal() else -1


def paths(directory: Path) -> list[Path]:
    """The checkpoints that are there, newest first."""
    there = [path for path in directory.glob("round-*.checkpoint") if number(path) >= 0]
    return sorted(there, key=number, reverse=True)


def save(directory: Path, state: ServerState, settings: Mapping[str, str] | None = None) -> Path:
    """Write a checkpoint, with the settings that decide about the run's result (`select_deciding`)."""
    tensors: Tensors = {f"param/{n}": t for n, t in state.params.items()}
    tensors |= {f"buffer/{n}": t for n, t in state.buffers.items()}
    tensors |= {f"state:{t}/{n}": v for t, slot in state.techniques.items() for n, v in slot.items()}
    tensors |= {"held": state.held, "remembers": state.remembers}
    head = {"round": state.round, "techniques": list(state.techniques), "changed": dict(state.changed)}
    head |= {"clock": state.clock} if state.clock else {}
    head |= {"base": state.base} if state.base else {}
    for version in state.versions:
        tensors |= {f"param@{version.round}/{n}": t for n, t in version.params.items()}
        tensors |= {f"buffer@{version.round}/{n}": t for n, t in version.buffers.items()}
        tensors |= {
            f"state@{version.round}:{t}/{n}": v for t, slot in version.techniques.items() for n, v in slot.items()
        }
    if state.flights:
        head["flights"] = [asdict(flight) for flight in state.flights]
        head["versions"] = {str(version.round): dict(version.changed) for version in state.versions}
    head |= {} if settings is None else {"settings": dict(settings)}
    path = _path(directory, state.round)
    write_sealed(path, pack(head, tensors))
    return path


def load(path: Path) -> ServerState:
    """Read a checkpoint back.

    Raises:
        Damaged: if the file is truncated, edited or of another form.
    """
    try:
        raw, tensors = unpack(read_sealed(path))
        head, found = _Head.model_validate(raw), sections(tensors)
        state = ServerState(
            round=head.round,
            params=found.get("param", {}),
            buffers=found.get("buffer", {}),
            techniques=slots_of(found, "state", head.techniques),
            changed=head.changed,
            held=tensors["held"],
            remembers=tensors["remembers"],
            clock=head.clock,
            flights=tuple(Flight(f.client, f.round, f.ends) for f in head.flights),
            versions=tuple(_version(int(number), head, found) for number in head.versions),
            base=head.base,
        )
    except (KeyError, ValueError, FedstrataError) as error:
        raise Damaged(f"{path} is damaged") from error
    if state.round != number(path) or not _sound(state):
        raise Damaged(f"{path} is damaged")
    return state


def _version(number: int, head: _Head, found: Mapping[str, Tensors]) -> Version:
    """What is kept of an earlier state."""
    params, buffers = found.get(f"param@{number}", {}), found.get(f"buffer@{number}", {})
    return Version(
        number, params, buffers, slots_of(found, f"state@{number}", head.techniques), head.versions[str(number)]
    )


def _sound(state: ServerState) -> bool:
    """True if what it says of clients and rounds can be: a file that was edited may have been sealed again."""
    clients = (state.held, state.remembers)
    if any(t.dtype != torch.int32 or t.dim() != 1 or len(t) != len(state.held) for t in clients):
        return False
    known = {version.round for version in state.versions}
    if len({f.client for f in state.flights}) < len(state.flights):
        return False
    if any(f.client >= len(state.held) or f.round not in known or f.ends < state.clock for f in state.flights):
        return False
    if any(v.params.keys() != state.params.keys() or v.round >= state.round for v in state.versions):
        return False
    last = [*state.changed.values(), *(n for t in clients if len(t) for n in (int(t.min()), int(t.max())))]
    return all(-1 <= n < max(state.round, 1) for n in last)


def settings(path: Path) -> dict[str, str] | None:
    """What decides about the result of the run that wrote a checkpoint; None in those of older versions.

    Raises:
        Damaged: if the file is not whole.
    """
    try:
        found = unpack(read_sealed(path))[0].get("settings")
    except FedstrataError as error:
        raise Damaged(f"{path} is damaged") from error
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None


def load_all(directory: Path) -> tuple[list[ServerState], list[Path]]:
    """All whole checkpoints, newest first, and the paths of damaged ones."""
    whole: list[ServerState] = []
    damaged: list[Path] = []
    for path in paths(directory):
        try:
            whole.append(load(path))
        except Damaged:
            damaged.append(path)
    return whole, damaged
