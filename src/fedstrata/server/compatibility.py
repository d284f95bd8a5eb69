"""Do the model, its sub-models and the data fit together? Asked once, before anything is trained or written."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.core.method import Method
from fedstrata.core.parts import Parts, shape_text
from fedstrata.core.task import Task
from fedstrata.core.technique import memory_mismatch
from fedstrata.core.tensors import Tensors, all_finite
from fedstrata.core.types import BUFFERS, PERSONAL, Examples, Slots, replace_fields
from fedstrata.data.examples import Split, TensorExamples, labels_at_hand, sizes
from fedstrata.data.labels import place_of
from fedstrata.errors import UsageError, did_you_mean, one_line
from fedstrata.models.adapted import is_part, rank_axes
from fedstrata.models.inputs import fit_model, fit_training
from fedstrata.models.norms import running_statistics
from fedstrata.models.passes import preserve_model
from fedstrata.server.state import Architecture, ServerState
from fedstrata.techniques import TECHNIQUES
from fedstrata.wire.packing import carries

SAMPLE = 7
"""Clients of which an input is in the sample that models are tried on."""


def check_module(model: object) -> None:
    """Refuse what is no model, or one that nobody can look into."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise UsageError("the model is scripted and cannot be looked into: give the module that it was made from")


def resolve_task(task: Task, clients: Sequence[Examples], model: nn.Module, sample: Tensor) -> Task:
    """The task with numbers for what depends on how many examples of each class all clients have."""
    if not task.needs_counts:
        return task
    held = [clients.all()] if isinstance(clients, Split) else list(clients)
    known = [labels_at_hand(examples) for examples in held if len(examples)]
    labels = [part for part in known if part is not None]
    if not labels or len(labels) < len(known):
        return task.resolve(None)
    with preserve_model(model):
        width = task.width(model(sample))
    return task.resolve(torch.bincount(torch.cat(labels), minlength=width))


def check_classes(method: Method, task: Task) -> None:
    """Refuse techniques that need classes where there are none."""
    for technique in method.techniques:
        if technique.needs_classes and not task.has_classes:
            raise UsageError(f"'{technique.name}' needs classes, and the task '{task.name}' has none")


def check_ranks(method: Method, architectures: Mapping[str, Architecture]) -> None:
    """Refuse sub-models of a lower rank where nothing says how ranks are mixed, or what is sent between scales."""
    lower = {arch: held.cuts.values() for arch, held in architectures.items() if held.cuts}
    if not lower:
        return
    arch = next(iter(lower))
    if not any(technique.mixes_ranks for technique in method.techniques):
        known = ", ".join(name for name, made in TECHNIQUES.items() if getattr(made, "mixes_ranks", False))
        raise UsageError(
            f"the adapters of '{arch}' have another rank or scale than the server's, and nothing in the method "
            f"'{method}' says how these are mixed: {known} do"
        )
    sender = next(iter(method.at("send")), None)
    if sender is not None and any(cut.factor != 1 for cuts in lower.values() for cut in cuts):
        raise UsageError(
            f"'{sender.name}' sends tensors for each parameter, and the adapters of '{arch}' have another scale than "
            "the server's: give all the same alpha / r"
        )


def check_trust(method: Method, trusted: object) -> None:
    """Refuse a rule that compares with the server's own update where the server has nothing to train on."""
    if method.reducer is not None and method.reducer.trusts and trusted is None:
        raise UsageError(f"reduce={method.base.reduce!r} needs examples that the server trusts: give trusted data")


def check_fit(
    task: Task,
    models: Mapping[str, nn.Module],
    arch_of: Callable[[int], str],
    clients: Sequence[Examples],
    test: Examples | None,
    batch_size: int,
    public: Examples | None = None,
    client_tests: Sequence[Examples | None] | None = None,
    trusted: Examples | None = None,
) -> Tensor:
    """Try every model on an input of every kind, and targets against its outputs; returns a small batch of inputs.

    Raises:
        UsageError: one sentence for the first thing that does not fit.
    """
    if test is not None and not len(test):
        raise UsageError("the test set is empty; give None for no evaluation")
    if trusted is not None and not len(trusted):
        raise UsageError("the trusted data is empty")
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
    tests += [] if trusted is None else [("the trusted data", trusted)]
    own = _first_of_each(client_tests)
    everybody = itertools.chain(((f"client {c}", clients[c]) for c in seen), tests, own)
    _check_examples(task, models, everybody, batch_size)
    if public is not None:
        _check_public(task, public, models, sample)
    return sample


def _first_of_each(client_tests: Sequence[Examples | None] | None) -> Iterator[tuple[str, Examples]]:
    """(whose, test examples) of those clients that may be unlike others; a split's share their tensors."""
    for client, examples in enumerate(client_tests or ()):
        if examples is not None and len(examples):
            yield f"the test data of client {client}", examples
            if isinstance(client_tests, Split):
                return


