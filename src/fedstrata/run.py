"""From a configuration to a Federation: load the data, deal it out, build the model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedstrata.config.schema import RunConfig, Settings, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.core.hugging_face import copy_tokenizer
from fedstrata.core.rng import derive
from fedstrata.core.spec import bind, parse_call
from fedstrata.data.client_data import ClientData, hold_out_examples
from fedstrata.data.datasets import DATASETS, load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.data.partitions import partition
from fedstrata.data.readers.archives import DATA_VARIABLE
from fedstrata.data.validation import set_aside
from fedstrata.errors import UsageError, one_line
from fedstrata.federation import Federation
from fedstrata.models.adapted import base_digest
from fedstrata.models.adapters import adapt
from fedstrata.models.export import merge_adapters, write_adapter, write_model
from fedstrata.models.registry import build_model, tokenizer_of
from fedstrata.models.submodels import deepest, groups, shares, split_adapter
from fedstrata.runs.checkpoint import load_all
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.dry_run import DryRun
from fedstrata.runs.files import disk_errors
from fedstrata.tasks.registry import build_task

RECIPE = tuple(name for name in RunConfig.model_fields if name not in Settings.model_fields)
"""Fields that say where model and data come from."""


def deal(config: RunConfig) -> tuple[Dataset, list[Any]]:
    """The dataset of a configuration, and its clients' index tensors."""
    dataset = load_dataset(config.dataset, config.data_dir, config.task or "", find_tokenizer(config))
    if config.validation is not None:
        dataset = set_aside(dataset, config.validation)
    parts = partition(
        dataset.labels,
        config.partition,
        config.clients,
        derive(config.seed, "partition"),
        dataset.groups,
    )
    return dataset, parts


def find_tokenizer(config: RunConfig) -> str:
    """Where the tokenizer of the run's model is; empty if it has none."""
    return tokenizer_of(config.model or split_adapter(next(iter(shares(config.archs or ""))))[0])


def open_run(config: RunConfig, out: Path | None, resume: bool = False, profile: bool = False) -> Federation:
    """The federation that a configuration describes, with its directory made (or, to resume, read)."""
    dataset, parts = deal(config)
    model, archs = models_of(config, dataset)
    data, names = divide(config, dataset, parts)
    return Federation(
        model,
        data,
        dataset.test,
        config.model_copy(update={"task": config.task or dataset.task}),
        out=out,
        resume=resume,
        archs=archs,
        arch_of=None if config.archs is None else groups(shares(config.archs), len(parts)),
        public=None if config.public is None else _public(config.public, config),
        trusted=None if config.trusted is None else _trusted(config.trusted, config),
        recipe={name: getattr(config, name) for name in RECIPE}
        | {"task": config.task, "data_dir": _absolute(config.data_dir or os.environ.get(DATA_VARIABLE))},
        class_names=dataset.class_names,
        client_names=names,
        notes=[f"data: {dataset.note}"] if dataset.note else [],
        profile=profile,
    )


