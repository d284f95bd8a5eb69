"""Partitions: which client holds which training examples.

A partition is named like everything else (`iid`, `dirichlet(alpha=0.1)`, `shards(classes=2)`, `natural`), or
is a partitioner object of flwr-datasets. A partition function answers with one number per example, the client
that owns it, so clients can never share an example. Draws come from a numpy Generator seeded with the
partition's own seed: the same (labels, spec, clients, seed) give the same clients whatever else was drawn
before.
"""

from __future__ import annotations

import copy
import heapq
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstrata.core.extras import missing
from fedstrata.core.lazy import torch
from fedstrata.core.spec import bind
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]
Labels: TypeAlias = "Tensor | NDArray[Any] | Sequence[int]"

NOBODY = -1
"""The owner of an example that no client holds (only `natural` with fewer clients than groups leaves any)."""

NATURAL_DATASETS = {"femnist": "its writers", "shakespeare": "its roles", "heart-disease": "its hospitals"}
"""Datasets that come with natural clients, for the sentence that refuses the others."""

_STREAM = 0x706172746974696F  # keeps these draws apart from every other stream made from the same seed
_MAX_DRAWS = 20_000_000  # shares drawn in all before `dirichlet` gives up: about a second
_MAX_TRIES = 10_000
_MIN_TRIES = 10
_LEAST_ALPHA = 1e-290  # below it the shares are the same (one client takes all), and 1/α would overflow


@dataclass(frozen=True, eq=False)
class PartitionRequest:
    """What a partition function sees.

    Args:
        labels: the class of each example, numbered 0…C−1 without gaps.
        clients: how many clients are wanted (0, all of them, only for `natural`).
        rng: the source of every draw.
        groups: the dataset's natural clients, as indices of examples.
    """

    labels: Ints
    clients: int
    rng: np.random.Generator
    groups: tuple[Ints, ...] = ()

    @property
    def class_sizes(self) -> Ints:
        """Number of examples of each class."""
        return np.bincount(self.labels)


class Partitioner(Protocol):
    """What is needed of a flwr-datasets partitioner: `dataset` is set, then partitions are read by number."""

    dataset: Any

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        ...

    def load_partition(self, partition_id: int) -> Any:
        """One of them, as a `datasets.Dataset`."""
        ...


def iid(request: PartitionRequest) -> Ints:
    """Every client a random part, sizes equal up to one example."""
    owners = np.empty(len(request.labels), dtype=np.int64)
    owners[request.rng.permutation(len(owners))] = np.arange(len(owners)) % request.clients
    return owners


