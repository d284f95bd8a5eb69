"""Remedies of a federation with a model and data of its own, tried in memory: one changed keyword each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedstrata.config.schema import Settings
from fedstrata.diagnosis import Diagnosis
from fedstrata.diagnosis.harm import guessing_score
from fedstrata.errors import Diverged, UsageError
from fedstrata.federation import Federation
from fedstrata.runs.tried import Tried, read_tried, write_tried
from fedstrata.trials.choice import DEFAULT_BUDGET, Budget, NothingToTry, Trial, choose_trials
from fedstrata.trials.outcome import Scores, TrialScore, summarise_trials


def try_federation(
    federation: Federation,
    diagnosis: Diagnosis | None = None,
    budget: Budget = DEFAULT_BUDGET,
    *,
    on_run: Callable[[str, int], None] | None = None,
) -> Tried:
    """Try the best remedies of a federation's diagnosis, beside itself and what could be reached.

    The federation stays as it is; each trial is a new one on its model and data with one change, and writes nothing.
    Where the federation has a directory, tried.json is written there.

    Args:
        federation: it needs a test set.
        diagnosis: None for `federation.diagnose()`.
        budget: how many remedies, rounds and seeds.
        on_run: called with the trial's name and the seed before each run.

    Raises:
        UsageError: if there is nothing to judge by, or no remedy to try.
    """
    if federation.test is None:
        raise UsageError("there is no test set: nothing tells whether a remedy helps")
    read_tried(federation.out)  # a file that was edited is not written over
    found, saved = diagnosis or federation.diagnose(), federation.saved_run()
    trials, _ = choose_trials(found, saved, budget.count, Settings.model_fields)
    if not any(trial.kind == "remedy" for trial in trials):
        raise NothingToTry(f"there is no remedy to try: {found.verdict}")
    task = federation.task
    rounds, seeds = budget.rounds_of(saved.config), budget.seeds_of(saved.config)
    guess = guessing_score(saved, task.primary)
    scores: list[Scores] = []
    for trial in trials:
        several = {}
        for seed in seeds:
            if on_run is not None:
                on_run(trial.name, seed)
            several[seed] = _score(federation, {**trial.changes, "rounds": rounds, "seed": seed}, guess)
        scores.append({seed: one for seed, one in several.items() if one is not None})
    commands = [keywords_text(trial) for trial in trials]
    tried = summarise_trials(trials, scores, commands, task.primary, task.better == "higher", rounds, seeds)
    if federation.out is not None:
        write_tried(federation.out, tried)
    return tried


def _score(federation: Federation, changes: dict[str, Any], guess: float | None) -> TrialScore | None:
    """What one run brings; None if it cannot be run, guessing if it diverged."""
    try:
        history = federation.sibling(**changes, target=None, stop_at_target=False, probe=None).fit()
    except Diverged:
        return TrialScore(guess)
    except UsageError:
        return None
    return TrialScore(history.records[-1].score, history.costs.bytes_up + history.costs.bytes_down)


def keywords_text(trial: Trial) -> str:
    """What to change in a program: `Federation(…, method="feddyn")`."""
    changes = {n: v for n, v in trial.changes.items() if v is not None and n != "faults"}
    return f"Federation({', '.join(['…', *(f'{name}={value!r}' for name, value in changes.items())])})"
