"""The walk of a search: ask every method's study for its next batch, run it, tell; then run what was found, anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstrata.compare.cuts import find_cut
from fedstrata.compare.plan import Plan, Run, check_distinct, directory_name
from fedstrata.compare.runner import Listener, find_result, read_finished_records, run_all
from fedstrata.errors import FedstrataError, Stopped, UsageError
from fedstrata.runs.files import claim, disk_errors
from fedstrata.runs.reader import read_records
from fedstrata.tuning.outcome import Searched, TriedTrial, Tuned, TunedMethod, values_text
from fedstrata.tuning.plan import Candidate, SearchPlan, describe
from fedstrata.tuning.space import Choice, Log, Space, Uniform, Whole
from fedstrata.tuning.study import MethodSearch, Trial, import_optuna, open_storage

FOLDER = "search"
"""Where trials' runs are, in the folder of those that are reported."""
Batch = dict[int, Run]


class Search:
    """The search of a plan in a folder; what was found there before is kept.

    Args:
        plan: what is tuned.
        out: the folder.
        on_news: called after every round and at every run's end.

    Raises:
        UsageError: if no run of it can be made, or Optuna is not installed, before anything is written.
    """

    def __init__(self, plan: SearchPlan, out: Path, on_news: Listener | None = None) -> None:
        import_optuna()
        self.plan, self.out = plan, out
        self.tell = on_news or (lambda news: None)
        self._failed: Mapping[Path, FedstrataError] = {}
        self._metric, self._better = _judge(plan)
        with disk_errors(out / FOLDER):
            (out / FOLDER).mkdir(parents=True, exist_ok=True)
        self._claim = claim(out / FOLDER)
        storage = open_storage(out / FOLDER)
        lower, budget = self._better == "lower", plan.budget
        self._searches = [
            MethodSearch(storage, c, budget, lower, _rounds_of(c, plan)) if c.spaces else None for c in plan.candidates
        ]

    @property
    def counts(self) -> tuple[int, int]:
        """(how many trials there will be, how many have ended): also those of a batch that has not."""
        known = [search for search in self._searches if search is not None]
        ended = sum(len(search.trials) + sum(self._has_ended(search, n) for n in search.begun) for search in known)
        return len(known) * self.plan.budget.trials, ended

    def _has_ended(self, search: MethodSearch, number: int) -> bool:
        try:
            return _is_over(self._run(search, number, search.values_of(number)))
        except UsageError:
            return False

    def run(self, jobs: int = 1) -> dict[Path, FedstrataError]:
        """Spend the budget of every method; a method of which a trial fails is left as it is.

        Returns:
            What went wrong, by directory.

        Raises:
            Stopped: after Ctrl-C; the same search goes on.
        """
        failures: dict[Path, FedstrataError] = {}
        stuck: set[int] = set()
        try:
            while batches := self._next_batches(stuck):
                runs = [run for batch in batches.values() for run in batch.values()]
                failures |= run_to_ends(runs, jobs, self.tell, self.plan.grid.sets_workers)
                for place, batch in batches.items():
                    if not self._settle(place, batch, failures):
                        stuck.add(place)
                self.tuned.write(self.out)
        except KeyboardInterrupt:
            total, done = self.counts
            raise Stopped(f"stopped with {done} of {total} trials finished; the same command goes on") from None
        self._failed = {path: why for path, why in failures.items() if not isinstance(why, UsageError)}
        return self._failed

    def _next_batches(self, stuck: set[int]) -> dict[int, Batch]:
        """The next trials of every method; those that no run can have are told at once."""
        found: dict[int, Batch] = {}
        for place, search in enumerate(self._searches):
            while search is not None and place not in stuck and (values := search.next_batch()):
                batch = {}
                for number, chosen in values.items():
                    try:
                        batch[number] = self._run(search, number, chosen)
                    except UsageError as why:
                        search.tell(Trial(number, chosen, "refused", why=str(why)))
                if batch:
                    found[place] = batch
                    break
        return found

    def _run(self, search: MethodSearch, number: int, values: Mapping[str, Any]) -> Run:
        candidate = search.candidate
        config = candidate.trial(values, self.plan.budget)
        label = f"{candidate.label} trial {number}"
        directory = self.out / FOLDER / directory_name(config)
        return Run(label, candidate.varied, {}, config, directory, search.cuts(number))

    def _settle(self, place: int, batch: Batch, failures: Mapping[Path, FedstrataError]) -> bool:
        """Tell a study what came of its trials; False if one of them has to be run again."""
        search = self._searches[place]
        assert search is not None
        found = {number: _outcome(number, run, search, failures) for number, run in batch.items()}
        if None in found.values():
            return False
        for trial in found.values():
            assert trial is not None
            search.tell(trial)
        return True

    @property
    def tuned(self) -> Tuned:
        """What is known by now."""
        methods = [
            _tuned_method(candidate, search)
            for candidate, search in zip(self.plan.candidates, self._searches, strict=True)
        ]
        known = [search.rungs for search in self._searches if search is not None]
        rungs = known[0] if known else []
        how = describe(self.plan, self.plan.grid.seeds, bool(rungs))
        return Tuned(how, self._metric, self._better, self.plan.budget.trials, rungs, methods)

    def best_plan(self) -> Plan:
        """The runs to report: every method with the best that was found for it, on the seeds that no trial had.

        Raises:
            FedstrataError: if a method has no trial that is complete.
        """
        runs: list[Run] = []
        for candidate, search in zip(self.plan.candidates, self._searches, strict=True):
            best = None if search is None else search.best
            if search is not None and best is None:
                raise self._nothing(candidate)
            own = candidate.chosen({} if best is None else best.values)
            fields = {name: value for name, value in candidate.fields.items() if name not in own}
            grid = replace(self.plan.grid, fields=fields)
            found = grid.runs({}, candidate.label, own, self.out)
            runs += [replace(run, varied=candidate.varied) for run in found]
        check_distinct(runs)
        return Plan(tuple(runs), self.out, self.plan.grid.sets_workers)

    def _nothing(self, candidate: Candidate) -> FedstrataError:
        """Why there is nothing to report of a method."""
        told = f"{candidate}: no trial is complete, so there is nothing to report"
        search = self._searches[self.plan.candidates.index(candidate)]
        assert search is not None
        own = [self._run(search, number, search.values_of(number)) for number in search.begun] if self._failed else []
        for run in own:
            if run.directory in self._failed:
                return FedstrataError(f"{told}: {self._failed[run.directory]}; the same command tries again")
        whys = [trial.why for trial in search.trials if trial.why]
        return UsageError(": ".join([told, *whys[:1]]))