def dirichlet(request: PartitionRequest, *, alpha: float = 0.1, min_size: int = 10) -> Ints:
    """Label skew: each class is shared out over the clients by proportions from Dirichlet(alpha).

    For each class c: p_c ~ Dir_N(α, …, α) over the N clients, and client k gets the share p_{c,k} of the
    class (Yurochkin et al. 2019, the reference that FedNLR gives, and FedImpro's "LDA"). Clients differ in
    their classes and in their sizes, and no example is left over. The other well-known form (Hsu et al. 2019)
    draws one mixture of classes per client and gives all clients the same size; the papers implemented here are
    "unbalanced", so it is not used. Nor is a client kept from growing beyond the mean size, as some code
    bases do without saying so.

    A draw in which a client stays below `min_size` is thrown away as a whole and drawn again, a bounded number
    of times.

    Args:
        alpha: the concentration α; the smaller, the fewer classes a client has.
        min_size: the fewest examples a client may get.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(f"partition 'dirichlet': alpha must be a finite number above 0, not {alpha}")
    if min_size < 1:
        raise UsageError(f"partition 'dirichlet': min_size must be at least 1, not {min_size}")
    if request.clients * min_size > len(request.labels):
        raise UsageError(
            f"partition 'dirichlet': {request.clients} clients with at least {min_size} examples each need"
            f" {request.clients * min_size} examples, and there are {len(request.labels)};"
            " use a smaller min_size or fewer clients"
        )
    sizes = request.class_sizes[:, None]
    shape = (len(sizes), request.clients)
    tries = max(_MIN_TRIES, min(_MAX_TRIES, _MAX_DRAWS // (shape[0] * shape[1])))
    best = 0
    for _ in range(tries):
        shares = np.cumsum(dirichlet_shares(request.rng, alpha, shape), axis=1)
        # A random offset per class: rounding then favours no client, in one class or over all of them.
        cuts = np.minimum(np.floor(shares * sizes + request.rng.random((len(sizes), 1))).astype(np.int64), sizes)
        cuts[:, -1:] = sizes
        counts = np.diff(cuts, axis=1, prepend=0)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= min_size:
            return _deal(request, counts)
        best = max(best, smallest)
    raise UsageError(
        f"partition 'dirichlet(alpha={alpha}, min_size={min_size})': in {tries} draws over {request.clients}"
        f" clients the smallest client never got more than {best} examples;"
        " use a smaller min_size, a larger alpha or fewer clients"
    )


def dirichlet_shares(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Rows drawn from the symmetric Dirichlet(α), in logarithms so that no α, however small, makes a row 0/0.

    A Dirichlet draw is a row of Gamma(α) variates over their sum, and Gamma(α) = Gamma(α+1)·U^{1/α}, whose
    logarithm is log Gamma(α+1) − E/α with E exponential.
    """
    alpha = max(alpha, _LEAST_ALPHA)
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    shares: NDArray[np.float64] = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def shards(request: PartitionRequest, *, classes: int = 2, balanced: bool = False) -> Ints:
    """Every client holds exactly `classes` classes, and every class is held by somebody.

    FedNLR's Shards(n, S) gives each of n clients S classes and is "unbalanced, allocating un-uniform size of
    data across clients"; how the sizes are drawn, the paper does not say. Here, a class is held by a number
    of clients in proportion to its size, at random ones; its examples, shuffled, are cut at uniformly random
    places into one piece per holder, none empty. With `balanced` the pieces are equal up to one example, which
    comes close to the equal shards of McMahan et al. (2017), except that a client's classes always differ
    from each other.

    Args:
        classes: S, the number of classes of each client.
        balanced: cut each class evenly instead of at random places.
    """
    sizes = request.class_sizes
    slots = request.clients * classes
    if not 1 <= classes <= len(sizes):
        raise UsageError(f"partition 'shards': classes must be 1 to {len(sizes)}, the classes there are, not {classes}")
    if slots < len(sizes):
        raise UsageError(
            f"partition 'shards': {request.clients} clients with {classes} classes each cannot hold all"
            f" {len(sizes)} classes; use at least {-(-len(sizes) // request.clients)} classes per client or"
            f" {-(-len(sizes) // classes)} clients"
        )
    if int(np.minimum(sizes, request.clients).sum()) < slots:
        raise UsageError(
            f"partition 'shards': there are too few examples of some classes for {request.clients} clients with"
            f" {classes} classes each; use fewer clients or fewer classes per client"
        )
    counts = np.zeros((len(sizes), request.clients), dtype=np.int64)
    for label, holders in enumerate(_holders(request, _holder_numbers(request, slots), classes)):
        counts[label, holders] = _pieces(request.rng, int(sizes[label]), len(holders), balanced)
    return _deal(request, counts)


def _holder_numbers(request: PartitionRequest, slots: int) -> Ints:
    """How many clients hold each class: at least one, in proportion to its size (D'Hondt), `slots` in all."""
    sizes = request.class_sizes.tolist()
    numbers = [1] * len(sizes)
    ties = request.rng.permutation(len(sizes)).tolist()
    heap = [(-size / 2, ties[c], c) for c, size in enumerate(sizes) if min(size, request.clients) > 1]
    heapq.heapify(heap)
    for _ in range(slots - len(sizes)):
        _, tie, c = heapq.heappop(heap)
        numbers[c] += 1
        if numbers[c] < min(sizes[c], request.clients):
            heapq.heappush(heap, (-sizes[c] / (numbers[c] + 1), tie, c))
    return np.array(numbers, dtype=np.int64)


