"""Deeper models: what a federation loses against centralised training by depth, and what the paper's guidelines change.

"Unlocking the Potential of Federated Learning for Deeper Models" (anonymous, under review): Fig. 1 and Tables 1 to 6.
CL and FL are the accuracies of centralised and of federated training with the same steps in all, Gap = CL − FL, and
I_div = (CL₁ − FL₁) − (CL₂ − FL₂) is what a change of the model or of the data does to FL beyond what it does to CL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.core.spec import text_of
from fedstrata.reproduce import deeper_divergence
from fedstrata.reproduce.claims import GAINS, Check, above, cell, differences, fewest
from fedstrata.reproduce.deeper_divergence import MILLI, SettingFigures, figures_of_setting, rounds_to_share
from fedstrata.reproduce.parts import DATASETS, Findings, FindingsTable, Grid, OwnWork, Part, unfinished_note

CL, FL = "CL", "FL"


@dataclass(frozen=True)
class DeeperFigures:
    """The paper's figures in a row; if a table lacks FL's accuracy, it is CL − Gap."""

    cl: float | None = None
    fl: float | None = None
    div: float | None = None

    @property
    def gap(self) -> float | None:
        """CL − FL."""
        return None if self.cl is None or self.fl is None else self.cl - self.fl


WIDTH = {
    "Tiny-ImageNet": (
        DeeperFigures(0.509, 0.458, 0.046),
        DeeperFigures(0.526, 0.484, 0.024),
        DeeperFigures(0.546, 0.504, 0.011),
    ),
    "CIFAR-100": (
        DeeperFigures(0.587, 0.527, 0.052),
        DeeperFigures(0.623, 0.596, 0.032),
        DeeperFigures(0.634, 0.613, 0.014),
    ),
}
BASE = {
    "Tiny-ImageNet": DeeperFigures(0.340, 0.236, 0.012),
    "CIFAR-100": DeeperFigures(0.510, 0.413, 0.014),
    "CIFAR-10": DeeperFigures(0.728, 0.618, 0.014),
}
"""ResNet101 with the large stem, 64×64, random resized crops: the first column of Tables 2, 4 and 5."""
STEM = {
    "Tiny-ImageNet": (BASE["Tiny-ImageNet"], DeeperFigures(0.472, 0.457, 0.008), DeeperFigures(0.486, 0.473, 0.008)),
    "CIFAR-100": (BASE["CIFAR-100"], DeeperFigures(0.594, 0.574, 0.011), DeeperFigures(0.602, 0.543, 0.012)),
    "CIFAR-10": (BASE["CIFAR-10"], DeeperFigures(0.775, 0.701, 0.012), DeeperFigures(0.793, 0.724, 0.010)),
}
RESOLUTION = {
    "Tiny-ImageNet": (BASE["Tiny-ImageNet"], DeeperFigures(0.495, 0.460, 0.008), DeeperFigures(0.540, 0.490, 0.006)),
    "CIFAR-100": (BASE["CIFAR-100"], DeeperFigures(0.604, 0.501, 0.012), DeeperFigures(0.645, 0.603, 0.010)),
    "CIFAR-10": (BASE["CIFAR-10"], DeeperFigures(0.785, 0.697, 0.012), DeeperFigures(0.799, 0.754, 0.010)),
}
AUGMENTATION = {
    "Tiny-ImageNet": (
        DeeperFigures(),
        BASE["Tiny-ImageNet"],
        DeeperFigures(0.218, 0.147, 0.008),
        DeeperFigures(0.321, 0.252, 0.008),
    ),
    "CIFAR-100": (
        DeeperFigures(),
        BASE["CIFAR-100"],
        DeeperFigures(0.330, 0.235, 0.016),
        DeeperFigures(0.455, 0.350, 0.014),
    ),
}
TRANSFORMER = {
    "Tiny-ImageNet": (DeeperFigures(0.340, 0.236), DeeperFigures(0.389, 0.326)),
    "CIFAR-100": (DeeperFigures(0.572, 0.454), DeeperFigures(0.499, 0.433)),
    "CIFAR-10": (DeeperFigures(0.684, 0.572), DeeperFigures(0.663, 0.607)),
}
RESIDUAL = {
    "Tiny-ImageNet": (DeeperFigures(0.522, 0.454), DeeperFigures(0.509, 0.458)),
    "CIFAR-100": (DeeperFigures(0.569, 0.526), DeeperFigures(0.587, 0.527)),
}
CHANNELS = {"Tiny-ImageNet": (DeeperFigures(fl=0.458), DeeperFigures(fl=0.440), DeeperFigures(fl=0.354))}

REACHED = 0.9
"""The share of the lower one's best accuracy that two runs are timed to; the paper's targets are 87 and 95 % of it."""

# --- the scales ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeeperScale:
    """The settings of a reproduction.

    Args:
        run: fields that all runs of the tables have.
        datasets: name → arguments; parts that need other datasets of the paper's than these take the first.
        resolutions: pixels per side, from the lowest.
        resolution: of all other parts' images.
        depths: of the ResNets, from the shallowest.
        shape: arguments of the ResNets that are compared by depth, stem, resolution and augmentation.
        deep: depth of the ResNet that is compared by stem, resolution and augmentation, and measured round by round.
        slim: name and arguments of the ResNet that is compared by width, residual links and channels.
        transformers: label → model.
        seeds: all of them.
        networks: of Fig. 3: fields of the runs that train them, images per class, draws of the noise.
    """

    run: Mapping[str, Any]
    datasets: Mapping[str, Mapping[str, Any]]
    resolutions: tuple[int, ...]
    resolution: int
    depths: tuple[int, ...]
    shape: Mapping[str, Any]
    deep: int
    slim: tuple[str, Mapping[str, Any]]
    transformers: Mapping[str, str]
    networks: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)

    def data(self, name: str, resolution: int | None = None) -> str:
        """A dataset at a resolution; at the usual one if none is given."""
        return text_of(name, {**self.datasets[name], "resolution": resolution or self.resolution})

    def among(self, *names: str) -> list[str]:
        """Those of the paper's datasets that this scale has; else the first that it has."""
        return [name for name in names if name in self.datasets] or [next(iter(self.datasets))]

    def resnet(self, depth: int, **others: Any) -> str:
        """A ResNet of a depth, with these arguments instead of the scale's."""
        return text_of(f"resnet{depth}", {**self.shape, **others})

    def slim_resnet(self, **others: Any) -> str:
        """The slim ResNet, with these arguments instead of its own."""
        name, shape = self.slim
        return text_of(name, {**shape, **others})


