"""Tables of a page: results, costs, configuration and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.core.text import metric_title, plural, simulated_text
from fedstrata.diagnosis.evidence import finite_numbers
from fedstrata.report.formatting import (
    NONE,
    bytes_or_dash,
    comma_list,
    duration_text,
    escape,
    flops_or_dash,
    mean,
    spread,
)
from fedstrata.report.run_groups import (
    PALETTE,
    RunGroup,
    differing_fields,
    metrics_of,
    primary_of,
)
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Costs, best_of


def swatch(index: int) -> str:
    """A spot of a group's colour."""
    return f'<span class="swatch" style="background:var(--line{index % len(PALETTE)})"></span>'


LONG = 14
"""Rows from which on a table scrolls by itself."""


@dataclass(frozen=True)
class HtmlTable:
    """Rows of plain text; the first column names a row.

    Args:
        caption: what it shows.
        head: of the columns.
        rows: as many cells each.
        groups: the index of the group of runs that each row belongs to, for its colour; empty for none.
        words: columns that hold words, which are aligned to the left.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    groups: tuple[int, ...] = ()
    words: frozenset[int] = frozenset({0})

    def html(self) -> str:
        """The table as HTML, with a caption, and with scopes for screen readers."""
        head = "".join(f'<th scope="col"{self._cell_class(c)}>{escape(name)}</th>' for c, name in enumerate(self.head))
        body = "".join(self._row(at, row) for at, row in enumerate(self.rows))
        table = f"<table><caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        label = f"Copy as Markdown: {escape(self.caption)}"
        copy = f'<button type="button" class="copy" aria-label="{label}">Copy Markdown</button>'
        size = "scroll long" if len(self.rows) > LONG else "scroll"
        place = f'<div class="{size}" tabindex="0" role="group" aria-label="{escape(self.caption)}">'
        return f'<div class="table">{place}{table}</table></div>{copy}</div>'

    def without(self, *names: str) -> HtmlTable | None:
        """The table without these columns, and without empty ones; None if it then holds nothing but names."""
        keep = [at for at, name in enumerate(self.head) if not at or name not in names]
        found = drop_empty_columns(self._only(keep))
        return found if len(found.head) > 1 else None

    def _only(self, keep: Sequence[int]) -> HtmlTable:
        words = frozenset(at for at, column in enumerate(keep) if column in self.words)
        rows = tuple(tuple(row[column] for column in keep) for row in self.rows)
        return HtmlTable(self.caption, tuple(self.head[column] for column in keep), rows, self.groups, words)

    def _row(self, at: int, row: Sequence[str]) -> str:
        mark = swatch(self.groups[at]) if self.groups else ""
        cells = "".join(f"<td{self._cell_class(c)}>{escape(cell)}</td>" for c, cell in enumerate(row[1:], 1))
        return f'<tr><th scope="row"><span class="named">{mark}<span>{escape(row[0])}</span></span></th>{cells}</tr>'

    def _cell_class(self, column: int) -> str:
        return "" if column in self.words else ' class="n"'


def drop_empty_columns(table: HtmlTable) -> HtmlTable:
    """The table without columns that hold nothing but dashes."""
    return table._only([at for at in range(len(table.head)) if not at or any(row[at] != NONE for row in table.rows)])


def judges_both(groups: Sequence[RunGroup]) -> bool:
    """True if some methods are judged by the global model, and others by clients' own, which have columns apart."""
    return len({group.is_own for group in groups}) > 1


def kind_titles(groups: Sequence[RunGroup], title: str) -> tuple[str, ...]:
    """The columns of a score: one, or two that never hold a number for the same method."""
    return (title, f"{title}, own models") if judges_both(groups) else (title,)


def kind_cells(groups: Sequence[RunGroup], group: RunGroup, text: str) -> tuple[str, ...]:
    """A method's cells under them."""
    if not judges_both(groups):
        return (text,)
    return (NONE, text) if group.is_own else (text, NONE)


def buffers(run: SavedRun) -> str:
    """What happens to running statistics."""
    return str(run.summary.get("buffers") or run.config.get("buffers") or NONE)


def has_diverged(run: SavedRun) -> bool:
    """True if training left the finite numbers."""
    return run.summary.get("diverged") is not None


def sound_runs(group: RunGroup) -> list[SavedRun]:
    """The runs whose accuracies count: not those that diverged."""
    return [run for run in group.runs if not has_diverged(run)]


def counted_seeds(group: RunGroup) -> str:
    """'3 seeds', and '2 of 3 seeds' where one diverged."""
    every, held = plural(len(group.runs), "seed"), len(sound_runs(group))
    return every if held == len(group.runs) else f"{held} of {every}"


