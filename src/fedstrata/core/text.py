"""Numbers as people read them: in a terminal, in a table, on a page."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1234567 → '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def flops_text(count: float) -> str:
    """Floating-point operations with a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} PFLOP"


def time_unit(seconds: float) -> tuple[int, str, str]:
    """(its seconds, its name, its sign) of the unit in which a time is best told."""
    for size, name, sign in ((3600, "hours", "h"), (60, "minutes", "min")):
        if seconds >= 1.5 * size:
            return size, name, sign
    return 1, "seconds", "s"


def simulated_text(seconds: float) -> str:
    """Simulated time in its unit: 30.5 → '30.5 s', 9000 → '2.5 h'."""
    size, _, sign = time_unit(seconds)
    return f"{seconds / size:{',.1f' if size > 1 else '.3g'}} {sign}"


def percent(value: float | None) -> str:
    """0.9137 → '91.37 %', and a dash for None."""
    return "–" if value is None else f"{100 * value:.2f} %"


def number(value: float | None) -> str:
    """Three digits after the point, and a dash for None."""
    return "–" if value is None else f"{value:.3f}"


def plural(count: int, word: str) -> str:
    """'1 round', '20 rounds'."""
    return f"{count:,} {word}{'s' * (count != 1)}"


SHARES = frozenset({"accuracy", "balanced_accuracy", "f1", "auroc", "average_precision", "miou", "dice"})
"""Metrics between 0 and 1, which are written in percent."""
TITLES = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "dice": "Dice",
    "f1": "F1",
    "mae": "MAE",
    "miou": "mIoU",
    "r2": "R²",
    "rmse": "RMSE",
}


def metric_title(name: str) -> str:
    """A metric's name as it is written."""
    return TITLES.get(name, name.replace("_", " "))


def metric_text(name: str, value: float | None) -> str:
    """A metric's value: shares in percent, others with four digits; a dash for None."""
    if name in SHARES or value is None:
        return percent(value)
    return f"{value:.4g}"


def metric_spread(name: str, mean: float, deviation: float | None) -> str:
    """A metric's mean ± standard deviation, of shares in percent and without the sign."""
    factor, form = (100, ".2f") if name in SHARES else (1, ".4g")
    return f"{factor * mean:{form}}" + ("" if deviation is None else f" ± {factor * deviation:{form}}")
