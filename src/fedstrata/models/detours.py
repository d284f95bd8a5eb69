"""Does anything of the input go around a module? Asked by running the model, with values compared.

The features that a module puts out for some inputs are put in its place while the model runs on others. If nothing goes
around it, what comes out is what the first inputs give: a link from the input, or a mask that is made of it, shows.
Gradients would not show a mask, and a look at the code is no proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedstrata.core.parts import Parts, call_on, zeros_of
from fedstrata.models.passes import preserve_model

CLOSE = 1e-5
"""So much of the largest output may be rounding."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of the model: its inputs, what the module put out, and what the model did."""

    inputs: Any
    there: Any
    outputs: list[Tensor]


def find_detour(model: nn.Module, module: nn.Module, sample: Any) -> str | None:
    """Why the rest of the model is not a function of what a module puts out, or None if it is; in both modes.

    Args:
        model: any model; it stays as it was.
        module: one that runs once.
        sample: a small batch of inputs.
    """
    for training in (False, True):
        runs = [_run(model, module, inputs, training) for inputs in _vary(sample)]
        known = [run for run in runs if run is not None]
        for run, other in zip(known, [*known[1:], *known[:1]], strict=True):
            if not isinstance(run.there, Tensor) or run.there.shape[:1] != (len(run.inputs),):
                return "it does not put out one tensor with a row for each input"
            again = _run(model, module, other.inputs, training, run.there)
            if again is None or not _alike(run.outputs, again.outputs):
                return "the model goes around it, with something of its input"
    return None


def _run(model: nn.Module, module: nn.Module, inputs: Any, training: bool, instead: Any = None) -> _Run | None:
    """One run, with something in the place of what the module puts out, if given; None where the model refuses it.

    Each run begins with the same random state and running statistics.
    """
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any) -> Any:
        seen.append(output.clone() if isinstance(output, Tensor) else output)  # what follows may write into it
        return None if instead is None else instead.clone()

    with preserve_model(model, training):
        handle = module.register_forward_hook(look)
        try:
            outputs = call_on(model, inputs)
        except Exception:  # such as a token that the model does not know
            return None
        finally:
            handle.remove()
    return _Run(inputs, seen[0], [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]) if seen else None


def _vary(sample: Any) -> list[Any]:
    """Batches that differ wherever inputs can: the sample, its rows moved on by one, other values, and zeros."""
    rows = torch.cat([sample, sample]) if len(sample) == 1 else sample  # norm layers cannot train on one row
    rng = torch.Generator().manual_seed(0)
    moved = torch.cat([rows[1:], rows[:1]])
    changed = rows.map(lambda part: _change(part, rng)) if isinstance(rows, Parts) else _change(rows, rng)
    return [rows, moved, changed, zeros_of(rows, len(rows))]


def _change(values: Tensor, rng: torch.Generator) -> Tensor:
    """Other numbers of the same kind: with noise, or whole ones at other places; 0 and 1 where all are the same."""
    if values.is_floating_point():
        noise = torch.randn(values.shape, generator=rng).to(values)
        return values + noise * values.std().nan_to_num().clamp(min=0.1)
    if not values.numel() or bool((values == values.flatten()[0]).all()):
        return torch.randint(2, values.shape, generator=rng).to(values)
    return values.flatten()[torch.randperm(values.numel(), generator=rng).to(values.device)].view(values.shape)


def _alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all numbers are the same, up to rounding."""
    return len(ours) == len(theirs) and all(_same_numbers(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    scale = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)
