"""Small techniques, one for each door that the papers' methods go through; each has a setting that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.core import Assignment, Batch, ClientView, Hooks, RoundView, Technique, Update
from fedstrata.strata import Stratum
from fedstrata.tensors import Tensors, add, scale, subtract, zeros_like


@dataclass(frozen=True, kw_only=True)
class Pull(Technique):
    """Door `loss`: + mu/2·‖w_k − w‖² over what trains (as FedProx)."""

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
class Steer(Technique):
    """Doors `send`, `correct`, `tally`, slot, memory, `fold` and `apply` with state: control variates (as SCAFFOLD)."""

    name: ClassVar[str] = "steer"
    vectorises: ClassVar[bool] = True
    defaults: ClassVar[dict[str, str]] = {"weight": "uniform"}
    strength: float = 1.0

    def init(self, params: Tensors) -> Tensors:
        return zeros_like(params)

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        return {n: state[n] for n in assignment.trains} if self.strength else {}

    def local(self, view: ClientView) -> Hooks:
        if not self.strength:
            return Hooks()
        names = view.assignment.trains
        mine = {n: view.memory.get(n, torch.zeros_like(view.slot[n])) for n in names}
        shift = scale(subtract(view.slot, mine, names), self.strength)

        def tally(total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            total = total or {**zeros_like(mine), "(steps)": torch.zeros(())}
            return {**add(total, grads), "(steps)": total["(steps)"] + 1}

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            mean = {n: tally[n] / tally["(steps)"] for n in names} if tally else mine
            return subtract(mean, mine, names), {**view.memory, **mean}

        return Hooks(correct=lambda grads, batch: {n: shift[n] for n in grads}, tally=tally, finish=finish)

    def fold(self, total: Tensors, slot: Tensors, weight: float) -> Tensors:
        return {**total, **add(slot, total)}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        moved = {n: state[n] + change / round.owners(n) for n, change in round.totals["steer"].items()}
        return delta, {**state, **moved}


@dataclass(frozen=True, kw_only=True)
class Turn(Technique):
    """Door `plan`: one stratum at a time after some full rounds (as FedPart)."""

    name: ClassVar[str] = "turn"
    full: int = 1

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...]) -> Assignment:
        if assignment.round < self.full:
            return assignment
        active = strata[(assignment.round - self.full) % len(strata)].params
        return replace(assignment, trains=active, travels=active)


@dataclass(frozen=True, kw_only=True)
class Pace(Technique):
    """Door `scale`: weights at another pace than the rest (as FedNLR)."""

    name: ClassVar[str] = "pace"
    vectorises: ClassVar[bool] = True
    factor: float = 0.5

    def local(self, view: ClientView) -> Hooks:
        if self.factor == 1:
            return Hooks()
        return Hooks(scale={n: torch.tensor(self.factor) for n in view.assignment.trains if n.endswith("weight")})


@dataclass(frozen=True, kw_only=True)
class Cool(Technique):
    """Door `output`: logits divided by a temperature (as FedRS, FedLC)."""

    name: ClassVar[str] = "cool"
    vectorises: ClassVar[bool] = True
    temperature: float = 2.0

    def local(self, view: ClientView) -> Hooks:
        return Hooks() if self.temperature == 1 else Hooks(output=lambda batch: batch.logits / self.temperature)


@dataclass(frozen=True, kw_only=True)
class Even(Technique):
    """Door `gather`: every update divided by its steps, times the mean number of steps, per name (as FedNova)."""

    name: ClassVar[str] = "even"
    on: bool = True

    def gather(self, updates: Sequence[Update], weights: Sequence[float]) -> Sequence[Update]:
        if not self.on or len({u.steps for u in updates}) == 1:
            return updates
        out = []
        for u in updates:
            delta = {}
            for n, d in u.delta.items():
                owners = [(w, o.steps) for w, o in zip(weights, updates, strict=True) if n in o.delta]
                mean = sum(w * s for w, s in owners) / sum(w for w, _ in owners)
                delta[n] = d * (mean / u.steps)
            out.append(replace(u, delta=delta))
        return out


@dataclass(frozen=True, kw_only=True)
class Heavy(Technique):
    """Door `apply` with state: momentum on the server (as FedAvgM)."""

    name: ClassVar[str] = "heavy"
    beta: float = 0.5

    def init(self, params: Tensors) -> Tensors:
        return zeros_like(params)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        if self.beta == 0:
            return delta, state
        moved = add(delta, scale({n: state[n] for n in delta}, self.beta))
        return moved, {**state, **moved}


@dataclass(frozen=True, kw_only=True)
class Twin(Technique):
    """Door `features`: rows of noisy features join at a stage and leave at the output (as FedImpro)."""

    name: ClassVar[str] = "twin"
    weight: float = 0.5
    stage: str = "norm"

    def local(self, view: ClientView) -> Hooks:
        if self.weight == 0:
            return Hooks()
        rows: list[Tensor] = []

        def join(batch: Batch, features: Tensor) -> Tensor:
            noise = torch.randn(features.shape, generator=view.rng) * 0.1
            return torch.cat([features, features.detach() + noise])

        def output(batch: Batch) -> Tensor:
            real, sampled = batch.logits.split(len(batch.y))
            rows[:] = [sampled]
            return real

        def loss(batch: Batch) -> Tensor:
            return self.weight * torch.nn.functional.cross_entropy(rows[0], batch.y)

        return Hooks(features={self.stage: join}, output=output, loss=loss)


@dataclass(frozen=True, kw_only=True)
class Blur(Technique):
    """Door `upload`: noise on what travels, from the technique's own random stream."""

    name: ClassVar[str] = "blur"
    std: float = 1e-3

    def local(self, view: ClientView) -> Hooks:
        if self.std == 0:
            return Hooks()
        return Hooks(
            upload=lambda delta: {n: torch.randn(d.shape, generator=view.rng) * self.std for n, d in delta.items()}
        )


