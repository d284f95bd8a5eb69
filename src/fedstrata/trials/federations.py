"""Remedies of a federation with a model and data of its own, tried in memory: one changed keyword each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.config.schema import Settings
from fedstrata.diagnosis import Diagnosis
from fedstrata.diagnosis.harm import guessing_score
from fedstrata.errors import Diverged, UsageError
from fedstrata.federation import Federation
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import Tried, read_tried, write_tried
from fedstrata.trials.choice import DEFAULT_BUDGET, Budget, NothingToTry, Trial, choose_trials
from fedstrata.trials.kept_scores import KeptScores
from fedstrata.trials.outcome import Guessing, Scores, TrialScore, summarise_trials, trial_notes


def try_federation(
    federation: Federation,
    diagnosis: Diagnosis | None = None,
    budget: Budget = DEFAULT_BUDGET,
    *,
    on_run: Callable[[str, int], None] | None = None,
) -> Tried:
    """Try the best remedies of a federation's diagnosis, beside itself and what could be reached.

    The federation stays as it is; each trial is a new one on its model and data with one change, and writes nothing.
    Where the federation has a directory, tried.json is written there, and what is finished is not run again: after
    Ctrl-C the same call goes on.

    Args:
        federation: it needs a test set.
        diagnosis: None for `federation.diagnose()`.
        budget: how many remedies, rounds and seeds.
        on_run: called with the trial's name and the seed before each run.

    Raises:
        UsageError: if there is nothing to judge by, no remedy to try, or the federation itself cannot be run again.
    """
    if federation.test is None:
        raise UsageError("there is no test set: nothing tells whether a remedy helps")
    read_tried(federation.out)  # a file that was edited is not written over
    found, saved = diagnosis or federation.diagnose(), federation.saved_run()
    trials, left_out = choose_trials(found, saved, budget.count, Settings.model_fields)
    if not any(trial.kind == "remedy" for trial in trials):
        raise NothingToTry(f"there is no remedy to try: {found.verdict}")
    task = federation.task
    rounds, seeds = budget.rounds_of(saved.config), budget.seeds_of(saved.config)
    runner = _Runner(federation, KeptScores(federation.out, saved), _guessing(federation, saved), rounds, seeds, on_run)
    scores, failed = [], dict[str, str]()
    for trial in trials:
        several, why = runner.run(trial)
        scores.append(several)
        if why is not None and trial.kind == "control":
            raise why
        failed |= {} if why is None else {trial.name: str(why)}
    commands, notes = [keywords_text(trial) for trial in trials], trial_notes(failed, left_out)
    tried = summarise_trials(trials, scores, commands, task.primary, task.better == "higher", rounds, seeds, notes)
    if federation.out is not None:
        write_tried(federation.out, tried)
    return tried


def _guessing(federation: Federation, saved: SavedRun) -> Guessing:
    return Guessing(guessing_score(saved, federation.task.primary), federation.task.better == "higher")


@dataclass(frozen=True, eq=False)
class _Runner:
    """Runs trials of a federation, seed by seed, unless they were kept."""

    federation: Federation
    kept: KeptScores
    guessing: Guessing
    rounds: int
    seeds: Sequence[int]
    on_run: Callable[[str, int], None] | None

    def run(self, trial: Trial) -> tuple[Scores, UsageError | None]:
        """(seed → what its run has brought, why it cannot be run)."""
        found: dict[int, TrialScore] = {}
        for seed in self.seeds:
            changes = {**trial.changes, "rounds": self.rounds, "seed": seed}
            score = self.kept.get(changes)
            if score is None:
                if self.on_run is not None:
                    self.on_run(trial.name, seed)
                try:
                    score = self._score(changes)
                except UsageError as why:
                    return found, why
                self.kept.keep(changes, score)
            found[seed] = score
        return found, None

    def _score(self, changes: dict[str, Any]) -> TrialScore:
        """What one run brings."""
        try:
            history = self.federation.sibling(**changes, target=None, stop_at_target=False, probe=None).fit(
                progress=False
            )
        except Diverged:
            return self.guessing.judge(None, 0, diverged=True)
        sent = history.costs.bytes_up + history.costs.bytes_down
        return self.guessing.judge(history.records[-1].score, sent, diverged=False)


def keywords_text(trial: Trial) -> str:
    """What to change in a program: `Federation(…, method="feddyn")`."""
    changes = {n: v for n, v in trial.changes.items() if v is not None and n != "faults"}
    return f"Federation({', '.join(['…', *(f'{name}={value!r}' for name, value in changes.items())])})"
