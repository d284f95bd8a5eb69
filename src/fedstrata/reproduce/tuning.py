"""The same effort for every method: a learning rate for each, chosen on a seed that is not reported."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Plan, plan, tabulate
from fedstrata.errors import UsageError
from fedstrata.reproduce.parts import Grid, Tuning, figures_by_seed, load_or_compute


@dataclass(frozen=True)
class Rates:
    """The rates that were tried and chosen.

    Args:
        chosen: method → its rate.
        scores: method → rate → what it was chosen by; a rate at which the trial diverged has none.
        tuning: how they were chosen.
    """

    chosen: Mapping[str, float]
    scores: Mapping[str, Mapping[str, float]]
    tuning: str

    def __str__(self) -> str:
        edge = [label for label, rate in self.chosen.items() if rate in self._ends(label)]
        found = ", ".join(f"{label} {rate:g}" for label, rate in self.chosen.items())
        at = f"; at the end of the grid, so a better one may be beyond: {', '.join(edge)}" if edge else ""
        return f"{self.tuning}: {found}{at}"

    def _ends(self, label: str) -> set[float]:
        tried = [float(rate) for rate in self.scores[label]]
        return {min(tried), max(tried)} if len(tried) > 1 else set()


def tuning_plan(part: Grid, free: Mapping[str, Any], out: Path) -> Plan:
    """The trials of a part: every method with every rate.

    Raises:
        UsageError: if the seed of the trials is among those that are reported.
    """
    tuning = _tuning_of(part)
    if tuning.seed in part.seeds:
        raise UsageError(f"seed {tuning.seed} is the one that the part '{part.name}' is tuned on: report others")
    return plan({**part.values, **tuning.fields, **free, "lr": list(tuning.lrs), "seed": [tuning.seed]}, out)


def choose_rates(part: Grid, trials: Plan, out: Path) -> Rates | None:
    """The best rate of each method, kept in a file; None while trials are missing."""
    known = json.dumps(sorted(run.directory.name for run in trials.runs))
    path = out / f"{part.name}-rates-{hashlib.sha256(known.encode()).hexdigest()[:8]}.json"
    if not path.exists():
        found = tabulate(trials)
        if any(row.missing_seeds for row in found.rows):
            return None
        load_or_compute(path, lambda: _compare_rates(_tuning_of(part), found))
    kept = load_or_compute(path, dict)
    return Rates(kept["chosen"], kept["scores"], _tuning_text(_tuning_of(part)))


def _compare_rates(tuning: Tuning, found: Comparison) -> dict[str, Any]:
    """Method → the score of every rate, in the mean over what else the trials vary, and the best rate of each."""
    scores: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(row.method for row in found.rows):
        mine = [row for row in found.rows if row.method == label]
        by_rate = {lr: [_score(row, tuning) for row in mine if row.run.config.lr == lr] for lr in tuning.lrs}
        scores[label] = {
            repr(lr): statistics.fmean(v for v in values if v is not None)
            for lr, values in by_rate.items()
            if None not in values
        }
        if not scores[label]:
            raise UsageError(f"{label} diverged at every learning rate that it was tried with")
    return {
        "scores": scores,
        "chosen": {label: float(max(of, key=lambda rate: of[rate])) for label, of in scores.items()},
    }


def _score(row: ComparisonRow, tuning: Tuning) -> float | None:
    return figures_by_seed(row, tuning.score).get(tuning.seed)


def tune_methods(part: Grid, rates: Rates) -> Grid:
    """The part with each method at the rate that was chosen for it."""
    entries = [
        {"lr": rates.chosen[entry["label"]], **entry} if entry["label"] in rates.chosen else entry
        for entry in part.values["method"]
    ]
    return replace(part, values={**part.values, "method": entries})


def _tuning_of(part: Grid) -> Tuning:
    assert part.tuning is not None
    return part.tuning


def _tuning_text(tuning: Tuning) -> str:
    tried = ", ".join(f"{lr:g}" for lr in tuning.lrs)
    fields = "".join(f", {name} {_value_text(value)}" for name, value in tuning.fields.items())
    return f"learning rates chosen on seed {tuning.seed}, which is not reported, from {tried} for every method{fields}"


def _value_text(value: Any) -> str:
    """A field's value; of several, that the trials are made under all of them."""
    return f"in the mean over {', '.join(map(str, value))}" if isinstance(value, list) else str(value)