def _rounds_of(candidate: Candidate, plan: SearchPlan) -> int:
    return candidate.trial(candidate.initial, plan.budget).rounds


def _judge(plan: SearchPlan) -> tuple[str, Any]:
    """(the metric of the trials, whether more or less of it is better), of the first that can be run.

    Raises:
        UsageError: the first one's reason, if none can.
    """
    from fedstrata.run import open_run

    first = None
    for candidate in plan.candidates:
        try:
            federation = open_run(candidate.trial(candidate.initial, plan.budget), None)
        except UsageError as error:
            first = first or error
        else:
            federation.close()
            return federation.task.primary, federation.task.better
    assert first is not None
    raise first


def _is_over(run: Run) -> bool:
    return find_result(run) is not None or find_cut(run.directory, run.cuts) is not None


def run_to_ends(runs: Sequence[Run], jobs: int, tell: Listener, workers: bool = False) -> dict[Path, FedstrataError]:
    """Run trials to their ends, or their cuts; of those with the same values one, and then whichever has further to go.

    Args:
        runs: of all trials; those that are over are left alone.
        jobs: how many at the same time.
        tell: called after every round and at every run's end.
        workers: True if the user has set the number of workers.

    Returns:
        What went wrong, by directory; a UsageError where no run can have such values.
    """
    failures: dict[Path, FedstrataError] = {}
    while left := [run for run in runs if not _is_over(run) and run.directory not in failures]:
        failures |= run_all(_each_once(left), jobs, tell, workers)
    return {run.directory: _blamed(run, failures[run.directory]) for run in runs if run.directory in failures}


def _blamed(run: Run, failure: FedstrataError) -> FedstrataError:
    """A failure: a UsageError only if no run can have these values, and not if the disk was full, say."""
    from fedstrata.run import open_run

    if isinstance(failure, UsageError):
        try:
            open_run(run.config, None).close()
        except UsageError:
            return failure
    return FedstrataError(str(failure))


def _each_once(runs: Sequence[Run]) -> list[Run]:
    """Two trials may have the same values; the one with fewer cuts is run first, and mostly shows both ends."""
    by_directory: dict[Path, Run] = {}
    for run in sorted(runs, key=lambda run: len(run.cuts)):
        by_directory.setdefault(run.directory, run)
    return [run for run in runs if by_directory.get(run.directory) is run]


def _outcome(number: int, run: Run, search: MethodSearch, failures: Mapping[Path, FedstrataError]) -> Trial | None:
    """What came of a trial; None if its run is not over, and may be tried again."""
    values = search.values_of(number)
    failure = failures.get(run.directory)
    if isinstance(failure, UsageError):
        return Trial(number, values, "refused", why=str(failure))
    result, cut = find_result(run), find_cut(run.directory, run.cuts)
    if result is None and cut is None:
        return None
    path = run.directory / "metrics.jsonl"
    records = read_records(path) if result is None else read_finished_records(run.directory)
    last = cut or len(records)
    scores = {r.round: r.score for r in records if r.score is not None and r.round <= last}
    by_round = {at: score for at, score in scores.items() if at in search.rungs or at == last}
    found = Trial(number, values, "ended early", None, by_round, last, run.directory.name)
    if cut is not None or result is None:  # also of a run that another search has let go on: it tells this one nothing
        return found
    if result.diverged is not None or result.score is None:
        return replace(found, state="diverged", why=result.diverged or "it has no score")
    return replace(found, state="complete", score=result.score)


def _tuned_method(candidate: Candidate, search: MethodSearch | None) -> TunedMethod:
    setting = ", ".join(f"{name}={value}" for name, value in candidate.varied.items())
    spaces = {name: _searched(space) for name, space in candidate.spaces.items()}
    trials = [] if search is None else [_tried(trial) for trial in search.trials]
    best = None if search is None else search.best
    found = TunedMethod(candidate.label, setting, spaces, trials)
    if search is None or best is None:
        return found
    chosen = candidate.chosen(best.values)
    method = str(chosen.pop("method"))
    return replace(found, best=best.number, importance=search.importance(), method=method, fields=chosen)


def _tried(trial: Trial) -> TriedTrial:
    about = (trial.score, dict(trial.by_round), trial.rounds, trial.directory, trial.why)
    return TriedTrial(trial.number, values_text(trial.values), trial.state, *about)


def _searched(space: Space) -> Searched:
    if isinstance(space, Choice):
        options = values_text({str(place): option for place, option in enumerate(space.options)})
        return Searched(str(space), options=[*options.values()])
    assert isinstance(space, Uniform | Whole)
    return Searched(str(space), space.low, space.high, isinstance(space, Log) or getattr(space, "log", False))
