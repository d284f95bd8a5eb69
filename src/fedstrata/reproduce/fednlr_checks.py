"""FedNLR's theory on constructed and on trained networks: how often each statement is right (part `theory`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedstrata.core.rng import generator
from fedstrata.reproduce.claims import POINTS, Check, beyond, counted
from fedstrata.reproduce.fednlr_theory import (
    EXAMPLE,
    TwoLayers,
    collapsed,
    discrepancy,
    example_figures,
    printed_reduction,
    rate_bounds,
    shares,
)
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import deal

SMALL = 1e-9
"""Double precision's rounding in these sums is far below, and what is claimed far above."""
INPUTS, HIDDEN = 6, 8


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """The counts of every check: how many cases there are, and in how many of them the statement is right."""
    rng = generator("fednlr_theory", seed)
    return {
        "collapsed": count_collapsed(settings["draws"], rng),
        "printed": count_printed(settings["draws"], rng),
        "rates": count_rates(settings["draws"], rng),
        "trained": count_trained(settings, seed, resources),
    }


# --- Theorem 2 -------------------------------------------------------------------------------------------------------


def count_collapsed(draws: int, rng: torch.Generator) -> dict[str, int]:
    """Bound neurons of the missing class after a step, on random networks that are exactly collapsed (Eq. 2)."""
    counts = {"bound": 0, "rising": 0, "falling": 0, "idle": 0}
    for _ in range(draws):
        hidden = torch.randn(HIDDEN, INPUTS, generator=rng, dtype=torch.float64) / 2  # no score is 0 up to rounding
        examples = torch.rand(2, INPUTS, generator=rng, dtype=torch.float64)  # so that x_kᵀx_i > 0
        net = collapsed(hidden, examples)
        own, other = net.activations(examples)
        change = net.step(examples[:1], 0, 0.1).activations(examples[1:])[0] - other
        bound = other > own
        counts["bound"] += int(bound.sum())
        counts["idle"] += int((bound & (own == 0)).sum())
        counts["rising"] += int((change[bound] > SMALL).sum())
        counts["falling"] += int((change[bound] < -SMALL).sum())
    return counts


def count_printed(draws: int, rng: torch.Generator) -> dict[str, int]:
    """Where Theorem 2's printed reduction is what a step does, over neurons that are active on an example.

    `active` are neurons that all of the client's examples activate, `others` the rest; `emptied` are those of the first
    kind that end at 0, the theorem's first branch.
    """
    counts = {"active": 0, "active right": 0, "others": 0, "others right": 0, "emptied": 0}
    for at in range(draws):
        hidden, out = (
            torch.randn(n, m, generator=rng, dtype=torch.float64) for n, m in ((HIDDEN, INPUTS), (2, HIDDEN))
        )
        own, other = torch.rand(2, 5, INPUTS, generator=rng, dtype=torch.float64)
        net, lr = TwoLayers(hidden, out), (0.01, 0.3)[at % 2]  # the larger one for the branch that ends at 0
        after = net.step(own, 0, lr).activations(other)
        before = net.activations(other)
        right = (before - after - printed_reduction(net, own, other, 1, lr)).abs() < SMALL
        always = (net.activations(own) > 0).all(0).expand_as(right)
        for name, which in {"active": always & (before > 0), "others": ~always & (before > 0)}.items():
            counts[name] += int(which.sum())
            counts[f"{name} right"] += int((which & right).sum())
        counts["emptied"] += int((always & (before > 0) & (after == 0)).sum())
    return counts