def training_parts(config: RunConfig, dataset: Dataset, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The clients' index tensors without what they hold out."""
    if config.holdout is None:
        return parts
    task = build_task(config.task or dataset.task)
    clients = ClientData(dataset.train.split(parts))
    kept = hold_out_examples(clients, config.holdout, config.seed, task.has_labels).train
    return [examples.index for examples in kept]


def divide(config: RunConfig, dataset: Dataset, parts: Sequence[Tensor]) -> tuple[ClientData, list[str]]:
    """(the clients' examples, with their own test examples where the dataset knows them; the clients' names, if any).

    Where every client holds out examples of its own, those are what it is judged by.
    """
    train = dataset.train.split(parts)
    if parse_call(config.partition).name != "natural":
        return ClientData(train), []
    number_of = {int(group.min()): number for number, group in enumerate(dataset.groups) if len(group)}
    chosen = [number_of[int(part.min())] for part in parts]
    names = [dataset.group_names[group] for group in chosen] if dataset.group_names else []
    if not dataset.test_groups or config.holdout is not None:
        return ClientData(train), names
    test = dataset.test if dataset.client_test is None else dataset.client_test
    return ClientData(train, test.split([dataset.test_groups[group] for group in chosen])), names


def models_of(config: RunConfig, dataset: Dataset) -> tuple[nn.Module, dict[str, nn.Module]]:
    """(the server's model, the architectures by name), with the weights of the run's seed.

    Where clients have models of their own and nothing is said of the server's, it is the deepest of these.
    """
    archs = {} if config.archs is None else {name: _build_model(name, config, dataset) for name in shares(config.archs)}
    return _build_model(config.model, config, dataset) if config.model else archs[deepest(archs)], archs


def outputs_of(config: RunConfig, dataset: Dataset) -> int:
    """How many outputs the model has: those of the dataset's own task, or of the one that is asked for."""
    task = build_task(config.task or dataset.task)
    if task.name == build_task(dataset.task).name:
        return dataset.classes
    return task.count_outputs(task.read_targets(dataset.train.labels(), dataset.name))


def _build_model(name: str, config: RunConfig, dataset: Dataset) -> nn.Module:
    """A model by name, with the weights of the run's seed."""
    try:
        seed, outputs = derive(config.seed, "model"), outputs_of(config, dataset)
        bare, own = split_adapter(name)
        adapter, model = own or config.adapter, build_model(bare, dataset.input_shape, outputs, seed=seed)
        if adapter is None:
            return model
        sample = dataset.train.padded.batch(torch.arange(min(2, len(dataset.train))))[0]
        return adapt(model, adapter, sample, seed=derive(config.seed, "adapter"))
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # torch, of sizes that no machine holds
        why = str(error).partition("\n")[0]
        if isinstance(error, MemoryError) or "allocate memory" in why:
            why = "there is not enough memory"
        raise UsageError(f"the model '{name}' cannot be built here: {why}") from error


def _public(public: str, config: RunConfig) -> Any:
    """The server's unlabelled inputs: an array of them from a file, or a dataset's training examples."""
    if not public.endswith(".npy"):
        tokenizer = find_tokenizer(config)
        task = config.task or "" if public == config.dataset else ""  # read for another one, other rows are set aside
        try:
            return _apart(load_dataset(public, config.data_dir, task, tokenizer), public, config).train
        except UsageError:  # its targets are never looked at, so they may be all the same
            with suppress(UsageError):
                return load_dataset(public, config.data_dir, "regression", tokenizer).train
            raise
    try:
        inputs = np.load(public, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot read {public}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise UsageError(f"{public} holds no array of numbers: {one_line(str(error), 200)}") from None
    if not isinstance(inputs, np.ndarray) or inputs.dtype.kind not in "fiu" or not inputs.ndim:
        raise UsageError(f"{public} holds no array of numbers")
    kind = {"f": np.float32, "i": np.int64}.get(inputs.dtype.kind, np.uint8 if inputs.dtype == np.uint8 else np.int64)
    return inputs.astype(kind, copy=False)


def _trusted(name: str, config: RunConfig) -> Any:
    """The labelled examples that the server trusts: a dataset's, to train on."""
    return _apart(load_dataset(name, config.data_dir, config.task or "", find_tokenizer(config)), name, config).train


def _apart(dataset: Dataset, name: str, config: RunConfig) -> Dataset:
    """The server's data without the validation set, if it is what clients have, too."""
    return dataset if config.validation is None or name != config.dataset else set_aside(dataset, config.validation)


def final_model(
    directory: Path, config: RunConfig, dataset: Dataset, own: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The model that a finished run left; `own` are tensors of a client that take the place of the server's.

    Raises:
        UsageError: if its file is damaged, or of another model.
    """
    path = directory / "model.safetensors"
    model, _ = models_of(config, dataset)
    try:
        model.load_state_dict({**load_file(path), **(own or {})})
    except (OSError, SafetensorError):
        raise UsageError(f"{path} is damaged") from None
    except RuntimeError:
        raise UsageError(f"{path} does not hold the model that run.toml describes") from None
    return model


def export_run(directory: Path, out: Path, merged: bool = False, data_dir: str | None = None) -> list[str]:
    """Write a finished run's model for others: (a line for each thing that was written).

    Where a method has changed the base beneath the adapters, only the merged model is whole.

    Raises:
        UsageError: if the run is not finished, or there is something at `out` already.
    """
    values = _recipe(directory) | ({} if data_dir is None else {"data_dir": data_dir})
    config = validate_settings(RunConfig, values)
    if not (directory / "model.safetensors").exists():
        raise UsageError(f"{directory} has no model.safetensors: the run is not finished")
    if out.exists():
        raise UsageError(f"{out} is there already: name another directory with --out")
    dataset, _ = deal(config)
    model = final_model(directory, config, dataset)
    own = base_digest(models_of(config, dataset)[0])
    parts = {"adapter": write_adapter} if own and base_digest(model) == own else {}
    if merged or not own:
        parts["merged" if own else "model"] = _write_merged
    if not parts:
        raise UsageError(
            f"the method has changed the base beneath the adapters of {directory}: export it with --merged"
        )
    return _write_parts(model, parts, out, _tokenizer_read_by(config))


def _tokenizer_read_by(config: RunConfig) -> str:
    """Where the tokenizer is that texts were read with: the dataset's own, or the model's."""
    _, arguments = bind("dataset", DATASETS, config.dataset)
    own: str = arguments.get("tokenizer", "")
    return own or find_tokenizer(config)


def _write_merged(model: nn.Module, folder: Path) -> None:
    write_model(merge_adapters(model), folder)


def _write_parts(
    model: nn.Module, parts: Mapping[str, Callable[[nn.Module, Path], None]], out: Path, tokenizer: str
) -> list[str]:
    """Write all parts of an export, or nothing."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with disk_errors(out):
        try:
            for name, write in parts.items():
                write(model, temporary / name)
                if tokenizer and name != "adapter":
                    copy_tokenizer(tokenizer, temporary / name)
            _let_others_read(temporary)
            os.replace(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return [f"{name}: {out / name}" for name in parts]


def _let_others_read(folder: Path) -> None:
    """Give files the rights that new ones have here: libraries write weights for their user alone."""
    usual = folder / ".new"
    usual.touch()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(usual.stat().st_mode)
    usual.unlink()


def _absolute(path: str | None) -> str | None:
    """So that a run can be resumed from another working directory."""
    return None if path is None else str(Path(path).expanduser().resolve())


def resume_run(directory: Path, profile: bool = False, **changed: Any) -> Federation:
    """The federation of a run directory, ready to go on where its last checkpoint is.

    What does not decide about the result may have changed, such as `workers`, `engine` or `data_dir`.
    """
    config = validate_settings(RunConfig, {**_recipe(directory), **changed})
    return open_run(config, directory, resume=True, profile=profile)


def _recipe(directory: Path) -> dict[str, Any]:
    """What run.toml says of a run that can be built again from it."""
    path = directory / "run.toml"
    if not path.exists():
        raise UsageError(f"{directory} has no run.toml: there is no run to resume")
    values = read_toml(path)
    if "method" not in values:
        raise UsageError(f"{path} does not describe a run: it was emptied or edited")
    if "dataset" not in values:
        raise UsageError(
            f"{directory} was run from Python with a model and data of its own: "
            "resume it there, with Federation(…, out=…, resume=True)"
        )
    return values


def dry_run_of(directory: Path, rounds: int, data_dir: str | None = None) -> DryRun:
    """What the probes find in a few rounds more of a run, which start from the state that it has now."""
    values = _recipe(directory) | ({} if data_dir is None else {"data_dir": data_dir})
    RunDirectory(directory).check_unedited()
    RunDirectory(directory).check_models(values)
    federation = open_run(validate_settings(RunConfig, values), None)
    states, _ = load_all(directory / "checkpoints")
    if not states:
        raise UsageError(f"{directory} has no checkpoint yet: there is no model to measure")
    return federation.dry_run(rounds, states[0], RunDirectory(directory).store())
