"""Rules that choose among whole clients, layer by layer: each stratum's updates are reduced by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Reducer, Stratum
from fedstrata.errors import one_of

Per = Literal["model", "stratum"]
"""What a rule looks at together: a client's whole update, or that of one stratum."""


def check_per(kind: str, per: str) -> None:
    """Refuse anything but a model or a stratum."""
    one_of(kind, ("model", "stratum"), per=per)


def reduce_updates(
    reducer: Reducer,
    deltas: Sequence[Tensors],
    buffers: Sequence[Tensors],
    weights: Sequence[float],
    strata: Sequence[Stratum],
) -> tuple[Tensors, Tensors]:
    """What a rule makes of all updates; stratum by stratum, if it is to look at each by itself.

    Of a stratum, only the clients that hold something of it are looked at. What is in no stratum is reduced together.
    Running statistics without a parameter beside them are judged by their clients' whole updates.
    """
    if reducer.per == "model":
        return reducer(deltas, buffers, weights)
    groups = [(set(stratum.params), set(stratum.buffers)) for stratum in strata]
    groups.append((_others(deltas, [group[0] for group in groups]), _others(buffers, [group[1] for group in groups])))
    delta: Tensors = {}
    values: Tensors = {}
    for params, names in groups:
        changes = [_part(tensors, params) for tensors in deltas]
        statistics = [_part(tensors, names) for tensors in buffers]
        moves = any(changes)
        holders = [k for k, held in enumerate(changes if moves else statistics) if held]
        if holders:
            seen = changes if moves else deltas
            found = reducer([seen[k] for k in holders], [statistics[k] for k in holders], [weights[k] for k in holders])
            delta |= found[0] if moves else {}
            values |= found[1]
    return delta, values


def _others(clients: Sequence[Tensors], groups: Sequence[set[str]]) -> set[str]:
    """Names that clients hold and no group does."""
    return {name for tensors in clients for name in tensors}.difference(*groups)


def _part(tensors: Tensors, names: set[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name in names}
