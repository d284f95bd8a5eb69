"""The probes by name: each is a function of a round's context, and gives what is written to probes.jsonl.

To add one, write a measure (a pure function, in `fedstrata.probes.measures`), a probe here that takes it, and a row in
`PROBES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import Lazy, nn, torch
from fedstrata.core.low_rank import adapters_of, cut_ranks, pad_ranks
from fedstrata.core.spec import lookup
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Into
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.strata import classifier
from fedstrata.probes.context import ObservedVisit, ProbeContext

if TYPE_CHECKING:
    from fedstrata.probes import measures
else:
    measures = Lazy("fedstrata.probes.measures")


STEPS = 8
"""Steps of `gradnorm`, from either model, and of `rates` with either learning rate, at most."""
SEARCHED = 4
"""Clients that `rates` trains, at most."""
EXCHANGED = ("own", "expected", "doubt", "own_after", "shared_after", "accuracy", "consistent")
"""What `exchange` writes: columns of losses and accuracies, a number for each client."""
MARGINS = 32
"""Examples of each client that `margin` measures, at most."""
POINTS = 400
"""Points of `embedding`, at most."""
ALL = "all"
"""What a setting says for every probe."""


def _divergence(context: ProbeContext) -> dict[str, Any]:
    """How far clients' gradients at the global model are apart, exactly (Eq. 1): passes over their examples."""
    found = [_gradient(context, m, v) for m, v in zip(context.start_models, context.visits, strict=True)]
    return context.without_idle(measures.divergence(found, context.strata))


def _gradient(context: ProbeContext, model: nn.Module, visit: ObservedVisit) -> Tensors:
    """A client's gradient of what is not frozen, in the server's ranks and scales of adapters: ∂B = s/s_k·∂B_k."""
    arch = context.architectures[visit.arch]
    (found,) = measures.client_gradients(model, [context.data[visit.client]], task=context.context.task)
    free = {n: g for n, g in found.items() if n not in arch.frozen}
    scaled = {n: g * arch.cuts[n].factor if n in arch.cuts else g for n, g in free.items()}
    return pad_ranks(scaled, arch.cuts, scaled=False)


def _proxy(context: ProbeContext) -> dict[str, Any]:
    """The same measure of the clients' updates, which costs nothing."""
    return context.without_idle(measures.divergence([visit.delta for visit in context.visits], context.strata))


def _weightdiv(context: ProbeContext) -> dict[str, Any]:
    """How far clients' weights are from their mean (FedImpro, §5.2)."""
    return context.without_idle(
        measures.weight_divergence_by_stratum([visit.delta for visit in context.visits], context.strata)
    )


def _cosine(context: ProbeContext) -> dict[str, Any]:
    """Whether clients' updates go the same way: the mean cosine of every two."""
    return context.without_idle(measures.update_cosine([visit.delta for visit in context.visits], context.strata))


def _cka(context: ProbeContext) -> dict[str, Any]:
    """How alike clients' features are, stage by stage, on the same examples: linear CKA (InCo Aggregation, §2)."""
    found = measures.layer_similarity(context.local_models, context.shared[0])
    means = {stage: mean for stage, mean in found.means.items() if not math.isnan(mean)}
    return {"mean": means, "matrix": {stage: matrix.tolist() for stage, matrix in found.matrices.items()}}


def _gradnorm(context: ProbeContext) -> dict[str, Any]:
    """A client's gradient norms step by step: from its own model on, and from the averaged one (FedPart, Fig. 2)."""
    visit, own = context.visits[0], context.local_models[0]
    found = measures.gradient_trace(
        own,
        context.model(context.after, visit.arch),
        context.data[visit.client],
        [stratum for stratum in context.architectures[visit.arch].strata if not stratum.idle],
        STEPS,
        context.work.batch_size,
        context.work.lr,
        context.before.round,
        context.context.task,
    )
    return {"client": visit.client, "alone": found.alone, "averaged": found.averaged}


def _drift(context: ProbeContext) -> dict[str, Any]:
    """What local training does to the neurons that are bound to a class (FedNLR, Definition 1)."""
    found = measures.neuron_drift(context.start_models, context.local_models, context.classes_held, *context.shared)
    return {"held": found.held, "missing": found.missing}


