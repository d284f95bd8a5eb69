"""Do the model, its sub-models and the data fit together? Asked once, before anything is trained or written."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.core.method import Method
from fedstrata.core.technique import memory_mismatch
from fedstrata.core.tensors import Tensors, all_finite
from fedstrata.core.types import BUFFERS, PERSONAL, Examples, Slots
from fedstrata.data.examples import Split, TensorExamples, labels_at_hand, sizes
from fedstrata.data.labels import check_range
from fedstrata.errors import UsageError, did_you_mean, one_line
from fedstrata.models.norms import running_statistics
from fedstrata.server.state import ServerState
from fedstrata.wire.packing import carries

SAMPLE = 7
"""Clients of which an input is in the sample that models are tried on."""


def check_module(model: object) -> None:
    """Refuse what is no model, or one that nobody can look into."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise UsageError("the model is scripted and cannot be looked into: give the module that it was made from")


def check_fit(
    models: Mapping[str, nn.Module],
    arch_of: Callable[[int], str],
    clients: Sequence[Examples],
    test: Examples | None,
    batch_size: int,
    public: Examples | None = None,
) -> Tensor:
    """Try every model on an input of every kind, and labels against its outputs; returns a small batch of inputs.

    Raises:
        UsageError: one sentence for the first thing that does not fit.
    """
    if test is not None and not len(test):
        raise UsageError("the test set is empty; give None for no evaluation")
    size = sizes(clients)
    holders = [c for c in range(len(clients)) if size(c)]
    if not holders:
        raise UsageError("there is no client with any examples")
    _check_architectures(models, arch_of, len(clients))
    for name, model in models.items():
        _check_tensors(f"the architecture '{name}'" if name else "the model", model)
    if batch_size == 1 and any(isinstance(m, _BatchNorm) for model in models.values() for m in model.modules()):
        raise UsageError("batch_size = 1 cannot train a model with batch norm: a single example has no statistics")
    sample = _sample(clients, holders)
    seen = holders[:1] if isinstance(clients, Split) else holders  # a split's clients share their tensors
    tests = [] if test is None else [("the test set", test)]
    _check_examples(models, itertools.chain(((f"client {c}", clients[c]) for c in seen), tests))
    if public is not None:
        _check_public(public, models, sample)
    return sample


def _check_examples(models: Mapping[str, nn.Module], everybody: Iterable[tuple[str, Examples]]) -> None:
    """Try every model on an input of every kind, and every label against the models' outputs."""
    tried: dict[tuple[object, ...], int] = {}
    checked: set[tuple[int, int]] = set()
    for whose, examples in everybody:
        if isinstance(examples, TensorExamples):
            if (id(examples.x), id(examples.y)) in checked:
                continue
            checked.add((id(examples.x), id(examples.y)))
        x, y = _first(examples, 1)
        kind = (x.dtype, x.shape[1:])
        if kind not in tried:
            tried[kind] = min(_outputs(model, x) for model in models.values())
        known = labels_at_hand(examples)
        check_range(y if known is None else known, tried[kind], whose)
        if isinstance(examples, TensorExamples):
            check_range(examples.y, tried[kind], "all data")  # others may hold the rest of it


def _sample(clients: Sequence[Examples], holders: Sequence[int]) -> Tensor:
    """Two inputs of the first client that has any, and one of each of the next few: models may choose by inputs."""
    sample, _ = _first(clients[holders[0]], 2)
    for client in holders[1:SAMPLE]:
        x, _ = _first(clients[client], 1)
        if (x.dtype, x.shape[1:]) == (sample.dtype, sample.shape[1:]):
            sample = torch.cat([sample, x])
    return sample


def _check_public(public: Examples, models: Mapping[str, nn.Module], sample: Tensor) -> None:
    """The server's unlabelled data must look like the clients'."""
    if not len(public):
        raise UsageError("the server's public data is empty; give None for none")
    x, _ = _first(public, 1)
    if x.shape[1:] != sample.shape[1:]:
        shapes = f"{list(x.shape[1:])} and not {list(sample.shape[1:])}"
        raise UsageError(f"the server's public data does not look like the clients': its inputs are {shapes}")
    for model in models.values():
        _outputs(model, x)
    if isinstance(public, TensorExamples) and not all_finite([public.x]):
        raise UsageError("the server's public data holds NaN or infinite numbers")


def first_unlike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """The first name under which two sets of tensors differ in shape or type, or None."""
    shapes = [{n: (t.shape, t.dtype) for n, t in tensors.items()} for tensors in (ours, theirs)]
    return next((n for n in {**ours, **theirs} if shapes[0].get(n) != shapes[1].get(n)), None)


