"""What a page consists of: sections of figures and tables, those without data left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstrata.diagnosis import diagnose
from fedstrata.diagnosis.findings import Diagnosis, Finding, Remedy
from fedstrata.diagnosis.thresholds import HIGH
from fedstrata.report import client_figures, evaluation_figures, feature_figures, figures, stratum_figures, tables
from fedstrata.report.figures import Control, Figure
from fedstrata.report.formatting import escape
from fedstrata.report.run_groups import RunGroup
from fedstrata.runs.reader import SavedRun


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: for links to it.
        heading: what it is about.
        about: how to read it, in a sentence or two.
        figures: in order.
        body: what stands above the figures, as HTML.
        wide: False if two figures stand side by side.
    """

    name: str
    heading: str
    about: str
    figures: tuple[Figure, ...] = ()
    body: str = ""
    wide: bool = False

    @property
    def controls(self) -> list[Control]:
        """Those of its figures, each once."""
        return list({c.name: c for figure in self.figures for c in figure.by}.values())

    def html(self) -> str:
        """The section, its figures yet to be drawn."""
        controls = " ".join(control.name for control in self.controls)
        drawn = "".join(_figure(figure) for figure in self.figures)
        shape = "figures" if self.wide or len(self.figures) == 1 else f"figures pair {self.name}"
        return (
            f'<section id="{self.name}" aria-labelledby="h-{self.name}">'
            + f'<div class="head"><h2 id="h-{self.name}">{escape(self.heading)}</h2>'
            + (f'<p class="about">{escape(self.about)}</p>' if self.about else "")
            + (f'<div class="controls" data-controls="{controls}"></div>' if controls else "")
            + "</div>"
            + (f'<div data-part="{self.name}">{self.body}</div>' if self.body else "")
            + (f'<div class="{shape}">{drawn}</div>' if drawn else "")
            + "</section>"
        )


def _figure(figure: Figure) -> str:
    height = figure.layout.get("height", HEIGHT)
    return (
        f'<figure data-figure="{figure.name}"><figcaption><span>{escape(figure.title)}</span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(figure.title)}. {escape(figure.about)}" '
        f'style="height:{height}px"></div>'
        f'<p class="caption">{escape(figure.about)}</p>'
        '<details class="data"><summary>Data as a table</summary></details></figure>'
    )


HEIGHT = 350
"""The height of a figure that does not set its own."""
_SPACES = str.maketrans("-_", "  ")
FEW = 3
"""Remedies of a finding that are shown without unfolding."""

_FIGURES: tuple[tuple[str, str, str, bool, tuple[Callable[[Sequence[RunGroup]], list[Figure]], ...]], ...] = (
    (
        "curves",
        "How good the model is",
        "Lines are means over seeds; shades are their ranges.",
        False,
        (figures.metrics, figures.loss),
    ),
    (
        "efficiency",
        "What it costs",
        "The same against what was sent and what was computed until then.",
        False,
        (figures.against_costs,),
    ),
    (
        "architectures",
        "By architecture",
        "Clients have models of different size; each part of the global model is evaluated.",
        True,
        (figures.architectures,),
    ),
    (
        "answers",
        "What the final model says",
        "On the test set, after the last round; of one seed of each method.",
        False,
        (
            evaluation_figures.confusion,
            evaluation_figures.class_scores,
            evaluation_figures.calibration,
            evaluation_figures.predictions,
            evaluation_figures.masks,
        ),
    ),
    (
        "clients",
        "Every client for itself",
        "Each client is judged by its own test examples, which nobody trains on.",
        False,
        (client_figures.clients, client_figures.over_rounds),
    ),
    (
        "layers",
        "Layer by layer",
        "How far clients pull each stratum apart. The slider moves through the rounds.",
        False,
        (stratum_figures.divergence,),
    ),
    (
        "gradients",
        "Gradients around averaging",
        "A jump at the first step after averaging means that averaged layers do not fit each other.",
        False,
        (stratum_figures.gradnorm,),
    ),
    (
        "similarity",
        "How alike clients' features are",
        "Linear CKA between clients' local models on one shared batch: 1 is the same up to rotation and scale.",
        True,
        (feature_figures.cka,),
    ),
    (
        "forgetting",
        "Forgetting",
        "What local training does to classes, above all to those that a client lacks.",
        False,
        (feature_figures.calibration,),
    ),
    (
        "drift",
        "Drift of neurons",
        "How far neurons that answer to a class move in local training.",
        True,
        (feature_figures.drift,),
    ),
    (
        "statistics",
        "Running statistics",
        "Whether normalisation by averaged statistics costs accuracy.",
        False,
        (stratum_figures.statistics,),
    ),
    (
        "crossing",
        "Gradients across layers",
        "InCo's coefficients of every layer.",
        True,
        (stratum_figures.crossing,),
    ),
    (
        "embedding",
        "A map of features",
        "t-SNE; distances between far points mean nothing.",
        True,
        (feature_figures.embedding,),
    ),
    (
        "partition",
        "Data of the clients",
        "",
        True,
        (figures.partition,),
    ),
)


