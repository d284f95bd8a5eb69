"""Many clients at once in one vectorised computation: in this process, or in every worker process."""

from __future__ import annotations

from fedstrata.client.context import ClientContext
from fedstrata.client.vectorised import check_vectorises
from fedstrata.engines.grouping import VECTORISED
from fedstrata.engines.processes import build_processes
from fedstrata.engines.protocol import Engine
from fedstrata.engines.registry import EngineRequest
from fedstrata.engines.serial import Serial


def build_vmap(request: EngineRequest) -> Engine:
    """The engine `vmap`: a way of training of its own, in this process or in the workers of `processes`."""
    check_models(request.context)
    if request.workers == 1:
        return Serial(request.context, request.clients, request.test, VECTORISED)
    return build_processes(request, VECTORISED)


def check_models(context: ClientContext) -> None:
    """Refuse models and methods that cannot be vectorised."""
    for arch in context.archs:
        check_vectorises(context.method, context.task, context.build(arch), context.sample)
