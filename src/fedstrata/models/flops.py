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
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        elif packet in self._extra:
            self.total += self._extra[packet](*args)
        return out


def count_flops(model: nn.Module, inputs: Tensor) -> int:
    """FLOPs of a forward pass per example, the model as in evaluation; nothing is changed by it."""
    count = FlopCount()
    with preserve_model(model), count:
        model(inputs[:1])
    return count.total
