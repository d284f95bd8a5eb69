"""A reproduction's findings in a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from fedstrata.errors import FedstrataError
from fedstrata.reproduce.claims import Check
from fedstrata.reproduce.parts import Findings, FindingsTable, Part
from fedstrata.runs.files import disk_errors, write_atomic

_STYLES = {True: "green", False: "red", None: "yellow"}


@dataclass(frozen=True)
class PartReport:
    """A part, its findings, and the settings behind them."""

    part: Part
    findings: Findings
    settings: str


@dataclass(frozen=True)
class Reproduction:
    """The outcome of a reproduction.

    Args:
        paper: its name.
        scale: smoke, small or paper.
        command: the command that repeats it.
        sections: the parts, in order.
        failures: what went wrong, by directory.
        machines: where the runs were made, each processor once: results differ between kinds of processors.
    """

    paper: str
    scale: str
    command: str
    sections: tuple[PartReport, ...]
    failures: Mapping[Path, FedstrataError]
    machines: tuple[str, ...] = ()

    @property
    def checks(self) -> list[Check]:
        """All claims, in order."""
        return [check for section in self.sections for check in section.findings.checks]

    def __str__(self) -> str:
        held = sum(check.holds is True for check in self.checks)
        return f"{held} of {len(self.checks)} claims hold at scale {self.scale}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            options = options.update(max_width=1000)
        for section in self.sections:
            yield Text(f"\n{section.part.name}: {section.part.about}", style="bold")
            for table in section.findings.tables:
                yield from console.render(_rich_table(table), options)
            for line in (section.settings, *section.findings.notes):
                yield Text(line, style="dim")
            for check in section.findings.checks:
                yield Text(str(check), style=_STYLES[check.holds])
        yield Text(f"\n{self}", style="bold")

    def markdown(self) -> str:
        """The whole report."""
        lines = [
            f"# {self.paper} at scale {self.scale}",
            "",
            "```console",
            f"$ {self.command}",
            "```",
            "",
            f"{self}. Made with {'; '.join(self.machines)}.",
            "",
        ]
        for section in self.sections:
            lines += [f"## {section.part.name}: {section.part.about}", ""]
            for table in section.findings.tables:
                lines += [f"{table.title}:", "", *_markdown_lines(table), ""]
            lines += [f"![{name}]({name})\n" for name in section.findings.pictures]
            lines += [*(f"{line}  " for line in (section.settings, *section.findings.notes)), ""]
            lines += [*_markdown_lines(_claims_table(section.findings.checks)), ""]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in full precision."""
        return {
            "paper": self.paper,
            "scale": self.scale,
            "command": self.command,
            "machines": list(self.machines),
            "parts": [
                {
                    "name": section.part.name,
                    "settings": section.settings,
                    "notes": list(section.findings.notes),
                    "tables": [asdict(table) for table in section.findings.tables],
                    "claims": [{**asdict(check), "verdict": check.verdict} for check in section.findings.checks],
                    "data": section.findings.data,
                }
                for section in self.sections
            ],
            "failed": {path.name: str(error) for path, error in self.failures.items()},
        }

    def write(self, out: Path) -> None:
        """Write report.md, report.json and the pictures."""
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            for name, draw in section.findings.pictures.items():
                draw(out / name)
        write_atomic(out / "report.md", self.markdown())
        write_atomic(out / "report.json", json.dumps(self.as_dict()) + "\n")


def _claims_table(checks: Sequence[Check]) -> FindingsTable:
    rows = tuple((check.name, check.verdict, check.figures, check.paper) for check in checks)
    return FindingsTable("Claims", ("claim", "verdict", "figures", "paper"), rows, left=4)


def _rich_table(table: FindingsTable) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", expand=False)
    for at, name in enumerate(table.columns):
        shown.add_column(name, justify="left" if at < table.left else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _markdown_lines(table: FindingsTable) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (table.columns, *table.rows)]
    rule = ["---" if at < table.left else "---:" for at in range(len(table.columns))]
    return [f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:])]
