"""A reproduction's findings in a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError
from fedstrata.reproduce.claims import Check
from fedstrata.reproduce.parts import Findings, FindingsTable, Part
from fedstrata.reproduce.verdicts import CONFIDENCE, EVIDENCE_SEEDS
from fedstrata.runs.files import disk_errors, write_atomic

_STYLES = {True: "green", False: "red", None: "yellow"}
_PLURAL = {"holds": "hold", "does not hold": "do not hold", "not decided": "are not decided"}
RULE = (
    f"a claim holds if the {100 * CONFIDENCE:g} % interval of its figure over the seeds (Student's t, differences "
    "paired by seed) is on its side of the threshold, does not hold if it is on the other, else it is not decided"
)


@dataclass(frozen=True)
class PartReport:
    """A part, its findings, and the settings behind them.

    Args:
        part: what was made.
        findings: its tables and claims.
        settings: of its runs, in one line.
        machines: where its runs were made, each machine once: results differ between kinds of processors.
        missing: how many of its runs are not there.
        rates: learning rates that were tried and chosen, if any were.
    """

    part: Part
    findings: Findings
    settings: str
    machines: tuple[str, ...] = ()
    missing: int = 0
    rates: Mapping[str, Any] = field(default_factory=dict)

    @property
    def made_on(self) -> str:
        """Where the tables' runs were made."""
        return f"made on {'; '.join(self.machines)}" if self.machines else ""

    def lines(self) -> list[str]:
        """What stands below the tables."""
        lacking = f"partial: {plural(self.missing, 'run')} missing" if self.missing else ""
        return [line for line in (lacking, self.settings, self.made_on, *self.findings.notes) if line]


@dataclass(frozen=True)
class Reproduction:
    """The outcome of a reproduction.

    Args:
        paper: its name.
        scale: smoke, small, evidence or paper.
        command: the command that repeats it.
        sections: the parts, in order.
        failures: what went wrong, by directory.
        machine: where the report was made.
        sets: settings that were changed, with their values as they were given.
    """

    paper: str
    scale: str
    command: str
    sections: tuple[PartReport, ...]
    failures: Mapping[Path, FedstrataError]
    machine: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_partial(self) -> bool:
        """True if runs are missing."""
        return any(section.missing for section in self.sections)

    @property
    def checks(self) -> list[Check]:
        """All claims, in order."""
        return [check for section in self.sections for check in section.findings.checks]

    def __str__(self) -> str:
        counts = Counter(str(check.verdict) for check in self.checks)
        verdicts = ", ".join(f"{counts[verdict]} {words}" for verdict, words in _PLURAL.items())
        beginning = "partial report: " if self.is_partial else ""
        return f"{beginning}of {plural(len(self.checks), 'claim')} {verdicts} at scale {self.scale}"

    def remarks(self) -> list[str]:
        """What a reader must know of all verdicts."""
        found = [RULE]
        if self.scale == "smoke":
            found.append("the scale smoke shows that everything works; it proves nothing about the paper")
        few = [s.part.name for s in self.sections if len(s.part.seeds) < EVIDENCE_SEEDS]
        if self.scale == "evidence" and few:
            found.append(f"fewer than {EVIDENCE_SEEDS} seeds, which is too few to rely on, in {', '.join(few)}")
        if self.sets:
            changed = ", ".join(f"{name} {value}" for name, value in self.sets.items())
            found.append(f"settings that are not the scale's: {changed}")
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            options = options.update(max_width=1000)
        for section in self.sections:
            yield Text(f"\n{section.part.name}: {section.part.about}", style="bold")
            for table in section.findings.tables:
                yield from console.render(_rich_table(table), options)
            for line in section.lines():
                yield Text(line, style="dim")
            for check in section.findings.checks:
                yield Text(str(check), style=_STYLES[check.holds])
        yield Text(f"\n{self}", style="bold")
        for line in self.remarks():
            yield Text(line, style="dim")

    def markdown(self) -> str:
        """The whole report."""
        lines = [
            f"# {self.paper} at scale {self.scale}",
            "",
            "```console",
            f"$ {self.command}",
            "```",
            "",
            f"{self}. Report made on {self.machine}.",
            "",
            *(f"{line}  " for line in self.remarks()),
            "",
        ]
        for section in self.sections:
            lines += [f"## {section.part.name}: {section.part.about}", ""]
            for table in section.findings.tables:
                lines += [f"{table.title}:", "", *_markdown_lines(table), ""]
                lines += [f"({section.made_on})", ""] if section.made_on else []
            lines += [f"![{name}]({name})\n" for name in section.findings.pictures]
            lines += [*(f"{line}  " for line in section.lines()), ""]
            lines += [*_markdown_lines(_claims_table(section.findings.checks)), ""]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in full precision."""
        return {
            "paper": self.paper,
            "scale": self.scale,
            "command": self.command,
            "machine": self.machine,
            "partial": self.is_partial,
            "sets": dict(self.sets),
            "confidence": CONFIDENCE,
            "parts": [_part_as_dict(section) for section in self.sections],
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


def _part_as_dict(section: PartReport) -> dict[str, Any]:
    return {
        "name": section.part.name,
        "seeds": list(section.part.seeds),
        "missing": section.missing,
        "machines": list(section.machines),
        "settings": section.settings,
        "rates": dict(section.rates),
        "notes": list(section.findings.notes),
        "tables": [asdict(table) for table in section.findings.tables],
        "claims": [claim_as_dict(check) for check in section.findings.checks],
        "data": section.findings.data,
    }


def claim_as_dict(check: Check) -> dict[str, Any]:
    """A claim with all that its verdict is based on: `judge(Rule(**rule), values)` gives it again."""
    return {**asdict(check), "verdict": str(check.verdict), **asdict(check.verdict)}


def _claims_table(checks: Sequence[Check]) -> FindingsTable:
    rows = tuple((check.name, str(check.verdict), check.told, check.paper) for check in checks)
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