def seeds_text(group: RunGroup) -> str:
    """'1 seed (seed 0)', '3 seeds (0, 1, 2)'."""
    which = f"seed {group.seeds[0]}" if len(group.runs) == 1 else comma_list(group.seeds)
    return f"{counted_seeds(group)} ({which})"


def final_score(run: SavedRun) -> float | None:
    """The primary metric of the last evaluation."""
    return next((found for r in reversed(run.records) for found in finite_numbers([r.score])), None)


def final_metric(run: SavedRun, name: str) -> float | None:
    """One of the metrics, of the last evaluation."""
    return next((f for r in reversed(run.records) for f in finite_numbers([r.all_metrics.get(name)])), None)


def _over_clients(run: SavedRun) -> dict[str, float | None]:
    """The columns of `OVER_CLIENTS`, of the last evaluation in which clients were judged for themselves."""
    last = next((r for r in reversed(run.records) if r.fairness is not None or r.newcomers), None)
    if last is None:
        return dict.fromkeys(OVER_CLIENTS)
    shown, apart = last.fairness, last.global_fairness
    own = shown if apart is not None or run.is_own else None
    whole = apart or (None if own is shown else shown)
    edges = [(None,) * 3 if found is None else (found.mean, found.worst, found.std) for found in (whole, own)]
    late = (last.newcomers.get("global"), last.newcomers.get("own"))
    return dict(zip(OVER_CLIENTS, (*edges[0], *edges[1], *late), strict=True))


def best_score(run: SavedRun) -> tuple[float, int] | None:
    """The best primary metric, and its round."""
    best = best_of([r for r in run.records if finite_numbers([r.score])])
    return None if best is None or best.score is None else (best.score, best.round)


def state_text(run: SavedRun) -> str:
    """How far a run is."""
    planned = run.config.get("rounds", NONE)
    if has_diverged(run):
        return f"diverged after round {len(run.records)}"
    if run.summary:
        return "finished"
    return f"round {len(run.records)} of {planned}" if run.records else "not begun"


OVER_CLIENTS = (
    "global model, by client",
    "global model, worst client",
    "global model, spread over clients",
    "own models, by client",
    "own models, worst client",
    "own models, spread over clients",
    "newcomers: global model",
    "newcomers: own models",
)
"""Judged on each client's own test examples; newcomers took part only after the last round."""
_AFTER_BEST = ("in round", "rounds to target", "simulated to target", "rounds", "seeds", "state")


def results(groups: Sequence[RunGroup]) -> HtmlTable:
    """The results, one row per group and one column per metric."""
    metrics = metrics_of(groups)
    titles = [title for name in metrics for title in kind_titles(groups, metric_title(name))]
    head = ("method", "buffers", *titles, *OVER_CLIENTS, *kind_titles(groups, "best"), *_AFTER_BEST)
    return drop_empty_columns(
        HtmlTable(
            "Results" + (", mean ± standard deviation over seeds" if any(len(x.runs) > 1 for x in groups) else ""),
            head,
            tuple(_result_row(groups, group, metrics) for group in groups),
            tuple(group.index for group in groups),
            frozenset({0, 1, len(head) - 1}),
        )
    )


def over_clients(groups: Sequence[RunGroup]) -> HtmlTable | None:
    """Scores on clients' own test examples: of the global model and of clients' own, newcomers apart; None without."""
    found = results(groups)
    held = found.without(*(name for name in found.head if name not in OVER_CLIENTS))
    caption = "On clients' own test examples, after the last evaluated round"
    return None if held is None else replace(held, caption=caption)


def _result_row(groups: Sequence[RunGroup], group: RunGroup, metrics: Sequence[str]) -> tuple[str, ...]:
    ended, primary = sound_runs(group), primary_of([group])
    tops = [top for run in ended if (top := best_score(run))]
    over = [_over_clients(run) for run in ended]
    finals = [spread(finite_numbers(final_metric(run, name) for run in ended), name) for name in metrics]
    finals[0] += f", {counted_seeds(group)}" if tops and len(ended) < len(group.runs) else ""
    reached = finite_numbers(run.summary.get("rounds_to_target") for run in ended)
    times = finite_numbers(run.summary.get("simulated_seconds_to_target") for run in ended)
    return (
        group.name,
        comma_list(list(dict.fromkeys(map(buffers, group.runs)))),
        *(cell for text in finals for cell in kind_cells(groups, group, text)),
        *(spread(finite_numbers(one[name] for one in over), primary) for name in OVER_CLIENTS),
        *kind_cells(groups, group, spread([score for score, _ in tops], primary)),
        comma_list([at for _, at in tops]) if tops else NONE,
        comma_list([f"{at:g}" for at in reached]) if reached else NONE,
        comma_list([simulated_text(at) for at in times]) if times else NONE,
        str(group.rounds),
        comma_list(group.seeds),
        comma_list(list(dict.fromkeys(map(state_text, group.runs)))),
    )


