"""A search by Optuna: one study per method and setting, in one SQLite file; only this process writes to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstrata.compare.cuts import least_score, rungs
from fedstrata.compare.plan import identity
from fedstrata.core.extras import missing
from fedstrata.core.rng import derive
from fedstrata.errors import UsageError
from fedstrata.tuning.plan import Budget, Candidate
from fedstrata.tuning.space import Choice, Log, Space, Uniform, Whole

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

FILE = "search.db"
STARTUP = 5
"""Trials before TPE chooses, the first one and random ones: as many for any budget, so that it can grow."""
IMPORTANCE_TREES = 64
LEAST_TRIALS = 4
"""Complete trials of different scores, below which nothing is said of what matters."""
State = Literal["complete", "ended early", "diverged", "refused"]


def import_optuna() -> Any:
    """The package.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise missing("optuna", "a search needs") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass(frozen=True)
class Trial:
    """A trial that is over.

    Args:
        number: from 0 on; 0 has the settings as they were.
        values: what was tried, by name.
        state: complete; ended early, by successive halving; diverged; or refused, because no run can have its values.
        score: on the validation set after the last round; None if it did not get there.
        by_round: its scores at the rungs that it reached, and at its end.
        rounds: how many it trained.
        directory: of its run.
        why: it diverged, or was refused.
    """

    number: int
    values: Mapping[str, Any]
    state: State
    score: float | None = None
    by_round: Mapping[int, float] = field(default_factory=dict)
    rounds: int = 0
    directory: str = ""
    why: str = ""


def open_storage(folder: Path) -> BaseStorage:
    """The file of all studies in a folder, made if it is not there.

    Raises:
        UsageError: if it is there, and is none.
    """
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    path = folder / FILE
    try:
        storage: BaseStorage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    except (SQLAlchemyError, RuntimeError) as error:
        raise UsageError(f"{path} is no file of a search: {str(error).partition(chr(10))[0]}") from None
    return storage


