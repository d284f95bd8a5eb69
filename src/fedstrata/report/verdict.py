"""What a page opens with: who won at what cost, or what came of one run; in sentences, as tiles and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_text, metric_title, plural, simulated_text
from fedstrata.diagnosis.evidence import finite_numbers
from fedstrata.report.formatting import (
    NONE,
    bytes_or_dash,
    comma_list,
    duration_text,
    flops_or_dash,
    mean,
    spread,
)
from fedstrata.report.run_groups import RunGroup, is_lower_better, judged_alike, primary_of
from fedstrata.report.tables import (
    HtmlTable,
    best_score,
    counted_seeds,
    final_score,
    has_diverged,
    kind_cells,
    kind_titles,
    seeds_text,
    sound_runs,
    state_text,
)
from fedstrata.runs.records import Costs

PROBLEM = (
    "dataset",
    "partition",
    "clients",
    "task",
    "holdout",
    "validation",
    "newcomers",
    "without",
    "standardise",
    "faults",
)
"""Settings that say what is learnt, and from whom: only methods for which they are the same are ranked."""
SAME = 1.005
"""Amounts are the same up to this factor: they are told in three digits."""


@dataclass(frozen=True)
class Entrant:
    """A method in a ranking.

    Args:
        group: its runs.
        score: the final primary metric, mean over the seeds that did not diverge; None without any.
        sent: bytes of a run, up and down.
        computed: floating-point operations of a run.
    """

    group: RunGroup
    score: float | None
    sent: float
    computed: float

    @staticmethod
    def of(group: RunGroup) -> Entrant:
        """The entrant that a group of runs is."""
        spent = [Costs.of(run.records) for run in group.runs if run.records]
        sent = mean(cost.bytes_up + cost.bytes_down for cost in spent) or 0.0
        score = mean(map(final_score, sound_runs(group)))
        return Entrant(group, score, sent, mean(cost.flops for cost in spent) or 0.0)


def rankings(groups: Sequence[RunGroup]) -> list[list[Entrant]]:
    """The methods of each problem, the best first; those without a score last, and in the order given.

    Those that are judged by clients' own models are ranked among themselves, after the others.
    """
    found: dict[tuple[bool, str], list[Entrant]] = {}
    for group in sorted(groups, key=lambda group: group.is_own):
        found.setdefault((group.is_own, _problem(group)), []).append(Entrant.of(group))
    sign = 1 if is_lower_better(groups) else -1
    return [sorted(held, key=lambda e: (e.score is None, sign * (e.score or 0.0))) for held in found.values()]


def _problem(group: RunGroup) -> str:
    return ", ".join(f"{n} = {group.runs[0].config[n]}" for n in PROBLEM if n in group.runs[0].config)


def verdict(groups: Sequence[RunGroup]) -> list[str]:
    """What came of the runs, in a few sentences, the most important one first."""
    if len(groups) == 1:
        return [_state(groups[0])]
    if not any(group.rounds for group in groups):
        return ["No round has ended yet."]
    if len(judged_alike(groups)) < len(groups):
        return ["These runs are judged by different metrics: there is no best one."]
    contests, problems = rankings(groups), len(set(map(_problem, groups)))
    if problems == 1:
        others = [_winner(held) for held in contests[1:] if len(held) > 1]
        return [*_course(contests[0]), *_remarks(groups), *filter(None, others)]
    told = [sentence for held in contests if (sentence := _winner(held))]
    return [f"Data or faults differ: methods are ranked in each of {problems} settings.", *told, *_remarks(groups)]


def _state(group: RunGroup) -> str:
    states = list(dict.fromkeys(map(state_text, group.runs)))
    told = f"{comma_list(states)}."
    return f"{told[0].upper()}{told[1:]}"


def _remarks(groups: Sequence[RunGroup]) -> Iterator[str]:
    """What makes a ranking preliminary, or its numbers unlike each other."""
    fallen = [group.label for group in groups if not sound_runs(group)]
    if fallen:
        yield f"Diverged: {comma_list(fallen)}."
    partly = [f"{g.label} ({counted_seeds(g)} left)" for g in groups if 0 < len(sound_runs(g)) < len(g.runs)]
    if partly:
        yield f"Diverged with some seeds, which its mean leaves out: {comma_list(partly)}."
    if any(not (run.summary or has_diverged(run)) for group in groups for run in group.runs):
        yield "Not all runs have ended."
    own = [group.label for group in groups if group.is_own]
    if own and len(own) < len(groups):
        yield f"Judged by clients' own models, since the server has no whole one, and ranked apart: {comma_list(own)}."


def _course(held: Sequence[Entrant]) -> Iterator[str]:
    """Who won, how sure that is, at what cost, and what the cheapest and the reference come to."""
    methods = [one for one in held if one.score is not None and not one.group.is_reference]
    if not methods:
        return
    first, rest = methods[0], methods[1:]
    yield _winner(held)
    if rest and first.score != rest[0].score:
        yield _certainty(first.group, rest[0].group)
    if rest:
        yield _price(first, methods)
        cheapest = min(methods, key=lambda one: one.sent)
        if cheapest not in (first, rest[0]) and cheapest.sent * SAME < first.sent:
            yield f"{cheapest.group.label}, which sends least, is {_gap(first, cheapest)} behind."
    for one in held:
        if one.group.is_reference and one.score is not None:
            side = "ahead" if _is_ahead(one, first) else "behind"
            yield f"The reference {one.group.label}, with everybody's data in one place, is {_gap(first, one)} {side}."


def _winner(held: Sequence[Entrant]) -> str:
    """'scaffold is best: 81.67 ± 0.49 % final accuracy, 6.65 points ahead of fedprox.'"""
    methods = [one for one in held if one.score is not None and not one.group.is_reference]
    if not methods:
        return ""
    first, metric = methods[0], primary_of([methods[0].group])
    what = f"{_final(first.group)} final {metric_title(metric)}"
    even = [one.group.label for one in methods if one.score == first.score]
    if len(methods) == 1:
        return f"{first.group.label} ended with {what}."
    if len(even) > 1:
        return f"{' and '.join(even)} are even: {what}."
    return f"{first.group.label} is best: {what}, {_gap(first, methods[1])} ahead of {methods[1].group.label}."


def _final(group: RunGroup) -> str:
    metric = primary_of([group])
    return spread(finite_numbers(map(final_score, sound_runs(group))), metric)


def _gap(one: Entrant, other: Entrant) -> str:
    """The distance of two scores: of shares in points."""
    metric, distance = primary_of([one.group]), abs((one.score or 0.0) - (other.score or 0.0))
    return f"{100 * distance:.2f} points" if metric in SHARES else f"{distance:.4g}"


def _is_ahead(one: Entrant, other: Entrant) -> bool:
    sign = -1 if is_lower_better([one.group]) else 1
    return sign * ((one.score or 0.0) - (other.score or 0.0)) > 0


def _certainty(first: RunGroup, second: RunGroup) -> str:
    """With how many of the seeds that both have the first is ahead."""
    scores = [{run.config.get("seed", 0): final_score(run) for run in sound_runs(group)} for group in (first, second)]
    sign = -1 if is_lower_better([first]) else 1
    pairs = [(a, b) for seed, a in scores[0].items() if a is not None and (b := scores[1].get(seed)) is not None]
    ahead = sum(sign * (a - b) > 0 for a, b in pairs)
    if len(pairs) < 2:
        return "With one seed the order may be chance." if pairs else "They have no seed in common: it may be chance."
    if ahead == len(pairs):
        return f"It is ahead with each of the {len(pairs)} seeds."
    return f"It is ahead with {ahead} of {len(pairs)} seeds: the order may be chance."


def _price(first: Entrant, methods: Sequence[Entrant]) -> str:
    """'It sends 3.0 GB, 1.12 times what fedavg does, and computes 102 TFLOP, no more than any other.'"""
    sent = _beside_others(first, methods, lambda one: one.sent, bytes_text)
    computed = _beside_others(first, methods, lambda one: one.computed, flops_text)
    return f"It sends {sent}, and computes {computed}."


def _beside_others(
    first: Entrant, methods: Sequence[Entrant], amount: Callable[[Entrant], float], text: Callable[[float], str]
) -> str:
    least, own = min(methods, key=amount), amount(first)
    if max(map(amount, methods)) <= SAME * amount(least):
        return f"{text(own)}, as all do"
    if own <= SAME * amount(least):
        return f"{text(own)}, no more than any other"
    if not amount(least):
        return f"{text(own)}, where {least.group.label} needs nothing"
    return f"{text(own)}, {own / amount(least):.3g} times what {least.group.label} does"


def standing(groups: Sequence[RunGroup]) -> HtmlTable:
    """Several methods, the best first: what each reached, how far it is behind, and what it cost."""
    alike = len(judged_alike(groups)) == len(groups)
    held = rankings(groups) if alike else [[Entrant.of(group) for group in groups]]
    metrics = list(dict.fromkeys(primary_of([group]) for group in groups))
    titles = [title for name in metrics for title in kind_titles(groups, metric_title(name))]
    rows = [
        _standing_row(one, _leader(ranked) if alike else None, metrics, groups) for ranked in held for one in ranked
    ]
    several = any(len(group.runs) > 1 for group in groups)
    head = ("method", *titles, *_AFTER_SCORE)
    table = HtmlTable(
        "Final scores and costs of a run" + (", mean ± standard deviation over seeds" if several else ""),
        head,
        tuple(rows),
        tuple(one.group.index for ranked in held for one in ranked),
        frozenset({0, len(head) - 2, len(head) - 1}),
    )
    alike_columns = [name for name in ("rounds", "seeds", "state") if _is_same(table, name, "finished")]
    return table.without(*alike_columns) or table


_AFTER_SCORE = ("behind", "sent", "computed", "simulated time", "time", "rounds", "seeds", "state")


def _is_same(table: HtmlTable, name: str, *untold: str) -> bool:
    """True if a column says the same in every row, which the line above has; of states only the usual one."""
    found = {row[table.head.index(name)] for row in table.rows}
    return len(found) == 1 and (name != "state" or found <= set(untold))


def _leader(ranked: Sequence[Entrant]) -> Entrant | None:
    return next((one for one in ranked if one.score is not None and not one.group.is_reference), None)


def _standing_row(
    one: Entrant, leader: Entrant | None, metrics: Sequence[str], groups: Sequence[RunGroup]
) -> tuple[str, ...]:
    group = one.group
    scores = [_final(group) if name == primary_of([group]) else NONE for name in metrics]
    seconds = mean(Costs.of(run.records).seconds for run in group.runs if run.records)
    simulated = mean(finite_numbers(run.records[-1].simulated_seconds for run in group.runs if run.records))
    return (
        group.name,
        *(cell for text in scores for cell in kind_cells(groups, group, text)),
        _behind(one, leader),
        bytes_text(one.sent),
        flops_text(one.computed),
        NONE if simulated is None else simulated_text(simulated),
        duration_text(seconds),
        f"{group.rounds:,}",
        seeds_text(group),
        comma_list(list(dict.fromkeys(map(state_text, group.runs)))),
    )


def _behind(one: Entrant, leader: Entrant | None) -> str:
    if leader is None or one.score is None:
        return NONE
    if one.group.is_reference:
        return "reference"
    return "best" if one.score == leader.score else _gap(leader, one)


def tiles(group: RunGroup) -> list[tuple[str, str, str]]:
    """One method in a few numbers: name, value, and a remark on it."""
    if not group.rounds:
        return [("rounds", "none yet", "")]
    metric = primary_of([group])
    spent = [Costs.of(run.records) for run in group.runs if run.records]
    up, down = mean(c.bytes_up for c in spent), mean(c.bytes_down for c in spent)
    steps, memory = mean(c.steps for c in spent) or 0, max(c.memory for c in spent)
    simulated = mean(finite_numbers(run.records[-1].simulated_seconds for run in group.runs if run.records))
    found = [
        (metric_title(metric), _final(group), _best_text(group, metric)),
        ("rounds", f"{group.rounds:,}", seeds_text(group)),
        ("sent", bytes_or_dash((up or 0) + (down or 0)), f"{bytes_or_dash(up)} up, {bytes_or_dash(down)} down"),
        ("computed", flops_or_dash(mean(c.flops for c in spent)), f"in {plural(round(steps), 'local step')}"),
        ("time", duration_text(mean(c.seconds for c in spent)), f"{bytes_or_dash(memory)} of memory" if memory else ""),
    ]
    return found + ([] if simulated is None else [("simulated time", simulated_text(simulated), "of the devices")])


def _best_text(group: RunGroup, metric: str) -> str:
    """'at best 72.16 % in round 40', of the best seed."""
    tops = [top for run in sound_runs(group) if (top := best_score(run))]
    if not tops:
        return ""
    score, at = (min if is_lower_better([group]) else max)(tops)
    return f"at best {metric_text(metric, score)} in round {at}"
