"""FedImpro's F.7: images rebuilt from raw features, and from the statistics that clients share."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstrata.attack import invert
from fedstrata.attack.sheet import contact_sheet
from fedstrata.compare.table import Stat, stat
from fedstrata.reproduce.claims import PLAIN, Seeds, Unit, above
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources
from fedstrata.reproduce.runs import configured
from fedstrata.run import open_run
from fedstrata.runs.files import write_atomic
from fedstrata.system.machine import compute_with


def _decibels(value: Stat | None) -> str:
    if value is None:
        return "–"
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}") + " dB"


DECIBELS = Unit(_decibels, lambda gain: ("+" if gain.mean >= 0 else "") + _decibels(gain))


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """A run, and the attack on its model: how near the rebuilt images come, and the images."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        history = open_run(configured(settings, seed, resources), directory).fit()
        with compute_with(1):
            found = invert(directory, **settings["attack"], seed=seed)
    return {
        "accuracy": history.accuracy,
        "split": found.split,
        "client": found.client,
        "classes": list(found.classes),
        "examples": list(found.examples),
        "rows": [{"name": row.name, "psnr": row.psnr, "ssim": row.ssim, "error": row.error} for row in found.rows],
        "shape": list(found.originals.shape),
        "pixels": [packed(images) for images in (found.originals, *(row.images for row in found.rows))],
    }


def packed(images: Tensor) -> str:
    """Images from 0 to 1 as text, a byte a value."""
    return base64.b64encode(images.mul(255).round().to(torch.uint8).numpy().tobytes()).decode()


def unpacked(text: str, shape: list[int]) -> Tensor:
    """The images that a text holds."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(shape).div(255)


def draw(found: Mapping[str, Any], seed: int, path: Path) -> None:
    """Originals above what was rebuilt of them."""
    labels = ["original"]
    labels += [f"{row['name']}\n{row['psnr']:.1f} dB, SSIM {row['ssim']:.2f}" for row in found["rows"]]
    title = f"client {found['client']}, features after {found['split']} (seed {seed})"
    images = [unpacked(text, found["shape"]) for text in found["pixels"]]
    columns = [f"{name}\n1 of {count:,}" for name, count in zip(found["classes"], found["examples"], strict=True)]
    write_atomic(path, contact_sheet(images, labels, columns, title))


def judge(found: Mapping[int, dict[str, Any]]) -> Findings:
    """Raw features against the statistics without noise, which tell most."""
    seed, first = next(iter(found.items()))
    names = [row["name"] for row in first["rows"]]
    figures = {
        kind: {name: {s: f["rows"][at][kind] for s, f in found.items()} for at, name in enumerate(names)}
        for kind in ("psnr", "ssim", "error")
    }
    rows = tuple(
        (
            name,
            DECIBELS.spread(stat(figures["psnr"][name].values())),
            *(PLAIN.spread(stat(figures[kind][name].values())) for kind in ("ssim", "error")),
        )
        for name in names
    )
    raw, shared, *_ = names
    told = "images from raw features are nearer to the originals than those from statistics"
    pairs: dict[str, tuple[Seeds, Seeds]] = {k: (v[raw], v[shared]) for k, v in figures.items()}
    checks = (
        above(f"{told} (PSNR)", *pairs["psnr"], unit=DECIBELS, paper="shown in figures 12 and 13, without a number"),
        above(f"{told} (SSIM)", *pairs["ssim"], unit=PLAIN),
    )
    trained = ", ".join(f"{100 * f['accuracy']:.1f} %" for f in found.values())
    one = sum(count == 1 for f in found.values() for count in f["examples"])
    notes = (
        f"accuracy of the models, seed by seed: {trained}",
        "feature error: ‖f − t‖² / ‖t‖² between a rebuilt image's features and what it was rebuilt from",
        f"{one} of {sum(len(f['examples']) for f in found.values())} images are the only one of their class in the "
        "client's data: there the statistics are the image's own features",
    )
    title = f"Images of a client, rebuilt from what leaves {first['split']}"
    data = {str(s): {k: v for k, v in f.items() if k not in ("pixels", "shape")} for s, f in found.items()}
    return Findings(
        (FindingsTable(title, ("", "PSNR", "SSIM", "feature error"), rows),),
        checks,
        notes,
        {"inversion.png": partial(draw, first, seed)},
        data,
    )
