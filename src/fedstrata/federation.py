"""The public door: a Federation trains a model over clients, round by round, and yields a Record of each."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from fedstrata import techniques
from fedstrata.client.context import ClientContext
from fedstrata.config.schema import Settings, checked
from fedstrata.core.method import Method
from fedstrata.core.optim import build_schedule
from fedstrata.core.rng import preserve_rng
from fedstrata.core.technique import Buffers, Setting
from fedstrata.core.tensors import clone
from fedstrata.core.types import Slots, Stratum, Update, Visit, Work
from fedstrata.data.augmentation import build_augment
from fedstrata.data.examples import as_examples, as_unlabelled, per_client
from fedstrata.diagnosis import Diagnosis, diagnose
from fedstrata.engines.cluster import Cluster
from fedstrata.engines.registry import build_engine
from fedstrata.engines.serial import Recall
from fedstrata.errors import Diverged, UsageError
from fedstrata.evaluation.evaluator import EvalResult, Evaluator
from fedstrata.models.isolated_architectures import copy_of, isolate_architectures
from fedstrata.models.norms import normalises_batches, running_statistics
from fedstrata.models.strata import idle_note, used_by_any
from fedstrata.probes.registry import PROBES
from fedstrata.probes.registry import choose_probes as named
from fedstrata.probes.runner import Prober, UpdateRecorder
from fedstrata.report import write
from fedstrata.runs.client_memory import Store
from fedstrata.runs.closed_round import ClosedRound
from fedstrata.runs.directory import versions
from fedstrata.runs.dry_run import DryRun, tried
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.recorder import RunRecorder, remembered
from fedstrata.runs.records import Costs, History, Record, rounds_to, summarise
from fedstrata.runs.run_facts import facts
from fedstrata.server.compatibility import check_fit, check_module, fingerprint, memory_misfit, misfit
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server
from fedstrata.server.state import Architecture, ServerState
from fedstrata.system.machine import device_by_name, keep_memory, peak_memory
from fedstrata.system.timing import Clock, timed, use_clock


class Federation:
    """Clients that train one model together.

    Args:
        model: any `nn.Module` that maps a batch of inputs to logits; it is copied, never changed.
        clients: one entry per client: a pair of tensors (inputs, labels), a map-style `torch.utils.data.Dataset`, or a
            function without arguments that returns one of them, called where the client is trained.
        test: the global test set, in the same form; None for no evaluation.
        method: a string such as `"fedavg(weight='uniform')"`, or a Method.
        rounds: number of rounds.
        participation: clients per round: a fraction (float) or a number (int).
        epochs: local passes over a client's data.
        steps: local steps, instead of epochs.
        batch_size: examples per local step.
        lr: local learning rate.
        optimizer: local optimiser, such as `"sgd(momentum=0.9)"` or `"adam"`.
        schedule: learning rate over the rounds, such as `"cosine"`.
        clip: largest norm of a local gradient.
        augment: change of training images, such as `"rrc + flip"` (extra `augment`).
        buffers: running statistics: `"average"`, `"local"` or `"drop"`; None leaves it to the method.
        seed: of every random stream; the same seed gives the same bits.
        engine: how clients are run: `"serial"`, `"processes"`, `"vmap"`, `"ray"`, `"wire"`, or the fastest: `"auto"`.
        workers: clients trained at the same time, each in a process of its own, or `"auto"` for one per core.
        threads: threads of one worker.
        ray_address: where Ray is, for the engine `"ray"`: `"local"` starts one, `"auto"` joins one, or HOST:PORT.
        ray_cpus: CPUs that each of its actors takes.
        ray_gpus: GPUs that each of its actors takes.
        channels_last: lay convolutions out with the channels last, which is faster and changes the last bits.
        compile: compile the training step: slow at first, fast in long runs; changes the last bits.
        device: where training runs.
        eval_every: rounds between evaluations.
        eval_clients: also evaluate the global model on every client's own data.
        target: accuracy to reach, for rounds-to-target.
        stop_at_target: end when it is reached.
        out: directory for configuration, metrics, checkpoints and the final model; None writes nothing.
        resume: continue the run that is in `out`.
        checkpoint_seconds: least time between checkpoints.
        probe: what to measure layer by layer, such as `"divergence cka"`, or `"all"`; see `fedstrata list probes`.
        probe_every: rounds between measurements; the last planned one is measured.
        probe_clients: clients measured per round, at most.
        probe_examples: examples per client, and for comparing clients, at most.
        archs: sub-models by name, for clients of different architecture; their parameters are named as the model's.
        arch_of: client → the name of its sub-model, "" for the whole model.
        public: unlabelled inputs that the server has, for techniques that use them: a tensor, or a dataset.
        recipe: where model and data came from, for run.toml; runs without it cannot be resumed by the command.
        class_names: names of the classes, for reports.
        notes: what a reader of the results must know, for run.toml's header and the summary.
        profile: measure where the time goes; `spent` tells it.

    Raises:
        UsageError: if anything does not fit, before the first round.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Any],
        test: Any = None,
        *,
        method: str | Method = "fedavg",
        rounds: int = 20,
        participation: int | float = 1.0,
        epochs: int = 1,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.1,
        optimizer: str = "sgd",
        schedule: str = "constant",
        clip: float | None = None,
        augment: str = "none",
        buffers: Buffers | None = None,
        seed: int = 0,
        engine: str = "auto",
        workers: int | str = 1,
        threads: int = 1,
        ray_address: str = "local",
        ray_cpus: float = 1.0,
        ray_gpus: float = 0.0,
        channels_last: bool = True,
        compile: bool = False,
        device: str = "cpu",
        eval_every: int = 1,
        eval_clients: bool = False,
        target: float | None = None,
        stop_at_target: bool = False,
        out: str | Path | None = None,
        resume: bool = False,
        checkpoint_seconds: float = 20.0,
        probe: str | None = None,
        probe_every: int = 1,
        probe_clients: int = 10,
        probe_examples: int = 256,
        archs: Mapping[str, nn.Module] | None = None,
        arch_of: Callable[[int], str] | None = None,
        public: Any = None,
        recipe: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
        notes: Sequence[str] = (),
        profile: bool = False,
    ) -> None:
        given = dict(locals())
        chosen = techniques.method(method)
        if buffers is not None and chosen.base.buffers not in (None, buffers):
            raise UsageError(f"the method says buffers={chosen.base.buffers!r}, but buffers={buffers!r}: leave one out")
        self.method = chosen.with_buffers(buffers)
        said = given | {"method": str(self.method), "buffers": self.method.buffers}
        self.settings = checked(Settings, {name: said[name] for name in Settings.model_fields})
        if self.settings.stop_at_target and self.method.epilogue:
            raise UsageError(f"stop_at_target would end the run before '{self.method}' finishes: leave one out")
        for module in (model, *(archs or {}).values()):
            check_module(module)
        parties = per_client(clients)
        self.test = None if test is None else as_examples(test, "the test set")
        self.notes = (*self.method.notes, *notes)
        self.clock = Clock() if profile else None
        inputs = None if public is None else as_unlabelled(public)
        models = {name: copy.deepcopy(m).cpu() for name, m in {"": model, **(archs or {})}.items()}
        arch_of = arch_of or (lambda client: "")
        if self.method.branches:
            models, arch_of = isolate_architectures(models, arch_of, len(parties))
        with preserve_rng():  # a dataset's own transforms may draw random numbers
            sample = check_fit(models, arch_of, parties, self.test, self.settings.batch_size, inputs)
        architectures = {name: Architecture.of(module, sample) for name, module in models.items()}
        self.strata: tuple[Stratum, ...] = used_by_any(
            architectures[""].strata, *(a.strata for a in architectures.values())
        )
        architectures[""] = replace(architectures[""], strata=self.strata)
        self.notes += idle_note(self.strata)
        context = ClientContext(
            build=partial(copy_of, models),
            method=self.method,
            augment=build_augment(augment, tuple(sample.shape[1:])),
            device=device_by_name(device),
            sample=sample,
            channels_last=channels_last,
            compile=compile,
            archs=tuple(models),
            strata={name: held.strata for name, held in architectures.items()},
        )
        self._context = context
        self._schedule = build_schedule(schedule)
        self.sampler = ClientSampler(
            parties,
            arch_of,
            self.settings.participation,
            self.settings.seed,
            self.settings.rounds,
            self.method.centralised,
            drop_single=normalises_batches(models[""]),
        )
        self.clients = self.sampler.clients
        work, augments, policy = self._work(0), context.augment is not None, self.method.buffers
        settings = {
            name: Setting(module, architectures[name].strata, work, sample, inputs, augments, name, policy)
            for name, module in models.items()
        }
        for technique in self.method.at("check"):
            for setting in settings.values():
                technique.check(setting)
        self._server = Server(
            self.method,
            architectures,
            len(self.clients),
            self.settings.seed,
            self.sampler.arch_of,
            rounds=self.settings.rounds,
            model=partial(context.model, turn=True),
            like=sample[:0].clone(),
            members=self.sampler.everybody,
            public=inputs,
        )
        s = self.settings
        cluster, visits = Cluster(s.ray_address, s.ray_cpus, s.ray_gpus), s.rounds * self.sampler.sampled
        self.engine, self._engine = build_engine(
            s.engine, s.workers, s.threads, context, self.clients, self.test, visits, cluster
        )
        about = self.method, s.seed, context, self._engine.evaluate, self.sampler, architectures, self.clients
        self._recorder = RunRecorder(out, s.checkpoint_seconds, self._misfit)
        self._examiner = Evaluator(*about, self._recorder.recall, s.eval_clients)
        self._prober = Prober(named(probe), self.settings, context, architectures, self.clients, self.test)
        self.probes: list[dict[str, Any]] = []
        self._facts = cache(partial(facts, models[""], self.strata, self.clients, sample, class_names))
        self.state = self._server.start(
            clone(dict(models[""].named_parameters())), clone(running_statistics(models[""])), settings[""]
        )
        self.records: list[Record] = []
        said = {**self.settings.model_dump(), **(recipe or {})}
        self._config = {name: value for name, value in said.items() if value is not None}
        self._since = time.perf_counter()
        self.on_visit: Callable[[int, int], None] | None = None
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
        begun = self._recorder.resume(self._config, self._about(), self.state)
        self.notes += begun.notes
        self.records, self.probes = list(begun.records), list(begun.probes)
        self.state = begun.state or self.state
        if begun.state is None:  # it begins anew, by what run.toml says now
            self._recorder.describe(self._facts())

    def _about(self) -> dict[str, str]:
        """What a result depends on besides its configuration, for this federation."""
        way = "trained many at once" if self.engine == "vmap" else "trained one by one"
        return {"data": fingerprint(self.clients, self._server.public), "clients": way}

    def fit(self, on_record: Callable[[Record], None] | None = None) -> History:
        """Run all rounds that are left, and return the history.

        Raises:
            Diverged: if training leaves the finite numbers; the last good state is kept.
        """
        with closing(self.rounds()) as rounds:  # a listener that fails leaves a checkpoint, too
            for record in rounds:
                if on_record is not None:
                    on_record(record)
        return self.history()

    def rounds(self) -> Generator[Record, None, None]:
        """Run round after round, yielding each one's record; stop at any time and go on later."""
        del self.records[self.state.round :]  # a round that was interrupted may have left its record and its line
        self.probes = [row for row in self.probes if row["round"] <= self.state.round]
        self._recorder.trim(self.state.round)
        keep_memory()
        self._since = time.perf_counter()
        is_finalizing = sys.is_finalizing  # modules lose their names when the interpreter ends
        try:
            yield from self._rounds()
        except BaseException as error:
            if is_finalizing():  # the interpreter is half gone: nothing can be written any more
                raise
            try:
                self.save()  # first: whoever sent a signal may not wait for long
            finally:
                self._engine.close()
            if isinstance(error, Diverged) and self.out is not None:
                told = str(error).replace(f"; the last good state is in {self.out}", "")  # a summary may be handed on
                self._recorder.finish(self.model, {**self.summary(), "diverged": told})
            raise
        self._finish()

    def _rounds(self) -> Iterator[Record]:
        """Train and settle in turns; where the engine can, the next round trains while one is being evaluated."""
        trained: ClosedRound | Exception | None = None
        while trained is not None or not self.done:
            if isinstance(trained, Exception):
                raise trained
            now = trained or self._train(self.state)
            trained = self._train_ahead(now) if self._engine.overlaps else None
            yield self._settle(now)
            self._since = time.perf_counter()  # what the caller does between two rounds is not theirs

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
        """Number of rounds, with those after the last one in which a technique finishes without training."""
        return self.settings.rounds + self.method.epilogue

    @property
    def done(self) -> bool:
        """True when all rounds are run, or the target is reached and the run is to stop there."""
        if self.state.round >= self.total:
            return True
        return self.settings.stop_at_target and self._reached() is not None

    def _reached(self) -> int | None:
        return None if self.settings.target is None else rounds_to(self.records, self.settings.target)

    def _train(self, state: ServerState) -> ClosedRound:
        """Open a round on a state, train its clients, close it, and begin to evaluate what came of it."""
        memories = partial(self._recorder.recall, state), partial(self._recorder.keep, state)
        trained = self._close(state, self._prober if self._prober.due(state.round) else None, *memories)
        due = (state.round + 1) % self.settings.eval_every == 0 or state.round + 1 >= self.settings.rounds
        request = self._examiner.begin(trained.after) if self.test is not None and due else None
        return replace(trained, request=request, seconds=self._lap())

    def _close(
        self, state: ServerState, prober: Prober | None, recall: Recall, keep: Callable[[int, Slots], None]
    ) -> ClosedRound:
        """Open a round on a state, train its clients, and close it."""
        number = state.round
        with preserve_rng(), self._context.computing(self.settings.threads), use_clock(self.clock):
            work = self._work(number)
            with timed("open the round"):
                assignments = self._server.open(state, self.sampler.sample(number), work)
            watch = None if prober is None else prober.watch(assignments)
            visits = self._engine.run(assignments, recall)
            counted = self._counted(visits, len(assignments), watch)
            with timed("train and close"):
                after, outcome = self._server.close(state, assignments, counted, keep)
        if outcome.diverged:
            raise self._diverged(number, "its updates are not finite numbers")
        return ClosedRound(state, after, outcome, assignments, work, watch)

    def _lap(self) -> float:
        """Seconds since the last lap: a round's own are those of its training and of waiting for its evaluation."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def _settle(self, trained: ClosedRound) -> Record:
        """Wait for a round's evaluation, write its record, and take its state up."""
        after, result = trained.after, EvalResult()
        with preserve_rng(), self._context.computing(self.settings.threads), use_clock(self.clock):
            if trained.request is not None:
                with timed("evaluate"):
                    result = trained.request()
        self.notes += self._engine.told()
        if result.loss is not None and not math.isfinite(result.loss):
            raise self._diverged(after.round - 1, f"the test loss is {result.loss}")
        record = trained.record(result, trained.seconds + self._lap(), peak_memory())
        if trained.watch is not None:  # before the record, which makes the round complete
            self.probes.append(self._prober.measure(trained, self.clock))
            self._recorder.measured(self.probes[-1])
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
        saved = self.saved()
        return diagnose(saved if saved.probes else self.tried(rounds).put_into(saved))

    def tried(self, rounds: int, state: ServerState | None = None, store: Store | None = None) -> DryRun:
        """What all probes find in a few rounds from here, or from another state; nothing else comes of them."""
        start, memories = state or self.state, store or self._recorder.store
        why = misfit(self.state, start)
        if why is not None:
            raise UsageError(f"the state was made with {why}")
        prober = replace(self._prober, probes=tuple(PROBES))
        recall = partial(remembered, memories, self._misfit, start)
        found = tried(self._close, prober, start, rounds, self.settings.rounds, recall)
        self._engine.close()
        return found

    def _counted(self, visits: Iterator[Visit], total: int, watch: UpdateRecorder | None) -> Iterator[Visit]:
        for done, visit in enumerate(visits, 1):
            if watch is not None and isinstance(visit[0], Update):
                watch.see(visit[0])
            yield visit
            if self.on_visit is not None:
                self.on_visit(done, total)

    def _work(self, number: int) -> Work:
        s = self.settings
        lr = s.lr * self._schedule(min(number, s.rounds - 1), s.rounds)
        return self.sampler.work(number, Work(s.epochs, s.steps, s.batch_size, s.optimizer, lr, s.clip))

    def memory(self, client: int) -> Slots:
        """What a client remembers after the last round: technique name → its tensors."""
        return self._recorder.recall(self.state, client)

    def _misfit(self, state: ServerState, client: int, memory: Slots) -> str | None:
        """Why a memory cannot be what a client remembers at a state, or None."""
        held = self._server.architectures[self.sampler.arch_of(client)]
        params, buffers = {n: state.params[n] for n in held.params}, {n: state.buffers[n] for n in held.buffers}
        return memory_misfit(self.method, memory, params, buffers)

    def _diverged(self, number: int, why: str) -> Diverged:
        where = f"; the last good state is in {self.out}" if self.out else ""
        return Diverged(f"training diverged in round {number + 1}: {why}{where}; a smaller lr may help")

    def save(self) -> None:
        """Write a checkpoint of the last complete round, if the run has a directory and it is not saved yet."""
        try:
            self._recorder.save(self.state)
        except KeyboardInterrupt:  # while it is being written, which an interrupt is about to ask for anyway
            self._recorder.save(self.state)
            raise

    def close(self) -> None:
        """End the worker processes, if there are any; a federation that goes on starts new ones."""
        self._engine.close()

    def _finish(self) -> None:
        self.save()
        if self.out is not None:
            self._recorder.finish(self.model, self.summary())
        self._engine.close()

    @property
    def model(self) -> nn.Module:
        """A copy of the global model as it is now, in evaluation mode."""
        return self._context.model(self.state.params, self.state.buffers, "")

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers, as written to summary.json."""
        return summarise(self.records, self.method, self.settings.target, self.notes, self.probes)

    def saved(self) -> SavedRun:
        """The run so far, as its files would tell it."""
        name = "this run" if self.out is None else self.out.name
        seen = tuple(self.records), tuple(self.probes)
        return SavedRun(
            name, self._config, *seen, self._facts(), self.summary(), {**versions(), **self._about()}, self.out
        )

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run so far as one HTML file; without a path, as report.html in the run's directory."""
        if path is None and self.out is None:
            raise UsageError("say where to write the report: report('report.html'), or give the run a directory, out=")
        return write([self.saved()], Path(path or f"{self.out}/report.html"))

    def history(self) -> History:
        """The records so far, the model and the totals."""
        return History(tuple(self.records), self.model, Costs.of(self.records), self.summary())
