"""Records as a table of pandas and as a curve of matplotlib (extra `notebook`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedstrata.core.extras import missing
from fedstrata.core.text import metric_title
from fedstrata.errors import UsageError, one_of
from fedstrata.runs.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_COSTS: Mapping[str, tuple[str, Callable[[Record], float]]] = {
    "bytes": ("megabytes up and down", lambda r: (r.bytes_up + r.bytes_down) / 1e6),
    "flops": ("GFLOP of the clients", lambda r: r.flops / 1e9),
    "seconds": ("seconds", lambda r: r.seconds),
}
"""What adds up over the rounds: its axis, and a round's share."""


def round_row(record: Record) -> dict[str, Any]:
    """A round's numbers by name, flat: one for each metric, counts in place of lists."""
    fairness = asdict(record.fairness) if record.fairness is not None else {}
    return {
        "round": record.round,
        "score": record.score,
        "loss": record.loss,
        "train_loss": record.train_loss,
        **record.all_metrics,
        **{f"fairness_{name}": value for name, value in fairness.items()},
        **{f"arch_{name}": value for name, value in record.arch_accuracy.items()},
        **{f"newcomers_{name}": value for name, value in record.newcomers.items()},
        **{f"attack_{name}": value for name, value in record.attack_success.items()},
        "strata": len(record.active),
        "clients": len(record.clients),
        "refused": len(record.refused),
        "late": len(record.late),
        "examples": record.examples,
        "steps": record.steps,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "flops": record.flops,
        "lr": record.lr,
        "seconds": record.seconds,
        "simulated_seconds": record.simulated_seconds,
        "memory": record.memory,
        "training_memory": record.training_memory,
    }


def client_rows(record: Record) -> Iterator[dict[str, Any]]:
    """What a round's record says of clients: of those that took part, and of those that were judged for themselves."""
    refused = {row["client"]: row["why"] for row in record.refused}
    took_part = set(record.clients)
    judged, own = record.client_metrics or [], record.own_metrics or []
    accuracy = record.client_accuracy or []
    for client in sorted(took_part.union(range(max(len(judged), len(own), len(accuracy))))):
        yield {
            "round": record.round,
            "client": client,
            "took_part": client in took_part,
            "refused": refused.get(client),
            **({"train_accuracy": accuracy[client]} if client < len(accuracy) else {}),
            **((judged[client] or {}) if client < len(judged) else {}),
            **{f"own_{name}": v for name, v in ((own[client] or {}) if client < len(own) else {}).items()},
        }


def build_frame(records: Sequence[Record], per: str) -> DataFrame:
    """Records as a DataFrame.

    Raises:
        UsageError: if pandas is not installed.
    """
    one_of("frame", ("round", "client"), per=per)
    try:
        import pandas
    except ImportError:
        raise missing("pandas", "a frame needs") from None
    if per == "round":
        return pandas.DataFrame([round_row(record) for record in records])
    rows = [row for record in records for row in client_rows(record)]
    return pandas.DataFrame(rows, columns=None if rows else ["round", "client", "took_part", "refused"])


def plot_records(records: Sequence[Record], name: str, against: str, axes: Axes | None) -> Axes:
    """Draw the primary metric against rounds, or against what was spent by then.

    Raises:
        UsageError: if matplotlib is not installed, or there is nothing to draw.
    """
    one_of("plot", ("round", *_COSTS, "simulated"), against=against)
    label, spent = _positions(records, against)
    points = [(at, record.score) for at, record in zip(spent, records, strict=True) if record.score is not None]
    if not points:
        raise UsageError("there is nothing to draw: no round was evaluated")
    if axes is None:
        axes = _new_axes(whole=against == "round")
    axes.plot(
        [at for at, _ in points], [score for _, score in points], marker="." if len(points) < 40 else "", label=name
    )
    axes.set_xlabel(label)
    axes.set_ylabel(metric_title(records[-1].primary))
    axes.grid(alpha=0.3)
    axes.legend()
    return axes


def _positions(records: Sequence[Record], against: str) -> tuple[str, list[float]]:
    """The axis' name, and where each round is on it."""
    if against == "round":
        return "round", [float(record.round) for record in records]
    if against != "simulated":
        label, of = _COSTS[against]
        return label, list(accumulate(of(record) for record in records))
    if any(record.simulated_seconds is None for record in records):
        raise UsageError("there is no simulated time without a fleet: Federation(…, fleet='phone*4')")
    return "simulated hours", [(record.simulated_seconds or 0.0) / 3600 for record in records]


def _new_axes(whole: bool) -> Axes:
    """Axes of a figure of their own, as pyplot makes them: notebooks show it, and `plt.show()` does.

    Where x counts what is `whole`, such as rounds, only whole numbers are marked.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise missing("matplotlib", "a plot needs") from None
    _, axes = pyplot.subplots(figsize=(5.0, 3.2), layout="constrained")
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    return axes
