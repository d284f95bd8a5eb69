"""Arrays of the user's own, in a file of NumPy's."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.data.arrays import Targets, as_input, check_shapes, examples_dataset, read_targets
from fedstrata.data.cells import Array
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.readers.build import channel_stats, join_notes, tensor_of
from fedstrata.data.tables import hold_out
from fedstrata.errors import UsageError, did_you_mean


class _Arrays(NamedTuple):
    """What a file holds, a row per example: inputs, targets and, where it says so, whose they are."""

    inputs: Array
    targets: Array
    owner: Array | None


class _Owners(NamedTuple):
    """Whose the examples are.

    Args:
        number: of each example's client, −1 where nobody says.
        names: of the clients; empty where there are none.
    """

    number: Array
    names: tuple[str, ...] = ()


def npz(
    data_dir: Path | None,
    asked: str = "",
    *,
    path: PathText,
    x: str = "x",
    y: str = "y",
    client: str = "client",
    test: float = 0.2,
    seed: int = 0,
    task: str = "",
) -> Dataset:
    """Arrays of your own, an .npz file with inputs, targets and perhaps whose they are (never with pickles).

    The arrays are `x`, `y` and `client`, of which a share is held out; or `x_train`, `y_train`, `client_train`,
    `x_test`, `y_test` and `client_test`. Bytes are images (grey, or with their channels first or last), two axes of
    whole numbers are tokens, anything else is float32.

    Args:
        data_dir: not needed.
        asked: the task that a run asks for, which goes before `task`.
        path: of the file.
        x: name of the inputs, a row per example.
        y: name of the targets.
        client: name of the array that says whose example it is, which may be missing.
        test: share of each client's examples that is held out, where the file has no test part.
        seed: of this choice.
        task: what is learnt; found from the type and shape of the targets where empty.
    """
    if not 0 < test < 1:
        raise UsageError(f"npz: the share of test examples is above 0 and below 1, not {test}")
    arrays = _read(Path(path))
    parts = [_part(arrays, x, y, client, part) for part in (("_train", "_test") if f"{x}_train" in arrays else ("",))]
    whole = parts[0] if len(parts) == 1 else _join(parts[0], parts[1], x, y)
    owners = _number([(len(part.inputs), part.owner) for part in parts], client)
    targets = read_targets("npz", whole.targets, asked or task, _tokens(whole.inputs))
    inputs, done = as_input("npz", whole.inputs)
    check_shapes("npz", targets, inputs.shape)
    if len(parts) == 1:
        held_out = hold_out(np.maximum(owners.number, 0), targets.classes(), test, derive(seed, "npz"))
        said = f"{test:g} held out for testing"
    else:
        held_out = np.arange(len(inputs)) >= len(parts[0].inputs)
        said = "test part as in the file"
    return _dataset(inputs, targets, owners, held_out, join_notes(f"{len(inputs):,} examples, {said}", done))


def _read(path: Path) -> dict[str, Array]:
    """All arrays of a file by name."""
    try:
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            arrays = {name: file[name] for name in file} if isinstance(file, Mapping) else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        pickles = "Object arrays" in str(error)  # NumPy's own words for a text file are of pickles as well
        why = "one is a pickle, which is never read" if pickles else "write them with numpy.savez"
        raise UsageError(f"{path} holds no arrays of numbers by name: {why}") from None
    if arrays is None:
        raise UsageError(f"{path} holds one array, and not several by name: write it with numpy.savez")
    return arrays


def _array(arrays: Mapping[str, Array], name: str) -> Array:
    """One of them; its rows are examples."""
    if name not in arrays:
        raise UsageError(f"npz has no array '{name}'{did_you_mean(name, arrays)}")
    found = arrays[name]
    if not found.ndim or not len(found):
        raise UsageError(f"npz: the array '{name}' has no rows")
    return found


def _part(arrays: Mapping[str, Array], x: str, y: str, client: str, part: str) -> _Arrays:
    """One part of a file."""
    inputs, targets = _array(arrays, x + part), _array(arrays, y + part)
    owner = _array(arrays, client + part) if client + part in arrays else None
    for name, found in ((y + part, targets), (client + part, owner)):
        if found is not None and len(found) != len(inputs):
            raise UsageError(f"npz: '{x + part}' has {len(inputs):,} rows, and '{name}' has {len(found):,}")
    if owner is not None and (owner.ndim != 1 or owner.dtype.kind not in "biuUS"):
        raise UsageError(f"npz: '{client + part}' is one whole number or word per example")
    return _Arrays(inputs, targets, owner)


def _join(train: _Arrays, test: _Arrays, x: str, y: str) -> _Arrays:
    """Inputs and targets of both parts, one after the other."""
    for name, one, other in ((x, train.inputs, test.inputs), (y, train.targets, test.targets)):
        if one.shape[1:] != other.shape[1:] or one.dtype.kind != other.dtype.kind:
            raise UsageError(f"npz: '{name}_train' and '{name}_test' are of different shape or type")
    inputs, targets = (np.concatenate([train[at], test[at]]) for at in (0, 1))
    return _Arrays(inputs, targets, None)


def _number(parts: list[tuple[int, Array | None]], client: str) -> _Owners:
    """Clients by number, of parts that are so many examples and, where somebody says it, whose they are."""
    given = [owner for _, owner in parts if owner is not None]
    if parts[0][1] is None:
        return _Owners(np.full(sum(count for count, _ in parts), -1))
    if len({"i" if owner.dtype.kind in "biu" else owner.dtype.kind for owner in given}) > 1:
        raise UsageError(f"npz: '{client}_train' and '{client}_test' are of different type")
    names, numbers = np.unique(np.concatenate(given), return_inverse=True)
    rest = np.full(sum(count for count, owner in parts if owner is None), -1)
    told = tuple(one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in names)
    return _Owners(np.concatenate([numbers.reshape(-1), rest]), told)


def _tokens(inputs: Array) -> tuple[int, ...] | None:
    """The shape of inputs that are tokens."""
    return inputs.shape if inputs.dtype.kind in "iu" and inputs.ndim == 2 else None


def _dataset(inputs: Array, targets: Targets, owners: _Owners, held_out: Array, note: str) -> Dataset:
    """Both parts, clients one after the other."""
    train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    train = train[np.argsort(owners.number[train], kind="stable")]
    stats = channel_stats(inputs[train]) if inputs.dtype == np.uint8 and inputs.ndim == 4 else ((), ())
    parts = [TensorExamples(tensor_of(inputs[rows]), tensor_of(targets.values[rows]), *stats) for rows in (train, test)]
    whose = np.unique(owners.number[train]).tolist() if owners.names else []
    groups, tests = (
        [tensor_of(np.flatnonzero(owners.number[rows] == client)) for client in whose] for rows in (train, test)
    )
    count = "one client only" if len(whose) == 1 else f"{len(whose):,} clients"
    return examples_dataset(
        "npz",
        parts[0],
        parts[1],
        replace(targets, values=targets.values[np.concatenate([train, test])]),
        groups,
        [owners.names[client] for client in whose],
        join_notes(count if whose else "", note, f"for {targets.task}"),
        tests if (owners.number[test] >= 0).any() else (),
    )
