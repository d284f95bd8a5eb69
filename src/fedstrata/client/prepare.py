"""A model replica made ready for a visit: parameters loaded, what does not train frozen."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from fedstrata.client.context import BUFFERS, PERSONAL, ModelReplica
from fedstrata.core.method import Method
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.types import Assignment, Slots


def _starting_buffers(method: Method, replica: ModelReplica, assignment: Assignment, memory: Slots) -> Tensors:
    """The client's own running statistics, the server's, or, where there are none yet, the model's initial ones."""
    own = memory.get(BUFFERS) if method.buffers == "local" else None
    return own or assignment.buffers or replica.initial


def prepare(replica: ModelReplica, method: Method, assignment: Assignment, memory: Slots) -> None:
    """Load the scratch model, and freeze what does not train: autograd then skips the frozen prefix by itself."""
    load(replica.params, assignment.params)
    load(replica.params, own_params(assignment, memory))
    load(replica.buffers, _starting_buffers(method, replica, assignment, memory))
    load(*replica.constants)
    trains = set(assignment.trains)
    for name, p in replica.params.items():
        p.grad = None  # of a step that was interrupted
        if p.requires_grad is not (name in trains):
            p.requires_grad_(name in trains)
    if not all(module.training for module in replica.modules):
        replica.model.train()
    for owner in {name.rpartition(".")[0] for name in still(replica, assignment)}:
        norm = replica.model.get_submodule(owner)
        if isinstance(norm, _NormBase):
            norm.eval()


def still(replica: ModelReplica, assignment: Assignment) -> tuple[str, ...]:
    """The running statistics that stay as they are."""
    if assignment.update_buffers is None:
        return ()
    moves = set(assignment.update_buffers)
    return tuple(n for n in replica.buffers if n not in moves)


def own_names(assignment: Assignment) -> tuple[str, ...]:
    """What trains and does not travel: the client keeps it."""
    if len(assignment.trains) == len(assignment.uploads):
        return ()
    sent = set(assignment.uploads)
    return tuple(n for n in assignment.trains if n not in sent)


def own_params(assignment: Assignment, memory: Slots) -> Tensors:
    """The parameters of its own that a client goes on with."""
    kept = memory.get(PERSONAL, {})
    return {n: kept[n] for n in own_names(assignment) if n in kept} if kept else {}
