"""Inputs of several tensors: tokens with a mask, an image with a table's row. They go through the house as one thing.

`Parts` has what is asked of a batch of inputs anywhere (rows, shape, device, `torch.cat`), part by part, so that
whoever passes inputs on need not know what they are made of. The model takes them as it was written to: by name or by
position (`fedstrata.models.inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class PartsShape(tuple[tuple[str, tuple[int, ...]], ...]):
    """The shapes of all parts by name; `[1:]` is that of one example, as for a tensor's shape."""

    def __getitem__(self, index: Any) -> Any:
        """A slice of every part's shape; numbers are those of the tuple itself."""
        if isinstance(index, slice):
            return PartsShape((name, tuple(shape)[index]) for name, shape in self)
        return super().__getitem__(index)

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape in self)


ExampleShape = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]
"""The shape of one example: of its one tensor, of several by position, or of several by name."""


def read_shape(given: Any) -> ExampleShape | None:
    """The shape of one example, from what a dataset says of it; None if it is no shape.

    Several parts come as (name, shape) pairs, as in `PartsShape`, where names that are numbers stand for positions.
    """
    if isinstance(given, Mapping):
        sizes = {str(name): _sizes(shape) for name, shape in given.items()}
        known = {name: shape for name, shape in sizes.items() if shape is not None}
        return known if known and len(known) == len(sizes) else None
    if not isinstance(given, Sequence) or isinstance(given, str):
        return None
    if given and all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in given):
        named = read_shape(dict(given))
        in_order = list(dict(given)) == [str(place) for place in range(len(given))]
        return tuple(named.values()) if in_order and isinstance(named, dict) else named
    if given and all(isinstance(one, tuple | list) for one in given):
        shapes = [shape for one in given if (shape := _sizes(one)) is not None]
        return tuple(shapes) if len(shapes) == len(given) else None
    return _sizes(given)


def _sizes(shape: Any) -> tuple[int, ...] | None:
    """Whole numbers, or None."""
    whole = isinstance(shape, Sequence) and all(isinstance(size, int) for size in shape)
    return tuple(shape) if whole else None


def shape_words(given: Any) -> str:
    """The shape of one example for people: 3×32×32, or part by part."""
    shape = read_shape(given)
    if isinstance(shape, dict):
        return ", ".join(f"{name} {shape_words(sizes)}" for name, sizes in shape.items())
    if shape and isinstance(shape[0], tuple):
        return " and ".join(map(shape_words, shape))
    return "×".join(map(str, shape or ())) or "one number"