def count_trained(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """A network trained on two classes, after one full-batch step on the client that has only the first of them."""
    own, other = two_classes(settings, seed, resources)
    net = train_network(own, other, settings, generator("fednlr_theory", seed, 1))
    one, two = net.activations(own), net.activations(other)
    stepped = net.step(own, 0, settings["lr"] / len(own))
    change = stepped.activations(other).mean(0) - two.mean(0)
    kinds = {"bound": two.mean(0) > one.mean(0), "strict": two.amin(0) > one.amax(0)}
    counts = {name: int(which.sum()) for name, which in kinds.items()}
    falling = {f"{name} falling": int((change[which] < 0).sum()) for name, which in kinds.items()}
    scores = torch.cat([net.scores(own)[:, 0], net.scores(other)[:, 1]])
    apart = [net.out[1] - net.out[0], two.mean(0) - one.mean(0)]
    return {
        **counts,
        **falling,
        "accuracy": float((scores > 0.5).double().mean()),
        "collapse": float(torch.cosine_similarity(apart[0], apart[1], dim=0)),
    }


def two_classes(settings: Mapping[str, Any], seed: int, resources: PartResources) -> tuple[Tensor, Tensor]:
    """So many examples of each of two classes, as rows of numbers of 0 and more, so that x_kᵀx_i ≥ 0."""
    dataset, _ = deal(build_config(settings, seed, resources))
    labels = dataset.train.labels()
    found = []
    for label in settings["classes"]:
        index = (labels == label).nonzero().flatten()
        chosen = index[torch.randperm(len(index), generator=generator("fednlr_theory", seed, label))]
        found.append(dataset.train.batch(chosen[: settings["images"]])[0].flatten(1).double())
    least = min(float(x.min()) for x in found)
    return found[0] - least, found[1] - least


def train_network(own: Tensor, other: Tensor, settings: Mapping[str, Any], rng: torch.Generator) -> TwoLayers:
    """Gradient descent on both classes together, from He's random parameters."""
    x, labels = torch.cat([own, other]), torch.tensor([0] * len(own) + [1] * len(other))
    hidden = torch.randn(settings["hidden"], x.shape[1], generator=rng, dtype=torch.float64) * math.sqrt(2 / x.shape[1])
    out = torch.randn(2, settings["hidden"], generator=rng, dtype=torch.float64) * math.sqrt(2 / settings["hidden"])
    net = TwoLayers(hidden, out)
    for _ in range(settings["steps"]):
        net = net.descend(x, labels, settings["lr"] / len(x))
    return net


# --- Lemma 4 and Eq. 16 ----------------------------------------------------------------------------------------------


def count_rates(draws: int, rng: torch.Generator) -> dict[str, int]:
    """How often Lemma 4's bounds hold on random activations, for η·q and for η·M·q, and how often a larger T evens."""
    counts = {"draws": draws, "Eq. 21": 0, "Eq. 15": 0, "even": 0}
    for _ in range(draws):
        widths = torch.randint(2, 40, (3,), generator=rng).tolist()
        mus = (1 + 4 * torch.rand(3, generator=rng, dtype=torch.float64)).tolist()
        layers = [torch.rand(width, generator=rng, dtype=torch.float64) for width in widths]
        rates = [shares(layer, mu) for layer, mu in zip(layers, mus, strict=True)]
        low, high = rate_bounds(mus, widths)
        for name, factors in {"Eq. 21": [1] * 3, "Eq. 15": widths}.items():
            every = torch.cat([rate * factor for rate, factor in zip(rates, factors, strict=True)])
            counts[name] += bool(every.min() >= low - SMALL and every.max() <= high + SMALL)
        counts["even"] += discrepancy(layers[0], 2.0) < discrepancy(layers[0], 1.0)
    return counts


# --- findings --------------------------------------------------------------------------------------------------------


def assess(found: SeedFigures) -> Findings:
    """Which statements are right, and how often."""
    example = example_figures()
    rows = [
        (name, *(f"{value:.2f}" for value in EXAMPLE[name]), *(f"{value:.4f}" for value in example[name]))
        for name in EXAMPLE
    ]
    columns = ("on class 2", "printed, before", "printed, after", "here, before", "here, after")
    notes = (
        "Example 1: the figure with its parameters is not at hand; W₁ = the classes' examples and W₂ = their "
        "activations (Eq. 2 with A = 1) give all of Eq. 9. The text says that the activations of all neurons on class "
        "2 fall; by Eq. 9 itself the first neuron's rises",
        "Theorem 2 is printed without ReLU's derivative: a neuron moves by those of the client's examples that "
        "activate it, and not at all if none does (idle). Eq. 10 ends with A·h^c − A·h^c, the same symbol twice, "
        "which is 0; it is read as A·h^c − A·h^c'",
        _trained_note(found),
        "Lemma 4 is proved with η̂ = η·q (Eq. 21), whose sum over a layer is η; the rates of Eq. 15, by which Algorithm "
        "1 trains, are M_l times as large: their mean is η, so their largest is above the lemma's bound, below η",
        "Section 5 says that a larger T_l indicates a larger discrepancy; by Eq. 16, T = range/ln μ, it is smaller",
    )
    tables = (FindingsTable("Example 1", columns, tuple(rows)), _counts_table(found))
    return Findings(tables, tuple(_claims(found)), notes, data={str(seed): mine for seed, mine in found.items()})


def _trained_note(found: SeedFigures) -> str:
    told = [figures["trained"] for figures in found.values()]
    accuracy, cosine = (statistics.fmean(one[name] for one in told) for name in ("accuracy", "collapse"))
    return (
        f"the trained networks have {100 * accuracy:.1f} % on their own examples, and a cosine of {cosine:.2f} between "
        "w_c − w_c' and the difference of the classes' mean activations, which neural collapse has at 1. Bound: more "
        "active on the missing class in the mean over the examples; strictly: in every example, as Definition 1 has it"
    )


def share(found: SeedFigures, part: str, count: str, of: str) -> dict[int, float]:
    """Seed → the share of the cases in which something is so; seeds without cases have none."""
    return {s: mine[part][count] / mine[part][of] for s, mine in found.items() if mine[part][of]}


def printed_share() -> float:
    """The share of Eq. 9's numbers that Example 1's network has, to their two digits."""
    pairs = [pair for name, own in example_figures().items() for pair in zip(own, EXAMPLE[name], strict=True)]
    return statistics.fmean(abs(value - printed) < 0.005 for value, printed in pairs)


def _claims(found: SeedFigures) -> Iterator[Check]:
    name = "Example 1's printed activations and scores follow from a network that is collapsed"
    yield _always(name, dict.fromkeys(found, printed_share()))
    rising = {s: 1 - v for s, v in share(found, "collapsed", "rising", "bound").items()}
    yield _always("Theorem 2: exactly collapsed, no bound neuron of the missing class rises", rising)
    live = {s: mine["collapsed"] for s, mine in found.items()}
    falling = {s: one["falling"] / (one["bound"] - one["idle"]) for s, one in live.items()}
    name = "Theorem 2: exactly collapsed, every bound neuron falls that the client's data activates"
    yield _always(name, falling)
    yield _always(
        "Theorem 2: exactly collapsed, every bound neuron of the missing class falls",
        share(found, "collapsed", "falling", "bound"),
    )
    name = "Theorem 2's reduction is what a step does, of neurons that"
    yield _always(f"{name} all of the client's examples activate", share(found, "printed", "active right", "active"))
    yield _always(f"{name} some of its examples do not activate", share(found, "printed", "others right", "others"))
    falls = share(found, "trained", "bound falling", "bound")
    yield beyond("Theorem 2: trained on two classes, most bound neurons fall", falls, 0.5, unit=POINTS)
    yield beyond("Theorem 2: trained on two classes, every bound neuron falls (99 %)", falls, 0.99, unit=POINTS)
    yield _always("Lemma 4's bounds hold for η·q (Eq. 21)", share(found, "rates", "Eq. 21", "draws"))
    yield _always(
        "Lemma 4's bounds hold for the rates that clients train with (Eq. 15)", share(found, "rates", "Eq. 15", "draws")
    )
    yield _always(
        "a larger temperature makes a layer's rates more alike (Eq. 16)", share(found, "rates", "even", "draws")
    )


def _always(name: str, shares: Seeds) -> Check:
    """The claim that something is so in every case: mathematics, not chance."""
    return counted(name, shares, 1.0, 1.0)


def _counts_table(found: SeedFigures) -> FindingsTable:
    parts = {"collapsed": "collapsed", "printed": "Theorem 2 as printed", "rates": "rates", "trained": "trained"}
    rows = []
    for part, label in parts.items():
        for name in next(iter(found.values()))[part]:
            values = [mine[part][name] for mine in found.values()]
            rows.append((label, name, ", ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)))
    return FindingsTable("What was counted, seed by seed", ("check", "", "figures"), tuple(rows), left=2)
