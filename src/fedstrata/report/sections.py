"""What a page consists of: sections of figures and tables, those without data left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedstrata.core.text import metric_title
from fedstrata.report import (
    client_figures,
    evaluation_figures,
    feature_figures,
    figures,
    outlier_figures,
    ranking_figures,
    stratum_figures,
    tables,
    training_figures,
    tried_figures,
)
from fedstrata.report.client_table import client_table
from fedstrata.report.device_table import device_table
from fedstrata.report.diagnosis_cards import diagnosis_html
from fedstrata.report.figures import HEIGHT, Control, Figure
from fedstrata.report.formatting import escape
from fedstrata.report.opening import IN_TILES, RANKED, opening_html, setup_html
from fedstrata.report.run_groups import RunGroup, primary_of

Maker = Callable[[Sequence[RunGroup]], list[Figure]]
OPENING = ("layers", "training")
"""What stands before the diagnosis: what a layer-wise method is about."""


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
        boxes = self._control_boxes()
        choice = f'<div class="controls" data-controls="{controls}">{boxes}</div>' if controls else ""
        shape = "figures" if self.wide or len(self.figures) == 1 else f"figures pair {self.name}"
        return (
            f'<section id="{self.name}" aria-labelledby="h-{self.name}">'
            + f'<div class="head"><h2 id="h-{self.name}">{escape(self.heading)}</h2>'
            + (f'<p class="about">{escape(self.about)}</p>' if self.about else "")
            + (choice if not self.body else "")
            + "</div>"
            + (f'<div data-part="{self.name}">{self.body}</div>{choice}' if self.body else "")
            + (f'<div class="{shape}">{drawn}</div>' if drawn else "")
            + "</section>"
        )

    def _control_boxes(self) -> str:
        """As report.js makes them, so that nothing moves when it does."""
        return "".join(_control_box(control) for control in self.controls if len(control.values) > 1)


def _control_box(control: Control) -> str:
    label = f"<span>{escape(control.label)}</span>"
    if control.slides:
        shown = escape(control.values[control.start])
        return f'<label class="slide">{label}<input type="range" disabled><output>{shown}</output></label>'
    options = "".join(f"<option>{escape(value)}</option>" for value in control.values)
    return f"<label>{label}<select disabled>{options}</select></label>"


def _figure(figure: Figure) -> str:
    height = figure.layout.get("height", HEIGHT)
    return (
        f'<figure id="figure-{figure.name}" data-figure="{figure.name}">'
        f"<figcaption><span>{escape(figure.title)}</span></figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(figure.title)}. {escape(figure.about)}" '
        f'style="height:{height}px"></div>'
        f'<p class="caption">{escape(figure.about)}</p>'
        '<details class="data"><summary>Data as a table</summary></details></figure>'
    )


def first_of(make: Maker) -> Maker:
    """What makes the first figure alone: it is shown apart from the others."""
    return lambda groups: make(groups)[:1]


def rest_of(make: Maker) -> Maker:
    """What makes all figures but the first."""
    return lambda groups: make(groups)[1:]


_FIGURES: tuple[tuple[str, str, str, bool, tuple[Maker, ...]], ...] = (
    (
        "results",
        "Results",
        "",
        False,
        (first_of(figures.metrics), first_of(figures.against_costs)),
    ),
    (
        "layers",
        "Layer by layer",
        "How far clients pull each stratum apart. The slider moves through the rounds.",
        False,
        (stratum_figures.divergence,),
    ),
    (
        "training",
        "Who trained what",
        "Which strata were trained in which round and by which clients.",
        False,
        (training_figures.who_trained_what,),
    ),
    (
        "clients",
        "Clients",
        "Each client is judged by its own test examples, which nobody trains on.",
        False,
        (client_figures.clients, client_figures.over_rounds),
    ),
    (
        "one-by-one",
        "Clients one by one",
        "Whose updates are unlike everybody else's, and in which strata. The slider moves through the rounds.",
        False,
        (outlier_figures.clients_one_by_one,),
    ),
    (
        "partition",
        "Data of the clients",
        "",
        True,
        (figures.partition,),
    ),
    (
        "curves",
        "Loss and other costs",
        "",
        False,
        (figures.loss, rest_of(figures.metrics), rest_of(figures.against_costs)),
    ),
    (
        "ranking",
        "Who is better, and at what cost",
        "",
        False,
        (ranking_figures.ranks, ranking_figures.pareto),
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
)
"""Name, heading, how to read it, whether figures are wide, and what makes them: what matters first."""


def figure_sections(groups: Sequence[RunGroup]) -> list[Section]:
    """The sections of figures that have something to show."""
    return _tried(groups) + [
        Section(name, heading, about + _seed_remark(name, groups), tuple(found), wide=wide)
        for name, heading, about, wide, makers in _FIGURES
        if (found := [figure for make in makers for figure in make(groups)])
    ]


def _tried(groups: Sequence[RunGroup]) -> list[Section]:
    """What remedies brought, if any were tried; a note if that cannot be read."""
    notes = [f'<p class="about">{escape(note)}</p>' for note in tried_figures.tried_notes(groups)]
    held = [table.html() for table in tried_figures.tried_tables(groups)]
    about = "The diagnosis's remedies, each run for real beside the unchanged run, for a few rounds and the same seeds."
    drawn = tuple(tried_figures.tried(groups))
    body = "".join([*notes, *held])
    return [Section("tried", "What was tried", about if held else "", drawn, body)] if body else []


_OF_ONE_RUN = {
    "one-by-one": ("All of it", "visits"),
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
    """All sections that have something to show: what matters first."""
    drawn = {section.name: section for section in figure_sections(groups)}
    diagnosis = diagnosis_html(groups, {figure.name: figure for one in drawn.values() for figure in one.figures})
    several = any(len(group.runs) > 1 for group in groups)
    about = "Of one seed of each method, the one that got furthest." if several else ""
    first = replace(drawn.pop("results", Section("results", "Results", "")), body=opening_html(groups))
    if several:
        remark = " Lines are means over seeds; shades are their ranges."
        first = replace(first, figures=tuple(replace(one, about=one.about + remark) for one in first.figures))
    found = [
        first,
        *(drawn.pop(name) for name in OPENING if name in drawn),
        Section("diagnosis", "Diagnosis", about, body=diagnosis),
        *(drawn.pop(name) for name in ("tried",) if name in drawn),
        _clients(drawn.pop("clients", None), groups),
        *drawn.values(),
        Section("numbers", "All numbers", "", body=_numbers(groups)),
        Section("setup", "How it was run", "", body=setup_html(groups)),
    ]
    return [section for section in found if section.body or section.figures]


def _clients(drawn: Section | None, groups: Sequence[RunGroup]) -> Section:
    """Scores over clients, and a row for each of them, above the figures."""
    tables_of = (tables.over_clients(groups), client_table(groups))
    body = "".join(table.html() for table in tables_of if table is not None)
    return replace(drawn or Section("clients", "Clients", ""), body=body)


def _numbers(groups: Sequence[RunGroup]) -> str:
    """Results and costs, but for what the page begins with."""
    told = RANKED if len(groups) > 1 else (*RANKED, *IN_TILES)
    told_first = tables.kind_titles(groups, metric_title(primary_of(groups)))
    results = tables.results(groups).without(*told_first, *tables.OVER_CLIENTS, *told)
    costs = tables.costs(groups).without(*told) if any(group.rounds for group in groups) else None
    more = (results, costs, device_table(groups), tables.probe_seconds(groups))
    return "".join(table.html() for table in more if table is not None)
