"""The command `fedstrata`."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table as RichTable

from fedstrata import __version__, console
from fedstrata.attack.command import app as attack_app
from fedstrata.compare import Comparison, overlaid, plan, run_missing, tabulate
from fedstrata.config import RunConfig, assign, checked, read_toml
from fedstrata.data.augment import AUGMENTS
from fedstrata.data.datasets import DATASETS
from fedstrata.data.fetch import fetch
from fedstrata.data.partition import PARTITIONS, describe
from fedstrata.data.picture import plot, terminal
from fedstrata.engines import ENGINES
from fedstrata.errors import FedstrataError, Stopped, UsageError, did_you_mean, one_line
from fedstrata.federation import Federation
from fedstrata.history import Record
from fedstrata.models import MODELS
from fedstrata.optim import OPTIMIZERS, SCHEDULES
from fedstrata.reducers import REDUCERS
from fedstrata.reproduce import PAPERS, SCALES
from fedstrata.reproduce import reproduce as reproduced
from fedstrata.run import deal, open_run, resume_run
from fedstrata.rundir import RunDirectory, fresh_directory
from fedstrata.spec import Table, signature, summary
from fedstrata.techniques import TECHNIQUES

app = typer.Typer(
    help="Federated learning, layer by layer, for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at datasets and fetch them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(attack_app, name="attack")

Quiet = Annotated[bool, typer.Option("--quiet", help="print only the last line")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard events")]
Profile = Annotated[bool, typer.Option("--profile", help="also show where the time of a round went")]
Out = Annotated[Path | None, typer.Option(help="directory of the run's files; default: a new one in runs/")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="any field, or a part of one: model.width=16"),
]
DEMO = {
    "dataset": "digits",
    "model": "cnn2(width=16)",
    "partition": "dirichlet(alpha=0.1)",
    "clients": 10,
    "rounds": 30,
    "epochs": 5,
    "lr": 0.1,
}
LISTS: Mapping[str, Table] = {
    "methods": TECHNIQUES,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "augmentations": AUGMENTS,
    "engines": ENGINES,
    "reducers": REDUCERS,
}


def _screen(stderr: bool = False, quiet: bool = False) -> Console:
    """A terminal that shows names and paths as they are, brackets and colons included."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


def _version(show: bool) -> None:
    if show:
        print(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks; may stand anywhere")] = False,
) -> None:
    """Federated learning, layer by layer, for PyTorch."""


def _option_type(annotation: Any) -> Any:
    """What the command line reads for a field; strings are checked, and numbers told apart, by the schema."""
    kinds = {a for a in (get_args(annotation) or (annotation,)) if a is not type(None)}
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= {int, float, bool, str} else str


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of the schema; they arrive in `given`, None where not said."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    options = []
    for name, info in RunConfig.model_fields.items():
        default = "" if info.default is None else f" [default: {info.default}]"
        flag = f"--{name.replace('_', '-')}"
        flags = (f"{flag}/--no-{flag[2:]}",) if info.annotation is bool else (flag,)
        option = typer.Option(*flags, help=f"{info.description}{default}", show_default=False)
        kind: Any = _option_type(info.annotation)
        options.append(_keyword(name, Annotated[kind | None, option], None))

    def run(**arguments: Any) -> None:
        given = {n: arguments.pop(n) for n in RunConfig.model_fields}
        command(**arguments, given={n: v for n, v in given.items() if v is not None})

    annotations = inspect.get_annotations(command, eval_str=True)
    own = [_keyword(p.name, annotations[p.name], p.default) for p in own]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _number(text: Any) -> Any:
    """An option that may be a whole number or a fraction: '5' and '0.5' are told apart by the decimal point."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(v) if name in ("participation", "workers") else v for name, v in given.items()}


def _config(path: Path | None, given: Mapping[str, Any], sets: list[str] | None) -> RunConfig:
    """File, then options, then --set."""
    values = {} if path is None else read_toml(path)
    return checked(RunConfig, assign(values | _numbers(given), sets or []))


def _default_out(config: RunConfig) -> Path:
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{config.dataset}-{config.method}".lower()).strip("-")
    return fresh_directory(Path("runs"), f"{slug[:60]}-seed{config.seed}")


@app.command()
@_with_fields
def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", show_default=False)] = None,
    out: Out = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: TensorBoard = False,
    profile: Profile = False,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation, from a TOML file, from options, or both (options win)."""
    settings = _config(config, given, sets)
    if tensorboard:
        _events_writer(None)
    federation = open_run(settings, out or _default_out(settings), profile=profile)
    _follow(federation, settings, quiet, as_json, tensorboard)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a run's directory", show_default=False)],
    workers: Annotated[str | None, typer.Option(help="clients trained at the same time, or auto")] = None,
    data_dir: Annotated[str | None, typer.Option(help="where the data's files are now")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: TensorBoard = False,
    profile: Profile = False,
) -> None:
    """Go on with a run that was stopped or killed; the result has the same bits as if it never was."""
    federation = resume_run(directory, data_dir, None if workers is None else _number(workers), profile)
    recipe = read_toml(directory / "run.toml")
    config = checked(RunConfig, recipe)
    _follow(federation, config, quiet, as_json, tensorboard)


