"""The server of a Flower federation: a Federation whose clients are at SuperNodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedstrata import techniques
from fedstrata.config.identity import AT_SITES
from fedstrata.config.keywords import resolve_settings
from fedstrata.config.schema import Settings, validate_settings, validate_values
from fedstrata.core.method import Method
from fedstrata.core.parts import Parts
from fedstrata.core.rng import derive, preserve_rng
from fedstrata.core.text import metric_title
from fedstrata.engines.pool import AHEAD, AHEAD_BYTES
from fedstrata.errors import FedstrataError, UsageError, did_you_mean, one_line
from fedstrata.federation import Federation
from fedstrata.flower.client import Model, make_model, weights_of
from fedstrata.flower.differential_privacy import Privacy
from fedstrata.flower.engine import Flower, RemoteExamples, RemoteStore
from fedstrata.flower.messages import ClientInfo, TrainSettings, allowance, check_flower
from fedstrata.flower.secure_aggregation import SecAggEngine, check_clients, check_sums
from fedstrata.flower.site_directory import SiteDirectory
from fedstrata.flower.transport import Transport
from fedstrata.models.adapted import base_digest, base_names
from fedstrata.models.isolated_architectures import isolate_architectures
from fedstrata.models.norms import running_statistics
from fedstrata.probes.registry import ALL, PROBES, READ_UPDATES
from fedstrata.runs.closed_round import ClosedRound, RoundFilter
from fedstrata.runs.records import Record
from fedstrata.server.state import Architecture, ServerState
from fedstrata.server.validation import UpdateValidator

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp


def server_app(
    model: Model,
    *,
    test: Any = None,
    clients: int | None = None,
    archs: Mapping[str, Model] | None = None,
    arch_of: Callable[[int], str] | None = None,
    public: Any = None,
    trusted: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    timeout: float = 3600.0,
    wait: float = 600.0,
    secure: bool = False,
    secure_clip: float = 1.0,
    secure_quorum: float = 0.67,
    dp_clip: float = 0.0,
    dp_noise: float = 0.0,
    method: str | Method = "fedavg",
    **settings: Any,
) -> ServerApp:
    """A Flower ServerApp that runs a method with the clients that are at the SuperNodes.

    What stands in the run's configuration under one of these names goes before what is given here:
    `flwr run . --run-config 'method="feddyn + fedpart" rounds=30'`.

    Args:
        model: any `nn.Module` that maps a batch of inputs to logits, or a function that makes it.
        test: the global test set, or a function that loads it; None for no evaluation.
        clients: how many there are; None if the SuperNodes say so (`num-partitions`).
        archs: sub-models by name, for clients of different architecture.
        arch_of: client → the name of its sub-model.
        public: unlabelled inputs of the server, or a function that loads them.
        trusted: labelled examples that the server trusts, or a function that loads them, for `reduce='fltrust'`.
        out: directory for configuration, metrics, checkpoints and the final model.
        resume: continue the run that is in `out`, if there is one.
        timeout: seconds that clients have to answer in a round; those that do not are refused, and asked again later.
        wait: seconds to wait for sites that are not there, before the first round and when a round finds nobody.
        secure: secure aggregation: the server sees the sum of a round's changes only. Clients need Flower's
            `secaggplus_mod`, and the method nothing but that sum.
        secure_clip: largest number of a change that fits; all are sent in steps of half a millionth of it.
        secure_quorum: share of a round's clients that must hold out to its end; as many could unmask one together.
        dp_clip: central differential privacy: largest norm of a client's change, C. Clients need Flower's
            `fixedclipping_mod`, and the method is a plain mean with `weight='uniform'`.
        dp_noise: z: noise of deviation z·C/n on the mean of n clients. What that promises over the rounds is for an
            accountant of your choice.
        method: what to run.
        settings: `Federation`'s, such as rounds, participation, epochs, lr, seed.
    """
    check_flower()
    protection = {"secure": secure, "secure_clip": secure_clip, "secure_quorum": secure_quorum}
    protection |= {"dp_clip": dp_clip, "dp_noise": dp_noise}
    given = {"out": out, "resume": resume, "timeout": timeout, "wait": wait, "clients": clients, **protection}
    spec = ServerSpec(model, test, archs or {}, arch_of, public, trusted, given, {"method": method, **settings})
    return _build_app(spec)


def _build_app(spec: ServerSpec) -> ServerApp:
    """The app that runs what was given, as the run's configuration changes it."""
    from flwr.serverapp import ServerApp

    spec.with_config({})
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            spec.with_config(context.run_config).run(grid)
        except FedstrataError as error:
            raise error.with_traceback(None) from None  # Flower prints the way to a mistake of the user's, too

    return app


