"""The server of a Flower federation: a Federation whose clients are at SuperNodes."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from fedstrata import techniques
from fedstrata.config.identity import LOOKING
from fedstrata.config.schema import Settings, checked
from fedstrata.core.method import Method
from fedstrata.core.rng import derive, preserve_rng
from fedstrata.core.types import Assignment, Slots, Update
from fedstrata.engines.pool import AHEAD, AHEAD_BYTES
from fedstrata.engines.serial import Recall
from fedstrata.errors import FedstrataError, UsageError, did_you_mean, one_line
from fedstrata.federation import Federation
from fedstrata.flower.client import Model, built, weights_of
from fedstrata.flower.differential_privacy import Privacy
from fedstrata.flower.engine import Flower, Memories, RemoteExamples
from fedstrata.flower.messages import ClientInfo, TrainSettings, allowance, check_flower
from fedstrata.flower.secure_aggregation import SecAggEngine, check_clients, check_sums
from fedstrata.flower.site_directory import SiteDirectory
from fedstrata.flower.transport import Transport
from fedstrata.probes.runner import Prober
from fedstrata.runs.closed_round import ClosedRound
from fedstrata.runs.files import write_atomic
from fedstrata.runs.records import Record
from fedstrata.server.state import ServerState

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

AT_HOME = frozenset({"engine", "workers", "ray_address", "ray_cpus", "ray_gpus", "eval_clients", *LOOKING})
"""Settings that need the clients' data, or say how to train them, on the server."""
RUN_ID = "flower.json"
"""The file of a run's directory that says which run its clients know it as."""


def server_app(
    model: Model,
    *,
    test: Any = None,
    clients: int | None = None,
    archs: Mapping[str, Model] | None = None,
    arch_of: Callable[[int], str] | None = None,
    public: Any = None,
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
    from flwr.serverapp import ServerApp

    plan = ServerSpec(
        model,
        test,
        archs or {},
        arch_of,
        public,
        {
            "out": out,
            "resume": resume,
            "timeout": timeout,
            "wait": wait,
            "clients": clients,
            "secure": secure,
            "secure_clip": secure_clip,
            "secure_quorum": secure_quorum,
            "dp_clip": dp_clip,
            "dp_noise": dp_noise,
        },
        {"method": method, **settings},
    )
    plan.with_config({})
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            plan.with_config(context.run_config).run(grid)
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
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Mapping[str, Any]) -> ServerSpec:
        """The same, with what Flower's run configuration says; its other entries are the user's own."""
        said = {name.replace("-", "_"): value for name, value in config.items()}
        given = checked(Given, {name: said.get(name, value) for name, value in self.given.items()}).model_dump()
        settings = {**self.settings, **{name: said[name] for name in Settings.model_fields if name in said}}
        for name in settings:
            if name in AT_HOME:
                raise UsageError(f"'{name}' has no meaning here: clients and their data are at other sites")
            if name not in Settings.model_fields:
                raise UsageError(f"there is no setting '{name}'{did_you_mean(name, Settings.model_fields)}")
        chosen = techniques.method(settings["method"])
        checked(Settings, {**settings, "method": str(chosen)})
        if given["secure"]:
            check_sums(chosen, 1 + len(self.archs))
        if chosen.personalised or chosen.centralised:
            raise UsageError(f"'{chosen}' is a reference, not a federation: run it where all data is")
        plan = ServerSpec(self.model, self.test, self.archs, self.arch_of, self.public, given, settings)
        plan.privacy.check(chosen, 1 + len(self.archs))
        return plan

    def run(self, grid: Grid) -> Federation:
        """Wait for the clients, and run all rounds that are left."""
        transport = Transport(grid, float(self.given["timeout"]))
        directory = SiteDirectory(transport, float(self.given["wait"]), logging.getLogger("flwr").warning)
        parties = directory.gather(self.given["clients"])
        if self.given["secure"]:
            check_clients(self.settings.get("participation", 1.0), parties, directory.node)
        federation = FlowerFederation(self, transport, directory, parties)
        federation.fit(lambda record: logging.getLogger("flwr").info(told(record, federation.settings.rounds)))
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

    def engine(self, method: Method, fault: Callable[[Assignment, Update], str | None]) -> Callable[..., Flower]:
        """What makes the engine; `validate` says what is wrong with an update."""
        if not self.given["secure"]:
            return Flower
        clip, quorum = self.given["secure_clip"], self.given["secure_quorum"]
        return partial(SecAggEngine, validate=fault, clip=clip, quorum=quorum, weighs=method.weight == "examples")

    def models(self) -> dict[str, nn.Module]:
        """The models by architecture, with weights that the run's seed decides where they are made here."""
        seed = derive(int(self.settings.get("seed", 0)), "model")
        made = {}
        with preserve_rng():
            for name, model in {"": self.model, **self.archs}.items():
                torch.default_generator.manual_seed(seed)
                made[name] = built(model)
        return made


