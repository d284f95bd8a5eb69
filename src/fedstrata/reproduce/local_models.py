"""Local models, as a technique that only looks on keeps them in its state: `i:name` is client i's own tensor."""

from __future__ import annotations

from fedstrata.core.technique import RoundView
from fedstrata.core.tensors import Tensors


def store_local_models(round: RoundView) -> Tensors:
    """The tensors of all local models of a round, as they are kept in a state."""
    found: Tensors = {}
    for update in round.updates:
        own = {n: round.params[n] + change for n, change in update.delta.items()} | update.buffers
        found |= {f"{update.client}:{name}": tensor.clone() for name, tensor in own.items()}
    return found


def read_local_models(state: Tensors) -> dict[int, Tensors]:
    """Client → its tensors after the last round; other entries of the state are passed over."""
    found: dict[int, Tensors] = {}
    for key, tensor in state.items():
        client, colon, name = key.partition(":")
        if colon:
            found.setdefault(int(client), {})[name] = tensor
    return found
