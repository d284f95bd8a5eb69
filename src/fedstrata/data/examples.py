"""Examples: what a client, or the server's test set, holds; indexed batch by batch, never copied whole.

Images stay uint8 and are scaled per batch; a client's part of a shared dataset is an index into one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np

from fedstrata.core.lazy import functional, torch
from fedstrata.core.parts import Parts, as_tensor, stack_inputs, zeros_of
from fedstrata.core.rng import preserve_rng
from fedstrata.core.types import Augment, Examples, replace_fields
from fedstrata.data.labels import read_classes
from fedstrata.data.no_data import LIST, refuse_no_data
from fedstrata.data.padding import cut_padding
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


ReadTargets = Callable[[Any, str, Any], "Tensor"]
"""(targets as somebody gave them, whose they are, their places or None) → a tensor, or a refusal."""


@dataclass(frozen=True, eq=False)
class TensorExamples:
    """Examples held in tensors: `x` (uint8 images, floats or integer tokens) and targets `y`, mostly integer labels.

    `x` may also be `Parts`, several tensors by name or by position.

    `index` selects a part without copying it. `mean` and `std` (per channel, in [0, 1]) scale uint8 images. `mask`
    names the part of texts that is 1 where a position is real and 0 where it is padding, which comes last: batches are
    cut to the longest of their texts.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    index: Tensor | None = None
    mask: str = ""
    _shift: Tensor | None = field(default=None, init=False, repr=False)
    _scale: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise UsageError(f"{len(self.x)} examples but {len(self.y)} labels")
        if self.y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            object.__setattr__(self, "y", self.y.long())
        if self.x.dtype == torch.uint8 and self.mean:
            shape = (-1,) + (1,) * (self.x.dim() - 2)
            object.__setattr__(self, "_shift", torch.tensor(self.mean).mul(255).view(shape))
            object.__setattr__(self, "_scale", torch.tensor(self.std).mul(255).reciprocal().view(shape))

    def __len__(self) -> int:
        return (self.y if self.index is None else self.index).shape[0]  # a third of the time that len(tensor) takes

    def select(self, index: Tensor) -> TensorExamples:
        """The part at `index`, sharing the tensors."""
        # Shares everything: a new object would compute the scaling again for every client.
        return replace_fields(self, index=index if self.index is None else self.index[index])

    def resize(self, side: int) -> TensorExamples:
        """The same images in `side` × `side` pixels (bilinear, antialiased), of the same type and scaled alike."""
        resized = torch.empty(len(self), *self.x.shape[1:-2], side, side, dtype=self.x.dtype)
        for begin in range(0, len(self), 1000):  # the floats of all at once would take four times the room
            rows = slice(begin, begin + 1000)
            images = self.x[rows if self.index is None else self.index[rows]]
            pixels = functional.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
            resized[rows] = (pixels if resized.is_floating_point() else pixels.round().clamp(0, 255)).to(resized.dtype)
        return TensorExamples(resized, self.labels(), self.mean, self.std)

    def split(self, parts: Sequence[Tensor]) -> Split:
        """All parts of a partition, as `select` would give them one by one, but made only when they are looked at."""
        flat = torch.cat(list(parts)) if len(parts) else torch.empty(0, dtype=torch.int64)
        small = flat.to(torch.int32) if len(self) < 2**31 else flat
        ends = np.cumsum([0, *(len(part) for part in parts)])
        return Split(self, small, ends)

    def labels(self) -> Tensor:
        """All labels, in order."""
        return self.y if self.index is None else self.y[self.index]

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs, scaled, and labels of the examples at `index`, whole numbers from 0 on."""
        if self.index is not None:
            index = self.index.index_select(0, index)  # a quarter of the time of self.index[index]
        x = self.x[index] if isinstance(self.x, Parts) else self.x.index_select(0, index)
        y = self.y.index_select(0, index)
        if x.dtype == torch.uint8:
            x = x.float()
            if augment is not None:
                x = augment(x.div_(255)).clamp(0, 1).mul_(255)
            x = x.div_(255) if self._shift is None or self._scale is None else x.sub_(self._shift).mul_(self._scale)
        elif augment is not None:
            x = augment(x)
        return cut_padding(x, y, self.mask) if self.mask else (x, y)

    @property
    def padded(self) -> TensorExamples:
        """The same, with all batches as long as the longest text of all, for those who look at shapes."""
        return replace_fields(self, mask="") if self.mask else self


@dataclass(frozen=True, eq=False)
class Split(Sequence["TensorExamples"]):
    """Many clients' parts of one dataset, held as one index: a hundred thousand clients take a few megabytes."""

    whole: TensorExamples
    order: Tensor
    ends: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, client: int) -> TensorExamples: ...
    @overload
    def __getitem__(self, client: slice) -> list[TensorExamples]: ...
    def __getitem__(self, client: int | slice) -> TensorExamples | list[TensorExamples]:
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"there are {len(self)} clients, and no number {client}")
        begin, end = self.ends[client % len(self) :][:2].tolist()
        return self.whole.select(self.order[begin:end].long())

    @cached_property
    def pool(self) -> TensorExamples:
        """Everybody's examples, client after client, in the memory that the index takes anyway."""
        return self.whole.select(self.order)

    def places(self, clients: Sequence[int], index: Sequence[Tensor]) -> Tensor:
        """Where in the pool some of each client's examples are, client after client."""
        begins = torch.from_numpy(self.ends[list(clients)])
        return torch.cat(list(index)).add_(begins.repeat_interleave(torch.tensor([len(part) for part in index])))

    def all(self) -> TensorExamples:
        """Everybody's examples, client after client."""
        return self.whole.select(self.order.long())

    def size(self, client: int) -> int:
        """Number of a client's examples, without looking at them."""
        return int(self.ends[client + 1] - self.ends[client])