class Parts:
    """Tensors with the same number of rows, by name; names that are numbers stand for positions.

    Args:
        tensors: name → tensor, rows first.
        named: True if the model takes them by name, False if in order.
    """

    def __init__(self, tensors: Mapping[str, Tensor], named: bool = True) -> None:
        self.tensors, self.named = dict(tensors), named

    @staticmethod
    def of(given: Any) -> Parts:
        """A tuple or a dict of arrays, all with the same number of rows.

        Raises:
            UsageError: if they have not.
        """
        named = isinstance(given, Mapping)
        items = given.items() if isinstance(given, Mapping) else enumerate(given)
        made = Parts({str(name): as_tensor(part) for name, part in items}, named)
        rows = {name: len(part) if part.dim() else None for name, part in made.tensors.items()}
        if not rows or len(set(rows.values())) > 1 or None in rows.values():
            told = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise UsageError(f"the parts of an input have one row per example each, not {told or 'none'}")
        return made

    def pass_to(self, function: Callable[..., Any]) -> Any:
        """What a function, such as a model, makes of the parts: each an argument of its own, by name or in order."""
        return function(**self.tensors) if self.named else function(*self.tensors.values())

    def map(self, function: Callable[[Tensor], Any]) -> Parts:
        """Every part through a function."""
        return Parts({name: function(part) for name, part in self.tensors.items()}, self.named)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __iter__(self) -> Iterator[Parts]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Any) -> Parts:
        return self.map(lambda part: part[index])

    def __setitem__(self, index: Any, value: Parts) -> None:
        for name, part in self.tensors.items():
            part[index] = value.tensors[name]

    @property
    def shape(self) -> PartsShape:
        """Of every part, by name."""
        return PartsShape((name, tuple(part.shape)) for name, part in self.tensors.items())

    @property
    def dtype(self) -> tuple[torch.dtype, ...]:
        """Of every part."""
        return tuple(part.dtype for part in self.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Of all parts together."""
        return sum(part.nbytes for part in self.tensors.values())

    def dim(self) -> int:
        """No number of axes of its own: layouts of images are not for it."""
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Parts:
        """As `Tensor.to`; only floating-point parts change their type."""
        return self.map(lambda part: part.to(*args, **kwargs))

    def pin_memory(self) -> Parts:
        """As `Tensor.pin_memory`."""
        return self.map(lambda part: part.pin_memory())

    def clone(self) -> Parts:
        """A copy."""
        return self.map(torch.clone)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Parts:
        """One axis of every part as several."""
        return self.map(lambda part: torch.unflatten(part, axis, tuple(sizes)))

    def zeros(self, *rows: int) -> Parts:
        """Zeros in the form of one example, with other axes in front of it."""
        return self.map(lambda part: part.new_zeros(*rows, *part.shape[1:]))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`torch.cat`, `torch.stack` and `torch.split`, part by part."""
        if function in (torch.cat, torch.stack):
            first, *rest = args
            whole = list(first)
            return Parts(
                {n: function([one.tensors[n] for one in whole], *rest, **(kwargs or {})) for n in whole[0].tensors},
                whole[0].named,
            )
        if function is torch.split:
            pieces = {n: function(part, *args[1:], **(kwargs or {})) for n, part in args[0].tensors.items()}
            count = len(next(iter(pieces.values())))
            return tuple(Parts({n: piece[at] for n, piece in pieces.items()}, args[0].named) for at in range(count))
        return NotImplemented


def shape_text(x: Tensor | Parts) -> str:
    """The shape of one example, for messages."""
    return str(x.shape[1:]) if isinstance(x, Parts) else str(list(x.shape[1:]))


def as_batch(given: Any) -> Any:
    """A batch of inputs as a user may give it: a tensor or an array, or a tuple or a dict of them.

    Raises:
        UsageError: if it is none, or has no rows.
    """
    wrong = "a batch of inputs is a tensor with a row for each, or a tuple or a dict of such tensors"
    try:
        batch = given if isinstance(given, Parts) else _tensor_or_parts(given)
    except UsageError:
        raise
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{wrong}, not {type(given).__name__}") from None
    if isinstance(batch, torch.Tensor) and not batch.dim():
        raise UsageError(f"{wrong}, not a single number")
    if not len(batch):
        raise UsageError("the batch of inputs is empty")
    return batch


def as_tensor(given: Any) -> Tensor:
    """A tensor of whatever stands for one; an array that nobody may write to (pandas has these) is copied first."""
    return torch.as_tensor(np.require(given, requirements="W") if isinstance(given, np.ndarray) else given)


def _tensor_or_parts(given: Any) -> Any:
    return Parts.of(given) if isinstance(given, Mapping | tuple) else as_tensor(given)


def call_on(model: Callable[..., Any], inputs: Tensor | Parts) -> Any:
    """What a model makes of a batch: several parts are arguments of their own."""
    return inputs.pass_to(model) if isinstance(inputs, Parts) else model(inputs)


def zeros_of(x: Tensor | Parts, *rows: int) -> Any:
    """Zeros in the form of one of the inputs, with other axes in front of it."""
    return x.zeros(*rows) if isinstance(x, Parts) else x.new_zeros(*rows, *x.shape[1:])


def stack_inputs(rows: Sequence[Any]) -> Any:
    """Single inputs, each a tensor (or what can be one), a tuple or a dict of them, as a batch."""
    first = rows[0]
    if isinstance(first, Mapping):
        return Parts({str(n): torch.stack([torch.as_tensor(row[n]) for row in rows]) for n in first}, named=True)
    if isinstance(first, tuple):
        columns = zip(*rows, strict=True)
        parts = {str(n): torch.stack([torch.as_tensor(one) for one in column]) for n, column in enumerate(columns)}
        return Parts(parts, named=False)
    return torch.stack([torch.as_tensor(row) for row in rows])