@app.command()
def demo(
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a small federation on real digits, embedded: ten clients, Dirichlet(0.1), under a minute."""
    config = checked(RunConfig, DEMO)
    federation = open_run(config, out or fresh_directory(Path("runs"), "demo"))
    _follow(federation, config, quiet, as_json, False)


@app.command()
@_with_fields
def compare(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", show_default=False)] = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="A; B; …", help="what to compare: 'fedavg; fedprox(mu=0.01)'")
    ] = None,
    seeds: Annotated[list[str] | None, typer.Option(metavar="0 1 2 …", help="run each with all of these seeds")] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="NAME=A; B; …", help="any other field with several values: 'lr=0.1; 1'")
    ] = None,
    out: Annotated[Path, typer.Option(help="directory of all runs; what is finished there is not run again")] = Path(
        "runs/compare"
    ),
    sets: Sets = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at the same time, each in a process of its own")] = 1,
    table_only: Annotated[
        bool, typer.Option("--table-only", "--no-run", help="show what is there; run nothing")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the table")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print the table as CSV, plain numbers")] = False,
    as_json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Run methods × seeds (and any other field), as far as they are missing, and print the table of them."""
    if as_markdown + as_csv + as_json > 1:
        raise UsageError("--markdown, --csv and --json exclude each other: give one of them")
    values = {} if config is None else read_toml(config)
    grid = plan(
        overlaid(values, _numbers(given), "; ".join(methods) if methods else None, seeds or [], vary or [], sets or []),
        out,
    )
    failures = {}
    if not table_only:
        plain = as_markdown or as_csv or as_json
        watcher = console.RunsWatcher(_screen(stderr=plain, quiet=quiet), grid)
        with watcher:
            failures = run_missing(grid, jobs, watcher.hear)
    found = tabulate(grid, failures)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in grid.runs}):
        raise wrong[0]  # the input fits no run, so there is nothing to show
    _show(found, as_markdown, as_csv, as_json)
    if failures:
        raise FedstrataError(console.failed(found))