def _calibration(context: ProbeContext) -> dict[str, Any]:
    """Accuracy class by class before and after local training: what clients forget."""
    found = measures.forgetting(context.start_models, context.local_models, context.classes_held, *context.shared)
    means = {"held": found.held, "missing": found.missing, "forgetting": found.forgetting}
    return {"before": found.before, "after": found.after} | {n: v for n, v in means.items() if v is not None}


def _statistics(context: ProbeContext) -> dict[str, Any]:
    """Whether averaged running statistics fit the averaged model: how good it is with them, and with each batch's."""
    if not context.after.buffers:
        raise UsageError("the model has no running statistics, or the run does not use them")
    from fedstrata.models.norms import without_statistics

    model = context.model(context.after, "")
    found: dict[str, Any] = {"running": _judge(context, model)}
    found["batch"] = _judge(context, without_statistics(model))
    spread = [visit.buffers for visit in context.visits if visit.buffers]
    return {**found, "spread": measures.statistics_spread(spread, context.strata)} if len(spread) > 1 else found


def _crossing(context: ProbeContext) -> dict[str, Any]:
    """What crossing layers does to each: θ, β, and its step's length and cosines (InCo Aggregation, Fig. 9)."""
    published = context.context.method.publish(context.after.techniques)
    found = {figure: dict(published.get(figure, {})) for figure in measures.CROSSING_FIGURES}
    if not any(found.values()):
        raise UsageError("the method does not cross layers, as inco does")
    return found


def _aggregation(context: ProbeContext) -> dict[str, Any]:
    """What the means of low-rank adapters' factors miss of the mean of their products, as a share of it."""
    if not any(stratum.low_rank for stratum in context.strata):
        raise UsageError("the model has no low-rank adapter")
    kept = context.context.method.kept(context.strata)
    shared = [s for s in context.strata if s.low_rank and kept.isdisjoint((s.low_rank.a, s.low_rank.b))]
    if not shared:
        raise UsageError("clients keep a factor of every adapter to themselves")
    weighs = context.context.method.weight == "examples"
    weights = [float(visit.examples) if weighs else 1.0 for visit in context.visits]
    return measures.aggregation_error([_factors(context, visit) for visit in context.visits], shared, weights)


def _factors(context: ProbeContext, visit: ObservedVisit) -> Tensors:
    """A client's factors after its training, with zeros beyond its rank; of adapters of which it sent something."""
    held = context.architectures[visit.arch]
    params, found = context.before.params, Tensors()
    for one in adapters_of(context.strata):
        names = {n: params[n] for n in (one.a, one.b) if n in held.params}
        if not visit.delta.keys().isdisjoint(names):
            starts = pad_ranks(cut_ranks(names, held.cuts, scaled=False), held.cuts, scaled=False)
            found |= {n: start + visit.delta[n] if n in visit.delta else start for n, start in starts.items()}
    return found


def _scores(context: ProbeContext) -> dict[str, Any]:
    """What a technique that chooses among strata goes by, stratum by stratum, after the round."""
    published = context.context.method.publish(context.after.techniques).get("score", {})
    found = {s.name: published[n] for s in context.strata for n in s.params if n in published}
    if not found:
        raise UsageError("the method has no scores to choose strata by, as select has")
    return found


def _visits(context: ProbeContext) -> dict[str, Any]:
    """Every client's update by itself: norm and cosine to the others' centre, its loss, its running statistics."""
    strata = [stratum for stratum in context.strata if not stratum.idle]
    names = {n for stratum in strata for n in stratum.params}
    deltas = [{n: t for n, t in visit.delta.items() if n in names} for visit in context.visits]
    found = measures.compare_visits(deltas, strata)
    return {
        "norm": found.norms,
        "cosine": found.cosines,
        "whole": {"norm": found.norm, "cosine": found.cosine, "nearest": found.nearest},
        "loss": [visit.loss for visit in context.visits],
        "examples": [visit.examples for visit in context.visits],
        "steps": [visit.steps for visit in context.visits],
        "statistics": measures.statistics_distances([visit.buffers for visit in context.visits]),
    }


def _exchange(context: ProbeContext) -> dict[str, Any]:
    """The global model on each client's own examples, and each client's model on everybody's: losses."""
    data = [context.data[visit.client] for visit in context.visits]
    task = context.context.task
    found = measures.exchange(context.start_models, context.local_models, data, context.shared, task)
    return {name: getattr(found, name) for name in EXCHANGED}


