"""What a technique may see (ClientView, RoundView) and do (Hooks, Technique).

A technique is a frozen dataclass without mutable state. What it remembers lives in three places and nowhere else:
`state` on the server, `memory` on a client, and `slot`s that travel between them. That is why one Method object runs
unchanged in this process, in worker processes and across a network.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import nn, torch
from fedstrata.core.spec import Buffers as Buffers
from fedstrata.core.spec import non_default_fields, text_of
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots, Stratum, Update, Work

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.core.types import Examples


Figures = Mapping[str, Mapping[str, float]]
"""Name of a figure, such as `theta` → layer → number."""


Measure = Callable[[Iterator[Tensors]], Tensors]
"""Gradients, one after the other → what is made of them."""


class Times(NamedTuple):
    """factor · tensors, as a correction: the product is taken while it is added, in one pass and in place.

    The tensors share no memory with the gradients that they are added to.
    """

    factor: float
    tensors: Tensors


@dataclass(eq=False)
class Batch:
    """One local step as a hook sees it.

    Args:
        x: the model's inputs.
        y: the labels.
        params: the sub-model's parameters at this step, by name (differentiable where they train).
        step: number of the step in this visit, or in its turn, from 0.
        logits: the model's outputs, with the `output` hooks of the techniques to the left applied.
        gradient: parameters → the raw gradient of the whole local loss on this batch at those parameters.
        forward: (parameters, module name or "") → what the model, or that module of it, puts out for `x` at those
            parameters (or, for an `Into`, what goes into it), without the techniques' hooks and as the run would
            evaluate it: no dropout, and norm layers use the running statistics that are given beside the parameters,
            or else the current ones (under the policy `drop`, the batch's own). Nothing in the model moves.
        again: True if this is a second look at the batch, asked for through `gradient`.
        rows: 1 for a real row and 0 for one that only fills the batch up, where many clients are trained at once; None
            where all are real.
    """

    x: Tensor
    y: Tensor
    params: Tensors
    step: int
    logits: Tensor
    gradient: Callable[[Tensors], Tensors]
    forward: Callable[[Tensors, str], Tensor]
    again: bool = False
    rows: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a number per row, over the real rows; 0 where there are none."""
        if self.rows is None:
            return values.mean()
        count = self.rows.sum()
        return (values * self.rows).sum() / torch.where(count > 0, count, torch.ones_like(count))


@dataclass(frozen=True)
class Hooks:
    """What a technique does during a visit: closures that die with it. What is None costs nothing.

    What a technique sums up over the steps goes through `tally`, not through variables that the closures share: an
    engine may train many clients at once, some of them for fewer steps than the others.

    Args:
        features: stage (or any module) name → function of the Batch (without logits yet) and of that module's output
            (or, for an `Into`, its input), whose result takes its place. "" is the model itself: it comes before all
            `output` hooks. Rows that somebody adds come after the batch's own.
        output: Batch → logits, folded over the techniques from left to right.
        loss: Batch → a scalar that is ADDED to the loss.
        correct: (raw gradients, Batch) → what is ADDED to the gradients, for any of the names: tensors, or a factor
            `Times` tensors that share no memory with the gradients, which is faster. It runs without autograd.
            A term whose gradient is known in closed form belongs here and not into `loss`: it costs no backward pass,
            and the raw gradients, which others sum up, stay those of the client's own loss.
        scale: what MULTIPLIES the optimiser's step, for any of the names; shapes broadcast.
        upload: delta → what is ADDED to the delta that travels, for any of the names.
        tally: (what was summed up so far, {} at the first step; raw gradients; Batch) → the same, one step later. It
            may hold gradients, but no views of them: corrections may be added to them in place.
        finish: (delta, tally) → (slot that travels, new memory; None keeps the old one).
        variant: anything that the amount of computation in these hooks depends on besides the batch, such as whether
            there is something to sample from yet; costs are counted once for each.
    """

    features: Mapping[str, Callable[[Batch, Tensor], Tensor]] | None = None
    output: Callable[[Batch], Tensor] | None = None
    loss: Callable[[Batch], Tensor] | None = None
    correct: Callable[[Tensors, Batch], Tensors | Times] | None = None
    scale: Tensors | None = None
    upload: Callable[[Tensors], Tensors] | None = None
    tally: Callable[[Tensors, Tensors, Batch], Tensors] | None = None
    finish: Callable[[Tensors, Tensors], tuple[Tensors, Tensors | None]] | None = None
    variant: Hashable = None


@dataclass(frozen=True, eq=False)
class ClientView:
    """All that a technique may see on a client.

    Args:
        model: the client's model, already holding the assignment's parameters; not to be changed.
        data: the client's examples.
        assignment: what the server asked for.
        strata: the model's strata, in order.
        slot: what this technique's `send` sent.
        memory: what this technique remembered on this client; empty at first.
        kept: the parameters that the client keeps to itself, as the visit begins; they are in the assignment's, too.
        rng: a random stream of this technique's own.
        width: how many answers the model tells apart: of a classifier, its classes; found when it is asked for.
        counts: how many examples of each class the client has, as a tensor; counted when it is asked for.
        statistics: a copy of the model's running statistics as they are when it is asked for: in `local` those that the
            visit starts with, in `finish` those that it ends with. Empty under the policy `drop`.
        outputs: module name (or `Into`) → pairs (what is there, labels), batch by batch over all of the client's data,
            with the received model as the run would evaluate it.
        observe: module name (or `Into`) → function: one such pass, in which each function is called with what is at
            its place whenever the model runs it.
        sum_rows: what such a function made of the rows that it was shown → (their sum, how many they are): of one
            client, or of each of many, a row per client, where `prepare` is asked once for all of them.
        sizes: how many examples the client has, as a tensor without axes; in `prepare`, which is asked once for many
            clients, one number for each. For `prepare` alone, if the technique is to vectorise.
        normal: (shape, type) → numbers of N(0, 1) from this technique's own stream: of one client, or of each of many,
            a row per client, where `prepare` is asked once for all of them.
        measure_gradients: (a number, measure) → what `measure` makes of that many gradients of the task's loss at the
            received model, which it is given one after the other, of all parameters but the `base`. Each is of a part
            of some of the client's examples, as many as that many batches have, with the model as the run would
            evaluate it. For `prepare` alone, if the technique is to vectorise: of many clients, a row of what it makes
            for each.
        prepare, draws: the technique's own doors, as `prepared` and `draw` go through them.
        base: the frozen base beneath adapters, by the names of its parameters, of which nothing ever trains.
    """

    model: nn.Module
    data: Examples
    assignment: Assignment
    strata: tuple[Stratum, ...]
    slot: Tensors
    memory: Tensors
    kept: Tensors
    rng: torch.Generator
    width: Callable[[], int]
    counts: Callable[[], Tensor]
    statistics: Callable[[], Tensors]
    outputs: Callable[[str], Iterator[tuple[Tensor, Tensor]]]
    observe: Callable[[Mapping[str, Callable[[Tensor], None]]], None]
    sum_rows: Callable[[Tensor], tuple[Tensor, Tensor | int]]
    sizes: Callable[[], Tensor]
    normal: Callable[[Sequence[int], torch.dtype], Tensor]
    measure_gradients: Callable[[int, Measure], Tensors]
    prepare: Callable[[ClientView], Tensors]
    draws: Callable[[ClientView], Callable[[Batch], Tensors]]
    base: frozenset[str] = frozenset()

    @cached_property
    def prepared(self) -> Tensors:
        """What this technique's `prepare` gives; asked for no earlier than somebody looks."""
        return self.prepare(self)

    @cached_property
    def draw(self) -> Callable[[Batch], Tensors]:
        """Batch → the random numbers of this step, which this technique's `draws` says how to draw; once per step."""
        return self.draws(self)

    def recall(self, names: Sequence[str]) -> Tensors:
        """What this technique remembers under parameters' names; zeros where there is nothing yet."""
        params, memory = self.assignment.params, self.memory
        return {n: memory[n] if n in memory else torch.zeros_like(params[n]) for n in names}


@dataclass(frozen=True, eq=False)
class Setting:
    """What a method is about to run with: one of the models, and how it will train.

    Args:
        model: the module.
        strata: its strata, in order.
        work: of the first round.
        sample: a small batch of inputs.
        public: the server's unlabelled data, if it has any.
        augment: True if training inputs are changed at random.
        arch: the model's architecture; "" is the server's own.
        buffers: the policy for running statistics.
        kept: the parameters and running statistics that techniques let clients keep to themselves.
    """

    model: nn.Module
    strata: tuple[Stratum, ...]
    work: Work
    sample: Tensor
    public: Examples | None
    augment: bool = False
    arch: str = ""
    buffers: Buffers = "average"
    kept: frozenset[str] = frozenset()

    @property
    def movable(self) -> frozenset[str]:
        """The parameters that may train and that a gradient reaches."""
        free = {n for n, p in self.model.named_parameters() if p.requires_grad}
        return frozenset(n for s in self.strata if not s.idle for n in s.params if n in free)


@dataclass(frozen=True, eq=False)
class RoundView:
    """All that a technique may see on the server when a round closes.

    Args:
        number: the round's number, from 0.
        rounds: number of rounds of the run.
        params: global parameters before this round's change.
        buffers: running statistics after it.
        strata: the server model's strata, in order.
        updates: the accepted updates in client order; their deltas and buffers are kept only where a technique
            `needs_deltas`, and their slots only where the technique does not `accumulate` them.
        asked: what each of these updates answers, in the same order.
        totals: what each technique's `accumulate` made of this round's slots.
        weights: each accepted update's weight, in the same order.
        population: number of clients in the federation.
        owners: parameter name → how many of the population's sub-models hold it.
        arrived: parameter name → how many of the accepted updates hold it; names that nobody sent are not in it.
        model: (parameters, buffers, architecture) → a model with these, as the run would evaluate it.
        like: a batch of no inputs, for their shape and type.
        public: the server's unlabelled data, if it has any; its labels mean nothing.
        seed: of this round's random streams on the server.
    """

    number: int
    rounds: int
    params: Tensors
    buffers: Tensors
    strata: tuple[Stratum, ...]
    updates: tuple[Update, ...]
    asked: tuple[Assignment, ...]
    totals: Slots
    weights: tuple[float, ...]
    population: int
    owners: Callable[[str], int]
    arrived: Mapping[str, int]
    model: Callable[[Tensors, Tensors, str], nn.Module]
    like: Tensor
    public: Examples | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One paper's idea. Subclass it as a frozen, keyword-only dataclass and override what the idea needs.

    Class attributes:
        name, papers: as written in a method string; what to cite for it.
        defaults: settings of the mean that the paper assumes, such as `{"weight": "uniform"}`; FedAvg's own arguments
            win over them.
        refuses: technique name → why the two have no meaning together.
        exclusive: why it has no meaning together with any other technique; empty if it has.
        epilogue: rounds after the last one, in which everybody takes part. Nothing of the model travels then, nobody
            trains unless it `tunes`, and techniques without an epilogue do nothing.
        centralised: True if one party holds everybody's examples and takes everybody's steps.
        branches: True if clients of one architecture share their parameters with nobody else.
        personalised: True if every client has a model of its own: because it trains what it does not send, and keeps
            it, or by the door `own`.
        incomplete: True if the server's model is no whole model, since clients keep parts of it to themselves: the run
            is judged by the mean over the clients' own models.
        needs_whole: True if it computes with whole models on the server; beside an `incomplete` one there are none.
        tunes: True if clients train in its rounds after the last one, and keep all that they train there.
        synchronous: why its maths needs all clients of a round to begin with the same model; it is refused beside a
            technique with `arrivals`.
        renews: why what clients remember of their changes means nothing in the next round; encodings with feedback are
            refused beside it. Empty where it means what it did.
        caveat: what a reader of the results must know.
        needs_deltas: True if `apply` reads the clients' deltas one by one, so that they must all be kept.
        sums: `slot` or `delta` as a promise that `accumulate` adds up slots, or deltas, and nothing else. Beside a
            robust reducer, what that makes of them, times their number, takes the sum's place.
        mixes_ranks: True if it says what becomes of adapters of different rank, which come with zeros in the rest.
        needs_classes: True if it has a meaning only where each example is of one class, and the model puts out a logit
            for each.
        vectorises: True as a promise that `local` and its hooks work on many clients at once under `torch.func.vmap`:
            they draw no random numbers but by `view.draw`, never look at a tensor's values (`.item()`, `if`), take
            class counts from `view.counts()` and whatever else they need of the examples from `view.prepared`, average
            over a batch's rows by `Batch.mean` alone, sum up over the steps in `tally` alone, and do not read the
            assignment's round, client or seed. One that does nothing on clients needs no promise.
        stacks: True as a promise, beyond `vectorises`, that its hooks are also right on tensors with one more axis in
            front, a row per client: they combine tensors of one name number by number, and are no others than
            `correct`, `scale`, `tally`, `upload` and `finish`. What is the same for all clients, such as the parameters
            that a visit begins with, has no such axis.
    """

    name: ClassVar[str] = ""
    papers: ClassVar[tuple[Paper, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}
    exclusive: ClassVar[str] = ""
    epilogue: ClassVar[int] = 0
    centralised: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    personalised: ClassVar[bool] = False
    incomplete: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = False
    tunes: ClassVar[bool] = False
    synchronous: ClassVar[str] = ""
    renews: ClassVar[str] = ""
    caveat: ClassVar[str] = ""
    needs_deltas: ClassVar[bool] = False
    sums: ClassVar[Literal["", "slot", "delta"]] = ""
    mixes_ranks: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    vectorises: ClassVar[bool] = False
    stacks: ClassVar[bool] = False

    @property
    def idle_doors(self) -> frozenset[str]:
        """The doors, of those that it overrides, at which it does nothing under its settings.

        It is as if it had none there: nobody goes through them, and they ask for no promise and refuse no company.
        """
        return frozenset()

    @property
    def per_client(self) -> bool:
        """True if it asks each client for something of its own, or keeps what each one sent.

        It is refused where the server sees the sum over clients alone.
        """
        return False

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """Server, once: the state to begin with; `setting` is that of the server's own model."""
        return {}

    @property
    def epochs_per_visit(self) -> int | None:
        """Passes over a client's data in a visit, if its plan has `turns` in the place of the run's epochs or steps."""
        return None

    @property
    def whole_run(self) -> str:
        """What goes by how many rounds the run has in all, as readers of a run that was extended are told."""
        return ""

    @property
    def arrivals(self) -> int | None:
        """How many updates end a round, in the order in which they arrive; None if all that were asked are awaited."""
        return None

    def check(self, setting: Setting) -> None:
        """Once per model, before anything is trained or written: raise a UsageError for what cannot work."""

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Server, for every assignment: narrow what trains and travels, or the `work`.

        The fields to narrow are `trains`, `uploads`, `upload_buffers` and `update_buffers`; `turns` let a visit train
        one part of the model after the other; `params` may get zeros, of which none travel where `sparse` names them.

        `strata` are the server model's, in order, as far as there is something in them to train and no other technique
        has it `fixed`; a client's sub-model may lack some, and names that it lacks do no harm. `state` is what this
        technique's `init` and `apply` made of the rounds before.

        What trains and does not travel is the client's own: it keeps it, and goes on with it at its next visit. No
        technique corrects its gradients.

        Draw random numbers from (`run_seed`, `round`) only, and from `client` where each is to be asked for something
        of its own; a technique that reads `client` is asked for every one of them, others once for all that are alike.
        """
        return assignment

    def kept(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """The parameters and running statistics that its plan lets clients keep to themselves in all rounds."""
        return frozenset()

    def fixed(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """Server: the parameters that its plan lets nobody train in the rounds: others plan without their strata."""
        return frozenset()

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        """Server, for every assignment: tensors that travel down with it."""
        return {}

    def prepare(self, view: ClientView) -> Tensors:
        """Client, when hooks look at `view.prepared`: what they need of the client's examples, or at random.

        Where many clients are trained at once it is asked once for all of them, before training and outside of
        `torch.func`: `view.observe` then shows everybody's rows, `view.sum_rows` tells them apart, `view.normal` draws
        from each one's stream, and what is given has a row per client in front.
        """
        return {}

    def draws(self, view: ClientView) -> Callable[[int], Tensors] | None:
        """Client: what draws the random numbers of a step with so many rows from `view.rng`; None if there are none.

        Hooks ask for them by `view.draw(batch)`. Always one client by itself, and only for steps that it takes. Where
        many are trained at once, what is shorter along the first axis than others' is filled up with zeros.
        """
        return None

    def local(self, view: ClientView) -> Hooks:
        """Client, before training: what to do during the visit."""
        return Hooks()

    def pack(self, slot: Tensors, view: ClientView) -> Tensors:
        """Client, after `finish`: what travels of its slot. Always one client by itself.

        For what cannot be done for many clients at once: shapes that depend on values, random numbers (`view.rng` goes
        on where `draws` left it).
        """
        return slot

    def rescale(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """Server, before the mean: rescale updates; the weights belong to the mean and stay."""
        return updates

    def rescale_guarded(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """Server, in the place of `rescale` beside a robust reducer: the same, so that a few liars cannot move it.

        What a liar makes of its own update may be anything, for the reducer looks at it; what it says must not change
        the others' much. A technique that rescales and has no such door is refused beside reducers.
        """
        return updates

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Server, for every update: why what the client sent in this technique's slot must be refused, or None."""
        return None

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Before a client's memory is used again: why it cannot be what this technique's `finish` gave, or None.

        A file may have been edited. `params` and `buffers` are the tensors of the client's model; what is remembered
        under one of their names has its shape and type. `memory_mismatch` compares names.
        """
        return None

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """Server, for every accepted update in client order: add its slot, or its delta, to the total, {} at first.

        Both are let go at once, so that a round never holds those of all its clients; `apply` finds the total.
        """
        return total

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """Server, after the mean: (delta to apply, new state)."""
        return delta, state

    def deploy(self, state: Tensors, params: Tensors) -> Tensors:
        """The parameters that are evaluated and handed out, where these are not the ones that clients are sent."""
        return params

    def own(self, memory: Tensors, params: Tensors) -> Tensors:
        """A client's own model, from what this technique remembers there; the same as given where there is none.

        `params` are those of the client's part of the server's model, with what the client keeps to itself.
        """
        return params

    def publish(self, state: Tensors) -> Figures:
        """After a round: the numbers in its state that a reader may want to see; nobody else reads state keys."""
        return {}

    def __str__(self) -> str:
        return text_of(self.name, non_default_fields(self))


def memory_mismatch(memory: Mapping[str, Tensor], known: Iterable[str], needed: Iterable[str] = ()) -> str | None:
    """What is wrong with the names in a memory, if they must be known ones and all the needed ones; else None."""
    names = set(known)
    unknown = next((n for n in memory if n not in names), None)
    if unknown is not None:
        return f"nothing is remembered as '{unknown}'"
    missing = next((n for n in needed if n not in memory), None)
    return None if missing is None else f"'{missing}' is missing"


def overrides(technique: Technique, door: str) -> bool:
    """True if the technique does something at this door; one that does nothing is never called there."""
    return getattr(type(technique), door) is not getattr(Technique, door) and door not in technique.idle_doors
