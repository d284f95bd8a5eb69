"""What is evaluated after a round: the global model, each architecture's part of it, and clients' own models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from fedstrata.client.context import ClientContext
from fedstrata.core.method import Method
from fedstrata.core.results import EvalResult
from fedstrata.core.rng import derive
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import BUFFERS, PERSONAL, Examples, Slots
from fedstrata.evaluation.evaluate import EvalRequest, NothingCounts, Scores, describe, evaluate
from fedstrata.evaluation.fairness import fairness_of
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.state import Architecture, ServerState

MOST_CLIENTS = 1000
"""Clients whose metrics are written one by one; of more of them the fairness alone."""
ClientMetrics = list[dict[str, float | None] | None]
Evaluate = Callable[[EvalRequest], Callable[[], Scores]]
"""Begins to evaluate on the test set; what it returns waits for the scores."""


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Judges the states of a run.

    Args:
        method: what is run.
        seed: of the run.
        context: where models are evaluated that the engine does not evaluate.
        evaluate: begins to evaluate on the test set; what it returns waits for the result.
        sampler: who takes part.
        architectures: by name; "" is the server's own.
        clients: their examples.
        recall: (state, clients) → what each of them remembers.
        on_clients: also evaluate every client's part of the global model on its own examples.
        tests: the clients' own test examples, None for a client without any; None if nobody has any.
        attacks: fault → test examples that are marked as it would, whose classes are what it is after.
    """

    method: Method
    seed: int
    context: ClientContext
    evaluate: Evaluate
    sampler: ClientSampler
    architectures: Mapping[str, Architecture]
    clients: Sequence[Examples]
    recall: Callable[[ServerState, Sequence[int]], Sequence[Slots]]
    on_clients: bool
    tests: Sequence[Examples | None] | None = None
    attacks: Mapping[str, Examples] = field(default_factory=dict)

    @property
    def nothing(self) -> EvalResult:
        """Of a round that is not evaluated."""
        task = self.context.task
        return EvalResult(accuracy=None, loss=None, primary=task.primary, better=task.better)

    def describe(self, state: ServerState, test: Examples) -> dict[str, Any]:
        """What a report shows of the global model beside its metrics; nothing where every client has its own."""
        if self.method.incomplete:
            return {}
        seed = derive(self.seed, "evaluate", state.round - 1)
        request = EvalRequest(self._deploy(state), state.buffers, self.method.buffers, seed)
        return describe(self.context.replica(""), request, test)

    def begin(self, state: ServerState) -> Callable[[], EvalResult]:
        """Begin to evaluate a state; what is returned waits for the result."""
        seed = derive(self.seed, "evaluate", state.round - 1)
        if self.method.incomplete:
            return lambda: self._everybody(state, seed)
        whole = self.architectures[""]
        parts = {
            arch: self.evaluate(self._part(state, arch, seed))
            for arch, held in self.architectures.items()
            if not arch or held.params != whole.params or held.cuts
        }

        def wait() -> EvalResult:
            task, scores = self.context.task, {arch: part() for arch, part in parts.items()}
            found = {arch: scores.get(arch, scores[""]).primary(task) for arch in self.architectures if arch}
            archs = {arch: value for arch, value in found.items() if value is not None}
            return self._result(scores[""], state, archs)

        return wait

    def _everybody(self, state: ServerState, seed: int) -> EvalResult:
        """The mean over all clients' own models."""
        scores = [self.evaluate(self._own(state, client, seed))() for client in self.sampler.everybody]
        metrics = {name: mean_of([one.metrics[name] for one in scores]) for name in scores[0].metrics}
        return self._result(Scores(sum(one.loss for one in scores) / len(scores), metrics), state, {})

    def _result(self, scores: Scores, state: ServerState, archs: dict[str, float]) -> EvalResult:
        in_common, own = self._on_tests(state)
        task = self.context.task
        told = len(own or in_common or ()) <= MOST_CLIENTS
        low = task.better == "lower"
        return EvalResult(
            accuracy=scores.metrics.get("accuracy"),
            loss=scores.loss,
            metrics=scores.metrics,
            primary=task.primary,
            better=task.better,
            arch_accuracy=archs,
            client_accuracy=self._on_clients(state),
            client_metrics=in_common if told else None,
            own_metrics=own if told else None,
            fairness=fairness_of(self._score_members(own or in_common), low),
            global_fairness=fairness_of(self._score_members(in_common), low) if own and in_common else None,
            newcomers=self._score_newcomers(in_common, own),
            attack_success=self._on_attacks(state),
        )

    def _score(self, found: ClientMetrics | None, client: int) -> float | None:
        """A client's primary metric."""
        mine = found[client] if found else None
        return None if mine is None else mine.get(self.context.task.primary)

    def _score_members(self, found: ClientMetrics | None) -> list[float | None]:
        """Every client's primary metric; none of those that take part only after the last round."""
        late = self.sampler.newcomers
        return [None if client in late else self._score(found, client) for client in range(len(found or ()))]

    def _score_newcomers(self, in_common: ClientMetrics | None, own: ClientMetrics | None) -> dict[str, float | None]:
        """The mean of the primary metric over those, of the global model and of their own."""
        late = sorted(self.sampler.newcomers)
        judged = {"global": in_common, "own": own} if late else {}
        return {kind: mean_of([self._score(found, c) for c in late]) for kind, found in judged.items() if found}

    def _on_attacks(self, state: ServerState) -> dict[str, float | None]:
        """How far attacks got with the global model."""
        seed = derive(self.seed, "evaluate", state.round - 1, "attacks")
        judged = {name: self._judge(self._part(state, "", seed), examples) for name, examples in self.attacks.items()}
        return {name: None if found is None else found.get("accuracy") for name, found in judged.items()}

    def _on_tests(self, state: ServerState) -> tuple[ClientMetrics | None, ClientMetrics | None]:
        """(of the global model, of the clients' own models where there are any), on each client's own test examples.

        A model that lacks what clients keep is none.
        """
        if self.tests is None:
            return None, None
        whole = not self.method.incomplete
        owned = not self.method.centralised and (self.method.personalised or self.method.buffers == "local")
        in_common: ClientMetrics = []
        own: ClientMetrics = []
        for client, examples in enumerate(self.tests):
            seed = derive(self.seed, "evaluate", state.round - 1, client)
            if whole:
                in_common.append(self._judge(self._part(state, self.sampler.arch_of(client), seed), examples))
            if owned:
                own.append(self._judge(self._own(state, client, seed), examples))
        return in_common if whole else None, own if owned else None

    def _judge(self, request: EvalRequest, examples: Examples | None) -> dict[str, float | None] | None:
        """All metrics of a model on some examples, with the loss; None where there are none that count."""
        found = self._scores(request, examples)
        return None if found is None else {**found.metrics, "loss": found.loss if isfinite(found.loss) else None}

    def _scores(self, request: EvalRequest, examples: Examples | None) -> Scores | None:
        if examples is None or not len(examples):
            return None
        with suppress(NothingCounts):
            return evaluate(self.context.replica(request.arch), request, examples)
        return None

    def _on_clients(self, state: ServerState) -> list[float | None] | None:
        """Every client's part of the global model on its own data."""
        if not self.on_clients:
            return None
        per_client: list[float | None] = []
        for client, examples in enumerate(self.clients):
            request = self._own(state, client, derive(self.seed, "evaluate", state.round - 1, client))
            judged = self._scores(request, examples)
            per_client.append(None if judged is None else judged.primary(self.context.task))
        return per_client

    def _own(self, state: ServerState, client: int, seed: int) -> EvalRequest:
        """A client's model, to be evaluated: its part of the global one, but for what it keeps itself."""
        arch, has_own = self.sampler.arch_of(client), self.method.buffers == "local" or self.method.personalised
        memory = self.recall(state, [client])[0] if has_own else {}
        return self._part(state, arch, seed, memory)

    def _part(self, state: ServerState, arch: str, seed: int, memory: Slots | None = None) -> EvalRequest:
        """An architecture's part of the global model, to be evaluated, but for what a client remembers of its own."""
        kept = memory or {}
        held, policy = self.architectures[arch], self.method.buffers
        params = {**held.part_of(self._deploy(state)), **kept.get(PERSONAL, {})}
        buffers = {**state.buffers, **kept.get(BUFFERS, {})}
        params = self.method.own(kept, params) if kept else params
        return EvalRequest(
            {n: params[n] for n in held.params}, {n: buffers[n] for n in held.buffers}, policy, seed, arch
        )

    def _deploy(self, state: ServerState) -> Tensors:
        return self.method.deploy(state.techniques, state.params)


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that there are; None if there are none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