def state_mismatch(fresh: ServerState, state: ServerState) -> str | None:
    """What a run was made with, if its state cannot be one of the federation whose first state is `fresh`; else None.

    A technique's state may get names that it did not have at first, and keeps those that it had as they are.
    """
    name = first_unlike(*({**s.params, **s.buffers} for s in (fresh, state)))
    if name is not None:
        return f"another model: '{name}' does not fit"
    if state.held.shape != fresh.held.shape:
        return f"another number of clients: {len(state.held)} instead of {len(fresh.held)}"
    if state.techniques.keys() != fresh.techniques.keys():
        return f"another method: {', '.join(state.techniques) or 'no technique'}"
    for technique, begun in fresh.techniques.items():
        name = first_unlike(begun, {n: t for n, t in state.techniques[technique].items() if n in begun})
        if name is not None:
            return f"another method: '{name}' of {technique} does not fit"
    return None


def client_memory_mismatch(method: Method, memory: Slots, params: Tensors, buffers: Tensors) -> str | None:
    """Why a client's memory cannot be one of this method and of a model with such tensors, or None."""
    kinds = {t.name for t in method.techniques} | {PERSONAL} | ({BUFFERS} if method.buffers == "local" else set())
    foreign = next((kind for kind in memory if kind not in kinds), None)
    if foreign is not None:
        return f"nothing in the method '{method}' remembers '{foreign}'"
    like = {**params, **buffers}
    every = ((name, tensor) for slot in memory.values() for name, tensor in slot.items() if name in like)
    for name, tensor in every:
        if (tensor.shape, tensor.dtype) != (like[name].shape, like[name].dtype):
            return f"'{name}' has another shape or type"
    told = [memory_mismatch(memory.get(PERSONAL, {}), params)]
    if BUFFERS in memory:
        told.append(memory_mismatch(memory[BUFFERS], buffers, buffers))
    told += [
        t.validate_memory(memory[t.name], params, buffers) for t in method.at("validate_memory") if t.name in memory
    ]
    return next((why for why in told if why is not None), None)


def fingerprint(clients: Sequence[Examples], public: Examples | None = None) -> str:
    """Sixteen hex digits that tell whether a run goes on with the data that it began with.

    Made of the clients' sizes and, where they are at hand without reading everything, their labels; and of the inputs
    that the server has itself.
    """
    size = sizes(clients)
    digest = hashlib.sha256(np.array([size(c) for c in range(len(clients))]).tobytes())
    for examples in [clients.all()] if isinstance(clients, Split) else clients:  # the same bytes, in one go
        if isinstance(examples, TensorExamples):
            digest.update(examples.labels().numpy().tobytes())
    if public is not None:
        digest.update(public.batch(torch.arange(min(len(public), 64)))[0].numpy().tobytes())
        digest.update(str(len(public)).encode())
    return digest.hexdigest()[:16]


def _first(examples: Examples, count: int) -> tuple[Tensor, Tensor]:
    try:
        return examples.batch(torch.arange(min(count, len(examples))))
    except UsageError:
        raise
    except Exception as error:  # whatever a user's own dataset raises
        why = one_line(f"{type(error).__name__}: {error}", 200)
        raise UsageError(f"the data cannot be read as (input, label) rows of one shape: {why}") from error


def _outputs(model: nn.Module, x: Tensor) -> int:
    """Number of classes that a model tells apart, found by trying it."""
    try:
        with torch.no_grad():
            logits = copy.deepcopy(model).eval()(x)
    except Exception as error:  # whatever a user's own model raises
        first = one_line(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        raise UsageError(f"the model does not take inputs of shape {list(x.shape[1:])}: {first}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        raise UsageError("the model must return one tensor of logits, with a row for each input")
    _check_training(model, torch.cat([x, x]))  # norm layers cannot train on one row
    return logits.shape[1]


def _check_training(model: nn.Module, x: Tensor) -> None:
    """In training, too, a model returns its logits alone; one that cannot run on so few rows is not judged."""
    try:
        with torch.no_grad():
            logits = copy.deepcopy(model).train()(x)
    except Exception:  # training will tell, if it does not come from the size of the batch
        return
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        what = f" of shape {list(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise UsageError(
            f"in training mode the model returns a {type(logits).__name__}{what}: it must return one tensor of "
            "logits, with a row for each input"
        )


def _check_tensors(what: str, model: nn.Module) -> None:
    named = [*model.named_parameters(), *running_statistics(model).items()]
    for name, tensor in named:
        if not carries(tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UsageError(f"'{name}' of {what} is of type {kind}, which messages do not carry")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{what} has no parameter that may train")


def _check_architectures(models: Mapping[str, nn.Module], arch_of: Callable[[int], str], clients: int) -> None:
    for client in range(clients):
        if arch_of(client) not in models:
            known = did_you_mean(arch_of(client), [name for name in models if name])
            raise UsageError(f"client {client} has the unknown architecture '{arch_of(client)}'{known}")
    whole = {**dict(models[""].named_parameters()), **running_statistics(models[""])}
    for arch, model in models.items():
        for name, tensor in {**dict(model.named_parameters()), **running_statistics(model)}.items():
            if name not in whole:
                raise UsageError(f"architecture '{arch}' has '{name}', which the server's model lacks")
            if tensor.shape != whole[name].shape or tensor.dtype != whole[name].dtype:
                shapes = f"{list(tensor.shape)} instead of {list(whole[name].shape)}"
                raise UsageError(f"'{name}' of the architecture '{arch}' is {shapes}")