def costs(groups: Sequence[RunGroup]) -> HtmlTable:
    """The costs, one row per group: totals of a run, mean over seeds."""
    several = any(len(group.runs) > 1 for group in groups)
    return drop_empty_columns(
        HtmlTable(
            "Costs of a run" + (", mean over seeds" if several else ""),
            ("method", "up", "down", "beside the model, up", "computed", "steps", "time", *_AFTER_TIME),
            tuple(map(_cost_row, groups)),
            tuple(group.index for group in groups),
            frozenset({0, 3}),
        )
    )


_AFTER_TIME = ("simulated time", "memory", "probes")


def _cost_row(group: RunGroup) -> tuple[str, ...]:
    each = [Costs.of(run.records) for run in group.runs if run.records]
    if not each:
        return (group.name, *[NONE] * 9)
    beside: Counter[str] = Counter()
    for cost in each:
        beside.update(cost.slots_up)
    steps = mean(cost.steps for cost in each)
    ended = mean(finite_numbers(run.records[-1].simulated_seconds for run in group.runs if run.records))
    spent = [
        sum(finite_numbers(value for row in run.probes for value in _probe_times(row)))
        for run in group.runs
        if run.probes
    ]
    return (
        group.name,
        bytes_or_dash(mean(cost.bytes_up for cost in each)),
        bytes_or_dash(mean(cost.bytes_down for cost in each)),
        ", ".join(f"{name} {bytes_or_dash(size / len(each))}" for name, size in beside.items()) or NONE,
        flops_or_dash(mean(cost.flops for cost in each)),
        NONE if steps is None else f"{steps:,.0f}",
        duration_text(mean(cost.seconds for cost in each)),
        NONE if ended is None else simulated_text(ended),
        bytes_or_dash(max(cost.memory for cost in each)),
        duration_text(mean(spent)),
    )


def _probe_times(row: Any) -> list[Any]:
    found = row.get("seconds")
    return list(found.values()) if isinstance(found, dict) else []


def probe_seconds(groups: Sequence[RunGroup]) -> HtmlTable | None:
    """How long each probe took, one row per group; None without probes."""
    names = list(
        dict.fromkeys(n for x in groups for run in x.runs for row in run.probes for n in row.get("seconds", {}))
    )
    if not names:
        return None
    rows = [(group.name, *(_probe_mean(group, name) for name in names)) for group in groups]
    caption = "Seconds of a probe, mean over probed rounds"
    return HtmlTable(caption, ("method", *names), tuple(rows), tuple(group.index for group in groups))


def _probe_mean(group: RunGroup, name: str) -> str:
    found = mean(row.get("seconds", {}).get(name) for run in group.runs for row in run.probes)
    return NONE if found is None else f"{found:.3g}"


_PRIVATE = frozenset({"seed", "data_dir"})
"""Settings that the table leaves out: seeds are shown elsewhere, and a path on one machine means nothing on another."""


def configuration(groups: Sequence[RunGroup]) -> HtmlTable:
    """All settings: those that are equal once, those that differ per group."""
    firsts, every = [group.runs[0] for group in groups], [run for group in groups for run in group.runs]
    unlike = set(differing_fields(firsts))
    fields = dict.fromkeys(field for run in every for field in run.config if field not in _PRIVATE)
    if not unlike:
        same = tuple((field, _setting_values(every, field)) for field in fields)
        return HtmlTable("Configuration", ("setting", "value"), same, words=frozenset({0, 1}))
    rows: list[tuple[str, ...]] = [
        (field, *(str(run.config.get(field, NONE)) for run in firsts))
        if field in unlike
        else (field, _setting_values(every, field), *[""] * (len(firsts) - 1))
        for field in fields
    ]
    rows.sort(key=lambda row: row[0] not in unlike)
    head = ("setting", *(group.label for group in groups))
    return HtmlTable("Configuration; what differs is first", head, tuple(rows), words=frozenset(range(len(head))))


def _setting_values(runs: Sequence[SavedRun], field: str) -> str:
    """All values of a setting: one that changes no result may differ within a group."""
    return comma_list(list(dict.fromkeys(str(run.config.get(field, NONE)) for run in runs)))


def versions(groups: Sequence[RunGroup]) -> HtmlTable | None:
    """The versions of the software that made the runs; None if the runs do not say."""
    found: dict[str, dict[str, None]] = {}
    for group in groups:
        for run in group.runs:
            for name, version in run.versions.items():
                found.setdefault(name, {})[str(version)] = None
    rows = tuple((name, comma_list(list(several))) for name, several in found.items())
    return HtmlTable("Versions", ("of", "version"), rows, words=frozenset({0, 1})) if rows else None


def notes(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader of the results must know, each once."""
    found = (note for group in groups for run in group.runs for note in run.summary.get("notes") or [])
    return list(dict.fromkeys(map(str, found)))
