"""Help in panels: which option stands under which heading, and commands that only name the settings of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import typer.core

from fedstrata.config.schema import RunConfig

if TYPE_CHECKING:
    import click

PANELS: Mapping[str, Sequence[str]] = {
    "Data": (
        "dataset",
        "data_dir",
        "task",
        "partition",
        "clients",
        "holdout",
        "validation",
        "standardise",
        "augment",
        "public",
        "trusted",
    ),
    "Model": ("model", "adapter", "archs", "buffers"),
    "Method": ("method", "participation", "without", "newcomers", "faults"),
    "Training": (
        "rounds",
        "epochs",
        "steps",
        "batch_size",
        "lr",
        "optimizer",
        "schedule",
        "clip",
        "precision",
        "seed",
    ),
    "Evaluation": (
        "eval_every",
        "eval_clients",
        "target",
        "stop_at_target",
        "probe",
        "probe_every",
        "probe_clients",
        "probe_examples",
    ),
    "Simulated devices": ("fleet", "deadline", "stragglers"),
    "Machine": (
        "engine",
        "workers",
        "threads",
        "device",
        "channels_last",
        "compile",
        "ray_address",
        "ray_cpus",
        "ray_gpus",
    ),
    "Output": ("checkpoint_seconds",),
}
"""Heading → the fields of the schema below it, in the order in which help shows them."""
PANEL_OF = {field: panel for panel, fields in PANELS.items() for field in fields}
OUTPUT = "Output"
OTHERS = "Options"
"""The heading of options that belong to no panel; it comes last."""


def _panel(param: click.Parameter) -> str:
    """The heading that an option stands under."""
    return getattr(param, "rich_help_panel", None) or OTHERS


def _in_order(panels: Iterable[str]) -> list[str]:
    """Headings: a command's own first, then those of the schema, the rest last."""
    order = [*PANELS, OTHERS]
    return sorted(dict.fromkeys(panels), key=lambda name: order.index(name) if name in order else -1)


def _rank(param: click.Parameter) -> int:
    """An option's place in its panel: fields in the order of the table, a command's own after them."""
    fields = PANELS.get(_panel(param), ())
    return fields.index(param.name) if param.name in fields else len(fields)


class PanelCommand(typer.core.TyperCommand):
    """A command whose options stand under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options."""
        write_panels(formatter, ctx, self.get_params(ctx))


class BriefCommand(PanelCommand):
    """A command that makes runs, whose settings it names only: `fedstrata run --help` explains them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what is this command's own, then the names of the settings, panel by panel."""
        params = self.get_params(ctx)
        write_panels(formatter, ctx, [param for param in params if param.name not in RunConfig.model_fields])
        settings = [param for param in params if param.name in RunConfig.model_fields]
        rows = []
        for panel in _in_order(map(_panel, settings)):
            named = sorted((param for param in settings if _panel(param) == panel), key=_rank)
            rows.append((panel, " ".join(param.opts[0] for param in named)))
        with formatter.section("Settings of the runs, as `fedstrata run --help` explains them"):
            formatter.write_dl(rows)


def write_panels(formatter: click.HelpFormatter, ctx: click.Context, params: Sequence[click.Parameter]) -> None:
    """Write arguments, and options panel by panel."""
    told = {param: param.get_help_record(ctx) for param in params}
    arguments = [record for param, record in told.items() if record and param.param_type_name == "argument"]
    options = [param for param, record in told.items() if record and param.param_type_name == "option"]
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl(arguments)
    for panel in _in_order(map(_panel, options)):
        own = sorted((param for param in options if _panel(param) == panel), key=_rank)
        with formatter.section(panel):
            formatter.write_dl([record for param in own if (record := told[param])])


class PanelGroup(typer.core.TyperGroup):
    """A command of commands, which stand under headings."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, panel by panel."""
        named = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in named.items() if command is not None and not command.hidden}
        limit = formatter.width - 6 - max(map(len, shown), default=0)
        panels = {name: getattr(command, "rich_help_panel", None) or "Commands" for name, command in shown.items()}
        for panel in dict.fromkeys(panels.values()):
            rows = [(name, shown[name].get_short_help_str(limit)) for name in shown if panels[name] == panel]
            with formatter.section(panel):
                formatter.write_dl(rows)
