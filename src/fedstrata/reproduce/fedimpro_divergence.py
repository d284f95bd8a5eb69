"""FedImpro's mechanism: how far local models are apart, layer by layer, and what shared features change in that."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedstrata.core.rng import generator
from fedstrata.core.technique import RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.text import plural
from fedstrata.core.types import Examples, Stratum
from fedstrata.federation import Federation
from fedstrata.models.stages import params_above as upper
from fedstrata.probes.measures import (
    Labelled,
    client_gradients,
    conditional_wasserstein,
    features_at,
    generalisation,
    gradient_variance,
    mean_wasserstein,
    shared_gradient,
    weight_divergence,
    weight_divergence_by_stratum,
    with_shared,
)
from fedstrata.reproduce.claims import GAINS, PLAIN, above, cell, within
from fedstrata.reproduce.local_models import read_local_models, store_local_models
from fedstrata.reproduce.part_runs import build_config, build_federation
from fedstrata.reproduce.parts import AssessedTable, Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import plot_divergence, plot_layers
from fedstrata.system.machine import compute_with
from fedstrata.techniques.feature_gaussians import draw_features
from fedstrata.techniques.fedimpro import FedImpro

MEAN_IMPRO = "FedImpro, mean"
"""With the loss as the mean over all rows, whose steps are no longer than FedAvg's."""

# --- watching a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LocalModels(Technique):
    """Remembers this round's local models and how far they are apart; training is as without it.

    Its state: `whole`, `strata` and `stages` hold (1/|S|) Σ ‖θ̄ − θ_i‖ in order; `i:name` is client i's own tensor.
    """

    name: ClassVar[str] = "watch"
    needs_deltas: ClassVar[bool] = True

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The round's change as it is; the state holds its divergences and local models."""
        deltas, weights = [update.delta for update in round.updates], round.weights
        by_stage = [
            weight_divergence([{n: mine[n] for n in names} for mine in deltas], weights)
            for names in params_by_stage(round.strata).values()
        ]
        found = {
            "whole": torch.tensor(weight_divergence(deltas, weights)),
            "strata": torch.tensor(list(weight_divergence_by_stratum(deltas, round.strata, weights).values())),
            "stages": torch.tensor(by_stage),
        }
        return delta, found | store_local_models(round)


def params_by_stage(strata: Sequence[Stratum]) -> dict[str, list[str]]:
    """Stage → its parameters' names, in order."""
    found: dict[str, list[str]] = {}
    for stratum in strata:
        found.setdefault(stratum.stage, []).extend(stratum.params)
    return found


def measure_run(federation: Federation, looks: int) -> dict[str, Any]:
    """Every round's divergence, and the last few rounds' local models on others' data."""
    names = {"strata": [s.name for s in federation.strata], "stages": list(params_by_stage(federation.strata))}
    curves = {kind: {name: list[float]() for name in several} for kind, several in names.items()}
    whole, visits, before = list[float](), list[dict[str, float]](), federation.model
    for record in federation.rounds():
        state = federation.state.techniques[LocalModels.name]
        whole.append(float(state["whole"]))
        for kind, lines in curves.items():
            for line, value in zip(lines.values(), state[kind].tolist(), strict=True):
                line.append(value)
        after = federation.model
        if record.round > federation.total - looks:
            visits.append(on_others(before, after, read_local_models(state), list(federation.clients)))
        before = after
    means = {name: statistics.fmean(visit[name] for visit in visits) for name in visits[0]}
    return {"whole": whole, **curves, **means}


def on_others(
    before: nn.Module, after: nn.Module, local: Mapping[int, Tensors], clients: Sequence[Examples]
) -> dict[str, float]:
    """A round's local models on all other clients' data, as they are and with the averaged running statistics."""
    held = {name for name, _ in after.named_parameters()}
    params = {client: {n: t for n, t in tensors.items() if n in held} for client, tensors in local.items()}
    found = generalisation(before, local, clients)
    return {
        "global": generalisation(before, {client: {} for client in local}, clients).mean,
        "others": found.mean,
        "averaged": generalisation(after, params, clients).mean,
        "own": statistics.fmean(found.own.values()),
    }


# --- shared features -------------------------------------------------------------------------------------------------


def balanced_labels(state: Tensors, count: int) -> Tensor:
    """A number of labels, of the classes that have statistics in turn, as in local training."""
    classes = state["known"].nonzero()[:, 0]
    return classes[torch.arange(count) % len(classes)]


def shared_features(state: Tensors, labels: Tensor, rng: torch.Generator) -> Tensor:
    """A feature for every label, sampled from the global Gaussians."""
    std = state["variance"].clamp(min=0).sqrt()
    return draw_features(state["mean"][labels], std[labels], state["mean"].shape[1:], rng)


