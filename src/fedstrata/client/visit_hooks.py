"""A client's hooks with all that they may ask for: its data's classes, its model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from fedstrata.client.context import ModelReplica
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.core.method import Method
from fedstrata.core.rng import generator
from fedstrata.core.tensors import match_layout
from fedstrata.core.types import Assignment, Examples, Slots, replace_fields
from fedstrata.data.batching import eval_batches
from fedstrata.data.labels import check_range
from fedstrata.models.norms import evaluation_mode
from fedstrata.models.taps import value_at, watch_places


def build_own_hooks(method: Method, replica: ModelReplica, data: Examples, a: Assignment, memory: Slots) -> HookSet:
    """Every technique's hooks for one client's visit; they see the parameters in the scratch model's layout."""
    a = replace_fields(a, params=match_layout(a.params, replica.params))

    def outputs(place: str) -> Iterator[tuple[Tensor, Tensor]]:
        for run, y in _passes(method, replica, data):
            yield value_at(replica.model, place, run), y

    def observe(watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        with watch_places(replica.model, watch):
            for run, _ in _passes(method, replica, data):
                run()

    counts = partial(class_counts, data, replica)
    return build_hooks(method, replica, data, a, memory, partial(generator, a.seed), counts, outputs, observe)


def _passes(method: Method, replica: ModelReplica, data: Examples) -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
    """Batch by batch over all of a client's data: (what runs the model on it, as in an evaluation; labels)."""
    device = next(iter(replica.params.values())).device
    with torch.no_grad(), evaluation_mode(replica.model, method.buffers, len(data)):
        for index in eval_batches(data, method.buffers, 256):
            x, y = data.batch(index)
            yield partial(replica.model, replica.inputs(x.to(device))), y.to(device)


def class_counts(data: Examples, replica: ModelReplica) -> Tensor:
    """How many examples of each class there are."""
    labels = data.labels()
    check_range(labels, replica.classes, whose(data))
    return torch.bincount(labels, minlength=replica.classes).to(replica.exact)


def whose(data: Examples, client: int | None = None) -> str:
    """Whose data it is, as far as it knows itself."""
    return getattr(data, "whose", "") or ("" if client is None else f"client {client}")
