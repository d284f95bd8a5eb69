"""Pictures of a reproduction (extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedstrata.errors import UsageError
from fedstrata.files import write_atomic

FULL, PART, FAINT = "#2166a8", "#ec7f2c", "#6b7480"


def check_plots() -> None:
    """Refuse early where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("pictures need the package matplotlib: pip install 'fedstrata[report]'") from None


def plot_norms(found: Mapping[str, Any], seed: int, path: Path) -> None:
    """The gradient's norm over the steps of all rounds, full and partial updates one above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, sharex=True, sharey=True)
    for axes, (label, run) in zip(panels, found.items(), strict=True):
        norms, most = run["norms"], max(map(len, run["active"]))
        starts = [0, *accumulate(map(len, norms))]
        for at, steps in enumerate(norms):
            full = len(run["active"][at]) == most
            places = range(starts[at], starts[at + 1])
            axes.axvline(starts[at] - 0.5, color="#d9dde2", linewidth=0.7, zorder=0)
            axes.plot(places, steps, color=FULL if full else PART, linewidth=1.1)
            axes.plot(starts[at], steps[0], "o", color=FULL if full else PART, markersize=3.2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("gradient norm")
        axes.set_title(f"{label} updates" if label == "full" else label, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for colour, label in ((FULL, "all strata train"), (PART, "only the active stratum trains")):
        panels[-1].plot([], [], color=colour, label=label)
    panels[-1].legend(frameon=False, ncols=2, loc="upper right", fontsize=8)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel(f"local step; dots and lines: the first step after the server has averaged (seed {seed})")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=140, metadata={"Software": None})
    write_atomic(path, drawn.getvalue())