SLIM = {"width": 8, "stem": "7x7", "maxpool": True}
TINY = {"width": 2, "stem": "7x7", "maxpool": True}

SCALES = {
    "smoke": DeeperScale(
        {
            "clients": 3,
            "rounds": 2,
            "steps": 2,
            "batch_size": 16,
            "lr": 0.05,
            "augment": "rrc",
            "engine": "serial",
            "workers": 1,
        },
        {"digits": {"examples": 240, "test_examples": 60}},
        resolutions=(8, 16),
        resolution=8,
        depths=(8, 10),
        shape=TINY,
        deep=10,
        slim=("resnet8", TINY),
        transformers={
            "ViT": "vit(patch=2, dim=8, depth=2, heads=2)",
            "Swin": "swin(patch=2, window=2, dim=6, depths=(1, 1), heads=(1, 2))",
        },
        networks={
            "run": {"dataset": "digits(examples=240, test_examples=60)", "rounds": 1, "engine": "serial", "workers": 1},
            "models": {"4-layer CNN": "cnn4(width=2)", "8-layer CNN": "cnn8(width=2)"},
            "images": 6,
            "draws": 8,
        },
        seeds=(0,),
    ),
    "small": DeeperScale(
        {
            "clients": 8,
            "rounds": 6,
            "epochs": 4,
            "batch_size": 32,
            "lr": 0.02,
            "optimizer": "sgd(momentum=0.9)",
            "augment": "rrc",
        },
        {"cifar-10": {"examples": 2000, "test_examples": 2000}},
        resolutions=(16, 32, 48),
        resolution=32,
        depths=(10, 18, 34),
        shape=SLIM,
        deep=18,
        slim=("resnet10", SLIM),
        transformers={
            "ViT": "vit(dim=32, heads=2, mlp_ratio=4.0)",
            "Swin": "swin(window=2, dim=12, heads=(2, 2, 4))",
        },
        networks={
            "run": {"dataset": "mnist(examples=4000, test_examples=1000)", "rounds": 2, "lr": 0.05},
            "models": {"4-layer CNN": "cnn4(width=16)", "8-layer CNN": "cnn8(width=16)"},
            "images": 100,
            "draws": 200,
        },
        seeds=(4, 5, 6),
    ),
    "paper": DeeperScale(
        {"clients": 30, "rounds": 60, "epochs": 8, "batch_size": 64, "lr": 0.02, "augment": "rrc", "device": "cuda"},
        {"tiny-imagenet": {"examples": 10000, "test_examples": 1000}, "cifar-100": {}, "cifar-10": {}},
        resolutions=(64, 128, 192),
        resolution=64,
        depths=(10, 18, 34, 50, 101),
        shape={"stem": "7x7", "maxpool": True},
        deep=101,
        slim=("resnet13", {"width": 32}),
        transformers={"ViT": "vit", "Swin": "swin"},
        networks={
            "run": {"dataset": "mnist", "rounds": 1, "lr": 0.05, "device": "cuda"},
            "models": {"4-layer CNN": "cnn4", "8-layer CNN": "cnn8"},
            "images": 1000,
            "draws": 1000,
        },
    ),
}


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    return [_accumulation(chosen), _rounds(chosen), *(_grid(chosen, *table) for table in _paper_tables(chosen).items())]


