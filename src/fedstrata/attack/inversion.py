"""The attack on a run: a client's images, rebuilt from their features, and from the statistics that it shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstrata.attack.asking import MOST, Progress, check_counts, check_search, last_of, step_counter, write_result
from fedstrata.attack.contact_sheet import contact_sheet
from fedstrata.attack.search import descend, feature_error, grey_images, psnr, ssim
from fedstrata.attack.victim import Victim, open_victim
from fedstrata.core.rng import generator
from fedstrata.errors import UsageError

NOISE = (0.0, 0.01, 0.1, 0.5)


@dataclass(frozen=True, eq=False)
class AttackRow:
    """Rebuilt images and how near they come, one figure per image.

    Args:
        name: what they were rebuilt from.
        noise: standard deviation of what was added to the statistics; None where there are none.
        images: (N, C, H, W), from 0 to 1.
        psnrs: in decibels, at most 100.
        ssims: at most 1.
        errors: how far their features, or gradients, are from the target, ‖f − t‖² / ‖t‖².
    """

    name: str
    noise: float | None
    images: Tensor
    psnrs: tuple[float, ...]
    ssims: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def psnr(self) -> float:
        """Mean over the images."""
        return math.fsum(self.psnrs) / len(self.psnrs)

    @property
    def ssim(self) -> float:
        """Mean over the images."""
        return math.fsum(self.ssims) / len(self.ssims)

    @property
    def error(self) -> float:
        """Mean over the images."""
        return math.fsum(self.errors) / len(self.errors)


@dataclass(frozen=True, eq=False)
class Inversion:
    """The outcome of an attack.

    Args:
        run: the run's directory.
        split: the module that the low part ends with.
        per: whether means of every element or of every channel are shared.
        client: the victim's number.
        classes: the class of each image, by name.
        examples: how many examples of that class the client has.
        originals: (N, C, H, W), from 0 to 1.
        rows: rebuilt from the features, then from the statistics at every noise level.
        settings: of the search, the seed among them.
    """

    run: Path
    split: str
    per: str
    client: int
    classes: tuple[str, ...]
    examples: tuple[int, ...]
    originals: Tensor
    rows: tuple[AttackRow, ...]
    settings: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All figures, without the pictures."""
        about = {"run": str(self.run), "split": self.split, "per": self.per, "client": self.client}
        return {**about, "settings": dict(self.settings), "rows": [self._row(row) for row in self.rows]}

    def _row(self, row: AttackRow) -> dict[str, Any]:
        figures = zip(self.classes, self.examples, row.psnrs, row.ssims, row.errors, strict=True)
        names = ("class", "examples", "psnr", "ssim", "error")
        means = {"name": row.name, "noise": row.noise, "psnr": row.psnr, "ssim": row.ssim, "error": row.error}
        return {**means, "images": [dict(zip(names, each, strict=True)) for each in figures]}

    def save(self, directory: str | Path) -> None:
        """Write sheet.png, the pictures, and invert.json, the figures."""
        title = f"client {self.client}, features after {self.split}"
        labels = ["original", *(f"{row.name}\n{row.psnr:.1f} dB, SSIM {row.ssim:.2f}" for row in self.rows)]
        columns = [f"{name}\n1 of {count:,}" for name, count in zip(self.classes, self.examples, strict=True)]
        picture = contact_sheet([self.originals, *(row.images for row in self.rows)], labels, columns, title)
        write_result(Path(directory), ("invert.json", self.as_dict()), ("sheet.png", picture))


