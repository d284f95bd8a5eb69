"""InCo's mechanism: how alike clients' models are, stage by stage, and where a stage's layers go the same way."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from fedstrata.compare.table import spread, stat
from fedstrata.config.schema import RunConfig, Settings
from fedstrata.core.method import Method
from fedstrata.core.rng import derive
from fedstrata.core.technique import RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Examples
from fedstrata.federation import Federation
from fedstrata.models.norms import without_statistics
from fedstrata.models.registry import build_model
from fedstrata.models.stages import stages as stages_of
from fedstrata.models.submodels import groups, shares
from fedstrata.probes.measures import crossing, embedding, features_at, layer_similarity
from fedstrata.reproduce.claims import PLAIN, above, cell
from fedstrata.reproduce.local_models import read_local_models, store_local_models
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import AssessedTable, Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import plot_heatmaps, plot_maps, plot_stages
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import deal
from fedstrata.system.machine import compute_with
from fedstrata.techniques import method

IID, EQUAL = "IID, equal models", "non-IID, equal models"
GROUP, HETERO = "non-IID, different models (GroupAvg)", "HeteroAvg"
INCO, PLAIN_INCO = "InCo", "InCo without optimisation"
HARDER = (IID, EQUAL, GROUP)
"""The case study's settings, each harder than the one before."""

# --- watching a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastLocalModels(Technique):
    """Remembers the last round's local models; training is as without it. Its state: `i:name`, client i's tensor."""

    name: ClassVar[str] = "locals"
    needs_deltas: ClassVar[bool] = True

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The round's change as it is; after the last round the state holds the local models."""
        last = round.number >= round.rounds - 1
        return delta, store_local_models(round) if last else {}


@dataclass(frozen=True, eq=False)
class ObservedFederation:
    """A federation whose clients may have models of their own, each client's untrained model, and the test set."""

    federation: Federation
    models: Sequence[nn.Module]
    test: Examples

    def local(self) -> list[nn.Module]:
        """The clients' models after the last round, in client order, as the run would evaluate them."""
        state = read_local_models(self.federation.state.techniques[LastLocalModels.name])
        found = [fill_model(self.models[client], tensors) for client, tensors in sorted(state.items())]
        return [without_statistics(m) for m in found] if self.federation.method.buffers == "drop" else found


def observe(config: RunConfig) -> ObservedFederation:
    """The federation of a configuration, evaluated at the end, with one more technique, which only looks on."""
    dataset, parts = deal(config)
    share = {} if config.archs is None else shares(config.archs)
    build = partial(
        build_model, input_shape=dataset.input_shape, classes=dataset.classes, seed=derive(config.seed, "model")
    )
    archs = {name: build(name) for name in share}
    whole, arch_of = build(config.model), groups(share, len(parts)) if share else None
    chosen = method(config.method)
    settings = {name: getattr(config, name) for name in Settings.model_fields} | {"eval_every": config.rounds}
    federation = Federation(
        whole,
        dataset.train.split(parts),
        dataset.test,
        **{**settings, "method": Method((*chosen.techniques, LastLocalModels()), chosen.base)},
        archs=archs,
        arch_of=arch_of,
    )
    models = [whole if arch_of is None else archs[arch_of(client)] for client in range(len(parts))]
    return ObservedFederation(federation, models, dataset.test)


