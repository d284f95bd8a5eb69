"""What the measures share: running a model without changing it, and refusals of what cannot be measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.core.rng import derive, preserve_rng, seed_global
from fedstrata.core.task import Task
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Examples, Stratum
from fedstrata.data.batching import eval_batches
from fedstrata.data.client_data import read_clients
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, did_you_mean, positive
from fedstrata.models.layouts import lay_out
from fedstrata.tasks.classification import CLASSIFICATION

_T = TypeVar("_T")

BATCH = 512
"""Examples that go through a model at once."""

Labelled = tuple[Tensor, Tensor]
"""(features, rows first; labels)."""

Data = Any
"""A client's data as `Federation` takes it: Examples, a pair (inputs, labels) of tensors or arrays, a map-style
Dataset, or a function without arguments that returns one of these."""


@contextmanager
def scratch_copy(model: nn.Module, training: bool = False) -> Iterator[nn.Module]:
    """A copy of the model to run; random generators are as before afterwards."""
    scratch = copy.deepcopy(model).train(training)
    lay_out(scratch, channels_last=False)
    with preserve_rng():
        yield scratch


def batches(
    model: nn.Module, data: Examples, batch_size: int = BATCH, index: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows of the index, inputs, labels), batch by batch; random transforms are the same in every pass."""
    index = torch.arange(len(data)) if index is None else index
    device = device_of(model)
    seed_global(derive("probes"), device, everything=not isinstance(data, TensorExamples))
    by_batch = any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in model.modules())
    if by_batch and len(index) == 1:
        raise UsageError("a client with one example has no batch statistics, which this model normalises by")
    for rows in eval_batches(TensorExamples(index, index), "drop" if by_batch else "average", batch_size):
        x, y = data.batch(index[rows])
        yield rows, x.to(device), y.to(device)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


def check_clients(clients: Sequence[Data], least: int = 1, task: Task = CLASSIFICATION) -> Sequence[Examples]:
    """Clients' data, in whatever form a federation takes it, as examples; a refusal if one has none."""
    held = read_clients(clients, task.read_targets).train
    empty = [client for client, data in enumerate(held) if not len(data)]
    if len(held) < least or empty:
        which = f", and client {empty[0]} has none" if empty else ""
        raise UsageError(f"this needs {least} or more clients with examples; there are {len(held)}{which}")
    return held


def names_of(high: Iterable[str]) -> frozenset[str]:
    """The names above a cut, or a refusal of a single string."""
    if isinstance(high, str):
        raise UsageError(f"the high part is a list of parameter names, not '{high}'")
    return frozenset(high)


def check_names(names: Iterable[str], known: Collection[str], who: str) -> None:
    """Refuse a name that is not known; the refusal begins with `who`, such as "the model has"."""
    for name in names:
        if name not in known:
            raise UsageError(f"{who} no '{name}'{did_you_mean(name, known)}")


def check_labelled(rows: Labelled) -> None:
    """Refuse features without a label for each."""
    features, labels = rows
    if not len(labels) or len(features) != len(labels):
        raise UsageError(f"features need one label per row, not {len(labels)} labels for {len(features)} rows")


def deviations(
    clients: Sequence[Tensors], weights: Sequence[float] | None
) -> tuple[list[float], list[dict[str, float]]]:
    """(the clients' weights, adding up to 1; for each client, name → ‖θ̄ − θ_i‖², θ̄ over those that hold the name)."""
    if not any(clients):
        raise UsageError("there are no clients with tensors to compare")
    given = [1.0] * len(clients) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(clients):
        raise UsageError(f"there are {len(given)} weights for {len(clients)} clients")
    for weight in given:
        positive("a client", weight=weight)
    found: list[dict[str, float]] = [{} for _ in clients]
    for name in dict.fromkeys(n for tensors in clients for n in tensors):
        held = {i: tensors[name].detach() for i, tensors in enumerate(clients) if name in tensors}
        if len({tensor.shape for tensor in held.values()}) > 1:
            raise UsageError(f"the clients' tensors '{name}' are of different shapes")
        mean = sum(given[i] * tensor.double() for i, tensor in held.items()) / sum(given[i] for i in held)
        for i, tensor in held.items():
            found[i][name] = float((tensor.double() - mean).square().sum())
    return [weight / sum(given) for weight in given], found


def params_of(strata: Iterable[Stratum]) -> set[str]:
    """The names of all parameters in the strata."""
    return {n for stratum in strata for n in stratum.params}


def per_stratum(figures: Sequence[Mapping[str, float]], strata: Sequence[Stratum]) -> dict[str, list[float]]:
    """Stratum name → the sum over its names, for each client that holds any of them; without those nobody holds."""
    check_names({n for mine in figures for n in mine}, params_of(strata), "the strata have")
    held = {s: [[mine[n] for n in s.params if n in mine] for mine in figures] for s in strata}
    return {s.name: [sum(values) for values in mine if values] for s, mine in held.items() if any(mine)}


def start_models(
    before: nn.Module | Sequence[nn.Module], local: Sequence[nn.Module], held: Sequence[Collection[int]]
) -> list[nn.Module]:
    """The model that each client begins with."""
    starts = [before] * len(local) if isinstance(before, nn.Module) else list(before)
    if not len(local) == len(held) == len(starts) or not len(local):
        raise UsageError(
            "this needs 1 or more clients, each with its model, its classes and the model it begins with; "
            f"there are {len(local)}, {len(held)} and {len(starts)}"
        )
    return starts


def measure_once(measure: Callable[[nn.Module], _T], models: Sequence[nn.Module]) -> list[_T]:
    """A result for each model; one that is listed several times is measured once."""
    found = {key: measure(model) for key, model in {id(model): model for model in models}.items()}
    return [found[id(model)] for model in models]


def class_set(classes: Collection[int]) -> set[int]:
    """Classes as plain numbers, whatever they came in."""
    return {int(c) for c in classes}