class FlowerFederation(Federation):
    """A federation whose clients are at other sites."""

    def __init__(
        self, plan: ServerSpec, transport: Transport, directory: SiteDirectory, parties: Sequence[ClientInfo]
    ) -> None:
        models = plan.models()
        super().__init__(
            models[""],
            [RemoteExamples(p.examples, tuple(p.shape), getattr(torch, p.dtype)) for p in parties],
            plan.test() if callable(plan.test) else plan.test,
            **plan.settings,
            engine="serial",  # judges the global model, and trains nobody
            archs={name: model for name, model in models.items() if name},
            arch_of=plan.arch_of,
            public=plan.public() if callable(plan.public) else plan.public,
            out=plan.out,
            resume=plan.resumes,
            recipe={"engine": "flower", **plan.protection},
            notes=plan.notes,
        )
        s = self.settings
        arch_of = plan.arch_of or (lambda client: "")
        used = sorted({arch_of(party.client) for party in parties})
        regime = TrainSettings(
            method=str(self.method),
            buffers=self.method.buffers,
            augment=s.augment,
            channels_last=s.channels_last,
            compile=s.compile,
            threads=s.threads,
            branches=used if self.method.branches else [],
            clip=plan.privacy.clip,
        )
        self._privacy = plan.privacy
        memories, weights = Memories(), weights_of(models.values())
        self._recorder.store = memories
        self._sites = self._engine = plan.engine(self.method, self._fault)(
            transport=transport,
            directory=directory,
            regime=regime,
            run_id=run_id(plan.out),
            limit=allowance(weights),
            holds=self._holds(len(models)),
            memories=memories,
            few=max(AHEAD, AHEAD_BYTES // max(weights, 1)),
            aside=plan.out,
        )
        self.engine = "flower"

    def _fault(self, assignment: Assignment, update: Update) -> str | None:
        return self._server.validate(assignment, update, self.state.buffers)

    def _holds(self, architectures: int) -> bool:
        """True if some parameters may stay as they are in a round: clients then hold on to them."""
        frozen = any(not p.requires_grad for p in self._context.build("").parameters())
        return frozen or architectures > 1 or any(self.method.at("plan"))

    def _close(
        self, state: ServerState, prober: Prober | None, recall: Recall, keep: Callable[[int, Slots], None]
    ) -> ClosedRound:
        trained = super()._close(self._sites.begin(state), prober, recall, keep)
        self._sites.heard(bool(trained.outcome.accepted))
        return self._privacy.noised(trained, self.method.server_lr)


def run_id(out: Path | None) -> str:
    """What clients know a run as: the same after it was resumed, and no other's."""
    new = secrets.token_hex(8)
    if out is None:
        return new
    path = out / RUN_ID
    try:
        known = json.loads(path.read_text())["run"]
        if re.fullmatch("[0-9a-f]{16}", known):
            return str(known)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    write_atomic(path, json.dumps({"run": new}) + "\n")
    return new


def told(record: Record, rounds: int) -> str:
    """A round in one line of a log."""
    parts = [f"round {record.round}/{rounds}"]
    if record.accuracy is not None:
        parts.append(f"accuracy {record.accuracy:.4f}")
    parts.append(f"{len(record.clients) - len(record.refused)} of {len(record.clients)} clients")
    parts += [f"client {refused['client']} refused: {one_line(refused['why'], 300)}" for refused in record.refused]
    return ", ".join(parts)
