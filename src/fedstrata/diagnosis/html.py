"""A diagnosis as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.core.markup import details, escape, heading, page_part, paragraph, table

if TYPE_CHECKING:
    from fedstrata.diagnosis.findings import Diagnosis, Finding, Remedy


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The verdict, the findings with their remedies, and what was looked at."""
    looked = [(name.replace("-", " "), f"{value:.3g}") for name, value in diagnosis.looked.items()]
    return page_part(
        heading("Diagnosis", f"of {diagnosis.run} ({diagnosis.method})"),
        f'<div style="margin:.3em 0"><strong>{escape(diagnosis.verdict)}</strong></div>',
        "".join(_finding_html(number, finding) for number, finding in enumerate(diagnosis.findings, start=1)),
        details("What was looked at", table(("figure", "value"), looked)) if looked else "",
        "".join(paragraph(note) for note in diagnosis.all_notes),
    )


def _finding_html(number: int, finding: Finding) -> str:
    """A finding; those that others explain are closed."""
    causes = ", ".join(cause.replace("-", " ") for cause in finding.explained_by)
    name = finding.name.replace("-", " ").capitalize()
    title = f"{number}. {name}, severity {finding.severity:.2f}" + (f", explained by {causes}" if causes else "")
    remedies = "".join(f"<li>{_remedy_html(remedy)}</li>" for remedy in finding.remedies)
    inside = paragraph(finding.sentence) + (f'<ul style="margin:.2em 0">{remedies}</ul>' if remedies else "")
    return details(title, inside) if causes else heading(title) + inside


def _remedy_html(remedy: Remedy) -> str:
    """What to try, why, and the paper."""
    options = f"<code>{escape(remedy.options)}</code>: " if remedy.options else ""
    paper = f" [{escape(remedy.paper)}]" if remedy.paper else ""
    return f"{options}{escape(remedy.why)}{paper}"
