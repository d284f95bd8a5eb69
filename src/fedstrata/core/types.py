"""The data that the whole code speaks in: assignments and updates, which travel; strata, examples, reducers.

Plain types without behaviour; what a technique may do with them is in `fedstrata.core.technique`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from fedstrata.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Slots = dict[str, Tensors]
"""Technique name → its own tensors."""
BUFFERS = "(buffers)"
"""Where a client's memory keeps its own running statistics under the policy `local`."""


PERSONAL = "(personal)"
"""Where it keeps the parameters that it trains and does not send."""


class Into(str):
    """The place where a module's input is, instead of its output: `Into("head")` is what goes into the head.

    It is not equal to the module's name, so that a dict can hold both places.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Into) and str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Into, str(self)))

    def __repr__(self) -> str:
        return f"Into({str(self)!r})"


Weight = Literal["examples", "uniform"]


Precision = Literal["fp32", "bf16"]
"""What local forward passes compute in; parameters, gradients and updates are as the model has them in either case."""


@dataclass(frozen=True)
class Work:
    """How a client trains in one round.

    Args:
        epochs: passes over the client's data; ignored where `steps` is given.
        steps: number of optimiser steps, over as many passes as they need.
        batch_size: examples per step.
        optimizer: name with arguments, such as `sgd(momentum=0.9)`; every visit makes a new one.
        lr: this round's learning rate.
        clip: largest norm of the whole gradient, None for no clipping.
        precision: of the forward pass; `bf16` is torch's autocast, and changes nothing else.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.1
    clip: float | None = None
    precision: Precision = "fp32"


@dataclass(frozen=True)
class Turn:
    """A part of a visit: for so many passes over the client's data these parameters train, and no others.

    Its optimiser is made anew.
    """

    trains: tuple[str, ...]
    epochs: int


@dataclass(frozen=True, eq=False)
class Assignment:
    """What the server asks of one client in one round.

    Args:
        round: number of the round, from 0.
        client: number of the client.
        arch: which sub-model the client holds ("" is the server's own model).
        params: the sub-model's parameters, by name.
        buffers: running statistics sent along; empty unless the policy is `average`.
        trains: names of the parameters that train; all others are frozen.
        uploads: names whose change is sent back.
        to_send: names of the parameters and running statistics that the client does not hold yet: what really travels
            down. None means all.
        upload_buffers: names of the running statistics that travel back; None means all of the sub-model's.
        update_buffers: names of the running statistics that move; all others stay as they are, and their norm layers
            run as in evaluation. None means all.
        turns: what trains one after the other, in the place of the work's epochs or steps; none if all of it trains at
            once.
        cache_prefix: True if what the model computes below everything that trains may be computed once per visit.
        slots: what techniques send along.
        work: how to train.
        seed: of this visit's random streams.
        method: digest of the method that the server runs.
        rounds: number of rounds of the run.
        run_seed: of the run, the same in every assignment.
        sparse: names of parameters of which only the numbers that are not zero travel down.
        staleness: how many rounds were closed between the one that it is of and the one that its update counts in; only
            the server knows, and it does not travel.
    """

    round: int
    client: int
    arch: str
    params: Tensors
    buffers: Tensors
    trains: tuple[str, ...]
    uploads: tuple[str, ...]
    work: Work
    seed: int
    method: str
    slots: Slots = field(default_factory=dict)
    to_send: tuple[str, ...] | None = None
    upload_buffers: tuple[str, ...] | None = None
    update_buffers: tuple[str, ...] | None = None
    cache_prefix: bool = False
    rounds: int = 1
    run_seed: int = 0
    turns: tuple[Turn, ...] = ()
    staleness: int = 0
    sparse: tuple[str, ...] = ()

    @property
    def works(self) -> tuple[Work, ...]:
        """How to train, turn by turn; the work itself where there are none."""
        if not self.turns:
            return (self.work,)
        return tuple(replace(self.work, epochs=turn.epochs, steps=None) for turn in self.turns)

    @property
    def is_after_training(self) -> bool:
        """True in the rounds after the last one."""
        own = vars(self)  # read past what hides the round from hooks that serve many clients
        return bool(own["round"] >= own["rounds"])


