"""Pictures of the user's own, in a folder for each class."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import damaged_error
from fedstrata.data.readers.build import Bytes, image_dataset, join_notes, tensor_of
from fedstrata.data.tables import hold_out
from fedstrata.errors import UsageError, one_line

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
    images = np.stack([read_picture(picture.path, side, grey) for picture in found])
    natural = len(owners) > 1 and not parts
    train = np.flatnonzero(~held_out)
    said = "test part as in the folder" if parts else f"{test:g} held out for testing"
    return image_dataset(
        "folder",
        (images[train], labels[train]),
        (images[held_out], labels[held_out]),
        tuple(names),
        groups=tuple(tensor_of(np.flatnonzero(owner[train] == o)) for o in range(len(owners))) if natural else (),
        group_names=tuple(map(str, owners)) if natural else (),
        note=join_notes(
            f"{len(owners)} clients" if natural else "",
            f"{len(found):,} pictures resized to {side}×{side}, {'grey' if grey else 'in colour'}, {said}",
        ),
    )


def find_pictures(top: Path) -> list[Picture]:
    """All pictures below a folder, client by client, in the order of their names.

    Raises:
        UsageError: if there are none, or if they are at several depths.
    """
    if not top.is_dir():
        raise UsageError(f"there is no folder {top}")
    below = [path.relative_to(top).parts for path in sorted(top.rglob("*")) if path.suffix.lower() in KINDS]
    paths = [parts for parts in below if not any(part.startswith(".") for part in parts)]
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


def read_picture(path: Path, side: int, grey: bool) -> Bytes:
    """A picture's pixels (channels, side, side)."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # of palettes, and of sizes that are large but can be read
            made = image.convert("L" if grey else "RGB").resize((side, side), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged_error(str(path), one_line(str(error) or type(error).__name__, 200)) from None
    pixels: Bytes = np.asarray(made, dtype=np.uint8).reshape(side, side, -1).transpose(2, 0, 1)
    return pixels
