"""A comparison as a LaTeX table: booktabs, the best in bold, and a mark where it is better by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.compare.show import OWN_MODELS, columns_of, measured_columns, primary_title, remarks, settings_text
from fedstrata.compare.table import Comparison, ComparisonRow, gap
from fedstrata.core.citation import escape_latex
from fedstrata.report.significance import LEVEL, ROUNDING, holm, paired_p

MARK = r"$^{\dagger}$"
LEFT_OUT = frozenset({"seeds", "best", "seconds"})
"""Columns that papers do not have; the caption names the seeds, unless some row lacks one."""


@dataclass(frozen=True)
class Contest:
    """Rows that can be compared: under the same settings, and all of the global model or all of clients' own.

    Args:
        rows: all of them; references are there, and do not compete.
        best: those with the best mean, of those with the most seeds; none if fewer than two have a mean.
        p: method → p of the best one's lead, after Holm's correction; those that could be tested. 1 without a lead over
            the seeds that both have.
    """

    rows: Sequence[ComparisonRow]
    best: Sequence[ComparisonRow]
    p: Mapping[str, float]


def contests(comparison: Comparison) -> list[Contest]:
    """All of them, in the table's order."""
    groups: dict[tuple[str, bool], list[ComparisonRow]] = {}
    for row in comparison.rows:
        groups.setdefault((row.run.setting, row.is_own), []).append(row)
    return [_decide(rows) for rows in groups.values()]


def _decide(rows: Sequence[ComparisonRow]) -> Contest:
    found = {row.method: score for row in rows if (score := row.of("score")) and not row.run.is_reference}
    if len(found) < 2:
        return Contest(rows, (), {})
    lower = any(result.better == "lower" for row in rows for result in row.results)
    # Whoever diverged where others did not is not the best of all by the seeds that are left of it.
    most = max(score.count for score in found.values())
    means = {name: score.mean for name, score in found.items() if score.count == most}
    first = (min if lower else max)(means, key=lambda name: means[name])
    by_name = {row.method: row for row in rows}
    best = by_name[first]
    even = [by_name[name] for name in means if math.isclose(means[name], means[first], rel_tol=ROUNDING)]
    others = [by_name[name] for name in found if name != first]
    tested = {row.method: p for row in others if (p := paired_p(best.by_seed(), row.by_seed())) is not None}
    leads = {row.method for row in others if (lead := gap(best.by_seed(), row.by_seed())) and lower is (lead.mean < 0)}
    return Contest(rows, even, {name: p if name in leads else 1.0 for name, p in holm(tested).items()})


def latex(comparison: Comparison) -> str:
    """The table, which needs the package booktabs. How to read it, and what was run, stands in the caption."""
    left_out = LEFT_OUT - {"seeds"} if _lacks_seeds(comparison) else LEFT_OUT
    columns = {name: text for name, text in columns_of(comparison).items() if name not in left_out}
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


def _lacks_seeds(comparison: Comparison) -> bool:
    """True if some row is no mean over all seeds, so that rows are not of the same seeds."""
    return any(row.missing_seeds for row in comparison.rows)


def _cell(
    name: str, text: Callable[[ComparisonRow], str], row: ComparisonRow, contest: Contest, comparison: Comparison
) -> str:
    """A cell; of the score, the best in bold, and what it beats by more than chance with a mark."""
    shown = escape_latex(text(row))
    if name not in (primary_title(comparison), OWN_MODELS) or text(row) == "–":
        return shown
    if any(row is best for best in contest.best):
        return f"\\textbf{{{shown}}}"
    return shown + (MARK if contest.p.get(row.method, 1.0) < LEVEL else "")


def _caption(comparison: Comparison, found: Sequence[Contest]) -> str:
    how, *notes = remarks(comparison)
    others = " among the methods that compete with it" if comparison.has_gap else ""
    counts = {score.count for row in comparison.rows if (score := row.of("score"))}
    most = ", of those with the most seeds" * (len(counts) > 1)
    told = [f"bold: the best mean{others}{most}"]
    if any(contest.p for contest in found):
        told.append(f"\\dag: worse than it (paired t-test over the seeds, Holm's correction, p < {LEVEL:g})")
    else:
        told.append("no test: it takes two seeds that two methods have in common")
    mark = escape_latex("\\dag")
    sentences = [settings_text(comparison), how, "; ".join(told), *notes]
    text = ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
    return escape_latex(text).replace(mark, MARK) + "."
