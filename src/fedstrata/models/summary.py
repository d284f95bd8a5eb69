"""A model's anatomy: its strata with their sizes and FLOPs, and its convolutions' receptive fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fedstrata.core.parts import Parts
from fedstrata.core.types import Stratum
from fedstrata.models.flops import FlopCount
from fedstrata.models.passes import calls
from fedstrata.models.receptive import Field, follow_fields, run_on_one
from fedstrata.models.strata import strata
from fedstrata.models.units import is_norm


@dataclass(frozen=True)
class StratumFacts:
    """One stratum.

    Attributes:
        name: of its weight layer.
        stage: that it lies in.
        parameters: how many numbers are trained.
        normalised: whether a norm layer belongs to it.
        bytes: of its parameters and running statistics, as an update carries them.
        flops: of one example's forward pass, from the layer's start to the next stratum's; None if the model could not
            be run.
        idle: whether no gradient of the outputs reaches it: it never runs, its results are not used or it is detached.
        classifies: whether it is the classifier.
    """

    name: str
    stage: str
    parameters: int
    normalised: bool
    bytes: int
    flops: int | None
    idle: bool = False
    classifies: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is trained: `describe_model`."""

    strata: tuple[StratumFacts, ...]
    fields: tuple[Field, ...]

    @property
    def parameters(self) -> int:
        """Of all strata."""
        return sum(s.parameters for s in self.strata)

    @property
    def bytes(self) -> int:
        """Of all strata."""
        return sum(s.bytes for s in self.strata)

    @property
    def flops(self) -> int | None:
        """Of one example's forward pass."""
        known = [s.flops for s in self.strata if s.flops is not None]
        return sum(known) if len(known) == len(self.strata) else None

    @property
    def step_flops(self) -> int | None:
        """Of one example's share of a training step, if everything trains.

        Backwards, a layer costs as much as forwards for its weights' gradients, and again for its inputs'; nobody
        asks for those of the first one.
        """
        return None if self.flops is None else 3 * self.flops - (self.strata[0].flops or 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "flops": self.flops,
            "step_flops": self.step_flops,
            "strata": [asdict(s) for s in self.strata],
            "fields": [f.as_dict() for f in self.fields],
        }


def describe_model(model: nn.Module, input_shape: Sequence[int] | Parts) -> ModelFacts:
    """The model's strata and receptive fields, found by running it once on one example; it stays as it was.

    A model that cannot be run on an example of zeros has neither FLOPs nor fields here.

    Args:
        model: any model with parameters.
        input_shape: of one example, without the batch; or one example itself, where it has several parts.
    """
    try:
        if isinstance(input_shape, Parts):
            groups, flops, fields = _observe(model, input_shape)
        else:
            groups, flops, fields = run_on_one(model, input_shape, lambda sample: _observe(model, sample))
    except Exception:  # a user's model may fail in any way, and none may keep a run from starting
        groups, flops, fields = strata(model), {}, ()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    kept = model.state_dict().keys()
    facts = [
        StratumFacts(
            name=group.name,
            stage=group.stage,
            parameters=sum(params[name].numel() for name in group.params),
            normalised=any(_in_norm(model, name) for name in (*group.params, *group.buffers)),
            bytes=sum(params[name].nbytes for name in group.params)
            + sum(buffers[name].nbytes for name in group.buffers if name in kept),
            flops=flops.get(group.name),
            idle=group.idle,
            classifies=group.classifies,
        )
        for group in groups
    ]
    return ModelFacts(tuple(facts), fields)


def _in_norm(model: nn.Module, name: str) -> bool:
    """Whether a norm layer owns the tensor of that name."""
    return is_norm(model.get_submodule(name.rpartition(".")[0]))


def _observe(model: nn.Module, sample: Any) -> tuple[tuple[Stratum, ...], dict[str, int], tuple[Field, ...]]:
    """(strata, FLOPs of each by name, fields); the last two from one run."""
    follow: Any = nullcontext({}) if isinstance(sample, Parts) else follow_fields(model, sample)
    with _count_calls(model) as spent, follow as fields:
        calls(model, sample)
    groups = strata(model, sample)
    names = [group.name for group in groups]
    flops = dict.fromkeys(names, 0)
    current = names[0]
    for name, count in spent:
        current = name if name in flops else current
        flops[current] += count
    return groups, flops, tuple(fields.values())


@contextmanager
def _count_calls(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    """Note every call inside: (name of the module, FLOPs until the next call)."""
    marks: list[tuple[str, int]] = []
    spent: list[tuple[str, int]] = []
    counter = FlopCount()
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: marks.append((name, counter.total)))
        for name, module in model.named_modules()
    ]
    try:
        with counter:
            yield spent
    finally:
        for handle in handles:
            handle.remove()
    ends = [total for _, total in marks[1:]] + [counter.total]
    spent.extend((name, end - begin) for (name, begin), end in zip(marks, ends, strict=True))