def _accumulation(scale: DeeperScale) -> OwnWork:
    given = scale.networks
    run = {**given["run"], "partition": "iid", "clients": 1, "model": next(iter(given["models"].values()))}
    return OwnWork(
        "accumulation",
        "how far apart gradients are in two CNNs, layer by layer, under noise and within a class",
        {**given, "run": run},
        scale.seeds,
        deeper_divergence.work,
        deeper_divergence.assess,
        draws=True,
    )


def _rounds(scale: DeeperScale) -> OwnWork:
    run = {**scale.run, "dataset": scale.data(scale.among("tiny-imagenet")[0]), "partition": "iid"}
    return OwnWork(
        "rounds",
        "the clients' divergence, layer by layer and round by round",
        {"run": {**run, "model": scale.resnet(scale.deep), "eval_every": run["rounds"]}},
        scale.seeds,
        deeper_divergence.measure_rounds,
        deeper_divergence.assess_rounds,
        draws=True,
    )


# --- the tables ------------------------------------------------------------------------------------------------------

FiguresByLabel = Mapping[str, SettingFigures]
"""The rows of a table, on one dataset, in order; I_div is against the first."""


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables.

    Args:
        axis: the field that is changed: model, augment or, for a resolution, dataset.
        rows: label → its value, or a resolution.
        datasets: names.
        claims: (this table, its figures on a dataset, the dataset's name) → the checks of what it claims.
        figures: dataset → the paper's figures, row by row.
        model: of all rows; None in a table of models.
    """

    axis: str
    rows: Mapping[str, Any]
    datasets: Sequence[str]
    claims: Callable[[PaperTable, FiguresByLabel, str], list[Check]]
    figures: Mapping[str, Sequence[DeeperFigures]] = field(default_factory=dict)
    model: str | None = None

    def places(self, scale: DeeperScale) -> dict[tuple[str, Any], tuple[str, str]]:
        """(dataset, value of the axis), as in a run's configuration → (the dataset's name, label), in order."""
        found = {}
        for name in self.datasets:
            for label, value in self.rows.items():
                sized = self.axis == "dataset"
                dataset = scale.data(name, value if sized else None)
                found[dataset, dataset if sized else value] = DATASETS[name], label
        return found

    def paper(self, measure: str, one: str, other: str, data: str) -> str:
        """The paper's figures in two rows."""
        at = [list(self.rows).index(label) for label in (one, other)]
        pairs = {name: [getattr(rows[i], measure) for i in at] for name, rows in self.figures.items()}
        return _paper_text({name: _pair_text(measure, *pair) for name, pair in pairs.items() if None not in pair}, data)


def _paper_text(texts: Mapping[str, str], data: str) -> str:
    """What the paper says of this dataset or, if nothing, of its own."""
    return texts.get(data) or "; ".join(f"{name}: {text}" for name, text in texts.items())


def _pair_text(measure: str, one: float, other: float) -> str:
    if measure == "div":
        return f"{1000 * one:.0f} against {1000 * other:.0f}"
    return f"{100 * one:.1f} against {100 * other:.1f} {'points' if measure == 'gap' else '%'}"


