"""`fedstrata attack`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.cli.options import Json, Quiet, open_screen
from fedstrata.core.text import plural
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from fedstrata.attack import ImageUpdate, Inversion, TextUpdate

app = typer.Typer(help="Attack what a run shares.", no_args_is_help=True)


Split = Annotated[
    str | None,
    typer.Option(help="where the lower part ends: a stage, or a number of strata; otherwise the method's"),
]
Client = Annotated[int | None, typer.Option(help="whose images; otherwise those of the client with the most classes")]
Images = Annotated[int, typer.Option(help="how many images, of as many classes as possible")]
Noise = Annotated[
    list[str] | None,
    typer.Option(metavar="A,B,…", help="levels of noise [default: 0,0.01,0.1,0.5]", show_default=False),
]
Steps = Annotated[int, typer.Option(help="steps of gradient descent, for each row")]
Rate = Annotated[float, typer.Option(help="the first step, as a share of a pixel's range")]
Variation = Annotated[float, typer.Option(help="weight of the total variation")]
Seed = Annotated[int, typer.Option(help="of the choice of images, of the noise and of the start")]
DataDir = Annotated[str | None, typer.Option(help="where the dataset's files are now")]
Examples = Annotated[int, typer.Option(help="how many examples, of as many classes as possible")]
Batch = Annotated[int, typer.Option(help="examples that a visit trains on at once")]
Epochs = Annotated[int, typer.Option(help="steps of a visit, each on its whole batch")]
Names = Annotated[
    list[str] | None,
    typer.Option(metavar="A,B,…", help="strata to look at, beside the whole [default: all]", show_default=False),
]
Start = Annotated[bool, typer.Option("--start", help="the model of the first round, instead of the final one")]
UpdateOut = Annotated[Path | None, typer.Option("--out", help="for update.png and update.json; default: RUN/attack")]
Out = Annotated[Path | None, typer.Option(help="for sheet.png and invert.json; default: RUN/attack")]


@app.callback()
def _attacks() -> None:
    """Attack what a run shares."""


@app.command()
def invert(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's directory", show_default=False)],
    split: Split = None,
    client: Client = None,
    images: Images = 8,
    noise: Noise = None,
    steps: Steps = 500,
    lr: Rate = 0.1,
    tv: Variation = 0.1,
    seed: Seed = 0,
    data_dir: DataDir = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Rebuild a client's images from their features, and from the class statistics that FedImpro shares."""
    from fedstrata.attack.contact_sheet import check_pictures
    from fedstrata.attack.inversion import NOISE
    from fedstrata.attack.inversion import invert as run_inversion

    out = _folder(directory, out)
    check_pictures()
    levels = NOISE if not noise else _parse_levels(noise)
    with _bar(shown=not quiet and not as_json and sys.stderr.isatty()) as progress:
        found = run_inversion(
            directory,
            split=int(split) if split is not None and split.isdecimal() else split,
            client=client,
            images=images,
            noise=levels,
            steps=steps,
            lr=lr,
            tv=tv,
            seed=seed,
            data_dir=data_dir,
            progress=progress,
        )
    found.save(out)
    _show(found, out, quiet, as_json)


@app.command()
def update(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's directory", show_default=False)],
    client: Client = None,
    examples: Examples = 8,
    batch: Batch = 1,
    epochs: Epochs = 1,
    strata: Names = None,
    start: Start = False,
    steps: Steps = 300,
    lr: Rate = 0.1,
    tv: Variation = 0.01,
    seed: Seed = 0,
    data_dir: DataDir = None,
    out: UpdateOut = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Rebuild a client's images, or the tokens of its texts, from its update: from all of it, and from each stratum."""
    from fedstrata.attack import attack_update
    from fedstrata.attack.contact_sheet import check_pictures

    out = _folder(directory, out)
    check_pictures()
    with _bar(shown=not quiet and not as_json and sys.stderr.isatty()) as progress:
        found = attack_update(
            directory,
            client=client,
            examples=examples,
            batch=batch,
            epochs=epochs,
            strata=[name for text in strata for name in text.split(",")] if strata else None,
            start=start,
            steps=steps,
            lr=lr,
            tv=tv,
            seed=seed,
            data_dir=data_dir,
            progress=progress,
        )
    found.save(out)
    _show_update(found, out, quiet, as_json)


def _folder(directory: Path, out: Path | None) -> Path:
    """Where the result goes: it may be a new directory or one that is there."""
    out = directory / "attack" if out is None else out
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} already exists and is not a directory")
    return out


