"""The diagnosis on a page: a card for each finding, with the figure that shows it beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.diagnosis.findings import Diagnosis, Finding, Remedy
from fedstrata.diagnosis.thresholds import HIGH
from fedstrata.report import tables
from fedstrata.report.figures import Figure
from fedstrata.report.formatting import escape
from fedstrata.report.run_groups import RunGroup, primary_of

FEW = 3
"""Remedies of a finding that are shown without unfolding."""
BESIDE = 240
"""The height of a figure beside a finding."""
METRIC = "the primary metric"
"""Stands for the figure of the metric that runs are judged by, which is named after it."""
_SPACES = str.maketrans("-_", "  ")
_CLIENTS = ("client-curves", "outliers")
_LEARNING = ("loss", METRIC)

SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("broken-inputs", "refused-updates", "hostile-updates", "broken-data"), _CLIENTS),
    "broken-labels": (*_CLIENTS, "partition"),
    **dict.fromkeys(("diverged", "exploded-loss", "rate-too-large", "rate-too-small", "probabilities"), _LEARNING),
    **dict.fromkeys(("no-learning", "unfinished", "too-early", "participation-noise"), (METRIC, "loss")),
    **dict.fromkeys(("label-skew", "class-imbalance", "few-examples"), ("partition",)),
    "running-statistics": ("statistics", "statistics-spread"),
    "layer-mismatch": ("gradnorm-spike", "gradnorm"),
    **dict.fromkeys(("opposed-updates", "accumulation", "diverging-strata"), ("divergence", "divergence-profile")),
    "inexact-adapters": ("divergence", "divergence-profile"),
    "unlike-features": ("cka-depth", "cka"),
    "forgetting": ("forgetting", "calibration"),
    "neuron-drift": ("drift",),
}
"""Finding → the figures that show it, the most telling first."""


def diagnosis_html(groups: Sequence[RunGroup], figures: Mapping[str, Figure]) -> str:
    """The diagnosis of each group's shown run, as HTML.

    Args:
        groups: if there are several, each one's findings are folded, and have links in place of figures.
        figures: those of the page, by name.
    """
    titles = {name: figure.title for name, figure in figures.items()}
    diagnosed = [(group, *told) for group in groups if group.shown_run.records and (told := _told(group))]
    if len(groups) == 1:
        return "".join(
            f"<p>{escape(verdict)}</p>{_findings(group, found, titles, set(titles))}"
            for group, verdict, found in diagnosed
        )
    return "".join(
        f'<details class="diagnosis"><summary>{tables.swatch(group.index)}<strong>{escape(group.name)}</strong> '
        f"{escape(verdict)}</summary>{_findings(group, found, titles, set())}</details>"
        for group, verdict, found in diagnosed
    )


def _told(group: RunGroup) -> tuple[str, Diagnosis | None] | None:
    """The verdict, and the diagnosis if it did not fail; None if there was nothing to look at."""
    found = group.diagnosis
    if isinstance(found, Exception):
        return f"The diagnosis failed: {type(found).__name__}: {found}", None
    return (found.verdict, found) if found.looked or found.findings else None


def _findings(group: RunGroup, diagnosis: Diagnosis | None, titles: Mapping[str, str], free: set[str]) -> str:
    """The cards; `free` are figures that may stand beside one, each once."""
    if diagnosis is None:
        return ""
    items = "".join(_finding(finding, _figures_of(finding, group, titles), free) for finding in diagnosis.findings)
    notes = "".join(f'<p class="about">{escape(note)}</p>' for note in diagnosis.notes)
    missing = ", ".join(name.replace("-", " ") for name in diagnosis.unmeasured)
    hint = f'<p class="about">Not measured: {escape(missing)}. A run with --probe all measures them.</p>'
    return (f'<ol class="findings">{items}</ol>' if items else "") + notes + (hint if missing else "")


def _figures_of(finding: Finding, group: RunGroup, titles: Mapping[str, str]) -> dict[str, str]:
    """The page's figures that show a finding: name → title."""
    names = (primary_of([group]) if name == METRIC else name for name in SHOWN_BY.get(finding.name, ()))
    return {name: titles[name] for name in names if name in titles}


def _finding(finding: Finding, shown: Mapping[str, str], free: set[str]) -> str:
    first = next(iter(shown), None)
    beside = "" if first is None or first not in free else _beside(first, shown[first])
    free -= {first}
    rest = [f'<a href="#figure-{name}">{escape(title)}</a>' for name, title in shown.items()]
    kind = "serious" if finding.severity >= HIGH else "slight"
    causes = ", ".join(cause.replace("-", " ") for cause in finding.explained_by)
    figures = ", ".join(f"{name.translate(_SPACES)} {value:.3g}" for name, value in finding.figure.items())
    return (
        f'<li class="finding {kind}{" shown" if beside else ""}"><div>'
        f"<p><strong>{escape(finding.name.replace('-', ' ').capitalize())}</strong> "
        f'<span class="severity">{kind}, {finding.severity:.2f}</span></p><p>{escape(finding.sentence)}</p>'
        + (f'<p class="measured">{escape(figures)}</p>' if figures else "")
        + (f"<p>Explained by {escape(causes)}.</p>" if causes else "")
        + _remedies(finding.remedies)
        + (f'<p class="see">Shown by: {", ".join(rest)}</p>' if rest else "")
        + f"</div>{beside}</li>"
    )


def _beside(name: str, title: str) -> str:
    """A small copy of a figure; the controls of the figure itself move both."""
    return (
        f'<figure class="beside" data-figure="{name}"><figcaption><span>{escape(title)}</span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)}, as further down" data-most="{BESIDE}" '
        f'style="height:{BESIDE}px"></div></figure>'
    )


def _remedies(remedies: Sequence[Remedy]) -> str:
    items = list(map(_remedy, remedies))
    more = f"<details><summary>{len(items) - FEW} more</summary><ul>{''.join(items[FEW:])}</ul></details>"
    few = f"<p>What to try:</p><ul>{''.join(items[:FEW])}</ul>" if items else ""
    return few + (more if len(items) > FEW else "")


def _remedy(remedy: Remedy) -> str:
    code = f"<code>{escape(remedy.options)}</code> " if remedy.options else ""
    return f"<li>{code}{escape(remedy.why)} <cite>{escape(remedy.paper)}</cite></li>"
