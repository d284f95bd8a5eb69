"""tried.json: what the remedies of a diagnosis have brought when they were tried, beside the run that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedstrata.core.results import Finite
from fedstrata.errors import UsageError
from fedstrata.runs.files import parse_object, write_atomic

FILE = "tried.json"
FOLDER = "tried"
"""Where, in a run's directory, the runs are that tried.json sums up."""
FORMAT: Literal[1] = 1

Outcome = Literal["helps", "hurts", "no gain", "not decided"]
"""By the interval of the gain: above 0, below 0, around 0 and narrow, or none of these."""
HELPS: Final = "helps"
HURTS: Final = "hurts"
NO_GAIN: Final = "no gain"
UNDECIDED: Final = "not decided"

Scores = tuple[Finite | None, ...]


class _Part(BaseModel):
    """Fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Control(_Part):
    """The run itself at the same budget.

    Args:
        command: what runs it, ready to be copied; for a federation of Python, its keywords.
        scores: one per seed, None for a seed that has no result.
    """

    command: str = ""
    scores: Scores


class Gain(Control):
    """Scores beside the control's, seed by seed.

    Args:
        gained: mean gain over the control, in the metric's own unit (a share for accuracy), positive if it is better.
        low: lower end of its 90 % interval; None for fewer than two seeds.
        high: its upper end.
        cost: bytes sent, as a multiple of the control's, over the seeds of which neither diverged; None where that is
            not known.
        leaves_out: clients that the run has and this does not, where that is all that differs.
    """

    gained: Finite | None = None
    low: Finite | None = None
    high: Finite | None = None
    cost: Finite | None = None
    leaves_out: tuple[int, ...] = ()


class Reference(Gain):
    """What could be reached: not advice, but what the harm is measured against.

    Args:
        name: `"centralised"`, or whom it does without.
    """

    name: str


class TriedRemedy(Gain):
    """A remedy that was tried.

    Args:
        finding: name of the finding that it is against, such as `"label-skew"`.
        change: what differs from the control, such as `--method feddyn`.
        verdict: what the interval says.
    """

    finding: str
    change: str
    verdict: Outcome


class Tried(_Part):
    """All that was tried for a run, at one budget.

    Args:
        format: of the file.
        metric: that scores are of.
        higher_is_better: False for errors.
        rounds: that each of the runs had.
        seeds: the same for all of them.
        control: the run itself.
        references: what could be reached.
        remedies: in the order of the diagnosis.
        notes: what could not be run, or is not tried, each with the reason.
    """

    format: Literal[1] = FORMAT
    metric: str
    higher_is_better: bool
    rounds: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    control: Control
    references: tuple[Reference, ...] = ()
    remedies: tuple[TriedRemedy, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> Tried:
        for held in (self.control, *self.references, *self.remedies):
            if len(held.scores) != len(self.seeds):
                raise ValueError(f"there are {len(self.seeds)} seeds and {len(held.scores)} scores")
        return self


def read_tried(directory: Path | None) -> Tried | None:
    """What was tried for the run of a directory; None if nothing was.

    Raises:
        UsageError: if the file was edited or damaged, or is of a later version.
    """
    path = None if directory is None else directory / FILE
    if path is None or not path.is_file():
        return None
    found = parse_object(path.read_bytes())
    if found is None:
        raise UsageError(f"{path} is not a JSON object: it was edited or damaged; remove it and try again")
    try:
        return Tried.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        why = first["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{path} does not say what was tried: {place}: {why[:1].lower()}{why[1:]}; remove it and try again"
        ) from None


def write_tried(directory: Path, tried: Tried) -> None:
    """Write the summary, whole or not at all."""
    write_atomic(directory / FILE, tried.model_dump_json(indent=1) + "\n")