def _parse_levels(given: Sequence[str]) -> list[float]:
    try:
        return [float(level) for text in given for level in text.split(",")]
    except ValueError:
        raise UsageError(f"--noise {' '.join(given)}: write numbers, as in 0,0.1,0.5") from None


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, and how to move it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=open_screen(stderr=True), transient=True, disable=not shown)
    task = bar.add_task("rebuilding", total=None)
    if shown:  # older versions of rich print an empty line for a bar that was never shown
        bar.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        if shown:
            bar.stop()


def _show(found: Inversion, out: Path, quiet: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**found.as_dict(), "out": str(out)}))
    elif quiet:
        print(f"{'; '.join(f'{row.name}: {row.psnr:.2f} dB' for row in found.rows)}; files in {out}")
    else:
        _show_table(found, out)


def _show_table(found: Inversion, out: Path) -> None:
    screen = open_screen()
    screen.print(
        f"client {found.client}: {plural(len(found.originals), 'image')}, "
        f"features after {found.split}, means of every {found.per}",
        soft_wrap=True,
    )
    rows = [(row.name, f"{row.psnr:.2f}", f"{row.ssim:.3f}", f"{row.error:.2g}") for row in found.rows]
    screen.print(_table("rebuilt", ("PSNR (dB)", "SSIM", "feature error"), rows))
    alone = dict.fromkeys(name for name, count in zip(found.classes, found.examples, strict=True) if count == 1)
    if alone:
        screen.print(
            f"note: of {', '.join(alone)} the client has one example: its statistics are that image's features",
            soft_wrap=True,
        )
    screen.print(f"files: {out}/ (sheet.png, invert.json)", soft_wrap=True)


def _show_update(found: ImageUpdate | TextUpdate, out: Path, quiet: bool, as_json: bool) -> None:
    from fedstrata.attack import ImageUpdate

    if as_json:
        print(json.dumps({**found.as_dict(), "out": str(out)}))
    elif quiet:
        if isinstance(found, ImageUpdate):
            told = "; ".join(f"{row.name}: {row.psnr:.2f} dB" for row in found.rows)
        else:
            told = "; ".join(f"{row.name}: {row.recall:.0%} of the tokens" for row in found.rows if row.reads)
        print(f"{told or 'nothing'}; files in {out}")
    elif isinstance(found, ImageUpdate):
        _show_images(found, out)
    else:
        _show_tokens(found, out)


def _show_images(found: ImageUpdate, out: Path) -> None:
    screen = open_screen()
    screen.print(f"client {found.client}: {plural(len(found.originals), 'image')}", soft_wrap=True)
    rows = [(row.name, f"{row.psnr:.2f}", f"{row.ssim:.3f}", f"{row.error:.2g}") for row in found.rows]
    screen.print(_table("rebuilt from", ("PSNR (dB)", "SSIM", "gradient error"), rows))
    screen.print(f"files: {out}/ (update.png, update.json)", soft_wrap=True)


def _show_tokens(found: TextUpdate, out: Path) -> None:
    screen = open_screen()
    screen.print(f"client {found.client}: {plural(len(found.originals), 'visit')}", soft_wrap=True)
    reading = [row for row in found.rows if row.reads]
    rows = [(row.name, f"{row.recall:.0%}", f"{row.precision:.0%}") for row in reading]
    screen.print(_table("what travels", ("tokens found", "right among these"), rows))
    if len(found.rows) > len(reading):
        rest = plural(len(found.rows) - len(reading), "other part")
        screen.print(f"not looked at: {rest} whose layers see tokens mixed", soft_wrap=True)
    screen.print("the first visit:", found.written(found.originals[0]), soft_wrap=True, markup=False)
    for row in reading[:1]:
        screen.print(f"from its {row.name}:", found.written(row.found[0]), soft_wrap=True, markup=False)
    screen.print(f"files: {out}/ (update.json)", soft_wrap=True)


def _table(first: str, others: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the screen, whose first column holds names and whose others hold numbers."""
    from rich.table import Table

    table = Table(expand=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
