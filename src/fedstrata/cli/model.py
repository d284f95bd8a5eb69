"""`fedstrata model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.completion import complete_table
from fedstrata.cli.options import DataDir, Json, open_screen
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts, shape_words
from fedstrata.core.text import bytes_text, flops_text
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from fedstrata.client.memory_forecast import StratumMemory
    from fedstrata.data.examples import Dataset
    from fedstrata.models.receptive import Field
    from fedstrata.models.summary import ModelFacts

app = typer.Typer(help="Look at models.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="a model, such as 'resnet18(width=16)'",
        show_default=False,
        autocompletion=complete_table("models"),
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option(help="the dataset that it is for [default: digits]", autocompletion=complete_table("datasets")),
]


@app.callback()
def _models() -> None:
    """Look at models."""


@app.command()
def show(
    name: Name,
    dataset: DatasetName = None,
    data_dir: DataDir = None,
    input_shape: Annotated[
        str | None, typer.Option("--input", metavar="3,32,32", help="instead of a dataset: the shape of one example")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="with --input [default: 10]")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="also what each stratum takes in training")] = False,
    batch_size: Annotated[int | None, typer.Option(help="with --memory: examples per step [default: 32]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="with --memory: local optimiser [default: sgd]")] = None,
    as_json: Json = False,
) -> None:
    """Print a model's strata: parameters, bytes, FLOPs, and each convolution's receptive field."""
    from fedstrata.models.summary import describe_model
    from fedstrata.run import models_of

    steps = {"batch_size": batch_size, "optimizer": optimizer}
    if not memory and any(value is not None for value in steps.values()):
        raise UsageError("--batch-size and --optimizer go with --memory")
    given = {field: value for field, value in {"dataset": dataset, **steps}.items() if value is not None}
    config = validate_settings(RunConfig, {"model": name, "data_dir": data_dir, **given})
    data = _read_data(config, dataset, input_shape, classes)
    model, _ = models_of(config, data)
    inputs: Any = data.train.x
    facts = describe_model(model, inputs[:1] if isinstance(inputs, Parts) else data.input_shape)
    taken = _forecast(config, data, model) if memory else ()
    if as_json:
        print(json.dumps(_about(name, data) | facts.as_dict() | _as_dict(config, taken)))
        return
    screen = open_screen()
    screen.print(f"{name}: inputs of {shape_words(data.input_shape)}, {data.classes} classes", soft_wrap=True)
    _print(_table(facts), _remarks(facts))
    if taken:
        _print(_memory_table(taken), _memory_remarks(config, taken))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's directory", show_default=False)],
    merged: Annotated[bool, typer.Option("--merged", help="also the model with its adapters merged into it")] = False,
    out: Annotated[Path | None, typer.Option(help="directory to write [default: RUN/export]")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a run's final model for others: its adapters as peft reads them, the merged model as safetensors."""
    from fedstrata.run import export_run

    for line in export_run(run, out or run / "export", merged, data_dir):
        open_screen().print(line, soft_wrap=True)


def _print(table: Table, remarks: Sequence[str]) -> None:
    """A table, and what its columns mean."""
    screen = open_screen()
    screen.print(table)
    for line in remarks:
        screen.print(line, soft_wrap=True)


def _about(name: str, data: Dataset) -> dict[str, Any]:
    """Whose anatomy it is, for JSON."""
    inputs: Any = data.train.x
    shape = inputs.shape[1:]
    sizes = dict(shape) if isinstance(inputs, Parts) else list(shape)
    return {"model": name, "input_shape": sizes, "classes": data.classes}


def _as_dict(config: RunConfig, strata: Sequence[StratumMemory]) -> dict[str, Any]:
    """What strata take in training, for JSON; nothing where nobody asked."""
    how = {"batch_size": config.batch_size, "optimizer": config.optimizer}
    return {"memory": {**how, "strata": [asdict(stratum) for stratum in strata]}} if strata else {}


def _forecast(config: RunConfig, data: Dataset, model: nn.Module) -> tuple[StratumMemory, ...]:
    """What each stratum takes in training."""
    from fedstrata.client.memory_forecast import forecast_memory
    from fedstrata.core.types import Work
    from fedstrata.tasks.registry import build_task

    work = Work(batch_size=config.batch_size, optimizer=config.optimizer)
    first = data.train.batch(torch.arange(min(1, len(data.train))))
    inputs, targets = first if len(data.train) else (torch.zeros(1, *data.input_shape), torch.zeros(1).long())
    return forecast_memory(model, build_task(data.task), work, inputs, targets).describe("", config.batch_size)


