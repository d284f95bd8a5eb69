"""Small techniques for doors that no method of the library goes through yet, or not alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.core.technique import Batch, ClientView, Hooks, RoundView, Technique
from fedstrata.core.tensors import Tensors, scale
from fedstrata.core.types import Assignment, Stratum


@dataclass(frozen=True, kw_only=True)
class Pull(Technique):
    """Door `loss`: + mu/2·‖w_k − w‖² over what trains (what FedProx writes as a gradient)."""

    name: ClassVar[str] = "pull"
    vectorises: ClassVar[bool] = True
    mu: float = 0.1

    def local(self, view: ClientView) -> Hooks:
        if self.mu == 0:
            return Hooks()
        anchor = {n: view.assignment.params[n] for n in view.assignment.trains}

        def loss(batch: Batch) -> Tensor:
            terms = [(batch.params[n] - w).square().sum() for n, w in anchor.items()]
            return self.mu / 2 * torch.stack(terms).sum()

        return Hooks(loss=loss)


@dataclass(frozen=True, kw_only=True)
class Turn(Technique):
    """Door `plan` without `upload_buffers`: one stratum at a time; all running statistics travel."""

    name: ClassVar[str] = "turn"
    full: int = 1

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        if assignment.round < self.full:
            return assignment
        active = strata[(assignment.round - self.full) % len(strata)].params
        return replace(assignment, trains=active, uploads=active)


@dataclass(frozen=True, kw_only=True)
class Pace(Technique):
    """Door `scale` for many clients at once: weights at another pace than the rest."""

    name: ClassVar[str] = "pace"
    vectorises: ClassVar[bool] = True
    factor: float = 0.5

    def local(self, view: ClientView) -> Hooks:
        if self.factor == 1:
            return Hooks()
        return Hooks(scale={n: torch.tensor(self.factor) for n in view.assignment.trains if n.endswith("weight")})


@dataclass(frozen=True, kw_only=True)
class Limit(Technique):
    """Doors memory and `needs_deltas`: a client remembers its last delta; the server limits the largest (as Krum)."""

    name: ClassVar[str] = "limit"
    vectorises: ClassVar[bool] = True
    needs_deltas: ClassVar[bool] = True
    limit: float = 1.0

    def local(self, view: ClientView) -> Hooks:
        return Hooks(finish=lambda delta, tally: ({}, {n: d.clone() for n, d in delta.items()}))

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        largest = max((d.abs().max().item() for u in round.updates for d in u.delta.values()), default=0.0)
        return (delta if largest <= self.limit else scale(delta, self.limit / largest)), state
