"""Deeper models' reproduction: the paper's figures, and its settings at every scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.core.spec import text_of
from fedstrata.reproduce.parts import Tuning, highest_accuracy

TUNING_SEED = 1
CL, FL = "CL", "FL"
"""Labels of the methods."""


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
        networks: of Fig. 3: fields of the runs that train them, models, classes, images of each, draws of the noise.
        terms: of Eq. 11: networks, which are trained as those of Fig. 3, classes, images of each, draws of the
            noise.
        trials: learning rates that CL and FL are tried with; none to leave them as they are.
        elsewhere: name → arguments: datasets that some tables are made on besides.
        draws: whether there are pictures of the tables.
        plateau: rounds after which FL learns no more; None if the scale's are as many.
    """

    run: Mapping[str, Any]
    datasets: dict[str, Mapping[str, Any]]
    resolutions: tuple[int, ...]
    resolution: int
    depths: tuple[int, ...]
    shape: Mapping[str, Any]
    deep: int
    slim: tuple[str, Mapping[str, Any]]
    transformers: Mapping[str, str]
    networks: Mapping[str, Any]
    terms: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    trials: tuple[float, ...] = ()
    elsewhere: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    draws: bool = True
    plateau: int | None = None

    @property
    def tuning(self) -> Tuning | None:
        """Trials of the deep ResNet on the first dataset, the same for all tables."""
        fields = {**self.run, "dataset": self.data(next(iter(self.datasets))), "model": self.resnet(self.deep)}
        return Tuning(self.trials, TUNING_SEED, highest_accuracy, fields) if self.trials else None

    def data(self, name: str, resolution: int | None = None) -> str:
        """A dataset at a resolution; at the usual one if none is given."""
        return text_of(name, {**(self.datasets | self.elsewhere)[name], "resolution": resolution or self.resolution})

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


def watched(scale: DeeperScale) -> dict[str, Any]:
    """The fields of runs whose clients' updates are compared in every round, which changes no result.

    Centralised training, which has but one, finds nothing.
    """
    return {"probe": "proxy", "probe_clients": scale.run["clients"]}


def fewer_steps(scale: DeeperScale) -> tuple[str, str, dict[str, Any]]:
    """(a visit's length, the shortest one, the fields of it): as many more rounds, as many steps and evaluations."""
    unit = "epochs" if "epochs" in scale.run else "steps"
    many = int(scale.run[unit])
    fields = {unit: 1, "rounds": many * scale.run["rounds"], "eval_every": many}
    return f"{many} local {unit}", f"1 local {unit.removesuffix('s')}", fields


def plain_cnns(width: int) -> dict[str, str]:
    """Label → model of Fig. 3, in pairs, shallow first: widths that double twice, or the one in the middle for all."""
    depths = {4: "4-layer CNN", 8: "8-layer CNN"}
    growing = {label: f"cnn{depth}(width={width})" for depth, label in depths.items()}
    constant = {f"{label} of one width": f"cnn{d}(width={2 * width}, growth=1)" for d, label in depths.items()}
    return growing | constant


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
            "models": plain_cnns(2),
            "classes": 3,
            "images": 6,
            "draws": 8,
        },
        terms={
            "models": {"MLP": "mlp(hidden=(8, 8))", "4-layer CNN": "cnn4(width=2)"},
            "classes": 2,
            "images": 4,
            "draws": 4,
        },
        seeds=(0,),
        draws=False,
        plateau=4,
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
            "models": plain_cnns(16),
            "classes": 10,
            "images": 100,
            "draws": 200,
        },
        terms={
            "models": {"MLP": "mlp(hidden=(128, 128, 128))", **plain_cnns(16)},
            "classes": 10,
            "images": 50,
            "draws": 50,
        },
        seeds=(4, 5, 6),
        plateau=24,
    ),
    "evidence": DeeperScale(
        {
            "clients": 8,
            "rounds": 32,
            "epochs": 4,
            "batch_size": 32,
            "lr": 0.02,
            "optimizer": "sgd(momentum=0.9)",
            "augment": "rrc",
        },
        {"cifar-10": {"examples": 4000, "test_examples": 2000}},
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
            "models": plain_cnns(16),
            "classes": 10,
            "images": 100,
            "draws": 200,
        },
        terms={
            "models": {"MLP": "mlp(hidden=(128, 128, 128))", **plain_cnns(16)},
            "classes": 10,
            "images": 50,
            "draws": 50,
        },
        seeds=(4, 5, 6, 7, 8),
        trials=(0.01, 0.02, 0.05),
        elsewhere={"cifar-100": {"examples": 4000, "test_examples": 2000}, "tiny-imagenet": {}},
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
            "models": plain_cnns(32),
            "classes": 10,
            "images": 1000,
            "draws": 1000,
        },
        terms={
            "models": {"MLP": "mlp(hidden=(512, 512, 512))", **plain_cnns(32)},
            "classes": 10,
            "images": 1000,
            "draws": 1000,
        },
    ),
}