class Given(BaseModel):
    """What a ServerApp is given of its own, besides a Federation's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    out: str | Path | None = None
    resume: bool = False
    timeout: float = Field(3600.0, gt=0)
    wait: float = Field(600.0, gt=0)
    clients: int | None = Field(None, ge=1)
    secure: bool = False
    secure_clip: float = Field(1.0, gt=0)
    secure_quorum: float = Field(0.67, gt=0.5, le=1)
    dp_clip: float = Field(0.0, ge=0)
    dp_noise: float = Field(0.0, ge=0)


@dataclass(frozen=True, eq=False)
class ServerSpec:
    """All that a ServerApp was given: `given` are its own arguments, `settings` a Federation's."""

    model: Model
    test: Any
    archs: Mapping[str, Model]
    arch_of: Callable[[int], str] | None
    public: Any
    trusted: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Mapping[str, Any]) -> ServerSpec:
        """The same, with what Flower's run configuration says; its other entries are the user's own."""
        said = {name.replace("-", "_"): value for name, value in config.items()}
        given = validate_values(Given, {name: said.get(name, value) for name, value in self.given.items()}).model_dump()
        settings = {**self.settings, **{name: said[name] for name in Settings.model_fields if name in said}}
        for name in settings:
            if name in AT_SITES:
                raise UsageError(f"'{name}' has no meaning here: clients and their data are at other sites")
            if name not in Settings.model_fields:
                raise UsageError(f"there is no setting '{name}'{did_you_mean(name, Settings.model_fields)}")
        chosen = techniques.method(settings["method"])
        validate_settings(Settings, {**settings, "method": str(chosen)})
        if settings.get("probe"):
            settings["probe"] = probes_of_updates(settings["probe"], given["secure"])
        if given["secure"]:
            check_sums(chosen, 1 + len(self.archs))
        if chosen.centralised or any(technique.exclusive for technique in chosen.techniques):
            raise UsageError(f"'{chosen}' is a reference, not a federation: run it where all data is")
        if chosen.arrivals is not None:
            raise UsageError(f"'{chosen}' takes updates in the order of simulated time, which no site has: simulate it")
        if chosen.incomplete and self.test is not None:
            raise UsageError(
                f"'{chosen}' keeps parts of the model at the sites, and the server has no whole one: leave test out"
            )
        plan = replace(self, given=given, settings=settings)
        plan.privacy.check(chosen, 1 + len(self.archs))
        return plan

    def run(self, grid: Grid) -> Federation:
        """Wait for the clients, and run all rounds that are left."""
        transport = Transport(grid, float(self.given["timeout"]))
        directory = SiteDirectory(transport, float(self.given["wait"]), logging.getLogger("flwr").warning)
        parties = directory.gather(self.given["clients"])
        if self.given["secure"]:
            check_clients(self.settings.get("participation", 1.0), parties, directory.node)
        federation = build_federation(self, transport, directory, parties)
        log = logging.getLogger("flwr")
        federation.fit(lambda record: log.info(format_round(record, federation.settings.rounds)), progress=False)
        return federation

    @property
    def out(self) -> Path | None:
        """The run's directory."""
        return Path(self.given["out"]) if self.given["out"] else None

    @property
    def protection(self) -> dict[str, Any]:
        """What protects clients from the server or from those who see the model, where it is not what is usual.

        It stands in run.toml, and a run does not go on with another one.
        """
        names = ("secure", "secure_clip", "secure_quorum", "dp_clip", "dp_noise")
        return {name: self.given[name] for name in names if self.given[name] != Given.model_fields[name].default}

    @property
    def notes(self) -> list[str]:
        """What a reader of the results must know."""
        secure = ["secure aggregation: the server saw sums only"] if self.given["secure"] else []
        return secure + ([self.privacy.note] if self.privacy.clip else [])

    @property
    def resumes(self) -> bool:
        """True if there is a run to go on with."""
        return bool(self.given["resume"]) and self.out is not None and (self.out / "run.toml").exists()

    @property
    def privacy(self) -> Privacy:
        """How changes are clipped and the mean is noised."""
        return Privacy(float(self.given["dp_clip"]), float(self.given["dp_noise"]))

    def models(self) -> dict[str, nn.Module]:
        """The models by architecture, with weights that the run's seed decides where they are made here."""
        seed = derive(int(self.settings.get("seed", 0)), "model")
        made = {}
        with preserve_rng():
            for name, model in {"": self.model, **self.archs}.items():
                torch.default_generator.manual_seed(seed)
                made[name] = make_model(model)
        return made


