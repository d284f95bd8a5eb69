"""Data that a function of the user's own makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.own_code import SourceText, call_own, load_object
from fedstrata.data.arrays import as_array, examples_dataset, read_targets
from fedstrata.data.examples import Dataset, TensorExamples, as_examples
from fedstrata.data.readers.leaf import spans
from fedstrata.data.targets import read_any
from fedstrata.errors import UsageError


def python(data_dir: Path | None, /, *, source: SourceText, **arguments: Any) -> Dataset:
    """Whatever a function of your own makes, named 'module:function' (a Dataset, or your clients and test data).

    The module is found in the working directory, or is installed. The function gets all other arguments, and returns a
    `fedstrata.Dataset`, or (clients, test): a list, or a dict by name, with a pair of arrays or a map-style Dataset for
    each client, and the same for testing. These are the natural clients; what is learnt is found from the targets.

    Args:
        data_dir: not needed; a function with an argument of that name gets its own.
        source: `module:function`, or `DIR/module:function`.
        arguments: of the function, literal values.
    """
    made = call_own(source, load_object(source), arguments)
    if isinstance(made, Dataset):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Sequence | Mapping)):
        raise UsageError(f"{source} returns a fedstrata.Dataset or (clients, test), not {_kind(made)}")
    return _from_clients(source, *made)


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return type(made).__name__


def _from_clients(source: str, clients: Sequence[Any] | Mapping[Any, Any], test: Any) -> Dataset:
    """The dataset of clients, one after the other."""
    if isinstance(clients, Mapping):
        names, given = tuple(map(str, clients)), list(clients.values())
    else:
        names, given = tuple(f"client {number}" for number in range(len(clients))), list(clients)
    if not given:
        raise UsageError(f"{source} returns no clients")
    parts = _settle([_read(source, *pair) for pair in zip((*names, "the test data"), (*given, test), strict=True)])
    y = np.concatenate([as_array(source, "targets", part.y) for part in _same_targets(source, parts)])
    x = parts[0].x
    tokens = isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.int64
    targets = read_targets(source, y, "", (len(y), *x.shape[1:]) if tokens else None)
    count = sum(len(part) for part in parts[:-1])
    values = torch.from_numpy(targets.values)
    try:
        together = torch.cat([part.x for part in parts[:-1]])
    except RuntimeError:
        raise UsageError(f"{source}: the clients' inputs are not all of one shape and type") from None
    whose = f"{len(names):,} {'client' if len(names) == 1 else 'clients'} of your own"
    return examples_dataset(
        "python",
        replace(parts[0], x=together, y=values[:count]),
        replace(parts[-1], y=values[count:]),
        targets,
        spans([len(part) for part in parts[:-1]]),
        names,
        f"{count:,} examples of {whose}, for {targets.task}",
    )


def _read(source: str, whose: str, data: Any) -> TensorExamples:
    """One client's examples, in tensors without an index."""
    try:
        found = as_examples(data, whose, read_any)
    except UsageError as error:
        raise UsageError(f"{source}: {whose}: {error}") from None
    if not len(found):
        raise UsageError(f"{source}: {whose} has no examples")
    if isinstance(found, TensorExamples):
        return found if found.index is None else replace(found, x=found.x[found.index], y=found.labels(), index=None)
    return TensorExamples(*found.batch(torch.arange(len(found))))


def _settle(parts: list[TensorExamples]) -> list[TensorExamples]:
    """Images as bytes where all are scaled alike, else as the numbers that a model sees; doubles as float32."""
    if len({(part.x.dtype, part.mean, part.std) for part in parts}) > 1:
        parts = [TensorExamples(*part.batch(torch.arange(len(part)))) for part in parts]
    return [replace(part, x=part.x.float()) if part.x.dtype == torch.float64 else part for part in parts]


def _same_targets(source: str, parts: list[TensorExamples]) -> list[TensorExamples]:
    """The parts, whose targets must be of one shape."""
    shapes = {tuple(part.y.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise UsageError(
            f"{source}: targets are of several shapes, {' and '.join(map(str, map(list, sorted(shapes))))}"
        )
    return parts
