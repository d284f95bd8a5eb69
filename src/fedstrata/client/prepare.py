"""A model replica made ready for a visit: parameters loaded, what does not train frozen."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from fedstrata.client.context import BUFFERS, PERSONAL, Bench
from fedstrata.core.method import Method
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.types import Assignment, Slots


def _starting_buffers(method: Method, bench: Bench, assignment: Assignment, memory: Slots) -> Tensors:
    """The client's own running statistics, the server's, or, where there are none yet, the model's initial ones."""
    own = memory.get(BUFFERS) if method.buffers == "local" else None
    return own or assignment.buffers or bench.initial


def prepare(bench: Bench, method: Method, assignment: Assignment, memory: Slots) -> None:
    """Load the scratch model, and freeze what does not train: autograd then skips the frozen prefix by itself."""
    load(bench.params, assignment.params)
    load(bench.params, own_params(assignment, memory))
    load(bench.buffers, _starting_buffers(method, bench, assignment, memory))
    load(*bench.constants)
    trains = set(assignment.trains)
    for name, p in bench.params.items():
        p.grad = None  # of a step that was interrupted
        if p.requires_grad is not (name in trains):
            p.requires_grad_(name in trains)
    if not all(module.training for module in bench.modules):
        bench.model.train()
    for owner in {name.rpartition(".")[0] for name in still(bench, assignment)}:
        norm = bench.model.get_submodule(owner)
        if isinstance(norm, _NormBase):
            norm.eval()


def still(bench: Bench, assignment: Assignment) -> tuple[str, ...]:
    """The running statistics that stay as they are."""
    if assignment.moves is None:
        return ()
    moves = set(assignment.moves)
    return tuple(n for n in bench.buffers if n not in moves)


def own_names(assignment: Assignment) -> tuple[str, ...]:
    """What trains and does not travel: the client keeps it."""
    if len(assignment.trains) == len(assignment.travels):
        return ()
    sent = set(assignment.travels)
    return tuple(n for n in assignment.trains if n not in sent)


def own_params(assignment: Assignment, memory: Slots) -> Tensors:
    """The parameters of its own that a client goes on with."""
    kept = memory.get(PERSONAL, {})
    return {n: kept[n] for n in own_names(assignment) if n in kept} if kept else {}
