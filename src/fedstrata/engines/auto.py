"""Which engine is the fastest for a model and a number of workers."""

from __future__ import annotations

from torch import nn

from fedstrata.client.context import ClientContext
from fedstrata.engines.registry import EngineRequest
from fedstrata.errors import UsageError

MANY_VISITS = 1_000
"""Visits of the shortest run that is vectorised; below, loading torch's part for it takes longer than it saves."""
SMALL_MODEL = 300_000
"""Parameters of the largest dense model that is vectorised; beyond, copies of it no longer fit the caches."""


def choose_fastest(request: EngineRequest) -> str:
    """The name of the engine that `auto` means."""
    if request.visits >= MANY_VISITS and vectorised_is_faster(request.context):
        return "vmap"
    return "serial" if request.workers == 1 else "processes"


def vectorised_is_faster(context: ClientContext) -> bool:
    """True for small dense models, where the costs of a step outweigh its arithmetic; the same for every round."""
    if context.device.type != "cpu" or not all(is_small_and_dense(context.build(arch)) for arch in context.archs):
        return False
    from fedstrata.engines.vmap import check_models  # not for models that it would not take anyway

    try:
        check_models(context)
    except UsageError:
        return False
    return True


def is_small_and_dense(model: nn.Module) -> bool:
    """True if all parameters are those of linear layers, and there are not too many."""
    holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    dense = all(isinstance(m, nn.Linear) for m in holders)
    return dense and sum(p.numel() for p in model.parameters()) <= SMALL_MODEL
