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
from fedstrata.attack.contact_sheet import contact_sheet
from fedstrata.reproduce.claims import PLAIN, above, plain_unit
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import open_run
from fedstrata.runs.files import write_atomic
from fedstrata.system.machine import compute_with

DECIBELS = plain_unit(2, suffix=" dB")


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """A run, and the attack on its model: how near the rebuilt images come, and the images."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        history = open_run(build_config(settings, seed, resources), directory).fit(progress=False)
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
        "pixels": [encode_images(images) for images in (found.originals, *(row.images for row in found.rows))],
    }


def encode_images(images: Tensor) -> str:
    """Encode images from 0 to 1 as text, one byte per value."""
    return base64.b64encode(images.mul(255).round().to(torch.uint8).numpy().tobytes()).decode()


def decode_images(text: str, shape: list[int]) -> Tensor:
    """Decode the images that a text holds."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(shape).div(255)


def draw_images(found: Mapping[str, Any], seed: int, path: Path) -> None:
    """Draw the originals, and below them what was rebuilt of them."""
    labels = ["original"]
    labels += [f"{row['name']}\n{row['psnr']:.1f} dB, SSIM {row['ssim']:.2f}" for row in found["rows"]]
    title = f"client {found['client']}, features after {found['split']} (seed {seed})"
    images = [decode_images(text, found["shape"]) for text in found["pixels"]]
    columns = [f"{name}\n1 of {count:,}" for name, count in zip(found["classes"], found["examples"], strict=True)]
    write_atomic(path, contact_sheet(images, labels, columns, title))


def assess(found: Mapping[int, dict[str, Any]]) -> Findings:
    """Raw features against the statistics without noise, which reveal most."""
    seed, first = next(iter(found.items()))
    names = [row["name"] for row in first["rows"]]
    figures = {
        kind: {name: {s: f["rows"][at][kind] for s, f in found.items()} for at, name in enumerate(names)}
        for kind in ("psnr", "ssim", "error")
    }
    rows = tuple(
        (
            name,
            DECIBELS.cell(figures["psnr"][name]),
            *(PLAIN.cell(figures[kind][name]) for kind in ("ssim", "error")),
        )
        for name in names
    )
    raw, shared, *_ = names
    claim = "images from raw features are nearer to the originals than those from statistics"
    pairs: dict[str, tuple[Seeds, Seeds]] = {k: (v[raw], v[shared]) for k, v in figures.items()}
    checks = (
        above(f"{claim} (PSNR)", *pairs["psnr"], unit=DECIBELS, paper="shown in figures 12 and 13, without a number"),
        above(f"{claim} (SSIM)", *pairs["ssim"], unit=PLAIN),
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
        {"inversion.png": partial(draw_images, first, seed)},
        data,
    )
