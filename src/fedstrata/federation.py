"""The public door: a Federation trains a model over clients, round by round, and yields a Record of each."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Unpack

from fedstrata.client.context import ClientContext
from fedstrata.client.forecast import Forecast
from fedstrata.config.keywords import resolve_settings
from fedstrata.config.schema import Settings, SettingsKeywords
from fedstrata.core.optim import build_schedule
from fedstrata.core.results import RoundCost
from fedstrata.core.rng import preserve_rng
from fedstrata.core.stacks import Memories
from fedstrata.core.task import Task, resolution_note
from fedstrata.core.tensors import clone
from fedstrata.core.types import Examples, Slots, Work
from fedstrata.data.augmentation import build_augment
from fedstrata.data.client_data import ClientData
from fedstrata.diagnosis import Diagnosis, diagnose
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.engines.registry import EngineRequest, build_engine, parse_way, way_of_training
from fedstrata.errors import Diverged, NobodyThere, UsageError
from fedstrata.evaluation.evaluator import Evaluate, Evaluator
from fedstrata.faults.engine import with_faults
from fedstrata.faults.plan import check_memories, plan_faults
from fedstrata.faults.spoilt_examples import real_clients, standardise_inputs
from fedstrata.fleet.devices import devices_of, traces_digest
from fedstrata.models.inputs import release_model
from fedstrata.models.isolated_architectures import copy_of
from fedstrata.models.norms import normalises_batches
from fedstrata.models.strata import Strata, idle_note
from fedstrata.probes.registry import PROBES, choose_probes
from fedstrata.probes.runner import Prober, watch_visits
from fedstrata.progress import progress_callbacks
from fedstrata.report import write
from fedstrata.runs.callbacks import Callback, Followers, RecordListener
from fedstrata.runs.client_memory import Store
from fedstrata.runs.closed_round import ClosedRound, RoundFilter
from fedstrata.runs.directory import versions
from fedstrata.runs.dry_run import DryRun, dry_run
from fedstrata.runs.html import federation_html
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.recorder import RunRecorder, read_memories
from fedstrata.runs.records import Costs, History, Record, rounds_to, summarise
from fedstrata.runs.run_facts import run_facts
from fedstrata.server.beginning import FirstVisits, build_start
from fedstrata.server.budgets import Compare, Overhead, plan_budgets
from fedstrata.server.compatibility import fingerprint, state_mismatch
from fedstrata.server.pace import Pace
from fedstrata.server.paces import build_pace
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server
from fedstrata.server.setup import Setup, build_setup
from fedstrata.server.state import ServerState
from fedstrata.server.trust import train_reference
from fedstrata.system.devices import devices_by_name
from fedstrata.system.machine import keep_memory, peak_memory
from fedstrata.system.timing import Clock, Lap, timed, use_clock


class Federation:
    """Clients that train one model together.

    Args:
        model: any `nn.Module` that maps a batch of inputs to logits; it is copied, never changed.
        clients: one entry per client: a pair of tensors (inputs, labels), a map-style `torch.utils.data.Dataset`, or a
            function without arguments that returns one of them, called where the client is trained. Or a tuple
            (train, test) of two of these, for a client with test data of its own, which never trains.
        test: the global test set, in the same form; None for all clients' own test data, or for no evaluation.
        settings: how to train, in one object; keywords go before what it says.
        out: directory for configuration, metrics, checkpoints and the final model; None writes nothing.
        resume: continue the run that is in `out`.
        archs: sub-models by name, for clients of different architecture; their parameters are named as the model's.
        arch_of: client → the name of its sub-model, "" for the whole model.
        public: unlabelled inputs that the server has, for techniques that use them: a tensor, or a dataset.
        trusted: labelled examples that the server has, in the form of `test`, for reducers that need them (`fltrust`).
        engine: how clients are run: a name (`"serial"`, `"processes"`, `"vmap"`, `"ray"`, `"wire"`, or the fastest,
            `"auto"`), or an engine of one's own, which then trains while the model is evaluated here.
        store: where clients' memories are kept; None for the run's directory, or for memory where it has none.
        around: looks at every round before it is opened and after it is closed, and may change it there.
        recipe: where model and data came from, for run.toml; runs without it cannot be resumed by the command.
        class_names: names of the classes, for reports.
        client_names: names of the clients, for reports.
        notes: what a reader of the results must know, for run.toml's header and the summary.
        profile: measure where the time goes; `spent` tells it.
        keywords: the fields of `Settings`, one by one, such as `method="feddyn + fedlc"` (a string or a Method),
            `rounds=30`, `lr=0.1` or `seed=1`; `Settings.model_fields` and `fedstrata run --help` explain each.

    Raises:
        UsageError: if anything does not fit, before the first round.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Any] | ClientData,
        test: Any = None,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        archs: Mapping[str, nn.Module] | None = None,
        arch_of: Callable[[int], str] | None = None,
        public: Any = None,
        trusted: Any = None,
        engine: str | Engine | None = None,
        store: Store | None = None,
        around: RoundFilter | None = None,
        recipe: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
        client_names: Sequence[str] = (),
        notes: Sequence[str] = (),
        profile: bool = False,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        given = {**keywords, "engine": engine} if isinstance(engine, str) else keywords
        self.method, task, self.settings = resolve_settings(settings, given)
        self._given = model, clients, test, archs or {}, arch_of, public, trusted
        setup = self._build_setup(task, *self._given)
        self.task, self.client_names = setup.task, tuple(client_names)
        self.test, self.client_tests, self.strata = setup.test, setup.client_tests, Strata(setup.strata)
        self.notes += (*self.method.notes, *resolution_note(task, self.task), *notes, *idle_note(self.strata))
        self.clock, self._around = Clock() if profile else None, around or RoundFilter()
        self._context, self._schedule = self._build_context(setup), build_schedule(self.settings.schedule)
        self.sampler, self.clients = self._build_sampler(setup)
        self._server, self._pace = self._build_server(setup)
        self.state, self._recorder = self._start(setup), self._build_recorder(out, store)
        self._engine, evaluate = self._choose_engine(engine, recipe or {}, resume)
        self._evaluator, self._prober = self._build_evaluator(evaluate), self._build_prober()
        self._facts = self._describe(setup, class_names)
        self._begin(resume, {**self.settings.model_dump(), **(recipe or {})})

    def _build_setup(self, task: Task, *given: Any) -> Setup:
        """Take up models and data, as clients see it: some go wrong, on purpose."""
        s = self.settings
        setup = build_setup(self.method, task, s.batch_size, s.holdout, s.seed, *given)
        self._faults = plan_faults(s.faults, setup, s.seed, self.method, s.rounds)
        self.notes = self._faults.notes
        self.devices = devices_of(s.fleet, len(setup.clients), self.method.centralised)
        seen = replace(setup, clients=self._faults.spoil(setup.clients))
        return seen if s.standardise is None else standardise_inputs(seen, s.left_out, given[2] is None)

    def _build_context(self, setup: Setup) -> ClientContext:
        """What visits and evaluations in this process share."""
        s = self.settings
        return ClientContext(
            build=partial(copy_of, setup.models),
            method=self.method,
            task=self.task,
            augment=build_augment(s.augment, setup.sample.shape[1:]),
            device=devices_by_name(s.device)[0],
            sample=setup.sample,
            channels_last=s.uses_channels_last,
            compile=s.compile,
            **setup.known_of_models,
        )

    def _build_sampler(self, setup: Setup) -> tuple[ClientSampler, Sequence[Examples]]:
        """(who takes part, everybody's examples)."""
        s = self.settings
        what = setup.clients, setup.arch_of, s.participation, s.seed, s.rounds, self.method.centralised
        alone = normalises_batches(setup.models[""])
        sampler = ClientSampler(*what, drop_single=alone, without=s.left_out, newcomers=s.newcomers)
        return sampler, sampler.clients

    def _build_server(self, setup: Setup) -> tuple[Server, Pace]:
        """What opens and closes rounds, and what says who takes part in them and how long they take."""
        s, sampler = self.settings, self.sampler
        how = s.seed, sampler.arch_of, s.rounds, partial(self._context.model, turn=True)
        data = setup.sample[:0].clone(), sampler.everybody, setup.public, setup.trusted

        def overheads(asked: Sequence[int], compare: Compare) -> Mapping[str, Overhead]:  # where there is a deadline
            plain = Server(self.method, setup.architectures, len(self.clients), *how, *data)
            visits, augments = Forecast(self._context, sampler.clients), self._context.augment is not None
            return FirstVisits(plain, setup, visits, self._work(0), augments).overheads(asked, compare)

        about = setup, self._context, self._work(0), s, self.devices, sampler.everybody
        budgets = plan_budgets(*about, overheads)
        self.notes += budgets.notes
        server = Server(self.method, setup.architectures, len(self.clients), *how, *data, budgets)
        return server, build_pace(server, sampler, s, self.devices, self._context)

    def _start(self, setup: Setup) -> ServerState:
        """The state before the first round, once every technique has agreed to what it will run with."""
        return build_start(self._server, setup, self._work(0), self._context.augment is not None)

    def _choose_engine(
        self, given: str | Engine | None, recipe: Mapping[str, Any], resume: bool
    ) -> tuple[Engine, Evaluate]:
        """(the engine, what evaluates); one of the caller's own trains only, and the recipe may name it."""
        s, begun = self.settings, self._recorder.versions if resume else {}
        visits = s.rounds, self.sampler.per_round, self._work(0), parse_way(begun.get("clients", ""))
        workers = s.workers if isinstance(s.workers, int) else None
        about = workers, s.threads, *visits, s.model_dump(), devices_by_name(s.device), begun.get("engine", "")
        request = EngineRequest(self._context, self.clients, self.test, *about)
        if given is not None and not isinstance(given, str):
            _, here = build_engine("serial", replace(request, workers=1, devices=()))
            self.engine, self.engine_reason = str(recipe.get("engine", "own")), ""
            return with_faults(given, self._faults, True), here.evaluate
        chosen, engine = build_engine(s.engine, request)
        self.engine, self.engine_reason, self.notes = chosen.name, chosen.why, (*self.notes, *chosen.notes)
        return with_faults(engine, self._faults), engine.evaluate

    def _build_evaluator(self, evaluate: Evaluate) -> Evaluator:
        """What evaluates the states."""
        what = self._context, evaluate, self.sampler, self._server.architectures, self.clients, self._recorder.recall
        tests = self.settings.eval_clients, self.client_tests, self._faults.success_tests(self.test)
        return Evaluator(self.method, self.settings.seed, *what, *tests)

    def _build_recorder(self, out: str | Path | None, store: Store | None) -> RunRecorder:
        s, check = self.settings, check_memories(self._faults, self._server.params_of, self._server.check_memory)
        return RunRecorder(out, s.checkpoint_seconds, check, store, s.rounds if self.method.epilogue else None)

    def _build_prober(self) -> Prober:
        """What measures rounds."""
        named, architectures = choose_probes(self.settings.probe), self._server.architectures
        return Prober(named, self.settings, self._context, architectures, self.clients, self.test)

    def _describe(self, setup: Setup, class_names: Sequence[str]) -> Callable[[], dict[str, Any]]:
        """What tells the facts of this federation, found once."""
        about = setup.models[""], self.strata, real_clients(self.clients), setup.sample, self.task, self.test
        late = {"newcomers": sorted(self.sampler.newcomers)} if self.sampler.newcomers else {}
        names, more = (class_names, self.client_names, self.clients), self._faults.facts | self._server.budgets.facts
        return cache(lambda: {**run_facts(*about, *names), **more, **late})

    def _begin(self, resume: bool, config: Mapping[str, Any]) -> None:
        """Make the run's directory, or go on with what is in it."""
        self.records, self.probes = list[Record](), list[dict[str, Any]]()
        self._shown: dict[int, dict[str, Any]] = {}
        self._lap = Lap()
        self._on_visit: Callable[[int, int], None] | None = None
        self._config = {name: value for name, value in config.items() if value is not None}
        if resume:
            self._resume()
        else:
            header = [f"buffers: {self.method.buffers}", *self.notes]
            self._recorder.begin(self._config, header, self._about, self._facts)

    @property
    def workers(self) -> int:
        """How many processes train clients at the same time."""
        return self._engine.workers

    @property
    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by phase so far, in this process and in all workers together; empty without `profile`."""
        return ({} if self.clock is None else dict(self.clock.seconds)), dict(self._engine.spent.seconds)

    @property
    def out(self) -> Path | None:
        """The run's directory."""
        return self._recorder.path

    def _resume(self) -> None:
        """Go on where the run in the directory was left."""
        begun = self._recorder.resume(self._config, self._about(), self.state, self.method)
        self.records, self.probes = list(begun.records), list(begun.probes)
        self.notes, self.state = (*self.notes, *begun.notes), begun.state or self.state
        if begun.state is None:  # it begins anew, by what run.toml says now
            self._recorder.describe(self._facts())

    def _about(self) -> dict[str, str]:
        """What a result depends on besides its configuration, for this federation."""
        way = way_of_training(self.engine)
        chosen = ": ".join(filter(None, (self.engine, self.engine_reason)))
        data = fingerprint(real_clients(self.clients), self._server.public, self._server.trusted)
        return {"data": data, "clients": f"trained {way}", "engine": chosen, **traces_digest(self.devices)}

    def fit(self, *callbacks: Callback | RecordListener, progress: bool | None = None) -> History:
        """Run all rounds that are left, and return the history.

        Args:
            callbacks: `Callback`s, or functions of a round's record, such as `print`.
            progress: show how far the run is; None does where somebody waits for it, in notebooks and at a prompt.

        Raises:
            Diverged: if training leaves the finite numbers; the last good state is kept.
        """
        with closing(self.rounds(*progress_callbacks(progress), *callbacks)) as rounds:
            deque(rounds, maxlen=0)
        return self.history()

    def rounds(self, *callbacks: Callback | RecordListener) -> Generator[Record, None, None]:
        """Run round after round, yielding each one's record; stop at any time and go on later."""
        followers = Followers(callbacks)
        del self.records[self.state.round :]  # a round that was interrupted may have left its record and its line
        self.probes = [row for row in self.probes if row["round"] <= self.state.round]
        self._recorder.go_on(self.state)
        with followers.following(self), closing(self._saved_rounds(followers)) as records:
            for record in records:
                followers.tell_round(self, record)
                yield record

    def _saved_rounds(self, followers: Followers) -> Generator[Record, None, None]:
        self._on_visit = followers.visit_listener(self)
        keep_memory()
        self._lap()
        is_finalizing = sys.is_finalizing  # modules lose their names when the interpreter ends
        try:
            yield from self._rounds()
        except BaseException as error:
            if is_finalizing():  # the interpreter is half gone: nothing can be written any more
                raise
            try:
                undone = self._recorder.undo()
                self.save()  # first: whoever sent a signal may not wait for long
            finally:
                self.close()
            if isinstance(error, Diverged) and self.out is not None and not undone:  # a summary may be handed on
                told = str(error).replace(f"; the last good state is in {self.out}", "")
                self._recorder.finish(self.model, {**self.summary(), "diverged": told})
            raise
        finally:
            self._on_visit = None
        self._finish()

    def _rounds(self) -> Iterator[Record]:
        """Train and settle in turns; where the engine can, the next round trains while one is being evaluated."""
        trained: ClosedRound | Exception | None = None
        while trained is not None or not self.done:
            try:
                if isinstance(trained, Exception):
                    raise trained
                now = trained or self._train(self.state)
            except NobodyThere as why:  # later rounds would find nobody, either
                self.notes += (f"the run ends after {len(self.records)} of {self.total} rounds: {why}",)
                return
            trained = self._train_ahead(now) if self._engine.overlaps else None
            yield self._settle(now)
            self._lap()  # what the caller does between two rounds is not theirs

    def _train_ahead(self, now: ClosedRound) -> ClosedRound | Exception | None:
        """The round after one that is still being evaluated; what is wrong with it comes after the other's record."""
        if now.request is None or self.settings.stop_at_target or now.after.round >= self.total:
            return None
        try:
            return self._train(now.after)
        except Exception as error:
            return error

    @property
    def total(self) -> int:
        """Number of rounds, with those after the last one in which techniques finish."""
        return self.settings.rounds + self.method.epilogue

    @property
    def done(self) -> bool:
        """True when all rounds are run, or the target is reached and the run is to stop there."""
        stop = self.settings.target if self.settings.stop_at_target else None
        return self.state.round >= self.total or (stop is not None and rounds_to(self.records, stop) is not None)

    def _train(self, state: ServerState) -> ClosedRound:
        """Open a round on a state, train its clients, close it, and begin to evaluate what came of it."""
        memories = partial(self._recorder.recall, state), partial(self._recorder.keep, state)
        trained = self._run_round(state, self._prober if self._prober.due(state.round) else None, *memories)
        due = (state.round + 1) % self.settings.eval_every == 0 or state.round + 1 >= self.settings.rounds
        due = due or not self._pace.goes_on(trained.after)  # then this is the last round
        request = self._evaluator.begin(trained.after) if self.test is not None and due else None
        return replace(trained, request=request, seconds=self._lap())

    def _run_round(
        self, state: ServerState, prober: Prober | None, recall: Recall, keep: Callable[[Sequence[int], Memories], None]
    ) -> ClosedRound:
        """Open a round on a state, train its clients, and close it."""
        state = self._around.open(state)
        number = state.round
        with preserve_rng(), self._context.computing(self.settings.threads), use_clock(self.clock):
            work = self._work(number)
            with timed("open the round"):
                opened = self._pace.open(state, self._work, recall)
            watch = None if prober is None else prober.watch(opened.asked)
            counted = watch_visits(opened.visits(self._engine.run, recall), len(opened.asked), watch, self._on_visit)
            with timed("train and close"):
                reference = train_reference(self._server, self._context, state, work)
                after, outcome = self._server.close(state, opened.asked, counted, keep, reference)
        if outcome.diverged:
            raise Diverged.in_round(number + 1, self.out, "its updates are not finite numbers")
        return self._around.close(ClosedRound(state, *opened.settle(after, outcome), opened.asked, work, watch))

    def _settle(self, trained: ClosedRound) -> Record:
        """Wait for a round's evaluation, write its record, and take its state up."""
        after, result = trained.after, self._evaluator.nothing
        with preserve_rng(), self._context.computing(self.settings.threads), use_clock(self.clock):
            if trained.request is not None:
                with timed("evaluate"):
                    result = trained.request()
        self.notes += self._engine.take_events()
        if result.loss is not None and not math.isfinite(result.loss):
            raise Diverged.in_round(after.round, self.out, f"the test loss is {result.loss}")
        cost = RoundCost(lr=trained.lr, seconds=trained.seconds + self._lap(), memory=peak_memory())
        record = trained.record(result, cost)
        if trained.watch is not None:  # before the record, which makes the round complete
            self.probes.append(self._prober.measure(trained, self.clock))
            self._recorder.add_probes(self.probes[-1])
        with use_clock(self.clock), timed("write to disk"):
            self._recorder.add(record)
            self.records.append(record)
            self.state = after
            self._recorder.advance(after)
        return record

    def diagnose(self, rounds: int = 3) -> Diagnosis:
        """What is wrong with this federation, layer by layer, and what to try; `print` shows it.

        Where the run has measured nothing so far, its next few rounds are tried and measured, or its last ones once
        more; nothing comes of them.
        """
        saved = self.saved_run()
        return diagnose(saved if saved.probes else self.dry_run(rounds).put_into(saved))

    def sibling(self, **changes: Unpack[SettingsKeywords]) -> Federation:
        """A new federation on the same model and data, with other settings; it writes nothing."""
        if "buffers" in changes and "method" not in changes:
            changes["method"] = self.method.with_buffers(changes.pop("buffers"))
        model, clients, test, archs, arch_of, public, trusted = self._given
        beside: Any = {"archs": archs, "arch_of": arch_of, "public": public, "trusted": trusted, "task": self.task}
        return Federation(model, clients, test, self.settings, **{**beside, "method": self.method, **changes})

    def dry_run(self, rounds: int, state: ServerState | None = None, store: Store | None = None) -> DryRun:
        """What all probes find in a few rounds from here, or from another state; nothing else comes of them."""
        start, memories = state or self.state, store or self._recorder.store
        if (why := state_mismatch(self.state, start)) is not None:
            raise UsageError(f"the state was made with {why}")
        prober = replace(self._prober, probes=tuple(PROBES))
        recall = partial(read_memories, memories, self._recorder.check_memory, start)
        with closing(self):
            return dry_run(self._run_round, prober, start, rounds, self.settings.rounds, recall)

    def _work(self, number: int) -> Work:
        s = self.settings
        named = {field.name: getattr(s, field.name) for field in fields(Work)}
        named["lr"] = s.lr * self._schedule(min(number, s.rounds - 1), s.rounds)
        return self.sampler.work(number, Work(**named))

    def memory(self, client: int) -> Slots:
        """What a client remembers after the last round: technique name → its tensors."""
        return {name: clone(slot) for name, slot in self._recorder.recall(self.state, [client])[0].items()}

    def save(self) -> None:
        """Write a checkpoint of the last complete round, if the run has a directory and it is not saved yet."""
        self._recorder.save_whole(self.state)

    def close(self) -> None:
        """End the worker processes, if there are any; a federation that goes on starts new ones."""
        self._engine.close()

    def _finish(self) -> None:
        self.save()
        if self.out is not None:
            self._recorder.finish(self.model, self.summary(), self._details())
        self._engine.close()

    def _details(self) -> dict[str, Any]:
        """What the final model does on the test set, beside its metrics."""
        if self.test is None:
            return {}
        if self.state.round not in self._shown:
            with preserve_rng(), self._context.computing(self.settings.threads):
                self._shown = {self.state.round: self._evaluator.describe(self.state, self.test)}
        return self._shown[self.state.round]

    @property
    def model(self) -> nn.Module:
        """A copy of the global model as it is now, in evaluation mode."""
        params = self.method.deploy(self.state.techniques, self.state.params)
        return release_model(self._context.model(params, self.state.buffers, ""))

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers, as written to summary.json."""
        return summarise(self.records, self.method, self.settings.target, self.notes, self.probes)

    def saved_run(self) -> SavedRun:
        """The run so far, as its files would tell it."""
        name, seen = "this run" if self.out is None else self.out.name, (tuple(self.records), tuple(self.probes))
        about, details = {**versions(), **self._about()}, self._details() if self.done else {}
        return SavedRun(name, self._config, *seen, self._facts(), self.summary(), about, self.out, details)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run so far as one HTML file; without a path, as report.html in the run's directory."""
        if path is None and self.out is None:
            raise UsageError("say where to write the report: report('report.html'), or give the run a directory, out=")
        return write([self.saved_run()], Path(path or f"{self.out}/report.html"))

    def history(self) -> History:
        """The records so far, the model and the totals."""
        return History(tuple(self.records), self.model, Costs.of(self.records), self.summary())

    _repr_html_ = federation_html