def probes_of_updates(asked: Any, secure: bool) -> str:
    """Those of the probes that are asked for which look at updates alone; `all` means all of these.

    Raises:
        UsageError: for a probe that needs the clients' data, and where the server sees no single update.
    """
    words = (asked if isinstance(asked, str) else " ".join(asked)).replace(",", " ").split()
    if secure:
        raise UsageError("'probe' has no meaning here: under secure aggregation the server sees no client's update")
    for name in words:
        if name not in READ_UPDATES and name != ALL:
            raise UsageError(f"the probe '{name}' has no meaning here: clients and their data are at other sites")
    return " ".join(name for name in PROBES if name in READ_UPDATES and (name in words or ALL in words))


class SiteRounds(RoundFilter):
    """Rounds at other sites: clients may have lost what they remembered, and the mean may need noise.

    Args:
        engine: knows which clients have lost something, and counts rounds without any update.
        privacy: what noise there is.
        server_lr: how far the server moves along the mean.
    """

    def __init__(self, engine: Flower, privacy: Privacy, server_lr: float) -> None:
        self._engine, self._privacy, self._server_lr = engine, privacy, server_lr

    def open(self, state: ServerState) -> ServerState:
        """The state, in which clients that have lost their memories begin anew."""
        return self._engine.begin(state)

    def close(self, closed: ClosedRound) -> ClosedRound:
        """The round, with noise where the run has any."""
        self._engine.count_barren(bool(closed.outcome.accepted))
        return self._privacy.add_noise(closed, self._server_lr)


def build_federation(
    spec: ServerSpec, transport: Transport, directory: SiteDirectory, parties: Sequence[ClientInfo]
) -> Federation:
    """A federation whose clients are at other sites: the same as any other, with another engine and another store."""
    models, memories = spec.models(), RemoteStore()
    method, task, settings = resolve_settings(None, spec.settings)
    engine = build_engine(spec, method, settings, models, parties, transport, directory, memories)
    return Federation(
        models[""],
        [_remote_examples(party) for party in parties],
        spec.test() if callable(spec.test) else spec.test,
        settings,
        method=method,
        task=task,
        engine=engine,
        store=memories,
        around=SiteRounds(engine, spec.privacy, method.server_lr),
        archs={name: model for name, model in models.items() if name},
        arch_of=spec.arch_of,
        public=spec.public() if callable(spec.public) else spec.public,
        trusted=spec.trusted() if callable(spec.trusted) else spec.trusted,
        out=spec.out,
        resume=spec.resumes,
        recipe={"engine": "flower", **spec.protection},
        notes=spec.notes,
    )


