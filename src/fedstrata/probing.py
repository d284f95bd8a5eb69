"""Probes during a run: what a round did, stratum by stratum, measured on copies after it was closed.

A probe is a function of a `Sight`, and gives what is written to probes.jsonl under its name. It costs what it costs, at
most: `every` so many rounds, so many clients, so many examples; its seconds are written beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from fedstrata.core import Assignment, Into, Update, Work
from fedstrata.data.examples import Examples, TensorExamples
from fedstrata.errors import UsageError, one_line
from fedstrata.lazy import Lazy, nn, torch
from fedstrata.spec import lookup
from fedstrata.strata import Stratum, classifier
from fedstrata.tensors import Tensors, clone, derive, generator, own_rng
from fedstrata.timing import Clock, timed, using

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata import probes
    from fedstrata.server import Architecture, Outcome, ServerState
    from fedstrata.workshop import Workshop
else:
    probes = Lazy("fedstrata.probes")

STEPS = 8
"""Of `gradnorm`, on either side."""
POINTS = 400
"""Of `embedding`, at most."""
DIGITS = 6
"""Significant ones of what is written."""


@dataclass(frozen=True, eq=False)
class Visit:
    """A client's part in a round: its architecture, the change of what it sent, and its running statistics."""

    client: int
    arch: str
    delta: Tensors
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class Sight:
    """All that a probe may see of a round; nothing of it may be changed.

    Args:
        before: the server's state that the round began with.
        after: the one that it ended with.
        visits: those of the observed clients whose updates were used.
        last: True for the run's last round.
        work: how clients trained.
        data: client → some of its examples.
        classes: client → the classes of all its examples, or of these where reading all would take long.
        shared: labelled examples that all models are shown.
        strata: the server model's.
        architectures: by name.
        shop: builds models.
    """

    before: ServerState
    after: ServerState
    visits: Sequence[Visit]
    last: bool
    work: Work
    data: Mapping[int, Examples]
    classes: Mapping[int, frozenset[int]]
    shared: tuple[Tensor, Tensor]
    strata: tuple[Stratum, ...]
    architectures: Mapping[str, Architecture]
    shop: Workshop

    def model(self, state: ServerState, arch: str) -> nn.Module:
        """An architecture's part of a state, as the run would evaluate it."""
        return self.shop.model(state.params, state.buffers, arch)

    def trained(self, by_stratum: Mapping[str, float]) -> dict[str, float]:
        """What was found stratum by stratum, without idle ones: nothing parts there, which would look like unity."""
        idle = {stratum.name for stratum in self.strata if stratum.idle}
        return {name: value for name, value in by_stratum.items() if name not in idle}

    @cached_property
    def starts(self) -> dict[str, nn.Module]:
        """Architecture → the model that its clients began the round with."""
        return {arch: self.model(self.before, arch) for arch in dict.fromkeys(visit.arch for visit in self.visits)}

    @cached_property
    def begun(self) -> list[nn.Module]:
        """The model that each client began with."""
        return [self.starts[visit.arch] for visit in self.visits]

    @cached_property
    def local(self) -> list[nn.Module]:
        """Each client's model after its training."""
        if self.shop.method.personal:
            raise UsageError("clients keep what they train: their models are not in their updates")
        return [self._local(visit) for visit in self.visits]

    def _local(self, visit: Visit) -> nn.Module:
        params = {n: t + visit.delta[n] if n in visit.delta else t for n, t in self.before.params.items()}
        return self.shop.model(params, {**self.before.buffers, **visit.buffers}, visit.arch)

    @cached_property
    def held(self) -> list[frozenset[int]]:
        """For each client, the classes that it has."""
        return [self.classes[visit.client] for visit in self.visits]


# The probes -------------------------------------------------------------------------------------------------


def _divergence(sight: Sight) -> dict[str, Any]:
    """How far clients' gradients at the global model are apart, exactly (Eq. 1): passes over their examples."""
    found = [
        probes.client_gradients(m, [sight.data[v.client]])[0] for m, v in zip(sight.begun, sight.visits, strict=True)
    ]
    return sight.trained(probes.divergence(found, sight.strata))


def _proxy(sight: Sight) -> dict[str, Any]:
    """The same measure of the clients' updates, which costs nothing."""
    return sight.trained(probes.divergence([visit.delta for visit in sight.visits], sight.strata))


def _weightdiv(sight: Sight) -> dict[str, Any]:
    """How far clients' weights are from their mean (FedImpro, §5.2)."""
    return sight.trained(probes.weight_divergence_by_stratum([visit.delta for visit in sight.visits], sight.strata))


def _cosine(sight: Sight) -> dict[str, Any]:
    """Whether clients' updates go the same way: the mean cosine of every two."""
    return sight.trained(probes.update_cosine([visit.delta for visit in sight.visits], sight.strata))


