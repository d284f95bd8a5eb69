"""Arrays of the user's own, in a file of NumPy's."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.data.arrays import Targets, as_input, examples_dataset, read_targets
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.readers.build import channel_stats, join_notes, tensor_of
from fedstrata.data.tables import Array, hold_out
from fedstrata.errors import UsageError, did_you_mean, one_line


def npz(
    data_dir: Path | None,
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
    `x_test` and `y_test`. Bytes are images (grey, or with their channels first or last), two axes of whole numbers are
    tokens, anything else is float32.

    Args:
        data_dir: not needed.
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
    if f"{x}_train" in arrays:
        whole, targets, owner, held_out = _given_parts(arrays, x, y, client, task)
        said = "test part as in the file"
    else:
        whole, given, owner = _part(arrays, x, y, client, "")
        targets = read_targets("npz", given, task, _tokens(whole))
        numbers = np.unique(owner, return_inverse=True)[1].reshape(-1)
        held_out = hold_out(numbers, targets.classes(), test, derive(seed, "npz"))
        said = f"{test:g} held out for testing"
    inputs, done = as_input("npz", whole)
    return _dataset(inputs, targets, owner, held_out, join_notes(f"{len(inputs):,} examples, {said}", done))


def _read(path: Path) -> dict[str, Array]:
    """All arrays of a file by name."""
    try:
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, Mapping):
                raise UsageError(f"{path} holds one array, and not several by name: write it with numpy.savez")
            return {name: file[name] for name in file}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} holds no arrays of numbers by name: {one_line(str(error), 200)}") from None


def _array(arrays: Mapping[str, Array], name: str) -> Array:
    """One of them; its rows are examples."""
    if name not in arrays:
        raise UsageError(f"npz has no array '{name}'{did_you_mean(name, arrays)}")
    found = arrays[name]
    if not found.ndim or not len(found):
        raise UsageError(f"npz: the array '{name}' has no rows")
    return found


def _part(arrays: Mapping[str, Array], x: str, y: str, client: str, part: str) -> tuple[Array, Array, Array]:
    """(inputs, targets, whose they are) of one part; all one client's where nobody says."""
    inputs, targets = _array(arrays, x + part), _array(arrays, y + part)
    owner = _array(arrays, client + part) if client + part in arrays else np.zeros(len(inputs), np.int64)
    for name, found in ((y + part, targets), (client + part, owner)):
        if len(found) != len(inputs):
            raise UsageError(f"npz: '{x + part}' has {len(inputs):,} rows, and '{name}' has {len(found):,}")
    if owner.ndim != 1 or owner.dtype.kind not in "biuUS":
        raise UsageError(f"npz: '{client + part}' is one whole number or word per example")
    return inputs, targets, owner


def _given_parts(
    arrays: Mapping[str, Array], x: str, y: str, client: str, task: str
) -> tuple[Array, Targets, Array, Array]:
    """(all inputs, all targets, whose they are, which are for testing) of a file that has both parts."""
    train, test = (_part(arrays, x, y, client, part) for part in ("_train", "_test"))
    for name, one, other in zip((x, y), train, test, strict=False):
        if one.shape[1:] != other.shape[1:] or one.dtype.kind != other.dtype.kind:
            raise UsageError(f"npz: '{name}_train' and '{name}_test' are of different shape or type")
    inputs, targets = (np.concatenate([train[at], test[at]]) for at in (0, 1))
    owner = np.concatenate([train[2], np.full(len(test[2]), train[2][0])])  # whose the tests are decides nothing
    held_out = np.arange(len(inputs)) >= len(train[0])
    return inputs, read_targets("npz", targets, task, _tokens(inputs)), owner, held_out


def _tokens(inputs: Array) -> tuple[int, ...] | None:
    """The shape of inputs that are tokens."""
    return inputs.shape if inputs.dtype.kind in "iu" and inputs.ndim == 2 else None


def _dataset(inputs: Array, targets: Targets, owner: Array, held_out: Array, note: str) -> Dataset:
    """Both parts, clients one after the other."""
    train = np.flatnonzero(~held_out)
    train = train[np.argsort(owner[train], kind="stable")]
    order = np.concatenate([train, np.flatnonzero(held_out)])
    sorted_targets = Targets(targets.task, targets.values[order], targets.outputs, targets.class_names)
    stats = channel_stats(inputs[train]) if inputs.dtype == np.uint8 and inputs.ndim == 4 else ((), ())
    parts = [
        TensorExamples(tensor_of(inputs[rows]), tensor_of(targets.values[rows]), *stats)
        for rows in (train, order[len(train) :])
    ]
    whose = np.unique(owner[train])
    groups = [tensor_of(np.flatnonzero(owner[train] == one)) for one in whose] if len(whose) > 1 else []
    names = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in whose]
    note = join_notes(f"{len(whose):,} clients" if groups else "", note, f"for {targets.task}")
    return examples_dataset("npz", parts[0], parts[1], sorted_targets, groups, names if groups else [], note)
