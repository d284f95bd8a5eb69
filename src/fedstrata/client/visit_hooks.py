"""A client's hooks with all that they may ask for: its data's classes, its model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from fedstrata.client.context import Bench
from fedstrata.client.hooks import Crew, open_crew
from fedstrata.core.method import Method
from fedstrata.core.rng import generator
from fedstrata.core.tensors import laid_out
from fedstrata.core.types import Assignment, Examples, Slots, altered
from fedstrata.data.batching import sheets
from fedstrata.data.labels import check_range
from fedstrata.models.norms import judging
from fedstrata.models.taps import seen_at, watched


def build_own_hooks(method: Method, bench: Bench, data: Examples, a: Assignment, memory: Slots) -> Crew:
    """Every technique's hooks for one client's visit; they see the parameters in the scratch model's layout."""
    a = altered(a, params=laid_out(a.params, bench.params))

    def outputs(place: str) -> Iterator[tuple[Tensor, Tensor]]:
        for run, y in _passes(method, bench, data):
            yield seen_at(bench.model, place, run), y

    def observe(watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        with watched(bench.model, watch):
            for run, _ in _passes(method, bench, data):
                run()

    counts = partial(class_counts, data, bench)
    return open_crew(method, bench, data, a, memory, partial(generator, a.seed), counts, outputs, observe)


def _passes(method: Method, bench: Bench, data: Examples) -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
    """Batch by batch over all of a client's data: (what runs the model on it, as in an evaluation; labels)."""
    device = next(iter(bench.params.values())).device
    with torch.no_grad(), judging(bench.model, method.buffers, len(data)):
        for index in sheets(data, method.buffers, 256):
            x, y = data.batch(index)
            yield partial(bench.model, bench.inputs(x.to(device))), y.to(device)


def class_counts(data: Examples, bench: Bench) -> Tensor:
    """How many examples of each class there are."""
    labels = data.labels()
    check_range(labels, bench.classes, whose(data))
    return torch.bincount(labels, minlength=bench.classes).to(bench.exact)


def whose(data: Examples, client: int | None = None) -> str:
    """Whose data it is, as far as it knows itself."""
    return getattr(data, "whose", "") or ("" if client is None else f"client {client}")
