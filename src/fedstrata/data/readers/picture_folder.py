"""Pictures of the user's own, in a folder for each class."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import damaged_error
from fedstrata.data.readers.build import Bytes, image_dataset, join_notes, tensor_of
from fedstrata.data.tables import hold_out
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

KINDS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
"""How the names of pictures end, in any case."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What they may be, for Pillow."""
PARTS = ("test", "train")
"""Top folders that are no clients, in the order of their names."""


@dataclass(frozen=True)
class Picture:
    """Where a picture is, of which class, and whose it is."""

    path: Path
    label: str
    owner: str = ""


def folder(
    data_dir: Path | None,
    *,
    path: PathText,
    side: int = 32,
    grey: bool = False,
    test: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Pictures of your own: a folder for each class, or one for each client with the classes in it (PNG, JPEG, …).

    All are resized to `side` × `side` pixels (bilinear, antialiased), whatever their shape. Top folders named `train`
    and `test` are no clients, but the two parts.

    Args:
        data_dir: not needed.
        path: of the folder.
        side: pixels per side.
        grey: one channel instead of red, green and blue.
        test: share of each client's pictures that is held out, the same share of every class.
        seed: of this choice.
    """
    if side < 1:
        raise UsageError(f"folder: pictures have 1 or more pixels per side, not {side}")
    if not 0 < test < 1:
        raise UsageError(f"folder: the share of test pictures is above 0 and below 1, not {test}")
    found = find_pictures(Path(path))
    names = sorted({picture.label for picture in found})
    if len(names) < 2:
        raise UsageError(f"{path} has pictures of one class only, '{names[0]}': there is a folder for each class")
    owners, owner = np.unique([picture.owner for picture in found], return_inverse=True)
    labels = np.unique([picture.label for picture in found], return_inverse=True)[1].astype(np.int64)
    parts = tuple(owners) == PARTS
    held_out = owner == PARTS.index("test") if parts else hold_out(owner, labels, test, derive(seed, "folder"))
    images, told = _read_all(found, side, grey)
    natural = not set(owners) <= {"", *PARTS}
    groups, test_groups = (
        tuple(tensor_of(np.flatnonzero(owner[rows] == one)) for one in range(len(owners))) if natural else ()
        for rows in (~held_out, held_out)
    )
    whose = "one client only" if len(owners) == 1 else f"{len(owners)} clients"
    said = "test part as in the folder" if parts else f"{test:g} held out for testing"
    return image_dataset(
        "folder",
        (images[~held_out], labels[~held_out]),
        (images[held_out], labels[held_out]),
        tuple(names),
        groups=groups,
        group_names=tuple(map(str, owners)) if natural else (),
        note=join_notes(whose if natural else "", f"{told}, {said}"),
        test_groups=test_groups,
    )


def find_pictures(top: Path) -> list[Picture]:
    """All pictures below a folder, client by client, in the order of their names.

    Raises:
        UsageError: if there are none, or if they are at several depths.
    """
    if not top.is_dir():
        raise UsageError(f"there is no folder {top}")
    below = [path.relative_to(top).parts for path in sorted(top.rglob("*")) if path.suffix.lower() in KINDS]
    shown = [parts for parts in below if not any(part.startswith(".") for part in parts)]
    paths = [parts for parts in shown if not top.joinpath(*parts).is_dir()]
    if not paths:
        raise UsageError(
            f"{top} has no pictures in it: there is a folder of {', '.join(sorted(KINDS))} files per class"
        )
    for parts in paths:
        if len(parts) not in (2, 3) or len(parts) != len(paths[0]):
            raise UsageError(
                f"{top.joinpath(*parts)} is in the wrong place: all pictures are in a folder for their class, or all "
                "in a client's folder with one for each class"
            )
    return [Picture(top.joinpath(*parts), parts[-2], parts[0] if len(parts) == 3 else "") for parts in paths]


def _read_all(found: Sequence[Picture], side: int, grey: bool) -> tuple[Bytes, str]:
    """(all pictures' pixels, what was done to them)."""
    shape = (len(found), 1 if grey else 3, side, side)
    size, memory = math.prod(shape), _memory()
    if 2 * size > memory:  # they are copied once, into their two parts
        raise UsageError(
            f"folder: {len(found):,} pictures of {side}×{side} pixels take {size / 2**30:,.1f} GiB, twice while they "
            f"are read, and this machine has {memory / 2**30:,.1f}: ask for a smaller side"
        )
    images: Bytes = np.empty(shape, dtype=np.uint8)
    deep, brightest = 0, 0
    for at, picture in enumerate(found):
        images[at], peak = read_picture(picture.path, side, grey)
        deep, brightest = deep + (peak is not None), max(brightest, peak or 0)
    resized = f"{len(found):,} pictures resized to {side}×{side}, {'grey' if grey else 'in colour'}"
    depth = f"{deep:,} of them of 16 bits, divided by 257 (their brightest pixel is {brightest:,} of 65,535)"
    return images, join_notes(resized, depth if deep else "")


def _memory() -> int:
    """How many bytes the machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # where nobody can say
        return 8 << 30


def read_picture(path: Path, side: int, grey: bool) -> tuple[Bytes, int | None]:
    """(a picture's pixels (channels, side, side), the brightest one of a picture of 16 bits)."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # of palettes, and of sizes that are large but can be read
            shallow, peak = _as_bytes(path, image)
            made = shallow.convert("L" if grey else "RGB").resize((side, side), Image.Resampling.BILINEAR)
    except UsageError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged_error(str(path), one_line(str(error) or type(error).__name__, 200)) from None
    pixels: Bytes = np.asarray(made, dtype=np.uint8).reshape(side, side, -1).transpose(2, 0, 1)
    return pixels, peak


def _as_bytes(path: Path, image: ImageFile) -> tuple[Image, int | None]:
    """(the picture with 8 bits per pixel, the brightest pixel if it had 16): Pillow would cut off what is above 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        pixels = np.asarray(image).astype(np.int64)
        return Image.fromarray(((pixels + 128) // 257).astype(np.uint8)), int(pixels.max())
    if image.mode == "F":
        numbers = np.asarray(image)
        if not ((numbers >= 0) & (numbers <= 1)).all():
            raise UsageError(f"{path} has floats that are not from 0 to 1: save it with 8 or 16 bits per pixel")
        return Image.fromarray((numbers * 255).round().astype(np.uint8)), None
    if image.mode == "I":
        raise UsageError(f"{path} has 32 bits per pixel: save it with 8 or 16")
    return image, None
