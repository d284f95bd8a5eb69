"""FLOPs of real computation, counted without changing a bit of it.

torch's own FlopCounterMode decomposes operations that it has no formula for, and decomposed ones round differently; a
run that is counted at another step than before (after a resume, in another worker) would end with other bits. This
counter uses torch's formulas but runs every operation as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedstrata.models.passes import preserve_model


def _recurrent(inputs: Tensor, weights: tuple[Tensor, ...], passes: int) -> int:
    """Matrix products of a fused recurrent layer: each row of the input meets both weight matrices in every pass."""
    rows = inputs.numel() // inputs.shape[-1]
    return 2 * passes * rows * sum(w.numel() for w in weights if w.dim() == 2)


def _extra() -> dict[Any, Any]:
    """Formulas for fused operations that torch has none for: LSTM on the CPU (its GRU runs as matrix products)."""
    aten = torch.ops.aten
    return {
        aten.mkldnn_rnn_layer: lambda x, *rest: _recurrent(x, rest[:2], 1),
        aten.mkldnn_rnn_layer_backward: lambda x, *rest: _recurrent(x, rest[:2], 2),
    }


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of matrix products, convolutions, attention and recurrent layers inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._extra = _extra()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiled is counted here; torch would import its compiler, which takes longer than a small round.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        if formula is not None:
            self.total += _evaluate(formula, args, kwargs or {}, out)
        elif packet in self._extra:
            self.total += self._extra[packet](*args)
        return out


_OF_TENSORS = flop_registry[torch.ops.aten.mm].__code__
"""torch's function around a formula that takes shapes: the same for most of them."""


def _evaluate(formula: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """What a formula of torch's says; torch's own way from tensors to shapes takes longer than a small product."""
    if getattr(formula, "__code__", None) is not _OF_TENSORS:
        return int(formula(*args, **kwargs, out_val=out))
    named = {name: _shapes(value) for name, value in kwargs.items()}
    return int(formula.__wrapped__(*map(_shapes, args), **named, out_shape=_shapes(out)))


def _shapes(value: Any) -> Any:
    """A tensor's shape, or those in a tuple or list; anything else as it is."""
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shapes, value)) if type(value) in (tuple, list) else value


def count_flops(model: nn.Module, inputs: Tensor) -> int:
    """FLOPs of a forward pass per example, the model as in evaluation; nothing is changed by it."""
    count = FlopCount()
    with preserve_model(model), count:
        model(inputs[:1])
    return count.total