def fill_model(model: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of the model with a client's tensors; those of a group have names that begin with the group's."""
    mine, copied = model.state_dict(), copy.deepcopy(model)
    own = {name if name in mine else name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    copied.load_state_dict({**mine, **own})
    return copied


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Case → accuracy, CKA of every two clients by stage, and for InCo each layer's share of β > 0 and mean θ."""
    found: dict[str, Any] = {}
    for label, fields in settings["cases"].items():
        run = observe(build_config(settings, seed, resources, **fields))
        with compute_with(1):
            found[label] = measure_run(run.federation)
            shown = run.test.batch(torch.arange(min(settings["shown"], len(run.test))))[0]
            models = run.local()
            alike = layer_similarity(models, shown, settings["stages"])
            found[label]["map"] = feature_map(models, run.test, settings["mapped"], seed)
        found[label]["matrices"] = {stage: matrix.tolist() for stage, matrix in alike.matrices.items()}
        found[label]["means"] = alike.means
    return found


def feature_map(models: Sequence[nn.Module], test: Examples, rows: int, seed: int) -> dict[str, Any]:
    """The clients' features of the same test examples before the classifier, in the plane."""
    index = torch.arange(min(rows, len(test)))
    seen = [features_at(model, test, stages_of(model)[-2], index) for model in models]
    owners = torch.arange(len(models)).repeat_interleave(len(index))
    features, labels = (torch.cat(part) for part in zip(*seen, strict=True))
    found = embedding(features, labels, owners, seed, limit=None)
    points = [[round(value, 2) for value in point] for point in found.points.tolist()]
    return {"points": points, "labels": found.labels.tolist(), "clients": found.clients.tolist()}


def measure_run(federation: Federation) -> dict[str, Any]:
    """The clients' accuracy at the end; layer by layer, in how many rounds β > 0, and the mean θ."""
    published, accuracy = [], math.nan
    for record in federation.rounds():
        published.append(federation.method.publish(federation.state.techniques))
        if record.accuracy is not None:
            accuracy = statistics.fmean(record.arch_accuracy.values()) if record.arch_accuracy else record.accuracy
    found = crossing(published)
    means = {name: statistics.fmean(values) for name, values in found.theta.items()}
    return {"accuracy": accuracy, "positive": found.positive, "theta": means}


# --- what is found ---------------------------------------------------------------------------------------------------


def assess(found: SeedFigures) -> Findings:
    """The harder the setting, the less alike the models; what InCo changes in that; and how often β > 0."""
    assessed = (_assess_likeness(found), _assess_signs(found))
    first = min(found)
    cases = [label for label in found[first] if label != PLAIN_INCO]
    notes = (
        "CKA is the unbiased linear one, between every two clients' local models after the last round, before the "
        "server averages, on the same test examples; its mean is over all pairs of clients",
        "an accuracy is that of the averaged models at the end, in the mean over the architectures",
        "with GroupAvg every group began at a model of its own, elsewhere all at one: that alone makes them unlike",
        "β is the product of a layer's mean change with that of its stage's layer 0, before they are crossed; its "
        "share is over the rounds, and over the layers of a stage",
    )
    pictures = {
        "similarity.png": partial(plot_stages, {label: _stage_curve(found, label) for label in cases}),
        "heatmaps.png": partial(plot_heatmaps, {label: found[first][label]["matrices"] for label in cases}, first),
        "tsne.png": partial(plot_maps, {label: found[first][label]["map"] for label in cases}, first),
    }
    data = {
        str(seed): {label: {n: v for n, v in case.items() if n != "map"} for label, case in figures.items()}
        for seed, figures in found.items()
    }
    tables, checks = (
        tuple(table for table, _ in assessed),
        tuple(check for _, several in assessed for check in several),
    )
    return Findings(tables, checks, notes, pictures, data)


def _assess_likeness(found: SeedFigures) -> AssessedTable:
    some = next(iter(found.values()))
    stages = list(some[IID]["means"])
    accuracy = {label: {s: f[label]["accuracy"] for s, f in found.items()} for label in some}
    at = {label: {stage: _stage_seeds(found, label, stage) for stage in stages} for label in some}
    first, last = stages[0], stages[-1]
    deep = {label: {s: statistics.fmean(at[label][g][s] for g in stages[-2:]) for s in found} for label in some}
    name = f"models are less alike in {last} than in {first}"
    checks = [above(f"{name}: {label}", at[label][first], at[label][last], unit=PLAIN) for label in HARDER]
    paper = {EQUAL: "81.0 against 62.3 %", GROUP: "62.3 against 52.3 %"}
    for easy, hard in pairwise(HARDER):
        checks += [
            above(f"accuracy is lower: {hard}, than {easy}", accuracy[easy], accuracy[hard], paper=paper[hard]),
            above(f"models are less alike in {last}: {hard}, than {easy}", at[easy][last], at[hard][last], unit=PLAIN),
        ]
    name = f"models are more alike than GroupAvg's in {' and '.join(stages[-2:])}"
    checks += [above(f"{label}'s {name}", deep[label], deep[GROUP], unit=PLAIN) for label in (HETERO, INCO)]
    rows = tuple((label, cell(accuracy[label]), *(PLAIN.cell(at[label][g]) for g in stages)) for label in some)
    title = "Accuracy, %, and CKA between clients' local models by stage"
    return FindingsTable(title, ("", "accuracy", *stages), rows), tuple(checks)


def _assess_signs(found: SeedFigures) -> AssessedTable:
    share = {label: {s: _stage_means(f[label]["positive"]) for s, f in found.items()} for label in (INCO, PLAIN_INCO)}
    theta = {s: _stage_means(f[INCO]["theta"]) for s, f in found.items()}
    rows = tuple(
        (
            stage,
            *(spread(stat(seeds[s][stage] for s in seeds)) for seeds in share.values()),
            PLAIN.spread(stat(theta[s][stage] for s in theta)),
        )
        for stage in next(iter(theta.values()))
    )
    one, other = ({s: stages["all"] for s, stages in share[label].items()} for label in (INCO, PLAIN_INCO))
    name = "β > 0 in more layers and rounds with optimisation than without"
    check = above(name, one, other, paper="83.8 and 74.4 against 53.5 and 50.2 % in two layers")
    return FindingsTable("Share of β > 0, %, and mean θ", ("stage", INCO, PLAIN_INCO, "θ, InCo"), rows), (check,)


def _stage_means(layers: Mapping[str, float]) -> dict[str, float]:
    """Stage → the mean over its layers, and over all."""
    stages: dict[str, list[float]] = {}
    for name, value in layers.items():
        stages.setdefault(name.partition(".")[0], []).append(value)
    means = {stage: statistics.fmean(values) for stage, values in sorted(stages.items())}
    return {**means, "all": statistics.fmean(layers.values())}


def _stage_seeds(found: SeedFigures, label: str, stage: str) -> Seeds:
    return {seed: figures[label]["means"][stage] for seed, figures in found.items()}


def _stage_curve(found: SeedFigures, label: str) -> dict[str, float]:
    """Stage → the mean over the seeds."""
    stages = next(iter(found.values()))[label]["means"]
    return {stage: statistics.fmean(_stage_seeds(found, label, stage).values()) for stage in stages}