ABOUT = {
    "depth": "ResNets of different depth",
    "width": "wider models",
    "stem": "a smaller receptive field: a stem of 3×3 instead of 7×7, or no max-pool",
    "resolution": "images of more pixels",
    "augmentation": "random resized crops (RRC), colour jitter (CJ), and both",
    "transformer": "attention over the whole image, and in windows",
    "residual": "residual links",
    "channels": "channels that grow with depth, are as many in all layers, or shrink",
}


def _grid(scale: DeeperScale, name: str, table: PaperTable) -> Grid:
    places = table.places(scale)
    axes = {"dataset": list(dict.fromkeys(dataset for dataset, _ in places))}
    if table.axis != "dataset":
        axes[table.axis] = list(dict.fromkeys(value for _, value in places))
    fixed = {} if table.model is None else {"model": table.model}
    varied = {name: several if len(several) > 1 else several[0] for name, several in axes.items()}
    methods = [{"method": "centralised", "label": CL}, {"method": "fedavg", "label": FL}]
    values = {**scale.run, "partition": "iid", "method": methods, "seed": list(scale.seeds), **fixed, **varied}
    return Grid(name, ABOUT[name], values, lambda comparison: _assess(scale, table, comparison))


def _assess(scale: DeeperScale, table: PaperTable, comparison: Comparison) -> Findings:
    places, rows = table.places(scale), {}
    for row in comparison.rows:
        rows[row.run.config.dataset, getattr(row.run.config, table.axis), row.method] = row
    found: dict[str, dict[str, SettingFigures]] = {}
    for (dataset, value), (data, label) in places.items():
        found.setdefault(data, {})[label] = figures_of_setting(rows[dataset, value, CL], rows[dataset, value, FL])
    checks = tuple(check for data, cells in found.items() for check in table.claims(table, cells, data))
    layers = {data: {label: dict(cell.layers) for label, cell in cells.items()} for data, cells in found.items()}
    values = "; ".join(dict.fromkeys(f"{label}: {value}" for (_, value), (_, label) in places.items()))
    return Findings(
        (_table(found),),
        checks,
        (f"{table.axis} {values}", *NOTES, *unfinished_note(comparison)),
        data={"layers": layers},
    )


def _table(found: Mapping[str, FiguresByLabel]) -> FindingsTable:
    rows = []
    for data, cells in found.items():
        first = next(iter(cells.values()))
        for label, one in cells.items():
            gained = "" if one is first else cell(differences(first.gap, one.gap))
            rows.append((data, label, cell(one.cl), cell(one.fl), cell(one.gap), gained, MILLI.cell(one.div)))
    columns = ("dataset", "", "Acc. CL, %", "Acc. FL, %", "Gap, points", "I_div, points", "Div., ×10⁻³")
    return FindingsTable("Centralised and federated training", columns, tuple(rows), left=2)


NOTES = (
    "an accuracy is the best of a run, as in the paper; ± is the sample standard deviation over the seeds",
    "CL: one party with everybody's examples takes as many steps as all clients together; Gap: CL − FL; I_div: the "
    "first row's gap − this row's",
    "Div.: Eq. 1 at the end of the federated run, over each client's whole data, without augmentation and with the "
    "running statistics, in the mean over the layers",
)

# --- what is claimed -------------------------------------------------------------------------------------------------


def _accuracy(table: PaperTable, cells: FiguresByLabel, data: str, one: str, other: str) -> Check:
    name = f"FL is better with {one} than with {other} on {data}"
    return above(name, cells[one].fl, cells[other].fl, paper=table.paper("fl", one, other, data))


def _narrower(table: PaperTable, cells: FiguresByLabel, data: str, one: str, other: str) -> Check:
    name = f"the gap is narrower with {one} than with {other} on {data}"
    return above(name, cells[other].gap, cells[one].gap, unit=GAINS, paper=table.paper("gap", other, one, data))


def _nearer(table: PaperTable, cells: FiguresByLabel, data: str, one: str, other: str) -> Check:
    name = f"clients diverge less with {one} than with {other} on {data}"
    return above(name, cells[other].div, cells[one].div, unit=MILLI, paper=table.paper("div", other, one, data))


def _deep_nearer(cells: FiguresByLabel, data: str, one: str, other: str) -> Check:
    name = f"clients diverge less in deep layers with {one} than with {other} on {data}"
    return above(name, cells[other].deep, cells[one].deep, unit=MILLI)


