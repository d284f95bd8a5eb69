"""FedNLR's Fig. 3: the temperature T_l of every layer, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstrata.core.technique import ClientView, Hooks, RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.diagnosis.evidence import rank_correlation
from fedstrata.federation import Federation
from fedstrata.models.taps import watch_places
from fedstrata.reproduce.claims import PLAIN, Check, above, beyond
from fedstrata.reproduce.part_runs import build_config, build_federation
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import save
from fedstrata.techniques import method
from fedstrata.techniques.fednlr import FedNLR

SECOND = 1
"""The place of the paper's second layer."""


@dataclass(frozen=True, kw_only=True)
class Temperatures(Technique):
    """Keeps the mean over a round's clients of every layer's temperature; training is as without it.

    Args:
        rates: the FedNLR whose temperatures they are.
    """

    name: ClassVar[str] = "temperatures"
    rates: FedNLR

    def local(self, view: ClientView) -> Hooks:
        """A slot with T_l and μ_l of every layer, as the client has them before training."""
        found = self.rates.temperatures(view)
        slot = {layer: torch.stack([heat, heat.new_tensor(mu)]) for layer, (heat, mu) in found.items()}
        return Hooks(finish=lambda delta, tally: (slot, None))

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """Sums over clients, and how many they are."""
        counted = {layer: torch.cat([pair, torch.ones_like(pair[:1])]) for layer, pair in slot.items()}
        return {layer: triple + total[layer] if total else triple for layer, triple in counted.items()}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The means take the place of the last round's."""
        totals = round.totals[self.name]
        return delta, {layer: triple[:2] / triple[2] for layer, triple in totals.items()}


def measure_run(federation: Federation) -> dict[str, Any]:
    """Layer → T_l after every round, μ_l, and how many neurons it has, as channels or units and as outputs."""
    (x, _) = federation.clients[0].batch(torch.arange(1))
    sizes = layer_sizes(federation, x)
    found: dict[str, Any] = {layer: {"temperatures": [], "neurons": n, "outputs": m} for layer, (n, m) in sizes.items()}
    for _ in federation.rounds():
        for layer, (heat, mu) in federation.state.techniques[Temperatures.name].items():
            found[layer]["temperatures"].append(float(heat))
            found[layer]["mu"] = float(mu)
    return found


def layer_sizes(federation: Federation, x: Tensor) -> dict[str, tuple[int, int]]:
    """Layer → (channels or units, numbers that it puts out for one example), from the input on."""
    shapes: dict[str, tuple[int, int]] = {}

    def note(name: str, there: Tensor) -> None:
        shapes[name] = (there.shape[1], there[0].numel())

    layers, model = [stratum.name for stratum in federation.strata], federation.model
    with torch.no_grad(), watch_places(model, {name: partial(note, name) for name in layers}):
        model(x)
    return {name: shapes[name] for name in layers}


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """The temperatures of a run."""
    config = build_config(settings, seed, resources)
    (rates,) = (one for one in method(config.method).techniques if isinstance(one, FedNLR))
    return measure_run(build_federation(config, Temperatures(rates=rates)))


# --- findings --------------------------------------------------------------------------------------------------------


Heat = Mapping[str, Mapping[int, float]]
"""Layer → seed → its temperature in the mean over the last rounds."""


def assess(found: SeedFigures, last: int) -> Findings:
    """Which layer is the hottest, and whether it is the one with the most neurons."""
    first = next(iter(found.values()))
    heat = {
        layer: {seed: statistics.fmean(mine[layer]["temperatures"][-last:]) for seed, mine in found.items()}
        for layer in first
    }
    rows = tuple(
        (layer, str(one["neurons"]), str(one["outputs"]), f"{one['mu']:.3f}", PLAIN.cell(heat[layer]))
        for layer, one in first.items()
    )
    over = "the last round" if last == 1 else f"the last {last} rounds"
    notes = (
        f"T_l = (h̄_max − h̄_min)/ln μ_l, in the mean over a round's clients and over {over}; of the classifier it is "
        "that of its logits",
        "the paper's second layer has the most neurons if every place of a channel counts as one (outputs); here a "
        "neuron is a channel or a unit, and the layers with the most are others",
        "Section 5 says that a larger T_l indicates a larger discrepancy of the rates; by Eq. 16 it is the other way "
        "round, at a given range of activations: T tells of that range, and μ of the discrepancy",
    )
    seed = min(found)
    curves = {layer: one["temperatures"] for layer, one in found[seed].items()}
    columns = ("layer", "channels or units", "outputs", "μ", "T")
    return Findings(
        (FindingsTable(f"Temperatures over {over}", columns, rows),),
        tuple(_claims(first, heat)),
        notes,
        pictures={"temperatures.png": partial(plot_temperatures, curves, seed)},
        data={str(seed): mine for seed, mine in found.items()},
    )


def _claims(layers: Mapping[str, Any], heat: Heat) -> Iterator[Check]:
    names = list(layers)
    yield _hottest("the second layer has the highest temperature", names[SECOND : SECOND + 1], heat, "Fig. 3")
    most = max(one["neurons"] for one in layers.values())
    widest = [name for name, one in layers.items() if one["neurons"] == most]
    yield _hottest("a layer with the most channels or units has the highest temperature", widest, heat)
    for kind, told in {"outputs": "outputs", "neurons": "channels or units"}.items():
        sizes = [one[kind] for one in layers.values()]
        seeds = heat[names[0]]
        ranks = {seed: rank_correlation(sizes, [heat[name][seed] for name in names]) for seed in seeds}
        yield beyond(f"the temperature grows with the number of a layer's {told} (rank correlation)", ranks, 0.0)


def _hottest(name: str, ours: Sequence[str], heat: Heat, paper: str = "") -> Check:
    """The claim that the hottest of some layers is hotter than all others."""
    sides = [[layer for layer in heat if (layer in ours) is side] for side in (True, False)]
    seeds = heat[ours[0]]
    mine, others = ({seed: max(heat[layer][seed] for layer in side) for seed in seeds} for side in sides)
    return above(name, mine, others, unit=PLAIN, paper=paper)


def plot_temperatures(curves: Mapping[str, Sequence[float]], seed: int, path: Path) -> None:
    """Every layer's temperature over the rounds, from the input (dark) to the classifier."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.subplots()
    for at, (layer, curve) in enumerate(curves.items()):
        colour = colormaps["viridis"](0.92 * at / max(len(curves) - 1, 1))
        axes.plot(range(1, len(curve) + 1), curve, ".-", color=colour, linewidth=1.3, markersize=3, label=layer)
    axes.set(xlabel=f"round (seed {seed})", ylabel="temperature T", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