def invert(
    directory: str | Path,
    *,
    split: str | int | None = None,
    client: int | None = None,
    images: int = 8,
    noise: Sequence[float] = NOISE,
    steps: int = 500,
    lr: float = 0.1,
    tv: float = 0.1,
    seed: int = 0,
    data_dir: str | None = None,
    progress: Progress | None = None,
) -> Inversion:
    """Rebuild a client's images from their features, and from the means of features that FedImpro would share.

    The attacker knows the low part of the final global model, and what is shared. The statistics are the mean features
    of each of the client's classes, over all of its examples, plus N(0, σ²) in every number.

    Args:
        directory: of a finished run of the command line.
        split: where the low part ends, as fedimpro's `split`; None for where the run's method cuts.
        client: whose images; None for the client with most classes.
        images: how many, of as many classes as there are; fewer if the client has not so many.
        noise: σ, the levels of noise.
        steps: of gradient descent, for each row.
        lr: the first step; see `descend`.
        tv: weight of the total variation.
        seed: seed of the choice of images, the noise and the start.
        data_dir: where the data files are now.
        progress: called with (steps done, steps of all rows).

    Raises:
        UsageError: if something does not fit.
    """
    noise = tuple(dict.fromkeys(noise))
    check_counts(MOST, images=images)
    check_search(steps, lr, tv, seed, noise)
    victim = open_victim(Path(directory), split, client, data_dir)
    originals, labels = victim.choose(images, seed)
    start = grey_images(tuple(originals.shape), generator(seed, "attack", "start"))
    goals = _goals(victim, originals, labels, noise, seed)
    tick = step_counter(progress, steps * len(goals))
    rows = []
    for goal in goals:
        goal.check_finite(victim.place)
        search = descend(goal.look, goal.target, start, steps=steps, lr=lr, tv=tv)
        rows.append(goal.rate(last_of(search, tick), originals))
    counts = victim.counts()
    settings = {"images": images, "noise": list(noise), "steps": steps, "lr": lr, "tv": tv, "seed": seed}
    return Inversion(
        run=Path(directory),
        split=victim.place,
        per=victim.per,
        client=victim.client,
        classes=tuple(victim.classes[label] for label in labels),
        examples=tuple(counts[label] for label in labels),
        originals=originals,
        rows=tuple(rows),
        settings=settings,
    )


@dataclass(frozen=True, eq=False)
class _Goal:
    """What rebuilt images are to match: `look` of them should be `target`."""

    name: str
    noise: float | None
    look: Callable[[Tensor], Tensor]
    target: Tensor

    def check_finite(self, place: str) -> None:
        """Refuse a target that no image can match."""
        if not self.target.isfinite().all():
            raise UsageError(f"{self.name}: not all numbers after '{place}' are finite, so there is nothing to match")

    def rate(self, rebuilt: Tensor, originals: Tensor) -> AttackRow:
        """How near the rebuilt images come to the originals, and their features to the target."""
        with torch.no_grad():
            error = feature_error(self.look(rebuilt), self.target)
        figures = (psnr(rebuilt, originals), ssim(rebuilt, originals), error)
        return AttackRow(self.name, self.noise, rebuilt, *(tuple(each.tolist()) for each in figures))


def _goals(victim: Victim, originals: Tensor, labels: Sequence[int], noise: Sequence[float], seed: int) -> list[_Goal]:
    """The images' own features, and the statistics of their classes at every level of noise."""
    with torch.no_grad():
        own = victim.low_features(originals)
    targets = zip(noise, _noisy_statistics(victim, labels, noise, seed), strict=True)
    return [
        _Goal("from features", None, victim.low_features, own),
        *(_Goal(f"from statistics, noise {level:g}", level, victim.shared_statistics, each) for level, each in targets),
    ]


def _noisy_statistics(victim: Victim, labels: Sequence[int], noise: Sequence[float], seed: int) -> list[Tensor]:
    """For every level, the shared mean of each image's class. A class is shared once, so its images have one target.

    All levels scale the same draw, so that they differ in nothing else.
    """
    means = victim.means() if noise else {}
    drawn = {
        label: torch.randn(mean.shape, generator=generator(seed, "attack", "noise", label))
        for label, mean in means.items()
    }
    return [torch.stack([means[label] + level * drawn[label] for label in labels]) for level in noise]