@dataclass(frozen=True, eq=False)
class Update:
    """What a client returns: the change of what travels, its buffers' values, and what techniques send up.

    Args:
        round: number of the round that the update answers.
        client: number of the client.
        method: digest of the method that the client ran.
        examples: number of the client's examples.
        steps: optimiser steps taken.
        delta: w_k − w for every name in the assignment's `uploads`.
        buffers: values of running statistics, never differences; empty under the policy `drop`.
        slots: what techniques send up.
        metrics: plain numbers, such as `train_loss` and `flops`.
        finite: True if this process has already seen that all numbers in it are finite; never travels.
    """

    round: int
    client: int
    method: str
    examples: int
    steps: int
    delta: Tensors
    buffers: Tensors = field(default_factory=dict)
    slots: Slots = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    finite: bool = False


@dataclass(frozen=True)
class Absence:
    """What an engine has instead of an update: why a client sent nothing that can be used."""

    client: int
    why: str


Visit = tuple[Update | Absence, Slots]
"""The result of an assignment, and what its client will remember if the update is accepted."""


@dataclass(frozen=True)
class LowRank:
    """A low-rank adapter by its parameters' names: W + scale·B·A, as in LoRA.

    `fedstrata.core.low_rank` computes with it.

    Attributes:
        a: A, from the inputs to the rank.
        b: B, from the rank to the outputs, which begins at zero.
        weight: W, the frozen weight that the product is added to.
        scale: what the product is multiplied by, such as α/r.
        transposed: True where W is stored from inputs to outputs.
        magnitude: the length of each output's weights, where that is a parameter of its own (DoRA); None elsewhere.
    """

    a: str
    b: str
    weight: str
    scale: float
    transposed: bool = False
    magnitude: str | None = None


@dataclass(frozen=True)
class Stratum:
    """One weight layer with the norm layers that run after it.

    Attributes:
        name: the weight layer's module name, such as `layer1.0.conv1`; empty where the model itself is the
            layer.
        stage: the first part of the name, such as `layer1`.
        params: parameter names as in `model.named_parameters()`; the weight layer's own first, then those
            that joined.
        buffers: buffer names as in `model.named_buffers()`, in the same order.
        norms: those of its parameters and buffers that are norm layers'.
        idle: True if no gradient of the outputs reaches it, because it never runs, its results are not used or it is
            detached; found by running the model, so never without a sample.
        classifies: True for the classifier; without a sample, for the last layer that tracing finds.
        low_rank: its adapter, if it has one of low rank.
    """

    name: str
    stage: str
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    norms: frozenset[str] = field(default=frozenset(), compare=False)
    idle: bool = field(default=False, compare=False)
    classifies: bool = field(default=False, compare=False)
    low_rank: LowRank | None = field(default=None, compare=False)


Augment = Callable[["Tensor"], "Tensor"]


@runtime_checkable
class Examples(Protocol):
    """Labelled examples that can be read in batches."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """The model's inputs and the labels of the examples at `index`."""
        ...

    def labels(self) -> Tensor:
        """All labels, in order."""
        ...


class Reducer(Protocol):
    """What takes the mean's place: makes one (delta, buffers) of all clients', which are given in client order."""

    by_name: ClassVar[bool]
    """True if it looks at every name by itself; others choose among whole clients."""
    trusts: ClassVar[bool]
    """True if the first update that it is given is to be the server's own, made with examples that it trusts."""

    @property
    def per(self) -> str:
        """`model`, or `stratum` if it is to be given the updates of each stratum by themselves."""
        ...

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """(delta, buffers) of all clients together."""
        ...


def make_quickly(kind: type[T], **fields: Any) -> T:
    """A frozen dataclass, all of whose fields are given: in a third of the time, for every visit."""
    new = object.__new__(kind)
    new.__dict__.update(fields)
    return new


def replace_fields(value: T, **fields: Any) -> T:
    """A frozen dataclass with other values in some fields: `replace` in a tenth of the time, for every visit."""
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__)
    new.__dict__.update(fields)
    return new