def variances(
    model: nn.Module, clients: Sequence[Examples], place: str, state: Tensors | None, seed: int
) -> dict[str, Any]:
    """CGV below and above the cut, on the clients' own data, and with as many sampled features as a client has data.

    Every client draws its own, as in training.
    """
    high, sizes = upper(model, place), [len(data) for data in clients]
    gradients = client_gradients(model, clients)
    own = gradient_variance(gradients, high, sizes)
    found = {"own": {"low": own.low, "high": own.high}}
    if state is not None:
        joined = []
        for client, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
            labels = balanced_labels(state, size)
            sampled = shared_features(state, labels, generator(seed, "variance", client))
            joined.append(with_shared(gradient, shared_gradient(model, sampled, labels, place), high, size, size))
        both = gradient_variance(joined, high, sizes)
        found["shared"] = {"low": both.low, "high": both.high}
    return found


def distances(
    model: nn.Module, clients: Sequence[Examples], place: str, state: Tensors, limit: int, seed: int
) -> dict[str, Any]:
    """C_d between clients in the mean over pairs: of their own features, and with every second one sampled instead.

    Of every client `limit` random examples, if it has them. A sampled feature has the label of the one whose place it
    takes, so that numbers and classes are the same in both; every client draws its own.
    """
    chosen = [
        torch.randperm(len(data), generator=generator(seed, "features", client))[:limit]
        for client, data in enumerate(clients)
    ]
    own = [features_at(model, data, place, index) for data, index in zip(clients, chosen, strict=True)]
    mixed = []
    for client, (features, labels) in enumerate(own):
        sampled = shared_features(state, labels, generator(seed, "distance", client))
        second = (torch.arange(len(labels)) % 2 == 1).view(-1, *[1] * (features.dim() - 1))
        mixed.append((torch.where(second, sampled, features), labels))
    return {"own": asdict(mean_wasserstein(own, None)), "shared": asdict(mean_wasserstein(mixed, None))}


def check_transport() -> None:
    """Refuse early if distances cannot be computed."""
    point: Labelled = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    conditional_wasserstein(point, point)


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Method → its curves and local models; what its last model's gradients and features are like.

    One thread, as in training: on a busy machine two wait for each other, and the last bits would depend on them.
    """
    place, found = settings["place"], dict[str, Any]()
    for label, text in settings["methods"].items():
        federation = build_federation(build_config(settings, seed, resources, method=text), LocalModels())
        with compute_with(1):
            found[label] = measure_run(federation, settings["looks"])
            model, clients = federation.model, list(federation.clients)
            state = federation.state.techniques.get(FedImpro.name)
            found[label]["variance"] = variances(model, clients, place, state, seed)
            if state is not None:
                found[label]["distance"] = distances(model, clients, place, state, settings["features"], seed)
                high = set(upper(model, place))
                found["high"] = [
                    name for name, params in params_by_stage(federation.strata).items() if high.issuperset(params)
                ]
    return found


# --- what is found ---------------------------------------------------------------------------------------------------


def scale_to_maximum(curve: Sequence[float]) -> list[float]:
    """A curve divided by its own maximum, as in Fig. 3."""
    most = max(curve)
    return [value / most for value in curve] if most else list(curve)


def half_means(curve: Sequence[float]) -> tuple[float, float]:
    """The means of a curve's first and second half."""
    cut = len(curve) // 2
    return statistics.fmean(curve[:cut]), statistics.fmean(curve[cut:])


def assess(found: SeedFigures, methods: Sequence[str], looks: int) -> Findings:
    """FedAvg against FedImpro, and low layers against high ones."""
    parts = [
        _assess_curves(found, methods),
        _assess_stages(found),
        _assess_generalisation(found, methods),
        _assess_variance(found, methods),
        _assess_distance(found),
    ]
    pictures = {
        "divergence.png": partial(
            plot_divergence, {m: _mean_curve([f[m]["whole"] for f in found.values()]) for m in methods}
        ),
        "layers.png": partial(plot_layers, {kind: _mean_lines(found, kind) for kind in ("strata", "stages")}),
    }
    notes = (
        "divergence is (1/|S|) Σ ‖θ̄ − θ_i‖ over the clients of a round, the mean θ̄ weighted by their examples",
        f"local models are those of the last {plural(looks, 'round')}, before the server averages; the global model is "
        "the one they began with; others' data are the training examples of all other clients together; local models "
        "have their own running statistics, or those of all of the round's clients in the mean",
        "gradients are taken at the last model over each client's whole data, with running statistics; with shared "
        "features, every client has sampled as many as it has data, and the mean is over both, where the loss that is "
        "trained adds two means",
        "a distance is the mean over the pairs of clients that have a class in common; covered: the share of the "
        "examples whose class both have; with shared features, every second feature is sampled, of the same class",
    )
    tables, checks = zip(*parts, strict=True)
    data = {str(seed): figures for seed, figures in found.items()}
    return Findings(tables, tuple(check for several in checks for check in several), notes, pictures, data)


