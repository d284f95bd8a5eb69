"""FedImpro's Definition 3.1 and Theorem 4.1: margins of local models on other clients' data, and what bounds them."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors, load
from fedstrata.core.text import plural
from fedstrata.core.types import Examples
from fedstrata.federation import Federation
from fedstrata.models.norms import running_statistics
from fedstrata.probes.measures import Labelled, conditional_wasserstein, generalisation, margin_terms
from fedstrata.reproduce.claims import PLAIN, Check, above, beyond, cell
from fedstrata.reproduce.fedimpro_divergence import LocalModels
from fedstrata.reproduce.fedimpro_settings import FEDAVG
from fedstrata.reproduce.local_models import read_local_models
from fedstrata.reproduce.part_runs import build_config, build_federation
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import deal
from fedstrata.system.machine import compute_with

FIGURES = ("others", "sample", "whole", "distance", "accuracy")
"""What is kept of every visit: the three margins, C_d between the client's data and the others', others' accuracy."""


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Method → figure → one number for each visit of the last rounds; what could not be told is left out."""
    found = {}
    for label, text in settings["methods"].items():
        config = build_config(settings, seed, resources, method=text)
        federation = build_federation(config, LocalModels())
        fresh = choose(deal(config)[0].test, settings["fresh"], seed, "fresh")
        with compute_with(1):
            found[label] = measure_run(federation, fresh, settings["looks"], settings["examples"], seed)
    return found


def choose(examples: Examples, count: int, seed: int, *salt: int | str) -> Labelled:
    """Some examples, chosen by lot, as tensors."""
    order = torch.randperm(len(examples), generator=generator(seed, "margin", *salt))
    return examples.batch(order[:count])


def measure_run(federation: Federation, fresh: Labelled, looks: int, count: int, seed: int) -> dict[str, list[float]]:
    """The figures of the last few rounds' visits, all of a round's clients against each other."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    before = federation.model
    for record in federation.rounds():
        local = read_local_models(federation.state.techniques[LocalModels.name])
        if record.round > federation.total - looks and len(local) > 1:
            for row in measure_round(before, local, federation.clients, fresh, count, seed):
                for name, value in row.items():
                    found[name].append(value)
        before = federation.model
    return found


def measure_round(
    before: nn.Module, local: Mapping[int, Tensors], clients: Sequence[Examples], fresh: Labelled, count: int, seed: int
) -> list[dict[str, float]]:
    """One row of figures for each client whose margins can all be told."""
    held = [choose(clients[client], count, seed, client) for client in local]
    terms = margin_terms([_local_model(before, tensors) for tensors in local.values()], held, fresh)
    right = generalisation(before, local, list(clients)).others
    rows = []
    for at, client in enumerate(local):
        margins = {"others": terms.others[at], "sample": terms.sample[at], "whole": terms.whole[at]}
        known = {name: value for name, value in margins.items() if value is not None}
        if len(known) == len(margins):
            rows.append({**known, "distance": _distance(held, at), "accuracy": right[client]})
    return rows


def _local_model(before: nn.Module, tensors: Tensors) -> nn.Module:
    """A client's model after its training."""
    model = copy.deepcopy(before).eval()
    own: Tensors = {**dict(model.named_parameters()), **running_statistics(model)}
    with torch.no_grad():
        load(own, {**own, **{name: tensor for name, tensor in tensors.items() if name in own}})
    return model


def _distance(held: Sequence[Labelled], client: int) -> float:
    """C_d between a client's examples and all others' together, over the classes that both have; 0 without any."""
    others = [pair for at, pair in enumerate(held) if at != client]
    x, y = (torch.cat([pair[part] for pair in others]) for part in (0, 1))
    if not torch.isin(held[client][1], y).any():
        return 0.0
    return conditional_wasserstein(held[client], (x, y), None).value


# --- what is found ---------------------------------------------------------------------------------------------------