def _check_examples(
    task: Task, models: Mapping[str, nn.Module], everybody: Iterable[tuple[str, Examples]], batch_size: int
) -> None:
    """Try every model on an input of every kind, and every target against the models' outputs."""
    tried: dict[tuple[object, ...], int] = {}
    compared: set[tuple[object, ...]] = set()
    checked: set[tuple[int, int]] = set()
    for whose, examples in everybody:
        if isinstance(examples, TensorExamples):
            if (id(examples.x), id(examples.y)) in checked:
                continue
            checked.add((id(examples.x), id(examples.y)))
        x, y = _first(examples, 1)
        kind = (x.dtype, x.shape[1:])
        if kind not in tried:
            tried[kind] = min(_outputs(task, model, x) for model in models.values())
        if isinstance(examples, TensorExamples):
            _check_largest(models, examples, whose)
        known = labels_at_hand(examples)
        task.check_targets(y if known is None else known, tried[kind], whose)
        if isinstance(examples, TensorExamples):
            task.check_targets(examples.y, tried[kind], "all data")  # others may hold the rest of it
        if (*kind, y.dtype, y.shape[1:]) not in compared:
            compared.add((*kind, y.dtype, y.shape[1:]))
            for model in models.values():
                _check_judgement(task, model, examples, whose, batch_size)


def _check_largest(models: Mapping[str, nn.Module], examples: TensorExamples, whose: str) -> None:
    """Try the rows with the largest and the smallest whole numbers, such as tokens: an embedding has so many rows."""
    whole = [part for part in _tensors_of(examples.x) if part.dtype in (torch.int32, torch.int64) and part.numel()]
    if not whole:
        return
    rows = [part.reshape(len(part), -1) for part in whole]
    ends = torch.tensor(sorted({int(end) for p in rows for end in (p.amax(1).argmax(), p.amin(1).argmin())}))
    x, _ = replace_fields(examples.padded, index=ends).batch(torch.arange(len(ends)))
    for model in models.values():
        try:
            with preserve_model(model):
                model(x)
        except Exception as error:  # whatever a user's own model raises
            why = one_line(str(error).strip().partition("\n")[0], 200) or type(error).__name__
            least, most = min(int(part.min()) for part in whole), max(int(part.max()) for part in whole)
            raise UsageError(
                f"the model does not take all inputs of {whose}, whose numbers are from {least} to {most}: {why}"
            ) from error


def _check_judgement(task: Task, model: nn.Module, examples: Examples, whose: str, batch_size: int) -> None:
    """Let the task judge a model's outputs once; a loss may want more than one row, but no more than a batch has."""
    for rows in (1, batch_size):
        x, y = _first(examples, rows)
        with preserve_model(model):
            outputs = model(x)
        judged = outputs.detach().requires_grad_(outputs.is_floating_point())
        known = task.resolve(torch.ones(task.width(outputs))) if task.needs_counts else task
        try:
            with torch.enable_grad():
                known.mean_loss(judged, y)
        except UsageError:
            raise
        except Exception as error:  # whatever torch, or a user's own task, raises
            shapes = f"outputs of shape {list(outputs.shape)} with targets of shape {list(y.shape)}{place_of(whose)}"
            why = one_line(f"{type(error).__name__}: {error}", 200)
            refusal = UsageError(f"the task '{task.name}' cannot compare {shapes}: {why}")
            continue
        task.check_primary(_metric_names(task, outputs, y))
        return
    raise refusal


def _metric_names(task: Task, outputs: Tensor, targets: Tensor) -> list[str] | None:
    """The names of a task's metrics; None where one cannot be computed of so few examples."""
    metrics = task.build_metrics(task.width(outputs))
    if isinstance(metrics, Mapping):
        return list(metrics)
    names: list[str] = []
    for metric in metrics:
        known = getattr(metric, "names", None)
        try:
            names += metric.compute([metric.observe(outputs, targets)]) if known is None else known
        except Exception:  # the first evaluation will tell
            return None
    return names


def _sample(clients: Sequence[Examples], holders: Sequence[int]) -> Tensor:
    """Two inputs of the first client that has any, and one of each of the next few: models may choose by inputs."""
    sample, _ = _first(clients[holders[0]], 2)
    for client in holders[1:SAMPLE]:
        x, _ = _first(clients[client], 1)
        if (x.dtype, x.shape[1:]) == (sample.dtype, sample.shape[1:]):
            sample = torch.cat([sample, x])
    return sample