def _cka(sight: Sight) -> dict[str, Any]:
    """How alike clients' features are, stage by stage, on the same examples: linear CKA (InCo Aggregation, §2)."""
    found = probes.layer_similarity(sight.local, sight.shared[0])
    means = {stage: mean for stage, mean in found.means.items() if not math.isnan(mean)}
    return {"mean": means, "matrix": {stage: matrix.tolist() for stage, matrix in found.matrices.items()}}


def _gradnorm(sight: Sight) -> dict[str, Any]:
    """A client's gradient norms step by step: from its own model on, and from the averaged one (FedPart, Fig. 2)."""
    visit, own = sight.visits[0], sight.local[0]
    found = probes.gradient_trace(
        own,
        sight.model(sight.after, visit.arch),
        sight.data[visit.client],
        [stratum for stratum in sight.architectures[visit.arch].strata if not stratum.idle],
        STEPS,
        sight.work.batch_size,
        sight.work.lr,
        sight.before.round,
    )
    return {"client": visit.client, "alone": found.alone, "averaged": found.averaged}


def _drift(sight: Sight) -> dict[str, Any]:
    """What local training does to the neurons that are bound to a class (FedNLR, Definition 1)."""
    found = probes.neuron_drift(sight.begun, sight.local, sight.held, *sight.shared)
    return {"held": found.held, "missing": found.missing}


def _calibration(sight: Sight) -> dict[str, Any]:
    """Accuracy class by class before and after local training: what clients forget."""
    found = probes.forgetting(sight.begun, sight.local, sight.held, *sight.shared)
    means = {"held": found.held, "missing": found.missing, "forgetting": found.forgetting}
    return {"before": found.before, "after": found.after} | {n: v for n, v in means.items() if v is not None}


def _statistics(sight: Sight) -> dict[str, Any]:
    """Whether averaged running statistics fit the averaged model: accuracy with them, and with each batch's own."""
    if not sight.after.buffers:
        raise UsageError("the model has no running statistics, or the run does not use them")
    from fedstrata.workshop import without_statistics

    model = sight.model(sight.after, "")
    found: dict[str, Any] = {"running": _accuracy(model, *sight.shared)}
    found["batch"] = _accuracy(without_statistics(model), *sight.shared)
    spread = [visit.buffers for visit in sight.visits if visit.buffers]
    return {**found, "spread": probes.statistics_spread(spread, sight.strata)} if len(spread) > 1 else found


def _crossing(sight: Sight) -> dict[str, Any]:
    """The θ and β of a technique that crosses layers, layer by layer (InCo Aggregation, Fig. 9)."""
    slots = sight.after.techniques.values()
    state = {n: t for slot in slots for n, t in slot.items() if n.partition("/")[0] in ("theta", "beta")}
    if not state:
        raise UsageError("the method does not cross layers, as inco does")
    found = probes.crossing([state])
    return {"theta": {n: v[0] for n, v in found.theta.items()}, "beta": {n: v[0] for n, v in found.beta.items()}}


def _embedding(sight: Sight) -> dict[str, Any]:
    """A map of clients' last features before the classifier, after the last round: t-SNE."""
    if not sight.last:
        return {}
    x, y = sight.shared
    rows = torch.arange(min(len(y), max(POINTS // len(sight.local), 1)))
    last = [classifier(sight.architectures[visit.arch].strata) for visit in sight.visits]
    if None in last:
        raise UsageError("no single last layer was found in this model, whose inputs could be shown")
    places = [Into(stratum.name) for stratum in last if stratum is not None]
    shown = TensorExamples(x, y)
    seen = [probes.features_at(model, shown, place, rows) for model, place in zip(sight.local, places, strict=True)]
    features, labels = (torch.cat(part) for part in zip(*seen, strict=True))
    owners = torch.tensor([visit.client for visit in sight.visits]).repeat_interleave(len(rows))
    found = probes.embedding(features, labels, owners, perplexity=min(30.0, len(labels) / 4), limit=None)
    return {name: getattr(found, name).tolist() for name in ("points", "labels", "clients")}


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x.to(next(model.parameters()).device)).argmax(1).cpu() == y).double().mean())


Probe = Callable[[Sight], dict[str, Any]]

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
    "embedding": _embedding,
}
ALL = "all"


def chosen(text: str | None) -> tuple[str, ...]:
    """The probes that a setting names, in the table's order: `"cka divergence"`, or `"all"`."""
    asked = (text or "").replace(",", " ").split()
    for name in asked:
        if name != ALL:
            lookup("probe", PROBES, name)
    return tuple(name for name in PROBES if name in asked or ALL in asked)


# During a run -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Watch:
    """Keeps copies of some clients' updates as they pass: client → (its delta, its running statistics)."""

    clients: frozenset[int]
    seen: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def see(self, update: Update) -> None:
        """Before the next update is asked for: its tensors may be gone then."""
        if update.client in self.clients and update.client not in self.seen:
            self.seen[update.client] = clone(update.delta), clone(update.buffers)


