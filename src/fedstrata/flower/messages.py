"""What goes through Flower: its records hold a short JSON head, and one of our messages as bytes. Never pickle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedstrata.core.extras import missing
from fedstrata.core.technique import Buffers
from fedstrata.wire.packing import WireError

if TYPE_CHECKING:
    from flwr.app import RecordDict

NAME = "fedstrata"
"""Of both records."""
HEAD_LIMIT = 2**20
"""Largest head that is read, in characters."""
WAYS = "bytes"
"""How the message lies in its array."""


def check_flower() -> None:
    """Refuse early where Flower is not installed."""
    try:
        import flwr.app  # noqa: F401
    except ImportError:
        raise missing("flwr", "Flower apps need") from None


class Head(BaseModel):
    """What stands in front of a message."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    called: ClassVar[str] = "a message"
    """What it is called in a sentence."""


class TrainSettings(Head):
    """How the server has its clients train, the same in every round.

    Args:
        method: as a string.
        buffers: its policy for running statistics.
        augment: change of training images.
        channels_last: layout of convolutions.
        compile: compile the training step.
        threads: of torch.
        branches: the architectures that clients have, where each is kept apart under a name of its own.
        clip: largest norm of a change that is sent, for Flower's mod; 0 for any.
        task: what is learnt, as a string.
        bases: architecture → the digest of the frozen base beneath its adapters, where it has any: it is never sent.
    """

    method: str
    buffers: Buffers
    augment: str = "none"
    channels_last: bool = True
    compile: bool = False
    threads: int = Field(1, ge=1, le=1024)
    branches: list[str] = []
    clip: float = Field(0.0, ge=0)
    task: str = "classification"
    bases: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{16}$")]] = {}


Run = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class TrainRequest(Head):
    """In front of an assignment.

    Args:
        run: identifies the run, also after it was resumed.
        regime: how to train.
        client: whom it is for.
        held: the round of which the server believes that the client holds the parameters, −1 for none.
        memory: the round in which the client last wrote a memory that was accepted, −1 for never.
        until: memories that were replaced before this round are not needed any more.
        holds: True if the client should hold on to the parameters, since only some of them will change.
    """

    called: ClassVar[str] = "ask"
    run: Run
    regime: TrainSettings
    client: int = Field(ge=0)
    held: int = -1
    memory: int = -1
    until: int = 0
    holds: bool = False


class TrainReply(Head):
    """In front of an update.

    Args:
        kept: True if the client has something to remember.
        lost: what the client should hold and does not: nothing, `parameters` or `memory`. No update comes with it then.
        refusal: why no update comes, in one sentence.
    """

    called: ClassVar[str] = "answer"
    kept: bool = False
    lost: str = ""
    refusal: str = ""


DType = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class PartInfo(BaseModel):
    """One of several parts of an input: its name or position, and what it looks like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=200)
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=16)
    dtype: DType


class ClientInfo(Head):
    """A client, as its site presents it: no example leaves it, only their number and what one looks like."""

    client: int = Field(ge=0, lt=2**31)
    examples: int = Field(ge=0, lt=2**53)
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=16)
    dtype: DType
    population: int | None = Field(None, ge=1, lt=2**31)
    target_shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default=[], max_length=16)
    target_dtype: DType = "int64"
    parts: list[PartInfo] = Field(default=[], max_length=64)
    named: bool = False

    @field_validator("shape", "target_shape")
    @classmethod
    def _shape(cls, value: list[int]) -> list[int]:
        if math.prod(value) > 2**28:
            raise ValueError("an input of more than 2²⁸ numbers")
        return value


class Greeting(Head):
    """What a site answers when it is asked who it is: the clients whose data it has, or why it has none."""

    called: ClassVar[str] = "greeting"
    parties: list[ClientInfo] = Field(max_length=10_000)
    refusal: str = ""


H = TypeVar("H", bound=Head)


def to_records(head: Head, message: bytes = b"", inside: bool = False) -> RecordDict:
    """A head and a message as Flower's records; a short message may be put inside the head's own."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    content = RecordDict({NAME: ConfigRecord({"head": head.model_dump_json(exclude_defaults=True)})})
    if inside:
        content.config_records[NAME]["message"] = message
    elif message:  # an array, which Flower sends in parts where it is large
        content[f"{NAME}.message"] = ArrayRecord({"": Array("uint8", (len(message),), WAYS, message)})
    return content


def from_records(content: RecordDict, kind: type[H], limit: int) -> tuple[H, bytes]:
    """The head and the message of Flower's records; `limit` is the longest message that is looked at.

    Raises:
        WireError: if the records are not of this form, or too long.
    """
    try:
        record: Any = content.config_records[NAME]
        text = record["head"]
        arrays: Any = content.array_records.get(f"{NAME}.message", {})
        message = arrays[""].data if arrays else record.get("message", b"")
    except KeyError:
        raise WireError("the records hold no message of ours") from None
    if not isinstance(message, bytes):
        raise WireError("the records hold no message of ours")
    if not isinstance(text, str) or len(text) > HEAD_LIMIT or len(message) > limit:
        raise WireError(f"the message is too long: {len(message)} bytes, and {limit} are the limit")
    try:
        return kind.model_validate_json(text), message
    except ValidationError:
        raise WireError(f"the message's head is not that of {kind.called}") from None


def allowance(weights: int) -> int:
    """Longest message about a model of so many bytes: techniques may send several tensors for each of its own."""
    return 16 * weights + 64 * 2**20
