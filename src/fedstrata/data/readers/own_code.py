"""Data that a function of the user's own makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.own_code import SourceText, call_own, load_object
from fedstrata.data.arrays import as_array, check_shapes, examples_dataset, read_targets
from fedstrata.data.cells import Array
from fedstrata.data.client_data import take_apart
from fedstrata.data.examples import Dataset, TensorExamples, as_examples
from fedstrata.data.readers.leaf import spans
from fedstrata.data.single_precision import refuse_beyond
from fedstrata.data.targets import read_any
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def python(data_dir: Path | None, asked: str = "", /, *, source: SourceText, **arguments: Any) -> Dataset:
    """Whatever a function of your own makes, named 'module:function' (a Dataset, or your clients and test data).

    The module is found in the working directory, or is installed. The function gets all other arguments, and returns a
    `fedstrata.Dataset`, or (clients, test): a list, or a dict by name, with a pair of arrays or a map-style Dataset for
    each client, and the same for testing. A client may be (train, test) instead, and then test may be None. These are
    the natural clients; what is learnt is found from the targets.

    Args:
        data_dir: not needed; a function with an argument of that name gets its own.
        asked: the task that a run asks for, of targets that the function does not give in a Dataset.
        source: `module:function`, or `DIR/module:function`.
        arguments: of the function, literal values.
    """
    made = call_own(source, load_object(source), arguments)
    if isinstance(made, Dataset):
        return made
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Sequence | Mapping)):
        raise UsageError(f"{source} returns a fedstrata.Dataset or (clients, test), not {_kind(made)}")
    return _from_clients(source, asked, *made)


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return type(made).__name__


def _from_clients(source: str, asked: str, clients: Sequence[Any] | Mapping[Any, Any], test: Any) -> Dataset:
    """The dataset of clients, one after the other."""
    named = clients if isinstance(clients, Mapping) else {f"client {n}": data for n, data in enumerate(clients)}
    names = tuple(map(str, named))
    train, own = _take_apart(source, list(named.values()))
    reader = _Reader(source)
    parts = [reader.read(whose, data) for whose, data in zip(names, train, strict=True)]
    for whose, part in zip(names, parts, strict=True):
        if not len(part):
            raise UsageError(f"{source}: {whose} has no examples")
    theirs = [None if data is None else reader.read(f"the test data of {names[n]}", data) for n, data in enumerate(own)]
    theirs = [part if part is not None and len(part) else None for part in theirs]
    given = None if test is None else reader.read("the test data", test)
    if given is not None and not len(given):
        raise UsageError(f"{source}: the test data has no examples")
    if given is None and all(part is None for part in theirs):
        raise UsageError(f"{source} returns no test data: return (clients, test), or (train, test) for every client")
    return _dataset(source, asked, names, reader, _Read(parts, theirs, given))


class _Read(NamedTuple):
    """Examples that were read: the clients' to train on, their own to test, and those to test all of them."""

    train: list[TensorExamples]
    own: list[TensorExamples | None]
    test: TensorExamples | None


def _take_apart(source: str, given: list[Any]) -> tuple[list[Any], list[Any]]:
    """(what clients train on, their own test data or None)."""
    if not given:
        raise UsageError(f"{source} returns no clients")
    try:
        parts = [take_apart(entry, number) for number, entry in enumerate(given)]
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    return [train for train, _ in parts], [test for _, test in parts]


def _dataset(source: str, asked: str, names: tuple[str, ...], reader: _Reader, found: _Read) -> Dataset:
    own = [part for part in found.own if part is not None]
    parts = _settle([*found.train, *own, *([] if found.test is None else [found.test])])
    count, tested = len(found.train), len(found.train) + len(own)
    y = reader.words_of(np.concatenate([as_array(source, "targets", p.y) for p in _same_targets(source, parts)]))
    x = parts[0].x
    tokens = isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.int64
    targets = read_targets(source, y, asked, (len(y), *x.shape[1:]) if tokens else None)
    if isinstance(x, torch.Tensor):
        check_shapes(source, targets, tuple(x.shape))
    values = torch.split(torch.from_numpy(targets.values), [len(part) for part in parts])
    parts = [replace(part, y=part_values) for part, part_values in zip(parts, values, strict=True)]
    train = _join(source, parts[:count])
    theirs = _join(source, parts[count:tested]) if own else None
    test = theirs if found.test is None else parts[-1]
    assert test is not None
    whose = f"{count:,} {'client' if count == 1 else 'clients'} of your own"
    return replace(
        examples_dataset(
            "python",
            train,
            test,
            targets,
            spans([len(part) for part in found.train]),
            names,
            f"{len(train):,} examples of {whose}, for {targets.task}",
            spans([0 if part is None else len(part) for part in found.own]) if own else (),
        ),
        client_test=None if test is theirs else theirs,
    )


def _join(source: str, parts: list[TensorExamples]) -> TensorExamples:
    """Several parts as one."""
    try:
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    except RuntimeError:
        raise UsageError(f"{source}: the clients' inputs are not all of one shape and type") from None
    return replace(parts[0], x=x, y=y)


class _Reader:
    """Reads clients' examples; words among the targets become numbers, in the order in which they are met."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._places: dict[str, int] = {}
        self._numbers = False

    def read(self, whose: str, data: Any) -> TensorExamples:
        """One client's examples, in tensors without an index."""
        try:
            found = as_examples(data, whose, self._targets)
            if not len(found):
                return TensorExamples(torch.empty(0), torch.empty(0))
            if not isinstance(found, TensorExamples):
                found = TensorExamples(*found.batch(torch.arange(len(found))))
        except UsageError as error:
            raise UsageError(f"{self.source}: {whose}: {error}") from None
        if found.index is not None:
            found = replace(found, x=found.x[found.index], y=found.labels(), index=None)
        if isinstance(found.x, torch.Tensor) and found.x.dtype == torch.float64:
            refuse_beyond(found.x.numpy(force=True), lambda row: f"{self.source}: {whose}: the input of example {row}")
        return found

    def _targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        words = _words_in(given)
        if words is None:
            self._numbers = True
            floats = isinstance(given, list) and all(isinstance(one, float) for one in given)
            return read_any(np.array(given) if floats else given, whose, index)  # torch would round a list's floats
        return torch.tensor([self._places.setdefault(word, len(self._places)) for word in words])

    def words_of(self, targets: Array) -> Array:
        """The targets of all, with words where there were words."""
        if not self._places:
            return targets
        if self._numbers:
            raise UsageError(f"{self.source}: some targets are words, and some are numbers")
        return np.array(list(self._places))[targets]


def _words_in(given: Any) -> list[str] | None:
    """The words of a list or an array of them with one axis; None of anything else."""
    if isinstance(given, np.ndarray):
        given = given.tolist() if given.ndim == 1 and given.dtype.kind in "USO" else None
    if not isinstance(given, list) or not given or not all(isinstance(one, str | bytes) for one in given):
        return None
    return [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in given]


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
