"""What a search has found, also as a file: tune.json, which pages and tables are made of without Optuna."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fedstrata.core.results import Count, Finite
from fedstrata.core.text import metric_text
from fedstrata.errors import UsageError
from fedstrata.runs.files import read_object, write_atomic

FILE = "tune.json"


@dataclass(frozen=True)
class TriedTrial:
    """A trial of a method, as `Trial`; what was tried is told as text."""

    number: Count
    values: dict[str, str]
    state: Literal["complete", "ended early", "diverged", "refused"]
    score: Finite | None
    by_round: dict[int, Finite]
    rounds: Count
    directory: str
    why: str = ""


@dataclass(frozen=True)
class Searched:
    """What was searched in.

    Args:
        text: as people write it.
        low, high: the ends of a space of numbers.
        log: by the logarithm.
        options: of a choice, as text.
    """

    text: str
    low: Finite | None = None
    high: Finite | None = None
    log: bool = False
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TunedMethod:
    """A method under one setting.

    Args:
        label: what tables call it.
        setting: what else is varied, as text.
        spaces: what was searched, by name.
        trials: those that are over.
        best: the number of the best one; None if there is none yet.
        importance: name → share of the score's variance that it explains.
        method: with the best values; empty if there are none yet.
        fields: other fields that it sets by then.
    """

    label: str
    setting: str
    spaces: dict[str, Searched]
    trials: list[TriedTrial]
    best: Count | None = None
    importance: dict[str, Finite] = field(default_factory=dict)
    method: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method, with what else is varied."""
        return ", ".join(filter(None, [self.label, self.setting]))

    @property
    def best_trial(self) -> TriedTrial | None:
        """The best of its trials."""
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def rounds(self) -> int:
        """How many rounds its trials have trained."""
        return sum(trial.rounds for trial in self.trials)


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    Args:
        how: how it was made, in a sentence.
        metric: what trials are judged by.
        better: whether more of it is, or less.
        budget: trials for every method.
        rungs: rounds after which trials may end early.
        methods: in the order of the table.
    """

    how: str
    metric: str
    better: Literal["higher", "lower"]
    budget: Count
    rungs: list[Count]
    methods: list[TunedMethod]

    def __str__(self) -> str:
        return "\n".join(f"{method.name}: {self.best_text(method)}" for method in self.methods)

    @property
    def choices(self) -> str:
        """The best values of every method, in one line."""
        told = [(method, method.best_trial) for method in self.methods]
        return "; ".join(f"{method.name}: {_assignments(best)}" for method, best in told if best is not None)

    def best_text(self, method: TunedMethod) -> str:
        """A method's best values and what they reached."""
        best = method.best_trial
        if best is None:
            return "nothing to search" if not method.spaces else "no trial is complete"
        return f"{_assignments(best)} ({metric_text(self.metric, best.score)} on validation data)"

    def write(self, folder: Path) -> None:
        """Write tune.json."""
        write_atomic(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")


def _assignments(trial: TriedTrial) -> str:
    return ", ".join(f"{name}={value}" for name, value in trial.values.items())


_TUNED = TypeAdapter(Tuned)


def read_tuned(folder: Path) -> Tuned:
    """What tune.json in a folder tells.

    Raises:
        UsageError: if it is not there, or was edited.
    """
    path = folder / FILE
    if not path.exists():
        raise UsageError(f"{folder} has no {FILE}: nothing was tuned there")
    try:
        return _TUNED.validate_python(read_object(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path} was edited: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None


def values_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as people write them: 1.0 is no 1, for a participation of 1 is one client."""
    return {name: _value_text(value) for name, value in values.items()}


def _value_text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return f"{text}.0" if isinstance(value, float) and text.lstrip("-").isdecimal() else text


def numbers(method: TunedMethod, name: str, trials: Sequence[TriedTrial]) -> list[float | None]:
    """A searched value of some trials as numbers: of a choice, the option's place."""
    options = method.spaces[name].options
    found: list[float | None] = []
    for trial in trials:
        text = trial.values.get(name)
        try:
            found.append(None if text is None else options.index(text) if options else float(text))
        except ValueError:
            found.append(None)
    return found