def _assess_curves(found: SeedFigures, methods: Sequence[str]) -> AssessedTable:
    both = {m: {s: half_means(f[m]["whole"]) for s, f in found.items()} for m in methods}
    early, late = ({m: {s: pair[at] for s, pair in seeds.items()} for m, seeds in both.items()} for at in (0, 1))
    rows = tuple((m, PLAIN.cell(early[m]), PLAIN.cell(late[m])) for m in methods)
    ours = {"FedImpro": "", MEAN_IMPRO: " (loss as a mean)"}
    checks = tuple(
        above(
            f"FedImpro's local models are nearer to each other in the second half of the run{which}",
            late["FedAvg"],
            late[label],
            unit=PLAIN,
            paper="lower after about 500 of 1000 rounds",
        )
        for label, which in ours.items()
        if label in late
    )
    return FindingsTable(
        "Divergence of the local models, mean over the rounds", ("", "first half", "second half"), rows
    ), checks


def _assess_stages(found: SeedFigures) -> AssessedTable:
    first = next(iter(found.values()))
    shrunk = {
        stage: {s: half_means(scale_to_maximum(f["FedAvg"]["stages"][stage]))[1] for s, f in found.items()}
        for stage in first["FedAvg"]["stages"]
    }
    low, high = (
        {s: statistics.fmean(v[s] for stage, v in shrunk.items() if (stage in first["high"]) is side) for s in found}
        for side in (False, True)
    )
    check = above("low layers' divergence shrinks faster than high layers' with FedAvg", high, low, unit=PLAIN)
    rows = tuple(
        (stage, "high" if stage in first["high"] else "low", PLAIN.cell(seeds)) for stage, seeds in shrunk.items()
    )
    title = "FedAvg's divergence by stage in the second half of the run, of its maximum"
    return FindingsTable(title, ("stage", "part", "of its maximum"), rows, left=2), (check,)


def _assess_generalisation(found: SeedFigures, methods: Sequence[str]) -> AssessedTable:
    columns = {
        "global model, others' data": "global",
        "local models, others' data": "others",
        "the same with averaged statistics": "averaged",
        "local models, own data": "own",
    }
    picked = {name: {m: _pick_figures(found, m, name) for m in methods} for name in columns.values()}
    rows = tuple((m, *(cell(picked[name][m]) for name in columns.values())) for m in methods)
    after, averaged, before = picked["others"], picked["averaged"], picked["global"]
    change = {m: {s: averaged[m][s] - before[m][s] for s in found} for m in methods}
    claim = "FedImpro's local models are better on other clients' data"
    checks = (
        above(claim, after["FedImpro"], after["FedAvg"]),
        above(f"{claim} (averaged statistics)", averaged["FedImpro"], averaged["FedAvg"]),
        above(
            "FedImpro's local training costs less on other clients' data (averaged statistics)",
            change["FedImpro"],
            change["FedAvg"],
            unit=GAINS,
        ),
    )
    return FindingsTable("Accuracy of the last rounds' local models, %", ("", *columns), rows), checks


def _assess_variance(found: SeedFigures, methods: Sequence[str]) -> AssessedTable:
    kinds = {
        **{m: (m, "variance", "own") for m in methods},
        "FedImpro, with shared features": ("FedImpro", "variance", "shared"),
    }
    rows = tuple(
        (label, *(PLAIN.cell(_pick_figures(found, *path, part)) for part in ("low", "high")))
        for label, path in kinds.items()
    )
    own, shared = (_pick_figures(found, "FedImpro", "variance", kind, "high") for kind in ("own", "shared"))
    check = within(
        "with as many sampled features as data, the high part's gradient variance is about a quarter",
        {s: shared[s] / own[s] for s in found},
        0.2,
        0.3,
        paper="N²/(N + N̂)², Theorem 4.2",
    )
    return FindingsTable("Variance of the gradients between clients (CGV)", ("model", "low part", "high part"), rows), (
        check,
    )


def _assess_distance(found: SeedFigures) -> AssessedTable:
    own, shared = ("FedImpro", "distance", "own"), ("FedImpro", "distance", "shared")
    rows = tuple(
        (label, PLAIN.cell(_pick_figures(found, *path, "value")), f"{cell(_pick_figures(found, *path, 'covered'))} %")
        for label, path in (("own", own), ("half of them sampled", shared))
    )
    check = above(
        "sampled features bring the clients' features nearer to each other",
        _pick_figures(found, *own, "value"),
        _pick_figures(found, *shared, "value"),
        unit=PLAIN,
    )
    title = "Conditional Wasserstein distance between clients' features, FedImpro's model"
    return FindingsTable(title, ("features", "distance", "covered"), rows), (check,)


def _pick_figures(found: SeedFigures, *path: str) -> dict[int, float]:
    """Seed → the figure at the end of a path."""
    picked: dict[int, float] = {}
    for seed, figures in found.items():
        at: Any = figures
        for key in path:
            at = at[key]
        picked[seed] = at
    return picked


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean over the seeds, round by round."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def _mean_lines(found: SeedFigures, kind: str) -> dict[str, list[float]]:
    """The mean curve of each of FedAvg's strata or stages, divided by its maximum."""
    several = [figures["FedAvg"][kind] for figures in found.values()]
    return {name: scale_to_maximum(_mean_curve([curves[name] for curves in several])) for name in several[0]}
