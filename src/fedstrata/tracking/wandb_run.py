"""A run in Weights & Biases (extra `wandb`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedstrata.tracking.kinds import Wandb
from fedstrata.tracking.worker import Values

_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 130}


class WandbRun:
    """A W&B run; a step is a round.

    Args:
        kind: what the user wants.
    """

    def __init__(self, kind: Wandb) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self._kind = kind

    def begin(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Open a run. Offline there is no server that knows how far an earlier part came: what was kept says so."""
        kept, run = told["kept"], told["kept"].get("run")
        run = run if isinstance(run, str) and run else None
        self._run = self._wandb.init(
            project=self._kind.project or os.environ.get("WANDB_PROJECT") or "fedstrata",
            entity=self._kind.entity,
            name=told["name"],
            id=run,
            resume=None if run is None else "allow",
            dir=os.environ.get("WANDB_DIR") or told["out"],
            mode=self._kind.mode,
            settings=self._wandb.Settings(silent=True, console="off", disable_job_creation=True),
        )
        self._run.config.update({**told["parameters"], "versions": told["versions"]}, allow_val_change=True)
        last = kept.get("round") if run is not None else 0
        return {"run": self._run.id}, max(last if isinstance(last, int) else 0, self._run.step - 1, 0)

    @property
    def link(self) -> str | None:
        """The run's page."""
        return None if self._run.offline else self._run.url

    def log(self, number: int, values: Values) -> None:
        """Write down a round."""
        self._run.log(dict(values), step=number, commit=True)  # else it waits for the next round

    def end(self, status: str, summary: Values, clients: list[dict[str, Any]], files: Mapping[str, str]) -> None:
        """The clients as a table, the files as one artifact."""
        self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        if clients and status == "finished":
            columns = list(dict.fromkeys(name for row in clients for name in row))
            rows = [[row.get(name) for name in columns] for row in clients]
            self._run.summary["clients"] = self._wandb.Table(columns=columns, data=rows)
        if files:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="fedstrata-run")
            for name, path in files.items():
                artifact.add_file(path, name=name)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=_EXIT_CODES[status])