def _margin(context: ProbeContext) -> dict[str, Any]:
    """How far examples are from being misclassified: by the global model, by clients' models on others' data."""
    held = [(data.x[:MARGINS], data.y[:MARGINS]) for data in (context.data[visit.client] for visit in context.visits)]
    found = measures.margin_terms(context.local_models, held, context.shared)
    globally = measures.margins(context.model(context.after, context.visits[0].arch), *context.shared)
    return {
        "global": measures.mean_margin(globally),
        **{name: getattr(found, name) for name in ("others", "sample", "whole")},
    }


def _depth(context: ProbeContext) -> dict[str, Any]:
    """Whether gradients reach all strata: their norm against the weights', and units that are never active."""
    visit, model = context.visits[0], context.start_models[0]
    strata = context.architectures[visit.arch].strata
    x, y = context.shared
    gradients = measures.relative_gradients(model, strata, x, y, context.context.task)
    return {"gradient": gradients, "dead": measures.dead_units(model, strata, x)}


def _rates(context: ProbeContext) -> dict[str, Any]:
    """A search for the learning rate: held-out loss after a few steps at a tenth, once, ten and a hundred times it."""
    first = context.visits[0].arch
    chosen = [visit.client for visit in context.visits if visit.arch == first][:SEARCHED]
    some = [context.data[client] for client in chosen]
    steps = min(STEPS, max(visit.steps for visit in context.visits))
    work, model = context.work, context.start_models[0]
    found = measures.search_rates(model, some, work, steps, seed=context.before.round, task=context.context.task)
    after = {f"{factor:g}": loss for factor, loss in found.after.items()}
    return {"lr": work.lr, "before": found.before, "after": after}


def _embedding(context: ProbeContext) -> dict[str, Any]:
    """A map of clients' last features before the classifier, after the last round: t-SNE."""
    if not context.last:
        return {}
    x, y = context.shared
    rows = torch.arange(min(len(y), max(POINTS // len(context.local_models), 1)))
    last = [classifier(context.architectures[visit.arch].strata) for visit in context.visits]
    if None in last:
        raise UsageError("no single last layer was found in this model, whose inputs could be shown")
    places = [Into(stratum.name) for stratum in last if stratum is not None]
    shown = TensorExamples(x, y)
    seen = [
        measures.features_at(model, shown, place, rows)
        for model, place in zip(context.local_models, places, strict=True)
    ]
    features, labels = (torch.cat(part) for part in zip(*seen, strict=True))
    owners = torch.tensor([visit.client for visit in context.visits]).repeat_interleave(len(rows))
    found = measures.embedding(features, labels, owners, perplexity=min(30.0, len(labels) / 4), limit=None)
    return {name: getattr(found, name).tolist() for name in ("points", "labels", "clients")}


def _judge(context: ProbeContext, model: nn.Module) -> float | None:
    """The task's primary metric on what all models are shown."""
    from fedstrata.evaluation.evaluate import judge

    x, y = context.shared
    with torch.no_grad():
        return judge(context.context.task, model(x.to(next(model.parameters()).device)).cpu(), y)


Probe = Callable[[ProbeContext], dict[str, Any]]
"""What a round's context shows, by name; {} where there is nothing to write."""

PROBES: Mapping[str, Probe] = {
    "divergence": _divergence,
    "proxy": _proxy,
    "weightdiv": _weightdiv,
    "cosine": _cosine,
    "cka": _cka,
    "gradnorm": _gradnorm,
    "drift": _drift,
    "calibration": _calibration,
    "statistics": _statistics,
    "crossing": _crossing,
    "scores": _scores,
    "aggregation": _aggregation,
    "visits": _visits,
    "exchange": _exchange,
    "margin": _margin,
    "depth": _depth,
    "rates": _rates,
    "embedding": _embedding,
}


READ_UPDATES = frozenset({"proxy", "weightdiv", "cosine", "crossing", "scores", "aggregation", "visits"})
"""Probes that look at nothing but what clients send, so that they run where the clients' data is elsewhere."""

NEED_CLASSES = frozenset({"drift", "calibration", "margin", "embedding"})
"""Probes that have a meaning only where each example is of one class."""


def choose_probes(text: str | None) -> tuple[str, ...]:
    """The probes that a setting names, in the table's order: `"cka divergence"`, or `"all"`."""
    asked = (text or "").replace(",", " ").split()
    for name in asked:
        if name != ALL:
            lookup("probe", PROBES, name)
    return tuple(name for name in PROBES if name in asked or ALL in asked)
