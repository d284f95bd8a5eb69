"""A run in MLflow (extra `mlflow`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fedstrata.tracking.kinds import MLflow
from fedstrata.tracking.worker import Values

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_ALWAYS = "round/lr"
"""A number that every round has: its last step is the last round."""
BATCH = 100
"""Entries that MLflow takes at once."""
T = TypeVar("T")


class MLflowRun:
    """An MLflow run; a step is a round.

    Args:
        kind: what the user wants.
    """

    def __init__(self, kind: MLflow) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._kind = kind

    def begin(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Open a run, or go on with the kept one if it is still there."""
        kept = {name: value for name, value in told["kept"].items() if isinstance(value, str)}
        wanted = kept.get("uri") or self._kind.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if wanted and (wanted.startswith("file:") or "://" not in wanted):  # MLflow asks whether files are meant
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        self._client: Any = mlflow.MlflowClient(tracking_uri=wanted or None)
        self.uri = wanted or str(mlflow.get_tracking_uri())
        self._run = self._find(kept.get("run"))
        if self._run is not None:
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, _ALWAYS)
            return {"run": self._run, "uri": self.uri}, max((metric.step for metric in history), default=0)
        made = self._client.create_run(self._experiment(), run_name=told["name"], tags=_tags(told["versions"]))
        self._run = made.info.run_id
        parameters = [entities.Param(_plain(name), str(value)) for name, value in told["parameters"].items()]
        for some in _batches(parameters):
            self._client.log_batch(self._run, params=some)
        return {"run": self._run, "uri": self.uri}, 0

    def _find(self, run: str | None) -> str | None:
        """The run that was kept, None if it was deleted since."""
        from mlflow.exceptions import MlflowException

        if run is None:
            return None
        try:
            return run if self._client.get_run(run).info.lifecycle_stage == "active" else None
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _experiment(self) -> str:
        """The experiment's id; another process may be making it, too."""
        from mlflow.exceptions import MlflowException

        if self._kind.experiment is None and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        name = self._kind.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedstrata"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    @property
    def link(self) -> str | None:
        """The run's page on a server."""
        if not self.uri.startswith("http"):
            return None
        experiment = self._client.get_run(self._run).info.experiment_id
        return f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"

    def log(self, number: int, values: Values) -> None:
        """Write down a round; what is told last of it makes it whole."""
        now, order = int(1000 * time.time()), sorted(values, key=lambda name: name == _ALWAYS)
        metrics = [self._entities.Metric(_plain(name), float(values[name]), now, number) for name in order]
        for some in _batches(metrics):
            self._client.log_batch(self._run, metrics=some)

    def end(self, status: str, summary: Values, clients: list[dict[str, Any]], files: Mapping[str, str]) -> None:
        """The files as artifacts; the table of clients is one of them."""
        for name, value in summary.items():
            self._client.set_tag(self._run, f"final.{name}", f"{value:g}")
        for path in files.values():
            self._client.log_artifact(self._run, path)
        self._client.set_terminated(self._run, _STATUS[status])


def _tags(versions: Mapping[str, Any]) -> dict[str, str]:
    return {"mlflow.source.name": "fedstrata", **{f"version.{name}": str(value) for name, value in versions.items()}}


def _plain(name: str) -> str:
    """A name of the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _batches(items: Sequence[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), BATCH):
        yield list(items[start : start + BATCH])
