"""What is known of a run: a Record of every round, its total Costs, and the History that `fit` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fedstrata.core.results import Count, EvalResult, RoundCost, RoundOutcome
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
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
        accuracy = "–" if self.accuracy is None else f"{100 * self.accuracy:.2f} %"
        sent = f"{self.bytes_up / 1e6:.1f} MB up, {self.bytes_down / 1e6:.1f} MB down"
        return f"round {self.round}: accuracy {accuracy}, {sent}, {self.seconds:.2f} s"

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
    """What a run cost in total; `slots_up` is the part of `bytes_up` that each technique sent beside the model."""

    bytes_up: int
    bytes_down: int
    flops: int
    seconds: float
    steps: int
    memory: int
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
        accuracy = "not evaluated" if self.accuracy is None else f"accuracy {self.accuracy:.4f}"
        sent = f"{self.costs.bytes_up / 1e6:.1f} MB up, {self.costs.bytes_down / 1e6:.1f} MB down"
        return f"<History of {self.summary['method']}: {len(self.records)} rounds, {accuracy}, {sent}>"

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        accuracy: float | None = self.summary["accuracy"]
        return accuracy

    def rounds_to(self, target: float) -> int | None:
        """The first round whose accuracy reaches the target, or None."""
        return rounds_to(self.records, target)


def rounds_to(records: Sequence[Record], target: float) -> int | None:
    """The first round whose accuracy reaches the target, or None."""
    return next((r.round for r in records if r.accuracy is not None and r.accuracy >= target), None)


def summarise(
    records: Sequence[Record],
    method: Method,
    target: float | None,
    notes: Sequence[str],
    probes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A run in a few numbers."""
    measured = {"rounds": len(probes), "seconds": round(sum(sum(row["seconds"].values()) for row in probes), 3)}
    evaluated = [r for r in records if r.accuracy is not None]
    best = max(evaluated, key=lambda r: r.accuracy or 0.0, default=None)
    return {
        "method": str(method),
        "buffers": method.buffers,
        "rounds": len(records),
        "accuracy": evaluated[-1].accuracy if evaluated else None,
        "loss": evaluated[-1].loss if evaluated else None,
        "best_accuracy": best.accuracy if best else None,
        "best_round": best.round if best else None,
        "target": target,
        "rounds_to_target": None if target is None else rounds_to(records, target),
        "diverged": None,
        "refused": sum(len(r.refused) for r in records),
        "costs": asdict(Costs.of(records)),
        "notes": list(notes),
    } | ({"probes": measured} if probes else {})
