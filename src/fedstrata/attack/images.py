"""Images from updates: those whose gradient points where the update does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstrata.attack.asking import Progress, last_of, step_counter, write_result
from fedstrata.attack.contact_sheet import contact_sheet
from fedstrata.attack.inversion import AttackRow
from fedstrata.attack.matching import gradient_directions, in_order, unit_rows
from fedstrata.attack.search import descend, grey_images, psnr, ssim
from fedstrata.attack.sending import Sender
from fedstrata.attack.victim import Pixels, RunClient
from fedstrata.core.rng import generator
from fedstrata.errors import UsageError

NOTHING = "nothing"


@dataclass(frozen=True, eq=False)
class ImageUpdate:
    """Images that were rebuilt from updates.

    Args:
        run: the run's directory.
        client: the victim's number.
        classes: the class of each image, by name; empty where there are none.
        originals: (N, C, H, W), from 0 to 1.
        rows: what knows nothing, then the full update, then stratum by stratum.
        settings: of the visits and of the search.
    """

    run: Path
    client: int
    classes: tuple[str, ...]
    originals: Tensor
    rows: tuple[AttackRow, ...]
    settings: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All figures, without the pictures."""
        about = {"run": str(self.run), "client": self.client, "classes": list(self.classes)}
        return {**about, "settings": dict(self.settings), "rows": [_row(row) for row in self.rows]}

    def save(self, directory: str | Path) -> None:
        """Write update.png, the pictures, and update.json, the figures."""
        labels = ["original", *(f"{row.name}\n{row.psnr:.1f} dB, SSIM {row.ssim:.2f}" for row in self.rows)]
        columns = list(self.classes) or [str(at) for at in range(len(self.originals))]
        title = f"client {self.client}, rebuilt from its update"
        picture = contact_sheet([self.originals, *(row.images for row in self.rows)], labels, columns, title)
        write_result(Path(directory), ("update.json", self.as_dict()), ("update.png", picture))


def _row(row: AttackRow) -> dict[str, Any]:
    means = {"name": row.name, "psnr": row.psnr, "ssim": row.ssim, "error": row.error}
    names, figures = ("psnr", "ssim", "error"), zip(row.psnrs, row.ssims, row.errors, strict=True)
    return {**means, "images": [dict(zip(names, each, strict=True)) for each in figures]}


def rebuild_images(
    run: Path,
    found: RunClient,
    sender: Sender,
    visits: Sequence[Tensor],
    parts: Mapping[str, tuple[str, ...]],
    settings: Mapping[str, Any],
    progress: Progress | None = None,
) -> ImageUpdate:
    """Search, for the full update and for each stratum's part, the images whose gradient points the same way."""
    pixels = Pixels.of(found.dataset.train)
    batches = [found.data.batch(index) for index in visits]
    originals = torch.stack([pixels.pixels(x.float()) for x, _ in batches])  # [visits, images, C, H, W]
    targets = torch.stack([y for _, y in batches])
    start = grey_images(tuple(originals.flatten(1, 2).shape), generator(settings["seed"], "attack", "start"))
    tick = step_counter(progress, settings["steps"] * len(parts))
    rows = [_rate(NOTHING, start, originals, torch.ones(len(visits)))]
    for name, names in parts.items():
        target = unit_rows([sender.change(names, index) for index in visits])
        if not target.isfinite().all():
            raise UsageError(f"{name}: not all numbers of the update are finite, so there is nothing to match")
        look = gradient_directions(sender.model, sender.task.mean_loss, names, targets, pixels.input)
        search = descend(look, target, start, steps=settings["steps"], lr=settings["lr"], tv=settings["tv"])
        rebuilt = last_of(search, tick)
        with torch.no_grad():
            errors = (look(rebuilt) - target).square().sum(1)
        rows.append(_rate(name, rebuilt, originals, errors))
    labels = found.data.labels()[torch.cat(list(visits))].tolist() if found.classes else []
    classes = tuple(found.classes[int(label)] for label in labels)
    return ImageUpdate(run, found.number, classes, originals.flatten(0, 1), tuple(rows), settings)


def _rate(name: str, rebuilt: Tensor, originals: Tensor, errors: Tensor) -> AttackRow:
    """How near rebuilt images come to the originals; those of one batch in whatever order is the nearest."""
    images = rebuilt.view(originals.shape)
    ordered = torch.cat([in_order(one, other) for one, other in zip(images, originals, strict=True)])
    whole = originals.flatten(0, 1)
    figures = (psnr(ordered, whole), ssim(ordered, whole), errors.repeat_interleave(originals.shape[1]))
    return AttackRow(name, None, ordered, *(tuple(each.tolist()) for each in figures))