def sizes(clients: Sequence[Examples] | Mapping[int, Examples]) -> Callable[[int], int]:
    """Client → number of its examples, in the quickest way."""
    return clients.size if isinstance(clients, Split) else lambda client: len(clients[client])


def sizes_of(clients: Sequence[Examples] | Mapping[int, Examples], some: Sequence[int]) -> list[int]:
    """Numbers of some clients' examples."""
    if isinstance(clients, Split):
        begin = np.asarray(some, dtype=np.int64)
        found: list[int] = (clients.ends[begin + 1] - clients.ends[begin]).tolist()
        return found
    return [len(clients[client]) for client in some]


@dataclass(frozen=True, eq=False)
class MapExamples:
    """Any map-style `torch.utils.data.Dataset` of (input, label) pairs; its own transforms run on every read.

    The refusal of a label that is none says `whose` it is, such as "client 3"; `read` tells what a label is.
    """

    dataset: Any
    whose: str = ""
    read: ReadTargets = read_classes

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index`, read one by one."""
        places = index.tolist()
        rows = [self.dataset[i] for i in places]
        x = stack_inputs([row[0] for row in rows])
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        return (x if augment is None else augment(x)), self.read([row[1] for row in rows], self.whose, places)

    def labels(self) -> Tensor:
        """All labels, in order; every example is read."""
        places = range(len(self.dataset))
        return self.read([self.dataset[i][1] for i in places], self.whose, places)


@dataclass(frozen=True, eq=False)
class CheckedExamples:
    """A user's own examples, whose labels are looked at whenever they are read."""

    examples: Examples
    whose: str = ""
    read: ReadTargets = read_classes

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index`."""
        x, y = self.examples.batch(index, augment)
        return x, self.read(y, self.whose, index)

    def labels(self) -> Tensor:
        """All labels, in order."""
        return self.read(self.examples.labels(), self.whose, None)


class LazyExamples:
    """Examples that a function makes where they are first read, and once in each process: only the function travels.

    It must make the same examples every time. What it draws from global random generators changes nobody else's.
    """

    def __init__(self, load: Callable[[], Any], whose: str = "", read: ReadTargets = read_classes) -> None:
        self._load, self.whose, self.read = load, whose, read
        self._made: Examples | None = None
        self._size: int | None = None

    def __getstate__(self) -> Any:
        return self._load, self._size, self.whose, self.read

    def __setstate__(self, state: Any) -> None:
        self._load, self._size, self.whose, self.read = state
        self._made = None

    def open(self) -> Examples:
        """The examples themselves."""
        if self._made is None:
            with preserve_rng():
                self._made = as_examples(self._load(), self.whose, self.read)
            self._size = len(self._made)
        return self._made

    def forget(self) -> None:
        """Keep no more than their number."""
        self._made = None

    def __len__(self) -> int:
        return len(self.open()) if self._size is None else self._size

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index`."""
        return self.open().batch(index, augment)

    def labels(self) -> Tensor:
        """All labels, in order."""
        return self.open().labels()