def _remote_examples(party: ClientInfo) -> RemoteExamples:
    """What stands for a client's data on the server."""
    inputs: Any = _no_rows(party.shape, party.dtype)
    if party.parts:
        inputs = Parts({part.name: _no_rows(part.shape, part.dtype) for part in party.parts}, party.named)
    return RemoteExamples(party.examples, inputs, _no_rows(party.target_shape, party.target_dtype))


def _no_rows(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.zeros(0, *shape, dtype=getattr(torch, dtype))


def build_engine(
    spec: ServerSpec,
    method: Method,
    settings: Settings,
    models: Mapping[str, nn.Module],
    parties: Sequence[ClientInfo],
    transport: Transport,
    directory: SiteDirectory,
    memories: RemoteStore,
) -> Flower:
    """What trains clients at their sites; under secure aggregation it sees their sum alone."""
    weights = weights_of(models.values())
    common: dict[str, Any] = {
        "transport": transport,
        "directory": directory,
        "regime": _train_settings(spec, method, settings, models, parties),
        "limit": allowance(weights),
        "holds": _keep_parameters(method, models),
        "memories": memories,
        "few": max(AHEAD, AHEAD_BYTES // max(weights, 1)),
        "out": spec.out,
        "base": _base_names(spec, method, models, parties),
    }
    if not spec.given["secure"]:
        return Flower(**common)
    names = Architecture(tuple(dict(models[""].named_parameters())), tuple(running_statistics(models[""])), ())
    return SecAggEngine(
        **common,
        validate=UpdateValidator(method, {"": names}),
        clip=spec.given["secure_clip"],
        quorum=spec.given["secure_quorum"],
        weighs=method.weight == "examples",
    )


def _train_settings(
    spec: ServerSpec,
    method: Method,
    settings: Settings,
    models: Mapping[str, nn.Module],
    parties: Sequence[ClientInfo],
) -> TrainSettings:
    """How clients train, the same in every round."""
    arch_of = spec.arch_of or (lambda client: "")
    used = sorted({arch_of(party.client) for party in parties})
    return TrainSettings(
        method=str(method),
        buffers=method.buffers,
        augment=settings.augment,
        channels_last=settings.uses_channels_last,
        compile=settings.compile,
        threads=settings.threads,
        branches=used if method.branches else [],
        clip=spec.privacy.clip,
        task=settings.task,
        bases={arch: digest for arch, model in models.items() if (digest := base_digest(model))},
    )


def _base_names(
    spec: ServerSpec, method: Method, models: Mapping[str, nn.Module], parties: Sequence[ClientInfo]
) -> frozenset[str]:
    """The frozen base beneath adapters, by the names that it has in the run."""
    if not method.branches:
        return base_names(models[""])
    whole, _ = isolate_architectures(models, spec.arch_of or (lambda client: ""), len(parties))
    return base_names(whole[""])


def _keep_parameters(method: Method, models: Mapping[str, nn.Module]) -> bool:
    """True if some parameters may stay as they are in a round: clients then hold on to them."""
    frozen = any(not p.requires_grad for p in models[""].parameters())
    return frozen or len(models) > 1 or any(method.at("plan"))


def format_round(record: Record, rounds: int) -> str:
    """A round in one line of a log."""
    parts = [f"round {record.round}/{rounds}"]
    if record.score is not None:
        parts.append(f"{metric_title(record.primary)} {record.score:.4f}")
    parts.append(f"{len(record.clients) - len(record.refused)} of {len(record.clients)} clients")
    parts += [f"client {refused['client']} refused: {one_line(refused['why'], 300)}" for refused in record.refused]
    return ", ".join(parts)
