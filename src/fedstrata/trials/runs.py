"""Remedies of a run in a directory, tried there: each trial is a run of its own, and what is finished stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.compare import Listener, Plan, Run, run_missing
from fedstrata.compare.plan import directory_name
from fedstrata.compare.runner import find_result
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.core.text import plural
from fedstrata.diagnosis import Diagnosis
from fedstrata.diagnosis.findings import quote_value
from fedstrata.diagnosis.harm import guessing_score
from fedstrata.errors import UsageError
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import FOLDER, Tried, read_tried, write_tried
from fedstrata.trials.choice import DEFAULT_BUDGET, Budget, NothingToTry, Trial, choose_trials
from fedstrata.trials.outcome import Guessing, Scores, summarise_trials, trial_notes

UNASKED: Mapping[str, Any] = {
    "target": None,
    "stop_at_target": False,
    "probe": None,
    "eval_clients": False,
    "checkpoint_seconds": 1e9,
}
"""Settings that would end a trial early, or measure what nobody reads."""


@dataclass(frozen=True)
class TrialPlan:
    """The trials of a run.

    Args:
        trials: the control first.
        runs: all runs of all trials.
        of_trial: each trial's configurations, seed by seed.
        left_out: remedies that cannot be tried so.
        rounds: of each run.
        seeds: of each trial.
    """

    trials: Sequence[Trial]
    runs: Plan
    of_trial: Sequence[Sequence[Run]]
    left_out: Sequence[str]
    rounds: int
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        kinds = [trial.kind for trial in self.trials]
        parts = [plural(kinds.count("reference"), "reference"), plural(kinds.count("remedy"), "remedy")]
        told = f"the run itself, {' and '.join(parts)}".replace("remedys", "remedies")
        return f"{told}: {plural(self.rounds, 'round')} each, seeds {', '.join(map(str, self.seeds))}"


def plan_trials(
    directory: Path, diagnosis: Diagnosis, saved: SavedRun, budget: Budget, data_dir: str | None
) -> TrialPlan:
    """Say what would be run for a diagnosis.

    Raises:
        UsageError: for a run that cannot be built again from its run.toml, or that has no remedy to try.
    """
    read_tried(directory)  # a file that was edited is not written over
    values = read_toml(directory / "run.toml")
    if values.get("engine") == "flower":
        raise UsageError(
            f"the data of {directory} is at its sites: its remedies can only be tried there, as runs of Flower"
        )
    if "dataset" not in values:
        raise UsageError(
            f"{directory} was run from Python with a model and data of its own: try its remedies there, with "
            "fedstrata.trials.try_federation(federation)"
        )
    trials, left_out = choose_trials(diagnosis, saved, budget.count, RunConfig.model_fields)
    if not any(trial.kind == "remedy" for trial in trials):
        raise NothingToTry(f"there is no remedy to try for {directory}: {diagnosis.verdict}")
    rounds, seeds = budget.rounds_of(values), budget.seeds_of(values)
    base = {**values, **UNASKED, "rounds": rounds} | ({} if data_dir is None else {"data_dir": data_dir})
    of_trial = [[_run(directory, trial, {**base, **trial.changes, "seed": seed}) for seed in seeds] for trial in trials]
    plan = Plan(tuple(run for runs in of_trial for run in runs), directory / FOLDER, False)
    return TrialPlan(trials, plan, of_trial, left_out, rounds, seeds)


def _run(directory: Path, trial: Trial, values: Mapping[str, Any]) -> Run:
    config = validate_settings(RunConfig, {n: v for n, v in values.items() if v is not None})
    return Run(trial.name, {}, {}, config, directory / FOLDER / directory_name(config))


def run_trials(
    directory: Path, plan: TrialPlan, saved: SavedRun, jobs: int = 1, on_news: Listener | None = None
) -> Tried:
    """Run what is missing, and write tried.json; what could not be run is in its notes.

    Raises:
        UsageError: if nothing can be run.
        FedstrataError: if the control failed.
        Stopped: after Ctrl-C; the same command goes on.
    """
    failures = run_missing(plan.runs, jobs, on_news)
    failed = {run.label: failures[run.directory] for run in reversed(plan.runs.runs) if run.directory in failures}
    if plan.trials[0].name in failed:
        raise failed[plan.trials[0].name]
    results = [find_result(run) for run in plan.of_trial[0]]
    known = [result for result in results if result is not None]
    metric, better = known[0].metric, known[0].better == "higher"
    guessing = Guessing(guessing_score(saved, metric), better)
    scores = [_scores(runs, guessing) for runs in plan.of_trial]
    commands = [command_text(directory, trial) for trial in plan.trials]
    notes = trial_notes({name: str(why) for name, why in failed.items()}, plan.left_out)
    tried = summarise_trials(plan.trials, scores, commands, metric, better, plan.rounds, plan.seeds, notes)
    write_tried(directory, tried)
    return tried


def try_remedies(
    directory: str | Path,
    diagnosis: Diagnosis | None = None,
    budget: Budget = DEFAULT_BUDGET,
    *,
    jobs: int = 1,
    on_news: Listener | None = None,
) -> Tried:
    """Try the best remedies of a run's diagnosis, beside the run itself and what could be reached.

    All have the same rounds and seeds, and are in the run's directory, under `tried/`; what is finished there is not
    run again. `tried.json` sums it up, and a diagnosis of the run then tells what findings cost.

    Args:
        directory: of the run, which a configuration describes.
        diagnosis: None for what the run's own probes tell.
        budget: how many remedies, rounds and seeds.
        jobs: how many runs at once, each in its own process.
        on_news: called after every round and at every run's end.
    """
    from fedstrata.diagnosis import diagnose

    saved = SavedRun.read(Path(directory))
    plan = plan_trials(Path(directory), diagnosis or diagnose(saved), saved, budget, None)
    return run_trials(Path(directory), plan, saved, jobs, on_news)


def _scores(runs: Sequence[Run], guessing: Guessing) -> Scores:
    """Seed → what came of it."""
    found = {}
    for run in runs:
        result = find_result(run)
        if result is not None:
            sent = result.bytes_up + result.bytes_down
            found[run.config.seed] = guessing.judge(result.score, sent, result.diverged is not None)
    return found


def command_text(directory: Path, trial: Trial) -> str:
    """What runs the same with a change, at the run's own rounds, ready to be copied."""
    changes = {n: v for n, v in trial.changes.items() if v is not None and n != "faults"}
    options = "".join(f" --{name.replace('_', '-')} {quote_value(value)}" for name, value in changes.items())
    return f"fedstrata run {quote_path(directory / 'run.toml')}{options}"


def quote_path(path: Path) -> str:
    """A path as a shell takes it."""
    import shlex

    return shlex.quote(str(path))
