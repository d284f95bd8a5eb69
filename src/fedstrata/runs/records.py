"""What is known of a run: a Record of every round, its total Costs, and the History that `fit` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedstrata.core.results import Count, EvalResult, Fairness, RoundCost, RoundOutcome
from fedstrata.core.text import bytes_text, metric_text, metric_title, plural
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from torch import nn

    from fedstrata.core.method import Method


@dataclass(frozen=True, kw_only=True)
class _Number:
    """Which round it is, from 1."""

    round: Annotated[Count, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Record(RoundCost, RoundOutcome, EvalResult, _Number):
    """One round, as written to metrics.jsonl: its number, how good the model is, what the server counted, what it cost.

    The fields are those of its parts (`fedstrata.core.results`).
    """

    @staticmethod
    def compose(number: int, *parts: EvalResult | RoundOutcome | RoundCost) -> Record:
        """The record of a round from its parts; what a part has beside a record's fields is left out."""
        known = {f.name for f in fields(Record)}
        values = {f.name: getattr(part, f.name) for part in parts for f in fields(part) if f.name in known}
        return Record(round=number, **values)

    def __str__(self) -> str:
        score = f"{metric_title(self.primary)} {metric_text(self.primary, self.score)}"
        sent = f"{self.bytes_up / 1e6:.1f} MB up, {self.bytes_down / 1e6:.1f} MB down"
        return f"round {self.round}: {score}, {sent}, {self.seconds:.2f} s"

    @staticmethod
    def read(row: Mapping[str, Any], where: str = "a line of metrics.jsonl") -> Record:
        """A line of metrics.jsonl, which errors name as `where`; fields of a later version are passed over.

        Raises:
            UsageError: if a field is missing, or of another kind.
        """
        known = {f.name for f in fields(Record)}
        try:
            return _record().validate_python({name: value for name, value in row.items() if name in known})
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                raise UsageError(f"{where} lacks '{first['loc'][0]}'") from None
            found, why = one_line(repr(first["input"]), 60), first["msg"]
            raise UsageError(f"{where} says {first['loc'][0]} = {found}: {why.lower()}") from None


@cache
def _record() -> TypeAdapter[Record]:
    """What checks a line, made when the first one is read."""
    return TypeAdapter(Record)


@dataclass(frozen=True)
class Costs:
    """What a run cost in total.

    `slots_up` is the part of `bytes_up` that each technique sent beside the model; `memory` is the largest of this
    process, `training_memory` of a client's step.
    """

    bytes_up: int
    bytes_down: int
    flops: int
    seconds: float
    steps: int
    memory: int
    training_memory: int = 0
    slots_up: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(records: Sequence[Record]) -> Costs:
        """The totals of some rounds."""
        slots_up: Counter[str] = Counter()
        for record in records:
            slots_up.update(record.slots_up)
        return Costs(
            bytes_up=sum(r.bytes_up for r in records),
            bytes_down=sum(r.bytes_down for r in records),
            flops=sum(r.flops for r in records),
            seconds=sum(r.seconds for r in records),
            steps=sum(r.steps for r in records),
            memory=max((r.memory for r in records), default=0),
            training_memory=max((r.training_memory for r in records), default=0),
            slots_up=dict(slots_up),
        )


