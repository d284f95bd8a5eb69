"""How much of the input does one output of a convolution see? Its receptive field.

Each kernel widens the field by its reach, in input pixels (deeper models, §4.1):

    l_k = l_{k−1} + (K_k − 1) · d_k · Π_{i<k} s_i      with kernels K, strides s and dilations d,

so the field may exceed the image: what lies outside is padding. Where paths meet (residual links), it is what all of
them see together. Behind an enlarged image positions differ in how much they see, and the most counts.

The formula is followed through the operations that the model really runs on one example, so it needs neither names
nor a model that can be traced. Every tensor carries a note of how its axes see the image; views, products, pools and
convolutions pass it on. Three conventions: norm layers see one pixel, though some of them average over the image;
attention, global pooling and whatever else mixes all positions see the whole image; and layers behind an operation
that is not understood here are left out rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fedstrata.errors import UsageError
from fedstrata.models.passes import calls
from fedstrata.models.receptive.axes import Axis, Trace, prefix
from fedstrata.models.receptive.rules import Operation, rule_for

T = TypeVar("T")


@dataclass(frozen=True)
class Field:
    """What one output of a convolution sees.

    Attributes:
        layer: the convolution's module name.
        field: the receptive field in input pixels, (height, width); (length,) for sequences.
        input: the input's own size, likewise.
    """

    layer: str
    field: tuple[int, ...]
    input: tuple[int, ...]

    @property
    def exceeds(self) -> bool:
        """Whether it is larger than the input, in height or in width."""
        return any(seen > there for seen, there in zip(self.field, self.input, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"layer": self.layer, "field": list(self.field), "input": list(self.input)}


def receptive_fields(model: nn.Module, input_shape: Sequence[int]) -> list[Field]:
    """The receptive field of every `nn.Conv1d` and `nn.Conv2d`, in the order of their first calls.

    The model is run once, in eval mode, and stays as it was.

    Args:
        model: any model.
        input_shape: of one example, without the batch: (channels, height, width), (channels, length), ….

    Raises:
        UsageError: if the model cannot run on an example of that shape.
    """
    return run_on_one(model, input_shape, lambda sample: _fields_of_run(model, sample))


def _fields_of_run(model: nn.Module, sample: Tensor) -> list[Field]:
    with follow_fields(model, sample) as fields:
        calls(model, sample)
    return list(fields.values())


def run_on_one(model: nn.Module, input_shape: Sequence[int], run: Callable[[Tensor], T]) -> T:
    """What `run` makes of a batch of one example that the model accepts: numbers, or else tokens, all zero."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    sample = weight.new_zeros(1, *input_shape)
    try:
        return run(sample)
    except UsageError as error:
        try:
            return run(sample.long())
        except UsageError:
            raise error from None


@contextmanager
def follow_fields(model: nn.Module, sample: Tensor) -> Iterator[dict[str, Field]]:
    """Note the fields of the convolutions that run inside, by name, when the model is called on this very sample."""
    names: dict[nn.Module, str] = {m: name for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d)}
    fields: dict[str, Field] = {}
    follower = _Follower(sample)

    def note(module: nn.Module, args: Any, out: Any) -> None:
        trace = follower.traces.get(out) if isinstance(out, Tensor) else None
        if trace is not None:
            name = names[module]
            seen = tuple(axis.field for axis in trace)
            if name in fields:  # a layer that is called again: the most that it ever sees
                seen = tuple(map(max, seen, fields[name].field))
            fields[name] = Field(name, seen, tuple(axis.input for axis in trace))

    handles = [module.register_forward_hook(note) for module in names]
    try:
        with follower if names else nullcontext():
            yield fields
    finally:
        for handle in handles:
            handle.remove()


@cache
def _arguments(func: Any) -> tuple[list[str], dict[str, Any]]:
    """(names of an operation's arguments, the defaults of those that have one)."""
    known = func._schema.arguments
    return [a.name for a in known], {a.name: a.default_value for a in known if a.has_default_value()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the notes on, operation by operation; `traces` has None for what is not understood."""

    def __init__(self, sample: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        shape = sample.shape
        images = range(2 if sample.ndim == 4 else 1, sample.ndim)  # without an image's channels
        self.traces: Any = WeakTensorKeyDictionary()
        self.traces[sample] = tuple(Axis(shape[dim], prefix(shape, dim), shape[dim]) for dim in images)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FlopCount`: torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        names, defaults = _arguments(func)
        given = defaults | dict(zip(names, args, strict=False)) | (kwargs or {})
        name = func._overloadpacket.__name__
        sources = [t for value in given.values() for t in _tensors(value) if t in self.traces]
        if sources and not name.endswith("_like") and not name.startswith("new_"):
            for result in _tensors(out):
                self.traces[result] = self._after(name, given, sources, result)
                if name.endswith("_") and result._base is not None and any(t is not result for t in sources):
                    self.traces[result._base] = None  # a part of it was overwritten: who knows which
        return out

    def _after(self, name: str, given: Mapping[str, Any], sources: Sequence[Tensor], result: Tensor) -> Trace | None:
        noted = [(t, self.traces[t]) for t in sources]
        if any(trace is None for _, trace in noted):
            return None
        step = Operation(given, noted, result)
        try:
            rule = rule_for(name, step)
            return None if rule is None else rule(step)
        except Exception:  # any operation of a user's model may come by, with arguments that no rule expects
            return None