@dataclass(frozen=True, kw_only=True)
class Look(Technique):
    """Door `gradient`: half the raw gradient, half the one at perturbed parameters (as FedSpeed)."""

    name: ClassVar[str] = "look"
    vectorises: ClassVar[bool] = True
    radius: float = 0.1

    def local(self, view: ClientView) -> Hooks:
        if self.radius == 0:
            return Hooks()

        def correct(grads: Tensors, batch: Batch) -> Tensors:
            ahead = batch.gradient({n: batch.params[n].detach() + self.radius * g for n, g in grads.items()})
            return {n: (ahead[n] - g) / 2 for n, g in grads.items()}

        return Hooks(correct=correct)


@dataclass(frozen=True, kw_only=True)
class Keep(Technique):
    """Doors memory and `needs_deltas`: a client remembers its last delta; the server limits the largest (as Krum)."""

    name: ClassVar[str] = "keep"
    vectorises: ClassVar[bool] = True
    needs_deltas: ClassVar[bool] = True
    limit: float = 1.0

    def local(self, view: ClientView) -> Hooks:
        return Hooks(finish=lambda delta, tally: ({}, {n: d.clone() for n, d in delta.items()}))

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        largest = max((d.abs().max().item() for u in round.updates for d in u.delta.values()), default=0.0)
        return (delta if largest <= self.limit else scale(delta, self.limit / largest)), state


@dataclass(frozen=True, kw_only=True)
class Lean(Technique):
    """Door `forward`: features of the last local model, kept in memory, push the current ones away (as MOON)."""

    name: ClassVar[str] = "lean"
    mu: float = 0.1
    stage: str = "relu"

    def local(self, view: ClientView) -> Hooks:
        if self.mu == 0:
            return Hooks()
        names = view.assignment.trains
        anchor = dict(view.assignment.params)
        previous = {n: view.memory.get(n, anchor[n]) for n in anchor}
        now: list[Tensor] = []

        def tap(batch: Batch, features: Tensor) -> Tensor:
            now[:] = [features[: len(batch.y)]]
            return features

        def loss(batch: Batch) -> Tensor:
            with torch.no_grad():
                near, far = batch.forward(anchor, self.stage), batch.forward(previous, self.stage)
            similar = torch.nn.functional.cosine_similarity
            logits = torch.stack([similar(now[0], near), similar(now[0], far)], dim=1)
            return self.mu * torch.nn.functional.cross_entropy(logits, torch.zeros(len(batch.y), dtype=torch.long))

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, {**previous, **add({n: anchor[n] for n in names}, delta)}

        return Hooks(features={self.stage: tap}, loss=loss, finish=finish)


@dataclass(frozen=True, kw_only=True)
class Census(Technique):
    """Doors `plan` without training, slot, `fault` and the server's model: the last round only counts (as CCVR)."""

    name: ClassVar[str] = "census"
    size: float = 0.01

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...]) -> Assignment:
        last = assignment.round == assignment.rounds - 1
        return replace(assignment, trains=(), travels=()) if last and self.size else assignment

    def local(self, view: ClientView) -> Hooks:
        if view.assignment.trains:
            return Hooks()
        count = view.counts()
        return Hooks(finish=lambda delta, tally: ({"count": count}, None))

    def fault(self, slot: Tensors, assignment: Assignment) -> str | None:
        return "its census is missing" if not assignment.trains and "count" not in slot else None

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        if round.number < round.rounds - 1 or not self.size:
            return delta, state
        total = torch.stack([u.slots["census"]["count"] for u in round.updates]).sum(0)
        model = round.model()
        outputs = model.get_submodule("head").out_features
        return {**delta, "head.bias": self.size * total[:outputs] / total.sum()}, state
