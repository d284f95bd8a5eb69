"""The contact sheet of an attack: a row of originals above rows of rebuilt ones (extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedstrata.core.extras import missing

_TILE, _GAP = 0.85, 0.06  # inches, and shares of a tile
_TEXT, _FAINT = "#222831", "#6b7480"


def check_pictures() -> None:
    """Refuse early if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing("matplotlib", "the contact sheet needs") from None


def contact_sheet(rows: Sequence[Tensor], labels: Sequence[str], columns: Sequence[str], title: str) -> bytes:
    """Draw a contact sheet as PNG.

    Args:
        rows: images (N, C, H, W) from 0 to 1; those with other than one or three channels are shown as their mean.
        labels: one per row, at the left.
        columns: one per image, at the top, in a line or two.
        title: above all.
    """
    check_pictures()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (1.9 + _TILE * len(columns), 0.85 + _TILE * len(rows))
    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((1.8 / size[0], 0.1 / size[1], 1 - 1.9 / size[0], 1 - 0.85 / size[1]))
    for down, row in enumerate(rows):
        for across, image in enumerate(_rgb(row)):
            extent = (across, across + 1 - _GAP, down + 1 - _GAP, down)
            axes.imshow(image, extent=extent, interpolation="nearest", vmin=0, vmax=1)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), aspect="auto")
    middle = 0.5 - _GAP / 2
    axes.xaxis.tick_top()
    axes.set_xticks([at + middle for at in range(len(columns))])
    axes.set_xticklabels(
        ["\n".join(map(_shorten, name.split("\n"))) for name in columns], fontsize=7, parse_math=False, color=_FAINT
    )
    axes.set_yticks([at + middle for at in range(len(rows))])
    axes.set_yticklabels(labels, fontsize=7.5, parse_math=False, color=_TEXT)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    figure.text(0.1 / size[0], 1 - 0.25 / size[1], title, fontsize=10, weight="bold", parse_math=False, color=_TEXT)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120, metadata={"Software": None})
    return drawn.getvalue()


def _shorten(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"


def _rgb(images: Tensor) -> npt.NDArray[np.float32]:
    """Images as matplotlib draws them, (N, H, W, 3)."""
    shown = images if images.shape[1] in (1, 3) else images.mean(1, keepdim=True)
    return shown.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy().astype(np.float32)
