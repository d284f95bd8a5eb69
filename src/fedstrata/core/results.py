"""What a round came to, in plain numbers: the parts that a record of it is composed of.

Each part is filled by whoever knows it: `RoundOutcome` by the server, `EvalResult` by the evaluator, `RoundCost` by the
federation. A field that is added to a part is in every record, in metrics.jsonl and in its reader. No torch here:
reports read these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

MOST = 10**30
"""Largest whole number that is believed of a file: sums and products of such numbers are finite."""
Real = Annotated[float, Field(strict=True)]
Finite = Annotated[Real, Field(ge=-MOST, le=MOST)]
Whole = Annotated[int, Field(strict=True, ge=-MOST, le=MOST)]
Count = Annotated[Whole, Field(ge=0)]

NOT_FINITE = "it holds NaN or infinite numbers"
"""Why most refused updates are: who reads a run tells these from others."""


def _check_refusal(row: dict[str, Any]) -> dict[str, Any]:
    """An update that was not used, if that is what this is."""
    if not isinstance(row.get("client"), int) or not isinstance(row.get("why"), str):
        raise ValueError("it needs a client and a why")
    return row


Refused = Annotated[dict[str, Any], AfterValidator(_check_refusal)]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some of a round's clients were asked to train.

    Args:
        strata: names of the strata.
        clients: numbers of the clients.
    """

    strata: list[str]
    clients: list[Whole]


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What the visits of a round took on devices of one kind, as foreseen by a fleet's clock.

    Args:
        device: its name.
        visits: how many there were.
        bytes_down: sum over the visits.
        bytes_up: likewise.
        flops: likewise.
        seconds: likewise, simulated.
        memory: the most bytes that a step of one of them holds at once.
    """

    device: str
    visits: Count
    bytes_down: Count
    bytes_up: Count
    flops: Count
    seconds: Annotated[Finite, Field(ge=0)]
    memory: Count


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What the server counted in a round.

    Args:
        clients: numbers of the clients that took part.
        active: names of the strata that trained.
        trained: which clients trained which of them; empty where all clients trained all of them.
        refused: updates that were not used: `{"client": …, "why": …}`.
        bytes_up: sum of the lengths of all encoded updates.
        bytes_down: sum of the lengths of all encoded assignments.
        slots_up: technique → how many of the bytes up are numbers that it sends beside the model; without those that
            send none.
        flops: of local training, counted on real steps (matrix products, convolutions, attention, recurrent layers).
        training_memory: the most bytes that a client held at once in a step: weights, optimiser's state, batch, and
            what the step made, with activations and gradients; 0 where nobody trained or nobody said.
        train_loss: the clients' mean training loss, weighted by examples; None if no update was used.
        examples: of the clients whose updates were used.
        steps: optimiser steps of those clients.
        simulated_seconds: when the round ended, in simulated time since the run began; None without a fleet.
        late: clients that would have come, or came, after the deadline.
        devices: what the visits whose updates came took, by kind of device; empty without a fleet.
    """

    clients: list[Whole]
    active: list[str]
    trained: list[Trained] = field(default_factory=list)
    refused: list[Refused]
    bytes_up: Count
    bytes_down: Count
    slots_up: dict[str, Count] = field(default_factory=dict)
    flops: Count
    training_memory: Count = 0
    train_loss: Real | None
    examples: Count
    steps: Count
    simulated_seconds: Annotated[Finite, Field(ge=0)] | None = None
    late: list[Whole] = field(default_factory=list)
    devices: list[DeviceUse] = field(default_factory=list)

    @property
    def trainings(self) -> list[Trained]:
        """Which clients were asked to train which strata, whatever the round."""
        return self.trained or [Trained(strata=self.active, clients=self.clients)]


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How the primary metric is spread over clients, each judged by its own test examples.

    Args:
        clients: how many have one.
        worst: of the client that the model serves worst.
        worst_client: its number.
        worst_tenth: mean over the tenth of clients that it serves worst, at least over one.
        mean: over clients, each counting the same.
        std: standard deviation over them.
        jain: Jain's index, 1 where all are equal; None where all are 0.
    """

    clients: Count
    worst: Real
    worst_client: Count
    worst_tenth: Real
    mean: Real
    std: Real
    jain: Real | None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """How good a state is; None and nothing where it was not evaluated.

    Args:
        accuracy: of the global model on the test set; None in rounds without evaluation, and where the task has none.
        loss: mean loss of the task on the test set; None in rounds without evaluation.
        metrics: all of the task's on the test set, by name; None for one that is not defined on it.
        primary: the name of the one that the run is judged by, or `loss`.
        better: whether more of it is better, or less.
        arch_accuracy: architecture → primary metric of its part of the global model, where clients have different ones.
        client_accuracy: primary metric of the global model on each client's own data, where asked for; None for clients
            without any.
        client_metrics: metrics and loss of the global model, or of the client's part of it, on each client's own test
            examples; None for clients without any. None if nobody has any, there are too many to write, or the server
            has no whole model.
        own_metrics: the same of each client's own model, where there is one: where it keeps a part of the model, or a
            whole one beside it, and with its own running statistics.
        fairness: of the primary metric over the clients that take part, of their own models where there are any.
        global_fairness: the same of the global model, where `fairness` is of their own.
        newcomers: mean of the primary metric over the clients that take part only after the last round, each on its own
            test examples: of the `global` model, and of their `own` where there are any.
        attack_success: fault → share of test examples, marked as it would mark them, that the global model takes for
            what the fault is after; of faults that are after anything, such as `backdoor`.
    """

    accuracy: Real | None
    loss: Real | None
    metrics: dict[str, Real | None] = field(default_factory=dict)
    primary: str = "accuracy"
    better: Literal["higher", "lower"] = "higher"
    arch_accuracy: dict[str, Real] = field(default_factory=dict)
    client_accuracy: list[Real | None] | None = None
    client_metrics: list[dict[str, Real | None] | None] | None = None
    own_metrics: list[dict[str, Real | None] | None] | None = None
    fairness: Fairness | None = None
    global_fairness: Fairness | None = None
    newcomers: dict[str, Real | None] = field(default_factory=dict)
    attack_success: dict[str, Real | None] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The primary metric; None where it was not evaluated or is not defined."""
        if self.primary == "loss":
            return self.loss
        return self.metrics.get(self.primary, self.accuracy if self.primary == "accuracy" else None)

    @property
    def all_metrics(self) -> dict[str, float | None]:
        """The metrics; of runs that were made when there was but one, that one."""
        return self.metrics or ({} if self.accuracy is None else {"accuracy": self.accuracy})

    def reaches(self, target: float) -> bool:
        """True if the primary metric is as good as the target, or better."""
        score = self.score
        return score is not None and (score <= target if self.better == "lower" else score >= target)


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What the federation itself knows of a round.

    Args:
        lr: learning rate of the round.
        seconds: wall time of the round, evaluation included.
        memory: peak resident memory of the process so far, in bytes.
    """

    lr: Finite
    seconds: Annotated[Finite, Field(ge=0)]
    memory: Count