@dataclass(frozen=True, eq=False)
class History:
    """What `fit` returns: the records, the trained model, and totals."""

    records: tuple[Record, ...]
    model: nn.Module
    costs: Costs
    summary: dict[str, Any]

    def __repr__(self) -> str:
        score, metric = self.score, metric_title(self.summary["metric"])
        found = "not evaluated" if score is None else f"{metric} {score:.4f}"
        sent = f"{bytes_text(self.costs.bytes_up)} up, {bytes_text(self.costs.bytes_down)} down"
        return f"<History of {self.summary['method']}: {plural(len(self.records), 'round')}, {found}, {sent}>"

    def _repr_html_(self) -> str:
        from fedstrata.runs.html import history_html

        return history_html(self)

    def frame(self, per: Literal["round", "client"] = "round") -> DataFrame:
        """The records as a pandas DataFrame: one row per round, or one per round and client.

        Args:
            per: `"round"` has a record's numbers, with one column for each metric; `"client"` has who took part, what
                was refused, and everybody's metrics in the rounds in which clients are judged for themselves.

        Raises:
            UsageError: if pandas is not installed.
        """
        from fedstrata.runs.frames import build_frame

        return build_frame(self.records, per)

    def plot(self, against: str = "round", axes: Axes | None = None) -> Axes:
        """Draw the primary metric with matplotlib, and return the axes: `history.plot().figure.savefig("run.pdf")`.

        Args:
            against: `"round"`, or what was spent by then: `"bytes"` (up and down), `"flops"`, `"seconds"`, or with a
                fleet `"simulated"` (hours).
            axes: where to draw; None makes a figure. Several histories are drawn into the same axes.

        Raises:
            UsageError: if matplotlib is not installed, or there is nothing to draw.
        """
        from fedstrata.runs.frames import plot_records

        return plot_records(self.records, self.summary["method"], against, axes)

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation; None where the task has none."""
        accuracy: float | None = self.summary["accuracy"]
        return accuracy

    @property
    def score(self) -> float | None:
        """The task's primary metric, of the last evaluation."""
        score: float | None = self.summary["score"]
        return score

    @property
    def metrics(self) -> dict[str, float | None]:
        """All of the task's metrics, of the last evaluation."""
        metrics: dict[str, float | None] = self.summary["metrics"]
        return metrics

    @property
    def client_metrics(self) -> list[dict[str, float | None] | None] | None:
        """The global model's metrics on each client's own test examples, of the last evaluation."""
        last = _last_evaluated(self.records)
        return None if last is None else last.client_metrics

    @property
    def fairness(self) -> Fairness | None:
        """The spread of the primary metric over the clients, of the last evaluation."""
        last = _last_evaluated(self.records)
        return None if last is None else last.fairness

    @property
    def global_fairness(self) -> Fairness | None:
        """The same of the global model, where `fairness` is of the clients' own."""
        last = _last_evaluated(self.records)
        return None if last is None else last.global_fairness

    @property
    def newcomers(self) -> dict[str, float | None]:
        """The mean over the clients that took part only after the last round: of the global model, and of their own."""
        last = _last_evaluated(self.records)
        return {} if last is None else dict(last.newcomers)

    def rounds_to(self, target: float) -> int | None:
        """The first round whose primary metric reaches the target, or None."""
        return rounds_to(self.records, target)


def rounds_to(records: Sequence[Record], target: float) -> int | None:
    """The first round whose primary metric reaches the target, or None."""
    return next((r.round for r in records if r.reaches(target)), None)


def simulated_seconds_to(records: Sequence[Record], target: float) -> float | None:
    """The simulated second at which the primary metric reaches the target, or None; None without a fleet, too."""
    return next((r.simulated_seconds for r in records if r.reaches(target)), None)


def _last_evaluated(records: Sequence[Record]) -> Record | None:
    return next((r for r in reversed(records) if r.loss is not None), None)


def best_of(records: Sequence[Record]) -> Record | None:
    """The record with the best primary metric, the first of those that are equally good; None if there is none."""
    rated = [r for r in records if r.score is not None]
    sign = -1.0 if rated and rated[0].better == "lower" else 1.0
    return max(rated, key=lambda r: sign * (r.score or 0.0), default=None)


def summarise(
    records: Sequence[Record],
    method: Method,
    target: float | None,
    notes: Sequence[str],
    probes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A run in a few numbers."""
    measured = {"rounds": len(probes), "seconds": round(sum(sum(row["seconds"].values()) for row in probes), 3)}
    last = _last_evaluated(records)
    over_clients = {} if last is None else _over_clients(last)
    best = best_of(records)
    shown = records[-1] if records else None
    return {
        "method": str(method),
        "buffers": method.buffers,
        "rounds": len(records),
        "metric": shown.primary if shown else "accuracy",
        "better": shown.better if shown else "higher",
        "score": last.score if last else None,
        "best_score": best.score if best else None,
        "accuracy": last.accuracy if last else None,
        "loss": last.loss if last else None,
        "metrics": dict(last.metrics) if last else {},
        "best_accuracy": max((r.accuracy for r in records if r.accuracy is not None), default=None),
        "best_round": best.round if best else None,
        "target": target,
        "rounds_to_target": None if target is None else rounds_to(records, target),
        "diverged": None,
        "refused": sum(len(r.refused) for r in records),
        "costs": asdict(Costs.of(records)),
        "notes": list(notes),
        **over_clients,
        **_simulated(records, target),
        **({"probes": measured} if probes else {}),
    }


def _simulated(records: Sequence[Record], target: float | None) -> dict[str, Any]:
    """Simulated time, where there is a fleet: of the run, and until the target was reached."""
    if not records or records[-1].simulated_seconds is None:
        return {}
    reached = None if target is None else simulated_seconds_to(records, target)
    return {"simulated_seconds": records[-1].simulated_seconds, "simulated_seconds_to_target": reached}


def _over_clients(record: Record) -> dict[str, Any]:
    """How the primary metric is spread over clients, as far as they are judged for themselves."""
    found = {"fairness": record.fairness, "global_fairness": record.global_fairness}
    told: dict[str, Any] = {name: asdict(fairness) for name, fairness in found.items() if fairness is not None}
    return {**told, **({"newcomers": dict(record.newcomers)} if record.newcomers else {})}