def _faster(cells: FiguresByLabel, data: str, one: str, other: str, paper: str = "") -> Check:
    name = f"FL needs no more rounds to {100 * REACHED:.0f} % with {one} than with {other} on {data}"
    return fewest(name, one, rounds_to_share({label: cells[label] for label in (one, other)}, REACHED), paper=paper)


def _guideline(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    """What Section 4 claims of every change for the better: accuracy, Gap and Div."""
    first, *others = cells
    claims = (_accuracy, _narrower, _nearer)
    return [claim(table, cells, data, label, first) for label in others for claim in claims]


def _by_depth(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    shallow, *_, deep = cells
    name = f"FL's accuracy falls more from round to round with {deep} than with {shallow} on {data}"
    return [
        _narrower(table, cells, data, shallow, deep),
        _nearer(table, cells, data, shallow, deep),
        _faster(cells, data, shallow, deep),
        above(name, cells[deep].falls, cells[shallow].falls, unit=GAINS),
    ]


def _by_resolution(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    first, *_, last = cells
    return [*_guideline(table, cells, data), _deep_nearer(cells, data, last, first)]


def _by_augmentation(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    checks = [claim(table, cells, data, "RRC", "none") for claim in (_accuracy, _narrower, _nearer)]
    return [*checks, _accuracy(table, cells, data, "RRC", "CJ")]


def _by_attention(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    paper = {
        "Tiny-ImageNet": "30.5 against 16.2 %",
        "CIFAR-100": "20.6 against 13.2 %",
        "CIFAR-10": "15.8 against 8.45 %",
    }
    vit, swin = cells
    name = f"FL loses a smaller share of CL's accuracy with {swin} than with {vit} on {data}"
    return [above(name, cells[vit].loss, cells[swin].loss, paper=_paper_text(paper, data))]


def _by_link(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    plain, linked = cells
    rounds = {"Tiny-ImageNet": "21 against 24", "CIFAR-100": "30 against 33"}
    name = f"FL is as good with {linked} as with {plain}, within a point, on {data}"
    paper = table.paper("fl", linked, plain, data)
    return [
        _faster(cells, data, linked, plain, _paper_text(rounds, data)),
        above(name, cells[linked].fl, cells[plain].fl, margin=0.01, paper=paper),
        _nearer(table, cells, data, linked, plain),
    ]


def _by_plan(table: PaperTable, cells: FiguresByLabel, data: str) -> list[Check]:
    normal, mean, turned = cells
    claims = (_accuracy, _nearer)
    checks = [claim(table, cells, data, normal, other) for other in (mean, turned) for claim in claims]
    return [*checks, _deep_nearer(cells, data, normal, turned)]


def _paper_tables(scale: DeeperScale) -> dict[str, PaperTable]:
    deep, slim = scale.resnet(scale.deep), scale.slim_resnet()
    three, two = scale.among("tiny-imagenet", "cifar-100", "cifar-10"), scale.among("tiny-imagenet", "cifar-100")
    depths = {f"ResNet{depth}": scale.resnet(depth) for depth in scale.depths}
    widths = {f"{times}× width": scale.slim_resnet(width=times * scale.slim[1]["width"]) for times in (1, 2, 3)}
    stems = {"3×3 conv.": scale.resnet(scale.deep, stem="3x3"), "no max-pool": scale.resnet(scale.deep, maxpool=False)}
    sizes = {f"{size}×{size}": size for size in scale.resolutions}
    augments = {"none": "none", "RRC": "rrc", "CJ": "cj", "both": "both"}
    links = {"no links": scale.slim_resnet(residual=False), "residual links": slim}
    plans = {"normal": slim} | {plan: scale.slim_resnet(plan=plan) for plan in ("mean", "reversed")}
    return {
        "depth": PaperTable("model", depths, scale.among("cifar-10", "cifar-100"), _by_depth),
        "width": PaperTable("model", widths, two, _guideline, WIDTH),
        "stem": PaperTable("model", {"base": deep, **stems}, three, _guideline, STEM),
        "resolution": PaperTable("dataset", sizes, three, _by_resolution, RESOLUTION, deep),
        "augmentation": PaperTable("augment", augments, two, _by_augmentation, AUGMENTATION, deep),
        "transformer": PaperTable("model", scale.transformers, three, _by_attention, TRANSFORMER),
        "residual": PaperTable("model", links, two, _by_link, RESIDUAL),
        "channels": PaperTable("model", plans, scale.among("tiny-imagenet"), _by_plan, CHANNELS),
    }