def _show(found: Comparison, as_markdown: bool, as_csv: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_dict()))
    elif as_csv:
        print(console.csv_text(found), end="")
    elif as_markdown:
        print(console.markdown(found))
    else:
        _screen().print(console.SideBySide(found), soft_wrap=True)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=", ".join(PAPERS), show_default=False)],
    scale: Annotated[
        str, typer.Option(help=f"{', '.join(SCALES)}: seconds, half an hour on two cores, a GPU")
    ] = "smoke",
    data_dir: Annotated[str | None, typer.Option(help="where the data's files are; else FEDSTRATA_DATA")] = None,
    out: Annotated[Path | None, typer.Option(help="for runs and report; what is finished there is not redone")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at the same time, each in a process of its own")] = 1,
    only: Annotated[list[str] | None, typer.Option(metavar="PART", help="some parts; may be given again")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the tables and claims")] = False,
) -> None:
    """Make a paper's experiments again: its tables, and its claims, each with 'holds' or 'does not hold'."""
    screen = _screen(quiet=quiet)
    watch = functools.partial(console.RunsWatcher, screen)
    found = reproduced(
        paper, scale, data_dir=data_dir, out=out, jobs=jobs, only=only or (), watch=watch, say=screen.print
    )
    _screen().print(found, soft_wrap=True)
    if found.failures:
        raise FedstrataError(
            f"{console.plural(len(found.failures), 'run')} failed: {next(iter(found.failures.values()))}"
        )


def _follow(federation: Federation, config: RunConfig, quiet: bool, as_json: bool, tensorboard: bool) -> None:
    screen = _screen()
    writer = _events_writer(federation) if tensorboard else None
    listeners: list[Callable[[Record], None]] = [] if writer is None else [writer]
    silent = quiet or as_json

    def hear(record: Record) -> None:
        for listener in listeners:
            listener(record)

    try:
        if silent:
            for note in federation.notes:
                print(f"fedstrata: note: {one_line(note)}", file=sys.stderr)
            history = federation.fit(hear)
        else:
            rows = {"data": f"{config.dataset}, {config.partition}", "model": config.archs or config.model}
            screen.print(console.header(federation, rows))
            with console.Watcher(screen, federation) as watcher:
                listeners.append(watcher.record)
                history = federation.fit(hear)
    except KeyboardInterrupt:
        again = f"; go on with: {RunDirectory(federation.out).resume_command}" if federation.out else ""
        raise Stopped(f"stopped after round {federation.state.round}{again}") from None
    if as_json:
        spent = dict(zip(("main", "workers"), federation.spent, strict=True))
        print(
            json.dumps({**history.summary, "out": str(federation.out)} | ({"profile": spent} if spent["main"] else {}))
        )
    elif quiet:
        accuracy = console.percent(history.accuracy)
        rounds = console.plural(len(history.records), "round")
        print(f"accuracy {accuracy} after {rounds}; files in {federation.out}")
    else:
        screen.print(console.summary(history, federation.out))
    if federation.clock is not None and not as_json:
        screen.print(console.profile(*federation.spent, len(history.records)))


def _events_writer(federation: Federation | None) -> Callable[[Record], None] | None:
    from fedstrata.events import event_writer

    return event_writer(federation)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=", ".join(LISTS), show_default=False)],
    as_json: Json = False,
) -> None:
    """List what can be named in a run, with arguments and one line of help: methods, models, datasets, …"""
    if what not in LISTS:
        raise UsageError(f"there is no list of '{what}'{did_you_mean(what, LISTS)}")
    rows = [{"name": n, "arguments": signature(f), "help": summary(f)} for n, f in LISTS[what].items()]
    if as_json:
        print(json.dumps(rows))
        return
    table = RichTable(show_lines=False, expand=False)
    table.add_column(what, style="bold", no_wrap=True)
    table.add_column("arguments", overflow="fold")
    table.add_column("help")
    for row in rows:
        table.add_row(row["name"], row["arguments"], row["help"])
    _screen().print(table)


