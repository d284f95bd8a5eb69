"""`fedstrata data`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.completion import complete_from, complete_table
from fedstrata.cli.options import DataDir, Json, open_screen
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.parts import shape_words
from fedstrata.core.spec import parse_call
from fedstrata.core.text import plural
from fedstrata.data.sources import SOURCES
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.data.examples import Dataset

app = typer.Typer(help="Look at datasets and fetch them.", no_args_is_help=True)

DatasetName = Annotated[str, typer.Option(help="name of the dataset", autocompletion=complete_table("datasets"))]
Partition = Annotated[
    str, typer.Option(help="how examples are split among clients", autocompletion=complete_table("partitions"))
]
Downloadable = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="name of the dataset",
        show_default=False,
        autocompletion=complete_from(lambda: list(SOURCES)),
    ),
]


@app.command()
def show(
    dataset: DatasetName = "digits",
    data_dir: DataDir = None,
    partition: Partition = "dirichlet(alpha=0.1)",
    clients: Annotated[int, typer.Option(help="number of clients; 0 for all of a natural partition")] = 10,
    seed: Annotated[int, typer.Option(help="of the partition, as in a run")] = 0,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="also write the plot to FILE.png, .svg or .pdf")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print, and plot, how many examples of each class each client holds."""
    from fedstrata.data.partitions import describe
    from fedstrata.data.picture import plot, terminal
    from fedstrata.run import deal, divide

    config = validate_settings(
        RunConfig,
        {"dataset": dataset, "data_dir": data_dir, "partition": partition, "clients": clients, "seed": seed},
    )
    loaded, parts = deal(config)
    classes, names = _dealt_classes(loaded)
    found = describe(parts, loaded.labels, classes)
    called = divide(config, loaded, parts)[1]
    if plot_to is not None:
        plot(found.counts, plot_to, names, f"{dataset}, {partition}, seed {seed}")
    if as_json:
        shown = {"counts": found.counts.tolist(), "classes": list(names), "clients": called, "note": loaded.note}
        print(json.dumps(shown))
        return
    screen = open_screen()
    for line in _describe_dataset(dataset, loaded):
        screen.print(line)
    screen.print(f"{partition}, seed {seed}: {found}")
    if called:
        screen.print(f"clients: {_numbered(called)}")
    screen.print(terminal(found.counts, names))
    if plot_to is not None:
        screen.print(f"plotted to {plot_to}")


@app.command(name="fetch")
def fetch_(
    name: Downloadable,
    data_dir: Annotated[str | None, typer.Option(help="where to put it; otherwise FEDSTRATA_DATA")] = None,
    mirror: Annotated[
        str | None, typer.Option(help="download MIRROR/NAME/FILE instead of the original addresses")
    ] = None,
    optional: Annotated[bool, typer.Option("--optional", help="also fetch optional files")] = False,
) -> None:
    """Download a dataset's files and check them; an interrupted download continues where it stopped."""
    where = data_dir or os.environ.get("FEDSTRATA_DATA")
    if not where:
        raise UsageError("say where to put the files: --data-dir DIR, or FEDSTRATA_DATA in the environment")
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fedstrata.data.fetch import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = sys.stderr.isatty()
    bars = Progress(*columns, console=open_screen(stderr=True), disable=not shown)
    tasks: dict[str, Any] = {}

    def progress(done: int, total: int | None, file: str) -> None:
        bars.start()
        if file not in tasks:
            tasks[file] = bars.add_task(file, total=total)
        bars.update(tasks[file], completed=done, total=total)

    try:
        paths = fetch(name, where, mirror=mirror, optional=optional, progress=progress)
    finally:
        if shown:  # older versions of rich print an empty line for a bar that was never shown
            bars.stop()
    for path in paths:
        print(path)


def _numbered(names: Sequence[str], most: int = 20) -> str:
    """The first clients' names, with the numbers that they have in the table."""
    shown = ", ".join(f"{number} {name}" for number, name in enumerate(names[:most]))
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _dealt_classes(loaded: Dataset) -> tuple[int, tuple[str, ...]]:
    """How many classes examples are dealt out by, and their names, if they have any."""
    largest = int(loaded.labels.max()) + 1
    if parse_call(loaded.task).name in ("classification", "binary"):
        count = max(loaded.classes, len(loaded.class_names), largest)
        return count, loaded.class_names if len(loaded.class_names) == count else ()
    if parse_call(loaded.task).name == "regression":
        return largest, tuple(f"tenth {number + 1}" for number in range(largest))
    return largest, tuple(map(str, range(largest)))


def _describe_dataset(name: str, loaded: Dataset) -> Iterator[str]:
    sizes = f"{len(loaded.train):,} train and {len(loaded.test):,} test examples"
    task = parse_call(loaded.task).name
    what = f"{loaded.classes} classes" if task == "classification" else f"for {task}"
    shape = shape_words(loaded.input_shape)
    yield f"{name}: {sizes} of {plural(int(shape), 'number') if shape.isdigit() else shape}, {what}"
    if task == "regression":
        yield "dealt out by tenths of the target"
    elif task not in ("classification", "binary"):
        yield "dealt out by a class that stands for each example"
    if loaded.note:
        yield f"note: {loaded.note}"
