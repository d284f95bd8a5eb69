"""The trackers by name, and what each can be told: `wandb(project='digits')`."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from fedstrata.core.extras import missing
from fedstrata.core.spec import Call, Registry, bind, parse_expression, read_call, text_of
from fedstrata.errors import UsageError, positive


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A tracker, and how it is used.

    Args:
        wait: seconds that the end of a run waits for it; then the run ends without it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str]
    wait: float = 120.0

    def __post_init__(self) -> None:
        positive(self.name, wait=self.wait)

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return text_of(self.name, given)

    @property
    def is_installed(self) -> bool:
        """Whether its library is there."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def missing(self) -> str:
        """What to do where its library is not there."""
        return str(missing(self.package, f"{self.title} needs"))


@dataclass(frozen=True, kw_only=True)
class Wandb(TrackerKind):
    """Weights & Biases: one run per run, in the cloud, on a server of yours or in a directory.

    Args:
        project: None for WANDB_PROJECT, or else `fedstrata`.
        entity: user or team; None for WANDB_ENTITY, or your default.
        mode: `offline` writes a directory that `wandb sync` uploads later; None for WANDB_MODE, or else `online`.
    """

    name: ClassVar[str] = "wandb"
    title: ClassVar[str] = "W&B"
    package: ClassVar[str] = "wandb"
    project: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None


@dataclass(frozen=True, kw_only=True)
class MLflow(TrackerKind):
    """MLflow: one run per run, on a tracking server, in a database or in files.

    Args:
        uri: the tracking URI: `http://…`, `sqlite:///runs.db`, `file:///path`; None for MLFLOW_TRACKING_URI, or
            MLflow's own default.
        experiment: None for MLFLOW_EXPERIMENT_NAME, or else `fedstrata`.
    """

    name: ClassVar[str] = "mlflow"
    title: ClassVar[str] = "MLflow"
    package: ClassVar[str] = "mlflow"
    uri: str | None = None
    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class TensorBoard(TrackerKind):
    """TensorBoard: event files.

    Args:
        dir: where they are written; None for `tensorboard` in the run's directory.
    """

    name: ClassVar[str] = "tensorboard"
    title: ClassVar[str] = "TensorBoard"
    package: ClassVar[str] = "tensorboard"
    dir: str | None = None


TRACKERS: Registry = {"wandb": Wandb, "mlflow": MLflow, "tensorboard": TensorBoard}


def build_kind(call: str | Call | TrackerKind) -> TrackerKind:
    """Read a tracker such as `"mlflow(uri='sqlite:///runs.db')"`.

    Raises:
        UsageError: for an unknown name (with the nearest known one) or a wrong argument.
    """
    if isinstance(call, TrackerKind):
        return call
    build, arguments = bind("tracker", TRACKERS, call)
    kind: TrackerKind = build(**arguments)
    return kind


def read_trackers(texts: Iterable[str]) -> list[TrackerKind]:
    """All trackers of some texts, each of which may name several: `"wandb, mlflow(experiment='digits')"`.

    Raises:
        UsageError: if one cannot be read, or is named twice.
    """
    found: list[TrackerKind] = []
    for text in texts:
        inside = parse_expression(f"[{text}]", shown=text)
        if not isinstance(inside, ast.List):
            raise UsageError(f"'{text}' cannot be read; write it like name or name(argument=value)")
        found += [build_kind(read_call(node, text)) for node in inside.elts]
    for place, kind in enumerate(found):
        if any(kind.name == other.name for other in found[:place]):
            raise UsageError(f"the tracker '{kind.name}' is given twice")
    return found