class MethodSearch:
    """The search for one method under one setting.

    What is chosen depends on what is known of earlier batches alone: so it is the same for any number of jobs, and
    after an interruption.

    Args:
        storage: where trials are kept.
        candidate: what is tuned.
        budget: for it.
        lower: True if less is better.
        rounds: of a whole run.
    """

    def __init__(self, storage: BaseStorage, candidate: Candidate, budget: Budget, lower: bool, rounds: int) -> None:
        self.candidate, self._budget, self._lower = candidate, budget, lower
        every = candidate.trial(candidate.initial, budget).eval_every
        self.rungs = rungs(rounds, every, budget.factor) if budget.factor else []
        self._optuna = import_optuna()
        self._storage = storage
        self._study: Study = self._optuna.create_study(
            storage=storage,
            study_name=f"{candidate} {_digest(candidate, budget)}"[-200:],
            direction="minimize" if lower else "maximize",
            load_if_exists=True,
        )

    @property
    def trials(self) -> list[Trial]:
        """Those that are over, in order."""
        return [_read_trial(trial, self.candidate.spaces) for trial in self._frozen() if trial.state.is_finished()]

    def _frozen(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)[: self._budget.trials]

    @property
    def begun(self) -> list[int]:
        """The numbers of trials that have begun and are not over, but for one that was killed as it began."""
        open_ones = (trial for trial in self._frozen() if trial.state.name == "RUNNING")
        return [trial.number for trial in open_ones if self.candidate.spaces.keys() <= trial.params.keys()]

    def values_of(self, number: int) -> dict[str, Any]:
        """What a trial that has begun tries."""
        frozen = self._study.get_trials(deepcopy=False)[number]
        return {name: _decode(space, frozen.params[name]) for name, space in self.candidate.spaces.items()}

    def next_batch(self) -> dict[int, dict[str, Any]]:
        """Trials to run: number → values; those that were begun before first. Nothing if the budget is spent."""
        known = self._frozen()
        begun = [trial.number for trial in known if not trial.state.is_finished()]
        first = begun[0] if begun else len(known)
        end = min((first // self._budget.batch + 1) * self._budget.batch, self._budget.trials)
        wanted = [*begun, *range(len(known), end)] if self.candidate.spaces else []
        return {number: self._ask(number) for number in wanted}

    def _ask(self, number: int) -> dict[str, Any]:
        """The values of a trial, which is begun if it has not been."""
        if number == 0 and not self._study.get_trials(deepcopy=False):
            begin = {
                name: _encode(space, self.candidate.initial[name]) for name, space in self.candidate.spaces.items()
            }
            self._study.enqueue_trial(begin)
        # A sampler of its own for each trial: its stream must not depend on how often the search was interrupted.
        seed = derive(self._budget.seed, "tune", number) % 2**32
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        known = self._study.get_trials(deepcopy=False)
        if number < len(known) and known[number].state.name == "RUNNING":
            trial = self._optuna.trial.Trial(self._study, known[number]._trial_id)
        else:
            trial = self._study.ask()
        # Of one that had begun this tells what was chosen then, and chooses what a process that was killed had not.
        return {name: _suggest(trial, name, space) for name, space in self.candidate.spaces.items()}

    def cuts(self, number: int) -> dict[int, float]:
        """Where a trial ends early, by what the trials of earlier batches had at each rung."""
        first = number // self._budget.batch * self._budget.batch
        earlier = [trial for trial in self.trials if trial.number < first]
        found = {}
        for rung in self.rungs:
            others = [trial.by_round[rung] for trial in earlier if rung in trial.by_round]
            least = least_score(others, self._budget.factor, self._lower)
            if least is not None:
                found[rung] = least
        return found

    def tell(self, trial: Trial) -> None:
        """Keep what came of a trial."""
        states = self._optuna.trial.TrialState
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        for at, score in trial.by_round.items():
            self._storage.set_trial_intermediate_value(frozen._trial_id, at, score)
        kept = {name: value for name, value in asdict(trial).items() if name not in ("number", "values", "by_round")}
        self._storage.set_trial_user_attr(frozen._trial_id, "fedstrata", kept)
        state = {"complete": states.COMPLETE, "refused": states.FAIL}.get(trial.state, states.PRUNED)
        self._study.tell(trial.number, trial.score if trial.state == "complete" else None, state=state)

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best score, the first of several; None if there is none."""
        rated = [trial for trial in self.trials if trial.state == "complete" and trial.score is not None]
        sign = -1 if self._lower else 1
        return max(rated, key=lambda trial: sign * (trial.score or 0.0), default=None)

    def importance(self) -> dict[str, float]:
        """How much of the score's variance each value explains (fANOVA), the most first; empty with too few trials."""
        scores = {trial.score for trial in self.trials if trial.state == "complete"}
        if len(scores) < LEAST_TRIALS or len(self.candidate.spaces) < 2:
            return {}
        evaluator = self._optuna.importance.FanovaImportanceEvaluator(n_trees=IMPORTANCE_TREES, seed=self._budget.seed)
        told = self._optuna.create_study(direction=self._study.direction)
        told.add_trials(self._frozen())  # no others, if there were more trials before than are asked for now
        found = self._optuna.importance.get_param_importances(told, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}


def _suggest(trial: OptunaTrial, name: str, space: Space) -> Any:
    """A value as a run has it."""
    if isinstance(space, Uniform):
        return _decode(space, trial.suggest_float(name, space.low, space.high, log=isinstance(space, Log)))
    if isinstance(space, Whole):
        return _decode(space, trial.suggest_int(name, space.low, space.high, log=space.log))
    assert isinstance(space, Choice)
    return _decode(space, trial.suggest_categorical(name, [repr(option) for option in space.options]))


def _encode(space: Space, value: Any) -> Any:
    """A value as Optuna keeps it."""
    return repr(value) if isinstance(space, Choice) else value


def _decode(space: Space, kept: Any) -> Any:
    """A value as a run has it: numbers with four digits, so that what is printed is what was run."""
    if isinstance(space, Choice):
        return next(option for option in space.options if repr(option) == kept)
    if isinstance(space, Uniform):
        return min(max(float(f"{kept:.4g}"), space.low), space.high)
    return int(kept)


def _read_trial(frozen: FrozenTrial, spaces: Mapping[str, Space]) -> Trial:
    told = frozen.user_attrs.get("fedstrata") or {}
    known = {name: told[name] for name in ("state", "score", "rounds", "directory", "why") if name in told}
    values = {name: _decode(space, frozen.params[name]) for name, space in spaces.items() if name in frozen.params}
    return Trial(frozen.number, values, by_round=dict(frozen.intermediate_values), **{"state": "refused", **known})


def _digest(candidate: Candidate, budget: Budget) -> str:
    """What decides about a study's trials, but for how many there are."""
    whole = identity(candidate.trial(candidate.initial, budget))
    searched = {template.field for template in candidate.templates}
    fixed = {name: value for name, value in whole.items() if name not in searched}
    texts = {template.field: str(template.value) for template in candidate.templates}
    about = [fixed, texts, budget.factor, budget.batch, STARTUP]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]