def _holders(request: PartitionRequest, numbers: Ints, classes: int) -> list[Ints]:
    """Which clients hold each class: `numbers[c]` clients for class c, `classes` different classes per client.

    Client by client, at random in proportion to the places a class still has to give, except that a class
    with as many places as there are clients left must be taken; so it always comes out even.
    """
    places = numbers.astype(np.float64)
    hands = np.empty((request.clients, classes), dtype=np.int64)
    for k in range(request.clients):
        keys = np.full(len(places), np.inf)
        np.divide(request.rng.standard_exponential(len(places)), places, out=keys, where=places > 0)
        keys[places == request.clients - k] = -1
        hands[k] = np.argpartition(keys, classes - 1)[:classes]
        places[hands[k]] -= 1
    return np.split(np.argsort(hands, axis=None, kind="stable") // classes, np.cumsum(numbers)[:-1])


def _pieces(rng: np.random.Generator, size: int, pieces: int, balanced: bool) -> Ints:
    """`size` examples cut into that many pieces, none empty: evenly, or at uniformly random places."""
    if balanced:
        return size // pieces + (rng.permutation(pieces) < size % pieces).astype(np.int64)
    cuts = np.sort(rng.choice(size - 1, pieces - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=size).astype(np.int64)


def natural(request: PartitionRequest) -> Ints:
    """The dataset's own clients, such as writers or the roles of a play; with fewer clients, a seeded choice of them.

    With fewer clients than the dataset has, the groups that were not chosen are left out: this is the one
    partition that need not be exhaustive. The chosen ones keep the dataset's order; `clients=0` takes them
    all.
    """
    if not request.groups:
        *known, last = [f"{name} ({what})" for name, what in NATURAL_DATASETS.items()]
        others = f"{', '.join(known)} and {last}"
        raise UsageError(f"partition 'natural': this dataset has no natural clients; {others} have them")
    if request.clients > len(request.groups):
        count = len(request.groups)
        there = "one natural client only" if count == 1 else f"{count} natural clients"
        raise UsageError(f"partition 'natural': the dataset has {there}, not {request.clients}")
    chosen: Sequence[int] = range(len(request.groups))
    if 0 < request.clients < len(request.groups):
        chosen = np.sort(request.rng.choice(len(request.groups), request.clients, replace=False)).tolist()
    return _owners([request.groups[g] for g in chosen], len(request.labels), "the dataset's natural clients")


PARTITIONS: dict[str, Callable[..., Ints]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "natural": natural,
}


def partition(
    labels: Labels,
    spec: str | Partitioner,
    clients: int,
    seed: int = 0,
    groups: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Share the examples out: one ascending int64 index tensor per client, disjoint and none empty.

    Every example goes to some client, except under `natural` with fewer clients than the dataset has.

    Args:
        labels: the class of each example.
        spec: a name with arguments (see `PARTITIONS`), or a flwr-datasets partitioner. The partitioner is
            copied, given a `datasets.Dataset` with the columns `label` and `index`; where it leaves
            examples out, there is a warning.
        clients: how many clients; 0 leaves it to the dataset (`natural`) or to the partitioner.
        seed: fixes every draw (a partitioner object brings its own).
        groups: the dataset's natural clients, for `natural`.

    Raises:
        UsageError: where the labels cannot be shared out as asked.
    """
    values = _label_array(labels)
    if seed < 0:
        raise UsageError(f"a partition's seed must be 0 or more, not {seed}")
    function, arguments = bind("partition", PARTITIONS, spec) if isinstance(spec, str) else (None, {})
    if clients < 1 and not (clients == 0 and function in (None, natural)):
        raise UsageError(f"a partition needs at least 1 client, not {clients}")
    if clients > len(values):
        raise UsageError(f"{len(values)} examples cannot be divided among {clients} clients")
    if function is None:
        return _indices(_foreign(spec, values, clients))
    numbers = np.unique(values, return_inverse=True)[1].astype(np.int64)
    rng = np.random.default_rng([seed, _STREAM])
    request = PartitionRequest(numbers, clients, rng, tuple(np.asarray(g, dtype=np.int64) for g in groups))
    return _indices(function(request, **arguments))


def _label_array(labels: Labels) -> Ints:
    """The labels as one row of integers, or a refusal."""
    try:
        values = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    except (ValueError, TypeError, OverflowError):
        raise UsageError("the labels to partition must be one integer per example") from None
    if values.size == 0:
        raise UsageError("there are no labels to partition")
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise UsageError(
            f"the labels to partition must be one integer per example, not {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.int64)


def _deal(request: PartitionRequest, counts: Ints) -> Ints:
    """Owners such that client k holds `counts[c, k]` examples of class c, which ones at random."""
    shuffled = request.rng.permutation(len(request.labels))
    by_class = shuffled[np.argsort(request.labels[shuffled], kind="stable")]
    owners = np.empty(len(request.labels), dtype=np.int64)
    owners[by_class] = np.repeat(np.tile(np.arange(request.clients), len(counts)), counts.ravel())
    return owners


def _owners(parts: Sequence[Ints], examples: int, what: str) -> Ints:
    """The owner of each example, from one index array per client, where these fit together."""
    sizes = np.array([part.size for part in parts], dtype=np.int64)
    if not len(sizes):
        raise UsageError(f"{what}: there are none")
    if not sizes.all():
        raise UsageError(f"{what}: client {int(np.argmin(sizes))} has no examples")
    index = np.concatenate([part.reshape(-1) for part in parts])
    if int(index.min()) < 0 or int(index.max()) >= examples:
        raise UsageError(f"{what} name examples outside the {examples} that there are")
    if int(np.bincount(index, minlength=examples).max()) > 1:
        raise UsageError(f"{what} share examples with each other")
    owners = np.full(examples, NOBODY, dtype=np.int64)
    owners[index] = np.repeat(np.arange(len(parts)), sizes)
    return owners


def _indices(owners: Ints) -> list[Tensor]:
    """One ascending index tensor per client, each with its own storage (a view is pickled with all of it)."""
    sizes = np.bincount(owners - NOBODY)
    order = torch.from_numpy(np.argsort(owners, kind="stable").astype(np.int64))
    return [part.clone() for part in order.split_with_sizes(sizes.tolist())[1:]]


def _foreign(partitioner: Any, labels: Ints, clients: int) -> Ints:
    """The owner of each example, by a flwr-datasets partitioner; the caller's object is left as it was."""
    name = type(partitioner).__name__
    if not callable(getattr(partitioner, "load_partition", None)):
        raise UsageError(f"a partition is a name such as 'iid' or a flwr-datasets partitioner, not {name}")
    assigned = getattr(partitioner, "is_dataset_assigned", None)
    if assigned is not None and assigned():
        raise UsageError(f"the partitioner {name} already has a dataset; pass a new one")
    try:
        from datasets import Dataset
    except ImportError:
        raise missing("datasets", f"the partitioner {name} needs") from None
    try:
        worker = copy.deepcopy(partitioner)
        worker.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
        number = int(worker.num_partitions)
        if clients in (0, number):
            parts = [np.asarray(worker.load_partition(i)["index"][:], dtype=np.int64) for i in range(number)]
    except Exception as error:  # third-party code: whatever it objects to, the user gets one sentence
        raise UsageError(f"the partitioner {name} failed: {' '.join(str(error).split())}") from error
    if clients not in (0, number):
        raise UsageError(f"the partitioner {name} makes {number} clients, and {clients} were asked for")
    owners = _owners(parts, len(labels), f"the partitions of {name}")
    if left := int((owners == NOBODY).sum()):
        warnings.warn(f"the partitioner {name} leaves out {left} of {len(labels)} examples", stacklevel=3)
    return owners


@dataclass(frozen=True, eq=False)
class PartitionSummary:
    """A partition in numbers.

    Args:
        counts: examples of each class (row) at each client (column), int64.
        smallest: examples of the smallest client.
        median: examples of the median client.
        largest: examples of the largest client.
        classes_per_client: mean over the clients of the number of classes they hold.
    """

    counts: Tensor
    smallest: int
    median: float
    largest: int
    classes_per_client: float

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.counts.shape[1]

    @property
    def examples(self) -> int:
        """Number of examples that clients hold."""
        return int(self.counts.sum())

    def __str__(self) -> str:
        return (
            f"{self.clients:,} client{'s' * (self.clients != 1)}, {self.examples:,} examples;"
            f" {self.smallest:,} to {self.largest:,} per client, median {self.median:,.10g};"
            f" {self.classes_per_client:.1f} classes per client on average"
        )


def describe(parts: Sequence[Tensor], labels: Labels, classes: int) -> PartitionSummary:
    """Count the examples of each class at each client.

    Args:
        parts: what `partition` returned.
        labels: the class of each example, 0…classes−1.
        classes: number of classes, also those that no example has.
    """
    values = torch.from_numpy(_label_array(labels))
    if not parts:
        raise UsageError("there are no clients to describe")
    if int(values.min()) < 0 or int(values.max()) >= classes:
        raise UsageError(f"the labels must be 0 to {classes - 1} for {classes} classes")
    sizes = torch.tensor([len(part) for part in parts])
    owners = torch.repeat_interleave(torch.arange(len(parts)), sizes)
    cells = values[torch.cat(list(parts))] * len(parts) + owners
    counts = torch.bincount(cells, minlength=classes * len(parts)).view(classes, len(parts))
    return PartitionSummary(
        counts=counts,
        smallest=int(sizes.min()),
        median=float(np.median(sizes.numpy())),
        largest=int(sizes.max()),
        classes_per_client=float((counts > 0).sum(0).double().mean()),
    )
