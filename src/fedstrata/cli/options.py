"""Options that several commands share, and how they are read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedstrata.cli.completion import complete_field, complete_setting
from fedstrata.cli.panels import OUTPUT, PANEL_OF
from fedstrata.config.overrides import assign
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml

if TYPE_CHECKING:
    from rich.console import Console

Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="where the dataset's files are; otherwise FEDSTRATA_DATA")]
Jobs = Annotated[int, typer.Option(min=1, help="how many runs at once, each in its own process")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print only the last line", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else", rich_help_panel=OUTPUT)]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TRACKER",
        help="also log with wandb, mlflow or tensorboard: \"wandb(project='digits'), mlflow\"; may be given again",
        rich_help_panel=OUTPUT,
    ),
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", hidden=True, help="the same as --track tensorboard")]
Profile = Annotated[bool, typer.Option("--profile", help="also show where the time went", rich_help_panel=OUTPUT)]
Report = Annotated[
    bool, typer.Option("--report/--no-report", help="write report.html beside the other files", rich_help_panel=OUTPUT)
]
Open = Annotated[bool, typer.Option("--open", help="show the report in the browser", rich_help_panel=OUTPUT)]
Out = Annotated[
    Path | None,
    typer.Option(help="directory for the run's files [default: a new one in runs/]", rich_help_panel=OUTPUT),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="any field, or an argument of one: model.width=16",
        autocompletion=complete_setting,
    ),
]


def open_screen(stderr: bool = False, quiet: bool = False) -> Console:
    """A terminal that shows names and paths as they are, with brackets and colons."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


def _option_type(annotation: Any) -> Any:
    """The type that the command line reads for a field; the schema checks strings and parses numbers."""
    kinds = {a for a in (get_args(annotation) or (annotation,)) if a is not type(None)}
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= {int, float, bool, str} else str


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_fields(
    command: Callable[..., None], of: Collection[str] | None = None, about: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., None]:
    """Give a command one option for every field of the schema; what the user sets arrives in `given`.

    Args:
        command: a function with a keyword `given`.
        of: only these fields, for a command that changes them and leaves the others as they were; None for all.
        about: field → its help, where it means something else than in a new run.
    """
    fields = {name: info for name, info in RunConfig.model_fields.items() if of is None or name in of}
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    options = []
    for name, info in fields.items():
        default = "" if info.default is None or of is not None else f" [default: {info.default}]"
        flag = f"--{name.replace('_', '-')}"
        flags = (f"{flag}/--no-{flag[2:]}",) if info.annotation is bool else (flag,)
        shown: Any = {"rich_help_panel": PANEL_OF[name], "autocompletion": complete_field(name)}
        option = typer.Option(*flags, help=f"{about.get(name, info.description)}{default}", show_default=False, **shown)
        kind: Any = _option_type(info.annotation)
        options.append(_keyword(name, Annotated[kind | None, option], None))

    def run(**arguments: Any) -> None:
        given = {n: arguments.pop(n) for n in fields}
        command(**arguments, given={n: v for n, v in given.items() if v is not None})

    annotations = inspect.get_annotations(command, eval_str=True)
    own = [_keyword(p.name, annotations[p.name], p.default) for p in own]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def parse_number(text: Any) -> Any:
    """Parse an option that may be a whole number or a fraction, by its decimal point; other text stays as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def parse_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with those parsed that may be a whole number or a fraction."""
    return {name: parse_number(v) if name in ("participation", "workers") else v for name, v in given.items()}


def read_config(path: Path | None, given: Mapping[str, Any], sets: list[str] | None) -> RunConfig:
    """Read a configuration: the file, then options, then --set; later ones win."""
    values = {} if path is None else read_toml(path)
    return validate_settings(RunConfig, assign(values | parse_numbers(given), sets or []))