def _check_public(task: Task, public: Examples, models: Mapping[str, nn.Module], sample: Tensor) -> None:
    """The server's unlabelled data must look like the clients'."""
    if not len(public):
        raise UsageError("the server's public data is empty; give None for none")
    x, _ = _first(public, 1)
    if x.shape[1:] != sample.shape[1:]:
        shapes = f"{shape_text(x)} and not {shape_text(sample)}"
        raise UsageError(f"the server's public data does not look like the clients': its inputs are {shapes}")
    for model in models.values():
        _outputs(task, model, x)
    if isinstance(public, TensorExamples) and not all_finite(_tensors_of(public.x)):
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
    if state.base != fresh.base:
        return f"another base beneath its adapters: {state.base or 'none'} instead of {fresh.base or 'none'}"
    if state.held.shape != fresh.held.shape:
        return f"another number of clients: {len(state.held)} instead of {len(fresh.held)}"
    for version in state.versions:
        name = first_unlike(*({**s.params, **s.buffers} for s in (fresh, version)))
        if name is not None:
            return f"another model: '{name}' does not fit"
    if state.techniques.keys() != fresh.techniques.keys():
        return f"another method: {', '.join(state.techniques) or 'no technique'}"
    for technique, begun in fresh.techniques.items():
        name = first_unlike(begun, {n: t for n, t in state.techniques[technique].items() if n in begun})
        if name is not None:
            return f"another method: '{name}' of {technique} does not fit"
    return None


def client_memory_mismatch(method: Method, memory: Slots, params: Tensors, buffers: Tensors) -> str | None:
    """Why a client's memory cannot be one of this method and of a model with such tensors, or None."""
    kinds = {t.name for t in method.techniques} | {PERSONAL} | ({BUFFERS} if method.remembers_statistics else set())
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


def fingerprint(clients: Sequence[Examples], public: Examples | None = None, trusted: Examples | None = None) -> str:
    """Sixteen hex digits that tell whether a run goes on with the data that it began with.

    Made of the clients' sizes and, where they are at hand without reading everything, their labels; and of the inputs
    that the server has itself.
    """
    size = sizes(clients)
    digest = hashlib.sha256(np.array([size(c) for c in range(len(clients))]).tobytes())
    for examples in [clients.all()] if isinstance(clients, Split) else clients:  # the same bytes, in one go
        if isinstance(examples, TensorExamples):
            digest.update(examples.labels().numpy().tobytes())
    for own in (data for data in (public, trusted) if data is not None):
        inputs = own.batch(torch.arange(min(len(own), 64)))[0]
        for part in _tensors_of(inputs):
            digest.update(part.numpy().tobytes())
        digest.update(str(len(own)).encode())
    return digest.hexdigest()[:16]


def _tensors_of(inputs: Tensor | Parts) -> list[Tensor]:
    return list(inputs.tensors.values()) if isinstance(inputs, Parts) else [inputs]


def _first(examples: Examples, count: int) -> tuple[Tensor, Tensor]:
    try:
        if isinstance(examples, TensorExamples):
            examples = examples.padded
        return examples.batch(torch.arange(min(count, len(examples))))
    except UsageError:
        raise
    except Exception as error:  # whatever a user's own dataset raises
        why = one_line(f"{type(error).__name__}: {error}", 200)
        raise UsageError(f"the data cannot be read as (input, label) rows of one shape: {why}") from error


def _outputs(task: Task, model: nn.Module, x: Tensor) -> int:
    """Number of answers that a model tells apart, found by trying it; it is fitted to its inputs."""
    try:
        logits = fit_model(model, x)
    except Exception as error:  # whatever a user's own model raises
        first = one_line(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        raise UsageError(f"the model does not take inputs of shape {shape_text(x)}: {first}") from error
    wrong = task.check_outputs(logits, len(x))
    if wrong is not None:
        raise UsageError(wrong)
    _check_training(task, model, torch.cat([x, x]))  # norm layers cannot train on one row
    return task.width(logits)


def _check_training(task: Task, model: nn.Module, x: Tensor) -> None:
    """In training, too, a model returns what the task needs; one that cannot run on so few rows is not judged."""
    found = fit_training(model, x)
    if found is not None and task.check_outputs(found, len(x)) is not None:
        what = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise UsageError(
            f"in training mode the model returns a {type(found).__name__}{what}: it must return {task.outputs}"
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
    axes = rank_axes(models[""])
    for arch, model in models.items():
        for name, tensor in {**dict(model.named_parameters()), **running_statistics(model)}.items():
            if name not in whole:
                raise UsageError(f"architecture '{arch}' has '{name}', which the server's model lacks")
            if not is_part(tensor.shape, whole[name].shape, axes.get(name)) or tensor.dtype != whole[name].dtype:
                shapes = f"{list(tensor.shape)} instead of {list(whole[name].shape)}"
                raise UsageError(f"'{name}' of the architecture '{arch}' is {shapes}")
