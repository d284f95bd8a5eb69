"""What is evaluated after a round: the global model, each architecture's part of it, and clients' own models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.client.context import ClientContext
from fedstrata.core.method import Method
from fedstrata.core.results import EvalResult
from fedstrata.core.rng import derive
from fedstrata.core.types import BUFFERS, PERSONAL, Examples, Slots
from fedstrata.evaluation.evaluate import EvalRequest, evaluate
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.state import Architecture, ServerState

Evaluate = Callable[[EvalRequest], Callable[[], tuple[float, float]]]
"""Begins to evaluate on the test set; what it returns waits for (accuracy, mean loss)."""


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
        recall: (state, client) → what the client remembers.
        on_clients: also evaluate every client's part of the global model on its own examples.
    """

    method: Method
    seed: int
    context: ClientContext
    evaluate: Evaluate
    sampler: ClientSampler
    architectures: Mapping[str, Architecture]
    clients: Sequence[Examples]
    recall: Callable[[ServerState, int], Slots]
    on_clients: bool

    def begin(self, state: ServerState) -> Callable[[], EvalResult]:
        """Begin to evaluate a state; what is returned waits for the result."""
        seed, policy = derive(self.seed, "evaluate", state.round - 1), self.method.buffers
        if self.method.personalised:
            return lambda: self._everybody(state, seed)
        whole = self.architectures[""]
        parts = {
            arch: self.evaluate(
                EvalRequest(
                    {n: state.params[n] for n in held.params},
                    {n: state.buffers[n] for n in held.buffers},
                    policy,
                    seed,
                    arch,
                )
            )
            for arch, held in self.architectures.items()
            if not arch or held.params != whole.params
        }

        def wait() -> EvalResult:
            scores = {arch: part() for arch, part in parts.items()}
            accuracy, loss = scores[""]
            archs = {arch: scores.get(arch, scores[""])[0] for arch in self.architectures if arch}
            return EvalResult(
                accuracy=accuracy, loss=loss, arch_accuracy=archs, client_accuracy=self._on_clients(state)
            )

        return wait

    def _everybody(self, state: ServerState, seed: int) -> EvalResult:
        """The mean over all clients' own models."""
        scores = [self.evaluate(self._own(state, client, seed))() for client in self.sampler.everybody]
        accuracy, loss = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return EvalResult(accuracy=accuracy, loss=loss, client_accuracy=self._on_clients(state))

    def _on_clients(self, state: ServerState) -> list[float | None] | None:
        """Every client's part of the global model on its own data."""
        if not self.on_clients:
            return None
        per_client: list[float | None] = []
        for client, examples in enumerate(self.clients):
            request = self._own(state, client, derive(self.seed, "evaluate", state.round - 1, client))
            per_client.append(
                evaluate(self.context.replica(request.arch), request, examples)[0] if len(examples) else None
            )
        return per_client

    def _own(self, state: ServerState, client: int, seed: int) -> EvalRequest:
        """A client's model, to be evaluated: its part of the global one, but for what it keeps itself."""
        policy, arch = self.method.buffers, self.sampler.arch_of(client)
        memory = self.recall(state, client) if policy == "local" or self.method.personalised else {}
        params, buffers = {**state.params, **memory.get(PERSONAL, {})}, {**state.buffers, **memory.get(BUFFERS, {})}
        held = self.architectures[arch]
        return EvalRequest(
            {n: params[n] for n in held.params}, {n: buffers[n] for n in held.buffers}, policy, seed, arch
        )
