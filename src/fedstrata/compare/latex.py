"""A comparison as a LaTeX table: booktabs, the best in bold, and a mark where it is better by more than chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.compare.show import OWN_MODELS, columns_of, measured_columns, primary_title, remarks, settings_text
from fedstrata.compare.table import Comparison, ComparisonRow
from fedstrata.core.citation import escape_latex
from fedstrata.report.significance import LEVEL, holm, paired_p

MARK = r"$^{\dagger}$"
LEFT_OUT = frozenset({"seeds", "best", "seconds"})
"""Columns that papers do not have; the caption names the seeds."""


@dataclass(frozen=True)
class Contest:
    """Rows that can be compared: under the same settings, and all of the global model or all of clients' own.

    Args:
        rows: all of them; references are there, and do not compete.
        best: the one with the best mean; None if fewer than two have one.
        p: method → p of the best one's lead, after Holm's correction; those that could be tested.
    """

    rows: Sequence[ComparisonRow]
    best: ComparisonRow | None
    p: Mapping[str, float]


def contests(comparison: Comparison) -> list[Contest]:
    """All of them, in the table's order."""
    groups: dict[tuple[str, bool], list[ComparisonRow]] = {}
    for row in comparison.rows:
        groups.setdefault((row.run.setting, row.is_own), []).append(row)
    return [_decide(rows) for rows in groups.values()]


def _decide(rows: Sequence[ComparisonRow]) -> Contest:
    means = {row.method: found.mean for row in rows if (found := row.of("score")) and not row.run.is_reference}
    if len(means) < 2:
        return Contest(rows, None, {})
    lower = any(result.better == "lower" for row in rows for result in row.results)
    first = (min if lower else max)(means, key=lambda name: means[name])
    by_name = {row.method: row for row in rows}
    best = by_name[first]
    tested = {name: paired_p(best.by_seed(), by_name[name].by_seed()) for name in means if name != first}
    return Contest(rows, best, holm({name: p for name, p in tested.items() if p is not None}))


def latex(comparison: Comparison) -> str:
    """The table, which needs the package booktabs. How to read it, and what was run, stands in the caption."""
    columns = {name: text for name, text in columns_of(comparison).items() if name not in LEFT_OUT}
    measured = measured_columns(comparison)
    found = contests(comparison)
    contest_of = {id(row): contest for contest in found for row in contest.rows}
    body: list[str] = []
    for row, before in zip(comparison.rows, [None, *comparison.rows], strict=False):
        if before is None or before.run.setting != row.run.setting:
            body.append(r"\midrule")
        cells = [_cell(name, text, row, contest_of[id(row)], comparison) for name, text in columns.items()]
        body.append(f"{' & '.join(cells)} \\\\")
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{_caption(comparison, found)}}}",
        r"  \label{tab:comparison}",
        f"  \\begin{{tabular}}{{{''.join('r' if name in measured else 'l' for name in columns)}}}",
        r"    \toprule",
        f"    {' & '.join(map(escape_latex, columns))} \\\\",
        *(f"    {line}" for line in body),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _cell(
    name: str, text: Callable[[ComparisonRow], str], row: ComparisonRow, contest: Contest, comparison: Comparison
) -> str:
    """A cell; of the score, the best in bold, and what it beats by more than chance with a mark."""
    shown = escape_latex(text(row))
    if name not in (primary_title(comparison), OWN_MODELS) or text(row) == "–":
        return shown
    if row is contest.best:
        return f"\\textbf{{{shown}}}"
    return shown + (MARK if contest.p.get(row.method, 1.0) < LEVEL else "")


def _caption(comparison: Comparison, found: Sequence[Contest]) -> str:
    how, *notes = remarks(comparison)
    others = " among the methods that compete with it" if comparison.has_gap else ""
    told = [f"bold: the best mean{others}"]
    if any(contest.p for contest in found):
        told.append(f"\\dag: worse than it (paired t-test over the seeds, Holm's correction, p < {LEVEL:g})")
    else:
        told.append("no test: it takes two seeds that two methods have in common")
    mark = escape_latex("\\dag")
    sentences = [settings_text(comparison), how, "; ".join(told), *notes]
    text = ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
    return escape_latex(text).replace(mark, MARK) + "."