def _read_data(config: RunConfig, dataset: str | None, input_shape: str | None, classes: int | None) -> Dataset:
    """The dataset that the model is for, or one without examples."""
    from fedstrata.data.datasets import load_dataset
    from fedstrata.models.registry import tokenizer_of

    if input_shape is not None and dataset is not None:
        raise UsageError("--dataset and --input exclude each other: give one of them")
    if input_shape is None and classes is not None:
        raise UsageError("--classes goes with --input; a dataset has its own number of classes")
    if input_shape is None:
        return load_dataset(config.dataset, config.data_dir, tokenizer=tokenizer_of(config.model))
    return _empty_dataset(input_shape, classes)


def _empty_dataset(input_shape: str, classes: int | None) -> Dataset:
    """A dataset without examples, of the shape that the user gives."""
    sizes = [size.strip() for size in input_shape.split(",")]
    if not all(size.isdecimal() and 0 < int(size) < 10**6 for size in sizes):
        raise UsageError(f"--input {input_shape}: write the sizes of one example, as in 3,32,32")
    from fedstrata.data.examples import Dataset, TensorExamples

    nothing = TensorExamples(torch.empty(0, *map(int, sizes)), torch.empty(0, dtype=torch.int64))
    return Dataset("input", nothing, nothing, 10 if classes is None else classes)


def _shape_text(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))


def _table(facts: ModelFacts) -> Table:
    from rich.table import Table

    fields = {field.layer: field for field in facts.fields}
    table = Table(expand=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("stratum", overflow="fold")
    for title in ("parameters", "bytes", "FLOPs", *(["field"] if fields else [])):
        table.add_column(title, justify="right", no_wrap=True)
    before = None
    for stratum in facts.strata:
        table.add_row(
            "" if stratum.stage == before else stratum.stage,
            f"{stratum.name} (idle)" if stratum.idle else stratum.name,
            f"{stratum.parameters:,}",
            bytes_text(stratum.bytes),
            _flops_text(stratum.flops),
            *([_field_text(fields.get(stratum.name))] if fields else []),
        )
        before = stratum.stage
    table.add_section()
    total = [f"{len(facts.strata)} strata", f"{facts.parameters:,}", bytes_text(facts.bytes), _flops_text(facts.flops)]
    table.add_row("all", *total, *([""] if fields else []))
    return table


def _memory_table(strata: Sequence[StratumMemory]) -> Table:
    from rich.table import Table

    table = Table(expand=False)
    table.add_column("stratum", overflow="fold")
    for title in ("weights", "gradient", "optimiser", "saved", "peak"):
        table.add_column(title, justify="right", no_wrap=True)
    for stratum in strata:
        table.add_row(*(text if isinstance(text, str) else bytes_text(text) for text in asdict(stratum).values()))
    table.add_section()
    sums = [sum(getattr(s, kind) for s in strata) for kind in ("weights", "gradient", "optimiser", "activations")]
    table.add_row("all", *map(bytes_text, sums), bytes_text(strata[0].from_here))
    return table


def _memory_remarks(config: RunConfig, strata: Sequence[StratumMemory]) -> list[str]:
    """What the columns of memory mean."""
    third = strata[-max(1, len(strata) // 3)].from_here
    return [
        f"memory: of a step with {config.batch_size} examples and {config.optimizer}; saved are the activations that "
        "the forward pass keeps for the backward pass while everything trains",
        "peak: the most that is held at once if this stratum and all after it train and those before are "
        f"frozen; the deepest third alone takes {third / max(strata[0].from_here, 1):.0%} of all",
    ]


def _flops_text(count: int | None) -> str:
    return "–" if count is None else flops_text(count).removesuffix("FLOP").strip()


def _field_text(field: Field | None) -> str:
    """A receptive field, with a mark if it exceeds the image."""
    return "" if field is None else f"{_shape_text(field.field)} {'▲' if field.exceeds else ' '}"


def _remarks(facts: ModelFacts) -> list[str]:
    """What the table's columns mean, and how many fields exceed the image."""
    lines = ["bytes: parameters and running statistics, as a client sends them"]
    if any(stratum.idle for stratum in facts.strata):
        why = "it never runs, its results are not used or it is detached"
        lines.append(f"idle: no gradient of the outputs reaches it, because {why}; its parameters are not trained")
    if facts.flops is not None and facts.step_flops is not None:
        lines.append(
            f"FLOPs: forward, one example; with the backward pass {flops_text(facts.step_flops)} "
            f"({facts.step_flops / max(facts.flops, 1):.2f} times)"
        )
    if facts.fields:
        size = _shape_text(facts.fields[0].input)
        many = sum(field.exceeds for field in facts.fields)
        beyond = f"▲ larger, in {many} of {len(facts.fields)} layers" if many else "none is larger"
        lines.append(f"field: the receptive field, in pixels of an image of {size}; {beyond}")
    return lines
