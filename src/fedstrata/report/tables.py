"""Tables of a page: results, costs, configuration and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.core.text import percent, plural
from fedstrata.report.formatting import NONE, flops, known, listed, mean, seconds, sized, spread, text
from fedstrata.report.run_groups import PALETTE, Line, differing
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Costs


def swatch(line: int) -> str:
    """A spot of a line's colour."""
    return f'<span class="swatch" style="background:var(--line{line % len(PALETTE)})"></span>'


@dataclass(frozen=True)
class HtmlTable:
    """Rows of plain text; the first column names a row.

    Args:
        caption: what it shows.
        head: of the columns.
        rows: as many cells each.
        lines: the line that each row belongs to, for its colour; empty for none.
        words: columns that hold words, which stand left.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...] = ()
    words: frozenset[int] = frozenset({0})

    def html(self) -> str:
        """With a caption, and scopes for those who hear it."""
        head = "".join(f'<th scope="col"{self._aligned(c)}>{text(name)}</th>' for c, name in enumerate(self.head))
        body = "".join(self._row(at, row) for at, row in enumerate(self.rows))
        table = f"<table><caption>{text(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<div class="table"><div class="scroll" tabindex="0">{table}</table></div></div>'

    def _row(self, at: int, row: Sequence[str]) -> str:
        mark = swatch(self.lines[at]) if self.lines else ""
        cells = "".join(f"<td{self._aligned(c)}>{text(cell)}</td>" for c, cell in enumerate(row[1:], 1))
        return f'<tr><th scope="row"><span class="named">{mark}<span>{text(row[0])}</span></span></th>{cells}</tr>'

    def _aligned(self, column: int) -> str:
        return "" if column in self.words else ' class="n"'


def _trimmed(table: HtmlTable) -> HtmlTable:
    """Without columns that say nothing."""
    keep = [c for c in range(len(table.head)) if not c or any(row[c] != NONE for row in table.rows)]
    return HtmlTable(
        table.caption,
        tuple(table.head[c] for c in keep),
        tuple(tuple(row[c] for c in keep) for row in table.rows),
        table.lines,
        frozenset(at for at, c in enumerate(keep) if c in table.words),
    )


def buffers(run: SavedRun) -> str:
    """What happens to running statistics."""
    return str(run.summary.get("buffers") or run.config.get("buffers") or NONE)


def diverged(run: SavedRun) -> bool:
    """True if training left the finite numbers."""
    return run.summary.get("diverged") is not None


def sound(line: Line) -> list[SavedRun]:
    """The runs whose accuracies count: not those that diverged."""
    return [run for run in line.runs if not diverged(run)]


def _seeds(line: Line) -> str:
    """'3 seeds', and '2 of 3 seeds' where one diverged."""
    every, held = plural(len(line.runs), "seed"), len(sound(line))
    return every if held == len(line.runs) else f"{held} of {every}"


def final(run: SavedRun) -> float | None:
    """The accuracy of the last evaluation."""
    return next((found for r in reversed(run.records) for found in known([r.accuracy])), None)


def best(run: SavedRun) -> tuple[float, int] | None:
    """The best accuracy, and its round."""
    return max(((found, -r.round) for r in run.records for found in known([r.accuracy])), default=None)


def state(run: SavedRun) -> str:
    """How far a run is."""
    planned = run.config.get("rounds", NONE)
    if diverged(run):
        return f"diverged after round {len(run.records)}"
    if run.summary:
        return "finished"
    return f"round {len(run.records)} of {planned}" if run.records else "not begun"


def results(lines: Sequence[Line]) -> HtmlTable:
    """What came out, a row for each line."""
    return _trimmed(
        HtmlTable(
            "Results" + (", mean ± standard deviation over seeds" if any(len(x.runs) > 1 for x in lines) else ""),
            ("method", "buffers", "accuracy", "best", "in round", "rounds to target", "rounds", "seeds", "state"),
            tuple(map(_result, lines)),
            tuple(line.index for line in lines),
            frozenset({0, 1, 8}),
        )
    )


def _result(line: Line) -> tuple[str, ...]:
    ended = sound(line)
    tops = [top for run in ended if (top := best(run))]
    reached = known(run.summary.get("rounds_to_target") for run in ended)
    return (
        line.name,
        listed(list(dict.fromkeys(map(buffers, line.runs)))),
        spread(known(map(final, ended))) + (f", {_seeds(line)}" if tops and len(ended) < len(line.runs) else ""),
        spread([accuracy for accuracy, _ in tops]),
        listed([-at for _, at in tops]) if tops else NONE,
        listed([f"{at:g}" for at in reached]) if reached else NONE,
        str(line.rounds),
        listed(line.seeds),
        listed(list(dict.fromkeys(map(state, line.runs)))),
    )


def costs(lines: Sequence[Line]) -> HtmlTable:
    """What it cost, a row for each line: totals of a run, mean over seeds."""
    several = any(len(line.runs) > 1 for line in lines)
    return _trimmed(
        HtmlTable(
            "Costs of a run" + (", mean over seeds" if several else ""),
            ("method", "up", "down", "beside the model, up", "computed", "steps", "time", "memory", "probes"),
            tuple(map(_cost, lines)),
            tuple(line.index for line in lines),
            frozenset({0, 3}),
        )
    )


def _cost(line: Line) -> tuple[str, ...]:
    each = [Costs.of(run.records) for run in line.runs if run.records]
    if not each:
        return (line.name, *[NONE] * 8)
    beside: Counter[str] = Counter()
    for cost in each:
        beside.update(cost.slots_up)
    steps = mean(cost.steps for cost in each)
    spent = [sum(known(value for row in run.probes for value in _spent(row))) for run in line.runs if run.probes]
    return (
        line.name,
        sized(mean(cost.bytes_up for cost in each)),
        sized(mean(cost.bytes_down for cost in each)),
        ", ".join(f"{name} {sized(size / len(each))}" for name, size in beside.items()) or NONE,
        flops(mean(cost.flops for cost in each)),
        NONE if steps is None else f"{steps:,.0f}",
        seconds(mean(cost.seconds for cost in each)),
        sized(max(cost.memory for cost in each)),
        seconds(mean(spent)),
    )


def _spent(row: Any) -> list[Any]:
    found = row.get("seconds")
    return list(found.values()) if isinstance(found, dict) else []


def probe_seconds(lines: Sequence[Line]) -> HtmlTable | None:
    """What each probe took, a row for each line; None without probes."""
    names = list(
        dict.fromkeys(n for x in lines for run in x.runs for row in run.probes for n in row.get("seconds", {}))
    )
    if not names:
        return None
    rows = [(line.name, *(_probe_mean(line, name) for name in names)) for line in lines]
    caption = "Seconds of a probe, mean over probed rounds"
    return HtmlTable(caption, ("method", *names), tuple(rows), tuple(line.index for line in lines))


def _probe_mean(line: Line, name: str) -> str:
    found = mean(row.get("seconds", {}).get(name) for run in line.runs for row in run.probes)
    return NONE if found is None else f"{found:.3g}"


_PRIVATE = frozenset({"seed", "data_dir"})
"""Settings that a table of all leaves out: seeds stand elsewhere, and a path on one machine is nobody else's."""