class Limits(Protocol):
    """What a run's settings say of its probes."""

    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def probe_every(self) -> int: ...
    @property
    def probe_clients(self) -> int: ...
    @property
    def probe_examples(self) -> int: ...


class Watched(Protocol):
    """A round that is closed, and was watched."""

    @property
    def before(self) -> ServerState: ...
    @property
    def after(self) -> ServerState: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def assignments(self) -> Sequence[Assignment]: ...
    @property
    def watch(self) -> Watch | None: ...


@dataclass(frozen=True, eq=False)
class Prober:
    """Measures a run's rounds.

    Args:
        probes: names in PROBES.
        settings: the run's: its seed, its rounds, and how often and how much is measured.
        shop: builds models.
        architectures: by name; "" is the server's own.
        clients: their examples.
        test: of which all models are shown some; where there is none, of the clients' own.
    """

    probes: tuple[str, ...]
    settings: Limits
    shop: Workshop
    architectures: Mapping[str, Architecture]
    clients: Sequence[Examples]
    test: Examples | None

    def due(self, number: int) -> bool:
        """Whether a round is to be measured: every so many, and the last one that is planned."""
        every = (number + 1) % self.settings.probe_every == 0 or number + 1 == self.settings.rounds
        return bool(self.probes) and every and number < self.settings.rounds

    def watch(self, asked: Sequence[Assignment]) -> Watch:
        """For a round that is to be measured: some of its clients, by lot, of all architectures alike."""
        lot = torch.randperm(len(asked), generator=generator(self.settings.seed, "probes", asked[0].round)).tolist()
        groups: dict[str, list[int]] = {}
        for at in lot:
            groups.setdefault(asked[at].arch, []).append(asked[at].client)
        in_turn = (client for several in zip_longest(*groups.values()) for client in several if client is not None)
        return Watch(frozenset(islice(in_turn, self.settings.probe_clients)))

    def measure(self, watched: Watched, clock: Clock | None = None) -> dict[str, Any]:
        """A line of probes.jsonl: what each probe found, its seconds, and why some could not measure anything."""
        from fedstrata.workshop import seed_global

        before, asked = watched.before, watched.assignments
        arch = {assignment.client: assignment.arch for assignment in asked}
        seen = {} if watched.watch is None else watched.watch.seen
        visits = [
            Visit(client, arch[client], *tensors)
            for client, tensors in sorted(seen.items())
            if client in watched.outcome.accepted and len(self.clients[client]) > 1
        ]
        row: dict[str, Any] = {"round": before.round + 1, "clients": [v.client for v in visits], "seconds": {}}
        missed: dict[str, str] = {}
        with own_rng(), self.shop.computing(self.settings.threads), using(clock), timed("probe"):
            seed_global(derive(self.settings.seed, "probes", before.round), torch.device("cpu"))
            sight = self._sight(before, watched.after, visits, asked[0].work) if visits else None
            for name in self.probes:
                start = time.perf_counter()
                try:
                    if sight is None:
                        raise UsageError("no client's update was used")
                    found = PROBES[name](sight)
                except Exception as error:  # a user's model may raise anything on what it is shown here
                    missed[name] = str(error) if isinstance(error, UsageError) else one_line(repr(error), 200)
                else:
                    row |= {name: plain(found)} if found else {}
                row["seconds"][name] = round(time.perf_counter() - start, 4)
        seen.clear()
        return {**row, "missed": missed} if missed else row

    def _sight(self, before: ServerState, after: ServerState, visits: Sequence[Visit], work: Work) -> Sight:
        data = {visit.client: self._some(self.clients[visit.client], visit.client) for visit in visits}
        held = {c: self.clients[c] if isinstance(self.clients[c], TensorExamples) else some for c, some in data.items()}
        return Sight(
            before=before,
            after=after,
            visits=visits,
            last=after.round >= self.settings.rounds,
            work=work,
            data=data,
            classes={client: frozenset(examples.labels().tolist()) for client, examples in held.items()},
            shared=self._shown(data),
            strata=self.architectures[""].strata,
            architectures=self.architectures,
            shop=self.shop,
        )

    def _shown(self, data: Mapping[int, Examples]) -> tuple[Tensor, Tensor]:
        if self.test is not None:
            some = self._some(self.test, "shared")
            return some.batch(torch.arange(len(some)))
        each = max(self.settings.probe_examples // len(data), 1)
        parts = [held.batch(torch.arange(min(each, len(held)))) for held in data.values()]
        x, y = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(y)

    def _some(self, examples: Examples, *salt: int | str) -> TensorExamples:
        """A choice of examples that is the same in every round, as tensors."""
        order = torch.randperm(len(examples), generator=generator(derive(self.settings.seed, "probes", *salt)))
        return TensorExamples(*examples.batch(order[: self.settings.probe_examples].sort().values))


def plain(found: Any) -> Any:
    """What JSON has: a few digits, None for what is not a finite number."""
    if isinstance(found, Mapping):
        return {str(name): plain(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}") if math.isfinite(found) else None
    return found