def figure_sections(groups: Sequence[RunGroup]) -> list[Section]:
    """The sections of figures that have something to show."""
    return [
        Section(name, heading, about + _seed_remark(name, groups), tuple(found), wide=wide)
        for name, heading, about, wide, makers in _FIGURES
        if (found := [figure for make in makers for figure in make(groups)])
    ]


_OF_ONE_RUN = {
    "gradients": ("Step by step", "gradnorm"),
    "similarity": ("Client by client", "cka"),
    "forgetting": ("Class by class", "calibration"),
    "embedding": ("The map", "embedding"),
}
"""Sections with a picture that is of one run, since a mean over seeds has no meaning there, and its probe."""


def _seed_remark(name: str, groups: Sequence[RunGroup]) -> str:
    """Which seed such a picture is of, if there are several."""
    if name not in _OF_ONE_RUN or all(len(group.runs) == 1 for group in groups):
        return ""
    picture, probe = _OF_ONE_RUN[name]
    seeds = dict.fromkeys(str(group.run_with(probe).config.get("seed", 0)) for group in groups)
    return f" {picture} is of seed {', '.join(seeds)} alone."


def sections(groups: Sequence[RunGroup]) -> list[Section]:
    """All sections that have something to show."""
    first = Section("results", "Results", "", body=_results(groups))
    diagnosis = _diagnosis(groups)
    several = any(len(group.runs) > 1 for group in groups)
    about = "Of one seed of each method, the one that got furthest." if several else ""
    findings = [Section("diagnosis", "Diagnosis", about, body=diagnosis)] if diagnosis else []
    spent = [Section("costs", "Costs", "", body=_costs(groups))] if any(group.rounds for group in groups) else []
    return [first, *findings, *figure_sections(groups), *spent]


def _results(groups: Sequence[RunGroup]) -> str:
    return tables.results(groups).html()


def _costs(groups: Sequence[RunGroup]) -> str:
    of_probes = tables.probe_seconds(groups)
    return tables.costs(groups).html() + (of_probes.html() if of_probes else "")


def _diagnosis(groups: Sequence[RunGroup]) -> str:
    """The diagnosis of each group's shown run; folded if there are several groups."""
    diagnosed = [
        (group, found) for group in groups if group.shown_run.records and (found := _diagnosis_of(group.shown_run))
    ]
    if len(groups) == 1:
        return "".join(f"<p>{escape(verdict)}</p>{findings}" for _, (verdict, findings) in diagnosed)
    return "".join(
        f'<details class="diagnosis"><summary>{tables.swatch(group.index)}<strong>{escape(group.name)}</strong> '
        f"{escape(verdict)}</summary>{findings}</details>"
        for group, (verdict, findings) in diagnosed
    )


def _diagnosis_of(run: SavedRun) -> tuple[str, str] | None:
    """The verdict and the findings, as HTML; None if there was nothing to look at."""
    try:
        found = diagnose(run)
        return (found.verdict, _findings(found)) if found.looked or found.findings else None
    except Exception as error:  # everything else in the report is as good as before
        return f"The diagnosis failed: {type(error).__name__}: {error}", ""


def _findings(diagnosis: Diagnosis) -> str:
    items = "".join(map(_finding, diagnosis.findings))
    notes = "".join(f'<p class="about">{escape(note)}</p>' for note in diagnosis.notes)
    missing = ", ".join(name.replace("-", " ") for name in diagnosis.unmeasured)
    hint = f'<p class="about">Not measured: {escape(missing)}. A run with --probe all measures them.</p>'
    return (f'<ol class="findings">{items}</ol>' if items else "") + notes + (hint if missing else "")


def _finding(finding: Finding) -> str:
    remedies = list(map(_remedy, finding.remedies))
    more = f"<details><summary>{len(remedies) - FEW} more</summary><ul>{''.join(remedies[FEW:])}</ul></details>"
    kind = "serious" if finding.severity >= HIGH else "slight"
    causes = ", ".join(cause.replace("-", " ") for cause in finding.explained_by)
    figures = ", ".join(f"{name.translate(_SPACES)} {value:.3g}" for name, value in finding.figure.items())
    return (
        f'<li class="finding {kind}"><p><strong>{escape(finding.name.replace("-", " ").capitalize())}</strong> '
        f'<span class="severity">{kind}, {finding.severity:.2f}</span></p><p>{escape(finding.sentence)}</p>'
        + (f'<p class="measured">{escape(figures)}</p>' if figures else "")
        + (f"<p>Explained by {escape(causes)}.</p>" if causes else "")
        + (f"<p>What to try:</p><ul>{''.join(remedies[:FEW])}</ul>" if remedies else "")
        + (more if len(remedies) > FEW else "")
        + "</li>"
    )


def _remedy(remedy: Remedy) -> str:
    code = f"<code>{escape(remedy.options)}</code> " if remedy.options else ""
    return f"<li>{code}{escape(remedy.why)} <cite>{escape(remedy.paper)}</cite></li>"