@dataclass(frozen=True, eq=False)
class SelectedExamples:
    """Some of a party's examples, by their places; only the places are held."""

    examples: Examples
    index: Tensor

    @property
    def whose(self) -> str:
        """Of whom a refusal speaks."""
        return getattr(self.examples, "whose", "")

    def forget(self) -> None:
        """Keep nothing that a function made."""
        if isinstance(self.examples, LazyExamples):
            self.examples.forget()

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index` among those selected."""
        return self.examples.batch(self.index[index], augment)

    def labels(self) -> Tensor:
        """All labels, in order."""
        return self.examples.labels()[self.index]


@dataclass(frozen=True, eq=False)
class JoinedExamples:
    """Several parties' examples as those of one, one party after the other."""

    parts: tuple[Examples, ...]
    ends: Tensor
    whose: ClassVar[str] = "all clients together"

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index`, in its order, whoever holds them."""
        owner = torch.searchsorted(self.ends, index, right=True)
        x: Tensor | None = None
        y: Tensor | None = None
        for part in sorted(set(owner.tolist())):
            rows = torch.nonzero(owner == part).flatten()
            begin = int(self.ends[part - 1]) if part else 0
            theirs, labels = self.parts[part].batch(index[rows] - begin, augment)
            x = zeros_of(theirs, len(index)) if x is None else x
            y = labels.new_zeros(len(index), *labels.shape[1:]) if y is None else y
            x[rows], y[rows] = theirs, labels
        assert x is not None
        assert y is not None
        return x, y

    def labels(self) -> Tensor:
        """All labels, party after party."""
        return torch.cat([part.labels() for part in self.parts])


def join_examples(clients: Sequence[Examples]) -> Examples:
    """Everybody's examples as one party's."""
    if isinstance(clients, Split):
        return clients.all()
    parts = tuple(data for data in clients if len(data))
    return JoinedExamples(parts, torch.tensor([len(part) for part in parts]).cumsum(0))


@dataclass(frozen=True, eq=False)
class _Inputs:
    """A map-style dataset's inputs: its rows, or the first part of each, whatever comes with it."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        found = self.rows[row]
        return found[0] if isinstance(found, tuple | list) else found, 0


def as_unlabelled(data: Any, what: str = "public data") -> Examples:
    """Whatever a user hands over as inputs without labels: an array of them, a pair, Examples or a map-style Dataset.

    Labels, where there are any, are never looked at. A refusal begins with `what` it is.
    """
    if isinstance(data, MapExamples):
        data = data.dataset
    elif isinstance(data, Examples):
        return data
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Mapping | Parts):
        data = _as_inputs(data[0])
    if isinstance(data, Parts):
        return TensorExamples(_as_inputs(data), torch.zeros(len(data), dtype=torch.int64))
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], torch.Tensor | np.ndarray):
        inputs = isinstance(data, list) and np.shape(data[0]) == np.shape(data[1])  # a list of two of them, not a pair
        data = data if inputs else data[0]
    numbers = isinstance(data, torch.Tensor) or (isinstance(data, np.ndarray) and data.dtype.kind in "biuf")
    if numbers and len(data.shape):
        rows = torch.as_tensor(data).detach()
        return TensorExamples(rows, torch.zeros(len(rows), dtype=torch.int64))
    readable = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if readable and not isinstance(data, Mapping | str | np.ndarray | torch.Tensor):
        return MapExamples(_Inputs(data))
    raise UsageError(f"{what} is an array of inputs or a map-style Dataset, not {type(data).__name__}")


def labels_at_hand(examples: Examples) -> Tensor | None:
    """All labels, where reading them means reading no inputs; else None."""
    if isinstance(examples, LazyExamples):
        return labels_at_hand(examples.open())
    if isinstance(examples, SelectedExamples):
        known = labels_at_hand(examples.examples)
        return None if known is None else known[examples.index]
    if isinstance(examples, TensorExamples):
        return examples.labels()
    if not isinstance(examples, MapExamples):
        return None
    rows = examples.dataset
    if isinstance(rows, list | tuple):
        return examples.labels()
    if isinstance(rows, torch.utils.data.TensorDataset) and len(rows.tensors) > 1:
        return examples.read(rows.tensors[1], examples.whose, None)
    if isinstance(rows, torch.utils.data.Subset):
        whole = rows.dataset
        if isinstance(whole, torch.utils.data.TensorDataset) and len(whole.tensors) > 1:
            return examples.read(whole.tensors[1][list(rows.indices)], examples.whose, None)
    return None