def bounds(found: Mapping[str, Sequence[float]], *, measured: bool) -> list[float]:
    """Theorem 4.1's right side for every visit: W(D̃_m) − |W(D_m) − W(D̃_m)| − 2·C_d, by the measured C_d or 0."""
    visits = zip(found["sample"], found["whole"], found["distance"], strict=True)
    return [sample - abs(whole - sample) - 2 * distance * measured for sample, whole, distance in visits]


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's, over the visits; None where one of them does not vary."""
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return statistics.correlation(one, other)


def assess(found: SeedFigures, methods: Sequence[str], looks: int) -> Findings:
    """Margins beside accuracies, and the theorem's two sides."""
    mean = {m: {name: _over(found, m, name) for name in FIGURES} for m in methods}
    low = {m: {kind: _bound(found, m, measured=kind == "measured") for kind in ("zero", "measured")} for m in methods}
    rows = tuple(
        (
            m,
            cell(mean[m]["accuracy"]),
            *(PLAIN.cell(mean[m][name]) for name in ("others", "sample", "whole")),
            PLAIN.cell(low[m]["zero"]),
            PLAIN.cell(mean[m]["distance"]),
            PLAIN.cell(low[m]["measured"]),
        )
        for m in methods
    )
    columns = (
        "local models of",
        "accuracy, others' data, %",
        "margin, others' data",
        "own data (D̃)",
        "own mixture, new data (D)",
        "bound with C_d = 0",
        "C_d of the samples",
        "bound with that",
    )
    notes = (
        "margins are first-order distances between inputs to the nearest point that is misclassified, 0 where the "
        f"example is; local models are those of the last {plural(looks, 'round')}, before the server averages; others: "
        "the other clients of the round",
        "under label skew all clients' examples of a class come from one distribution, so that C_d is 0 but for the "
        "samples' size; samples of one distribution are apart, too, and that is what is measured",
        "the proof (Eq. 11) also has max{δ, γ}, which is 0 only if all clients have the same mixture of classes; the "
        "theorem leaves it out",
    )
    table = FindingsTable("Theorem 4.1: margins of local models, and the bound", columns, rows)
    data = {str(seed): figures for seed, figures in found.items()}
    return Findings((table,), tuple(_checks(found, methods, mean, low)), notes, data=data)


def _checks(
    found: SeedFigures,
    methods: Sequence[str],
    mean: Mapping[str, Mapping[str, Seeds]],
    low: Mapping[str, Mapping[str, Seeds]],
) -> list[Check]:
    checks = [
        above(
            f"{m}'s local models have larger margins than FedAvg's on other clients' data",
            mean[m]["others"],
            mean[FEDAVG]["others"],
            unit=PLAIN,
        )
        for m in methods
        if m != FEDAVG
    ]
    for m in methods:
        checks += [
            above(
                f"Theorem 4.1 holds in the mean over visits, C_d = 0 ({m})",
                mean[m]["others"],
                low[m]["zero"],
                unit=PLAIN,
            ),
            beyond(f"Theorem 4.1's bound with the samples' C_d is above 0 ({m})", low[m]["measured"], 0.0),
        ]
    related = {
        m: {s: r for s, f in found.items() if (r := correlation(f[m]["others"], f[m]["accuracy"])) is not None}
        for m in methods
    }
    checks += [beyond(f"visits with larger margins have higher accuracies ({m})", related[m], 0.0) for m in methods]
    return checks


def _over(found: SeedFigures, method: str, name: str) -> dict[int, float]:
    """Seed → the mean over the visits."""
    return {seed: statistics.fmean(f[method][name]) for seed, f in found.items() if f[method][name]}


def _bound(found: SeedFigures, method: str, *, measured: bool) -> dict[int, float]:
    values = {seed: bounds(figures[method], measured=measured) for seed, figures in found.items()}
    return {seed: statistics.fmean(of) for seed, of in values.items() if of}
