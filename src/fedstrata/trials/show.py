"""What was tried, as a table for a terminal, and in sentences what helped, what did not, and what is not decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedstrata.core.text import SHARES, metric_title, plural
from fedstrata.runs.tried import HELPS, HURTS, NO_GAIN, UNDECIDED, Gain, Tried

HEADER = ("tried", "gained", "90 % interval", "bytes", "verdict")


def tried_text(tried: Tried) -> str:
    """The table and what it says."""
    return "\n".join(_lines(tried))


def _lines(tried: Tried) -> Iterator[str]:
    unit = "points" if tried.metric in SHARES else metric_title(tried.metric)
    known = [score for score in tried.control.scores if score is not None]
    itself = "no result" if not known else _score_text(tried.metric, sum(known) / len(known))
    seeds = ", ".join(map(str, tried.seeds))
    yield (
        f"Tried for {plural(tried.rounds, 'round')} with seed{'s' * (len(tried.seeds) > 1)} {seeds}; "
        f"the run as it is: {itself}. Gains are in {unit}, seed by seed against it."
    )
    yield ""
    rows: list[tuple[str, Gain, str]] = [(reference.name, reference, "reference") for reference in tried.references]
    rows += [(remedy.change, remedy, remedy.verdict) for remedy in tried.remedies]
    cells = [HEADER, *((name, *_gain_cells(tried.metric, gain), word) for name, gain, word in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(HEADER))]
    for row in cells:
        yield "  ".join(
            cell.rjust(width) if place in (1, 2, 3) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
    yield ""
    yield from _sentences(tried)
    yield from (f"{note[:1].upper()}{note[1:]}." for note in tried.notes)


def _sentences(tried: Tried) -> Iterator[str]:
    """Commands of what helps, the best first, and the names of the rest."""
    named: dict[str, list[str]] = {}
    ran = [remedy for remedy in tried.remedies if remedy.gained is not None]
    for remedy in sorted(ran, key=lambda one: -(one.gained or 0.0)):
        named.setdefault(remedy.verdict, []).append(remedy.command if remedy.verdict == HELPS else remedy.change)
    for command in named.get(HELPS, ()):
        yield f"Helps: {command}"
    if HELPS not in named:
        yield "Nothing that was tried helps for certain."
    for verdict, words in ((NO_GAIN, "Does not help"), (HURTS, "Hurts"), (UNDECIDED, "Not decided")):
        if verdict in named:
            more = "; more seeds (--try-seeds) or rounds (--try-rounds) may tell" if verdict == UNDECIDED else ""
            yield f"{words}: {'; '.join(named[verdict])}{more}."


def _gain_cells(metric: str, gain: Gain) -> Sequence[str]:
    cost = "–" if gain.cost is None else f"×{gain.cost:.2f}"
    if gain.gained is None:
        return "–", "no result", cost
    if gain.low is None or gain.high is None:
        return points_text(metric, gain.gained), "one seed", cost
    return points_text(metric, gain.gained), interval_text(metric, gain.low, gain.high), cost


def points_text(metric: str, value: float) -> str:
    """+47.2 points of a share, or a number of anything else."""
    return f"{100 * value:+.1f}" if metric in SHARES else f"{value:+.3g}"


def interval_text(metric: str, low: float, high: float) -> str:
    """[+44.4, +49.6]."""
    return f"[{points_text(metric, low)}, {points_text(metric, high)}]"


def _score_text(metric: str, score: float) -> str:
    return f"{100 * score:.1f} %" if metric in SHARES else f"{metric_title(metric)} {score:.4g}"