def configuration(lines: Sequence[Line]) -> HtmlTable:
    """All settings: those that are the same once, those that differ by line."""
    firsts, every = [line.runs[0] for line in lines], [run for line in lines for run in line.runs]
    unlike = set(differing(firsts))
    fields = dict.fromkeys(field for run in every for field in run.config if field not in _PRIVATE)
    if not unlike:
        same = tuple((field, _shown(every, field)) for field in fields)
        return HtmlTable("Configuration", ("setting", "value"), same, words=frozenset({0, 1}))
    rows: list[tuple[str, ...]] = [
        (field, *(str(run.config.get(field, NONE)) for run in firsts))
        if field in unlike
        else (field, _shown(every, field), *[""] * (len(firsts) - 1))
        for field in fields
    ]
    rows.sort(key=lambda row: row[0] not in unlike)
    head = ("setting", *(line.label for line in lines))
    return HtmlTable("Configuration; what differs is first", head, tuple(rows), words=frozenset(range(len(head))))


def _shown(runs: Sequence[SavedRun], field: str) -> str:
    """A setting that changes no result may differ without being told apart."""
    return listed(list(dict.fromkeys(str(run.config.get(field, NONE)) for run in runs)))


def versions(lines: Sequence[Line]) -> HtmlTable | None:
    """What made the runs; None for runs that do not say."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        for run in line.runs:
            for name, version in run.versions.items():
                found.setdefault(name, {})[str(version)] = None
    rows = tuple((name, listed(list(told))) for name, told in found.items())
    return HtmlTable("Versions", ("of", "version"), rows, words=frozenset({0, 1})) if rows else None


def notes(lines: Sequence[Line]) -> list[str]:
    """What a reader of the results must know, each once."""
    found = (note for line in lines for run in line.runs for note in run.summary.get("notes") or [])
    return list(dict.fromkeys(map(str, found)))


def tiles(lines: Sequence[Line]) -> list[tuple[str, str, str]]:
    """The few numbers that stand first: name, value, and a word on it."""
    every = [line for line in lines if line.rounds]
    if not every:
        return [("rounds", "none yet", "")]
    means = [(m, line) for line in every if (m := mean(map(final, sound(line)))) is not None]
    top, winner = max(means, key=lambda pair: pair[0], default=(None, every[0]))
    cost = [Costs.of(run.records) for run in winner.runs if run.records]
    first = ("best final accuracy", percent(top), winner.label if means else "")
    if len(lines) == 1:
        first = ("accuracy", percent(top), "")
    if len(lines) == 1 and (tops := known(b[0] for run in sound(winner) if (b := best(run)))):
        first = (*first[:2], f"at best {percent(max(tops))}")
    return [
        first,
        ("rounds", f"{winner.rounds:,}", _seeds(winner)),
        ("sent", sized(mean(c.bytes_up + c.bytes_down for c in cost)), "up and down"),
        ("computed", flops(mean(c.flops for c in cost)), "by all clients"),
        ("time", seconds(mean(c.seconds for c in cost)), "of a run"),
    ]