@data_app.command()
def show(
    dataset: Annotated[str, typer.Option(help="name of the data")] = "digits",
    data_dir: Annotated[str | None, typer.Option(help="where the data's files are; else FEDSTRATA_DATA")] = None,
    partition: Annotated[str, typer.Option(help="how examples are dealt to clients")] = "dirichlet(alpha=0.1)",
    clients: Annotated[int, typer.Option(help="number of clients; 0 for all natural ones")] = 10,
    seed: Annotated[int, typer.Option(help="as in a run")] = 0,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="also write the picture: FILE.png, .svg, .pdf")] = None,
    as_json: Json = False,
) -> None:
    """Print, and plot, how many examples of each class each client holds."""
    config = checked(
        RunConfig,
        {"dataset": dataset, "data_dir": data_dir, "partition": partition, "clients": clients, "seed": seed},
    )
    loaded, parts = deal(config)
    found = describe(parts, loaded.train.labels(), loaded.classes)
    if plot_to is not None:
        plot(found.counts, plot_to, loaded.class_names, f"{dataset}, {partition}, seed {seed}")
    if as_json:
        print(json.dumps({"counts": found.counts.tolist(), "classes": list(loaded.class_names), "note": loaded.note}))
        return
    screen = _screen()
    shape = "×".join(map(str, loaded.input_shape))
    screen.print(
        f"{dataset}: {len(loaded.train):,} train and {len(loaded.test):,} test examples of {shape}, "
        f"{loaded.classes} classes"
    )
    if loaded.note:
        screen.print(f"note: {loaded.note}")
    screen.print(f"{partition}, seed {seed}: {found}")
    screen.print(terminal(found.counts, loaded.class_names))
    if plot_to is not None:
        screen.print(f"plotted to {plot_to}")


@data_app.command(name="fetch")
def fetch_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the data", show_default=False)],
    data_dir: Annotated[str | None, typer.Option(help="where to put it; else FEDSTRATA_DATA")] = None,
    mirror: Annotated[str | None, typer.Option(help="take MIRROR/NAME/FILE in place of upstream's addresses")] = None,
    optional: Annotated[bool, typer.Option("--optional", help="the optional files too")] = False,
) -> None:
    """Download a dataset's upstream files, checked; an interrupted download goes on where it stopped."""
    where = data_dir or os.environ.get("FEDSTRATA_DATA")
    if not where:
        raise UsageError("say where to put the files: --data-dir DIR, or FEDSTRATA_DATA in the environment")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = sys.stderr.isatty()
    bars = Progress(*columns, console=_screen(stderr=True), disable=not shown)
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


def main() -> None:
    """Run the command; a mistake gets one sentence on standard error and exit code 2."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or bool(os.environ.get("FEDSTRATA_DEBUG"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no '–' gets a '?'
    code = _guarded(arguments, debug)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or _report(error, debug)
    sys.exit(code)


def _gathered(arguments: list[str]) -> list[str]:
    """`--seeds 0 1 2` as `--seeds 0,1,2`, since an option takes one word."""
    words: list[str] = []
    for word in arguments:
        if words[-2:-1] == ["--seeds"] and re.fullmatch(r"[\d,]+", words[-1]) and re.fullmatch(r"[\d,]+", word):
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def _guarded(arguments: list[str], debug: bool) -> int:
    try:
        code = app(_gathered(arguments), standalone_mode=False, prog_name="fedstrata") or 0
        if code == Stopped.exit_code:  # what typer makes of Ctrl-C
            raise Stopped("stopped")
        return code
    except BaseException as error:
        return _report(error, debug)


def _report(error: BaseException, debug: bool) -> int:
    """Say what went wrong, and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if debug:
        traceback.print_exception(error)
    if isinstance(error, FedstrataError):
        sentence, code = str(error), error.exit_code
    elif hasattr(error, "format_message"):  # what typer raises for unknown options and values of a wrong type
        sentence, code = error.format_message(), 2
    elif isinstance(error, KeyboardInterrupt | typer.Abort):
        sentence, code = "stopped", Stopped.exit_code
    elif isinstance(error, BrokenPipeError):
        return 0
    elif isinstance(error, OSError):
        sentence, code = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2
    elif isinstance(error, MemoryError):
        sentence, code = "there is not enough memory", 2
    else:
        sentence, code = f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1
    if sentence.startswith("Usage: "):  # a command without its subcommand: the whole help
        print(sentence, file=sys.stderr)
    elif sentence:
        print(f"fedstrata: {one_line(sentence)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
