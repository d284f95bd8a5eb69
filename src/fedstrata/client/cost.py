"""What a visit costs in FLOPs: counted once for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fedstrata.client.context import ClientContext
from fedstrata.client.prepare import prepare
from fedstrata.client.step import LocalSteps
from fedstrata.client.visit_hooks import build_own_hooks
from fedstrata.core.rng import preserve_rng
from fedstrata.core.types import Assignment, Examples, Slots
from fedstrata.models.flops import FlopCount

T = TypeVar("T")


@dataclass(eq=False)
class FlopEstimate:
    """What visits of one kind cost, and the parameters that they leave without a gradient.

    Args:
        around: FLOPs before and after the steps.
        steps: number of examples → FLOPs of a step with so many.
        idle: parameters that the steps do not use.
    """

    around: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()


def estimate_flops(
    context: ClientContext, a: Assignment, data: Examples, memory: Slots, sizes: Iterable[int], kind: Hashable
) -> FlopEstimate:
    """What a visit of this kind costs, counted on the side: for ways of training that cannot be counted themselves.

    Nothing changes but the scratch model, which the caller prepares again.
    """
    known: FlopEstimate | None = context.kept.get(kind)
    done = context.kept[kind] = known or FlopEstimate()
    missing = sorted(set(sizes) - done.steps.keys())
    if known is not None and not missing:
        return done
    replica = context.replica(a.arch)
    with preserve_rng():
        prepare(replica, context.method, a, memory)
        with FlopCount() as before:
            hooks = build_own_hooks(context.method, replica, data, a, memory)
        prepare(replica, context.method, a, memory)
        steps = LocalSteps(context, replica, a, hooks, replica.model)
        with hooks.tapped(steps.objective):
            for size in missing if steps.names else ():
                x, y = data.batch(torch.arange(size), context.augment)
                with FlopCount() as counter:
                    steps.step(replica.inputs(x.to(context.device)), y.to(context.device))
                done.steps[size] = counter.total
        if known is None:
            delta = {n: torch.zeros_like(replica.params[n], memory_format=torch.contiguous_format) for n in a.uploads}
            with FlopCount() as after:
                hooks.finished(delta, steps.tallies, memory)
                hooks.uploaded(delta)
            done.around = before.total + after.total
            done.idle = frozenset(n for n, g in zip(steps.names, steps.grads, strict=False) if g is None)
    return done


def counted_flops(context: ClientContext, key: Any, compute: Callable[[], T]) -> tuple[T, int]:
    """(result, FLOPs): counted at the first, real execution with this key, and known from then on.

    Counting every step would cost more than training; what the key names (sub-model, plan, hooks, inputs) settles the
    number of matrix products and convolutions.
    """
    known = context.flops.get(key)
    if known is not None:
        return compute(), known
    with FlopCount() as counter:
        result = compute()
    context.flops[key] = counter.total
    return result, counter.total