def as_examples(data: Any, whose: str = "", read: ReadTargets = read_classes) -> Examples:
    """Whatever a user hands over for one client: Examples, an (x, y) pair of tensors, a map-style Dataset.

    Or a function without arguments that returns one of these. `read` makes targets of what stands for them; its refusal
    says `whose` they are.
    """
    if isinstance(data, TensorExamples):
        return _read_again(data, whose, read)
    if isinstance(data, LazyExamples | SelectedExamples | JoinedExamples | CheckedExamples):
        return data
    if isinstance(data, MapExamples):
        return MapExamples(data.dataset, data.whose or whose, read)
    if isinstance(data, Examples):
        return CheckedExamples(data, whose, read)
    refuse_no_data(data, whose)
    arrays = torch.Tensor | np.ndarray
    if (
        isinstance(data, Sequence)
        and len(data) == 2
        and isinstance(data[0], arrays | Mapping | tuple | Parts)
        and isinstance(data[1], arrays | list)
    ):
        return TensorExamples(_as_inputs(data[0]), read(data[1], whose, None))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return MapExamples(data, whose, read)
    if callable(data) and not isinstance(data, type):
        return LazyExamples(data, whose, read)
    raise UsageError(f"a client's data is a pair of tensors or a map-style Dataset, not {type(data).__name__}")


def _as_inputs(given: Any) -> Any:
    """A tensor, or several by name or by position."""
    if isinstance(given, Parts):
        return given
    return Parts.of(given) if isinstance(given, Mapping | tuple) else as_tensor(given)


def _read_again(data: TensorExamples, whose: str, read: ReadTargets) -> TensorExamples:
    """The examples with targets as they are to be; most are, and stay the same object."""
    if data.y.dtype == torch.int64 and data.y.dim() == 1 and read is read_classes:
        return data
    found = read(data.y, whose, None)
    return data if found.dtype == data.y.dtype and found.shape == data.y.shape else replace(data, y=found)


def per_client(clients: Sequence[Any], read: ReadTargets = read_classes) -> Sequence[Examples]:
    """Whatever a user hands over for all clients, as one Examples for each."""
    if isinstance(clients, Split):
        whole = _read_again(clients.whole, "all data", read)
        return clients if whole is clients.whole else replace(clients, whole=whole)
    if isinstance(clients, tuple) and len(clients) == 2 and all(isinstance(c, torch.Tensor) for c in clients):
        raise UsageError(f"{LIST}, and this is one pair of tensors: write [(x, y)] for a single client")
    return [as_examples(data, f"client {number}", read) for number, data in enumerate(clients)]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named dataset: train and test examples, and its natural clients where it has any.

    Args:
        name: as in `fedstrata list datasets`.
        train: training examples.
        test: test examples.
        classes: number of classes.
        class_names: one name per class, in order (empty where there are none).
        groups: the natural clients, one index tensor into `train` each (a writer, a role); empty where there are none.
        group_names: one name per natural client.
        note: what a reader of results must know, such as which part of the dataset was found; shown in a run's header.
        task: what it is for, such as `regression`.
        deal_by: a class per training example to deal them out by, where targets are none.
        test_groups: the natural clients' own parts of `test`, in the order of `groups`; empty where nobody knows.
        client_test: what `test_groups` are parts of, where clients' test examples are not among those of `test`.
    """

    name: str
    train: TensorExamples
    test: TensorExamples
    classes: int
    class_names: tuple[str, ...] = ()
    groups: tuple[Tensor, ...] = ()
    group_names: tuple[str, ...] = ()
    note: str = ""
    task: str = "classification"
    deal_by: Tensor | None = None
    test_groups: tuple[Tensor, ...] = ()
    client_test: TensorExamples | None = None

    @property
    def labels(self) -> Tensor:
        """A class per training example, to deal them out by: its label, or what stands for it."""
        return self.train.labels() if self.deal_by is None else self.deal_by

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch."""
        return tuple(self.train.x.shape[1:])
