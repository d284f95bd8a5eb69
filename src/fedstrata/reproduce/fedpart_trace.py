"""The norm of the clients' gradients, step by step: does it jump where the server has averaged?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from fedstrata.core.technique import Batch, ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.text import plural
from fedstrata.federation import Federation
from fedstrata.reproduce.claims import PLAIN, above, beyond
from fedstrata.reproduce.part_runs import build_config, build_federation
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import plot_norms


def gradient_norm(grads: Tensors) -> torch.Tensor:
    """√Σ‖g‖² over all names."""
    return torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()


@dataclass(frozen=True, kw_only=True)
class GradientTrace(Technique):
    """Remembers the norm of the raw gradient at every step of a client's last visit; training is as without it."""

    name: ClassVar[str] = "trace"

    def local(self, view: ClientView) -> Hooks:
        """Hooks that collect the norm and the batch size of every step, and change nothing."""

        def tally(total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            now = {"norms": gradient_norm(grads).reshape(1), "sizes": torch.tensor([len(batch.y)])}
            return {name: torch.cat([total[name], step]) for name, step in now.items()} if total else now

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, dict(tally)

        return Hooks(tally=tally, finish=finish)


def measure_norms(federation: Federation) -> dict[str, Any]:
    """Every round's norms, step by step in the mean over its clients, and the names of the strata that trained.

    A pass's last batch is left out if it is smaller than the others: its gradient is larger by chance alone.
    """
    norms, active = [], []
    for record in federation.rounds():
        kept = [federation.memory(client)[GradientTrace.name] for client in record.clients]
        visits = [seen["norms"][seen["sizes"] == seen["sizes"].max()] for seen in kept]
        steps = min(map(len, visits))
        norms.append(torch.stack([visit[:steps] for visit in visits]).mean(0).tolist())
        active.append(record.active)
    return {"norms": norms, "active": active}


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Method → its norms."""
    return {
        label: measure_norms(build_federation(build_config(settings, seed, resources, method=text), GradientTrace()))
        for label, text in settings["methods"].items()
    }


@dataclass(frozen=True)
class Jump:
    """Two rounds one after the other in which the same strata trained: the norm after the aggregation over before."""

    round: int
    full: bool
    ratio: float


def jumps(found: Mapping[str, Any], ends: int) -> list[Jump]:
    """The mean norm of a round's first `ends` steps over that of the last ones before, wherever the two compare."""
    norms: Sequence[Sequence[float]] = found["norms"]
    active: Sequence[Sequence[str]] = found["active"]
    most = max(map(len, active))
    return [
        Jump(at, len(active[at]) == most, statistics.fmean(norms[at][:ends]) / statistics.fmean(norms[at - 1][-ends:]))
        for at in range(1, len(norms))
        if active[at] == active[at - 1]
    ]


def assess(found: SeedFigures, ends: int) -> Findings:
    """Full updates' jumps against partial updates', in the same stretch of training."""
    full: dict[int, float] = {}
    part: dict[int, float] = {}
    before: dict[int, float] = {}
    for seed, methods in found.items():
        mixed = jumps(methods["FedPart"], ends)
        partial_ones = [jump for jump in mixed if not jump.full]
        since = min(jump.round for jump in partial_ones)
        part[seed] = statistics.fmean(jump.ratio for jump in partial_ones)
        full[seed] = statistics.fmean(jump.ratio for jump in jumps(methods["full"], ends) if jump.round >= since)
        before[seed] = statistics.fmean(jump.ratio for jump in mixed if jump.full)
    lines = {
        "full updates, in the rounds in which FedPart's are partial": full,
        "FedPart, partial rounds": part,
        "FedPart, full rounds at the beginning": before,
    }
    rows = tuple((name, PLAIN.cell(seeds)) for name, seeds in lines.items())
    title = f"Mean norm of the first {plural(ends, 'step')} after aggregation over that of the last {ends} before"
    checks = (
        beyond("gradient norm spikes after full aggregation", full, 1),
        above("gradient norm spikes less after partial aggregation", full, part, unit=PLAIN),
    )
    first = next(iter(found))
    notes = (
        "the norm is that of a client's raw gradient over what trains, in the mean over the clients, without batches "
        "that are smaller than the others; two rounds are compared if the same strata trained in both",
    )
    return Findings(
        (FindingsTable(title, ("rounds", "ratio"), rows),),
        checks,
        notes,
        {"trace.png": partial(plot_norms, found[first], first)},
        {str(seed): methods for seed, methods in found.items()},
    )
