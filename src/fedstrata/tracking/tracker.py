"""A callback that passes a run on to a tracker's process, and tells once if that fails."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.data.examples import sizes
from fedstrata.errors import Diverged, FedstrataError, UsageError, one_line
from fedstrata.runs.callbacks import Callback, Followed
from fedstrata.runs.files import read_object
from fedstrata.runs.records import Record
from fedstrata.tracking.kinds import TrackerKind, build_kind
from fedstrata.tracking.link import Link
from fedstrata.tracking.numbers import CLIENTS, as_csv, client_table, parameters, round_values, summary_values

GRACE = 2.0
"""Seconds that a run which is told to end waits for a tracker, which then goes on by itself."""
FOLDER = "tracking"
"""The folder in a run's directory that says which runs of trackers are its own."""


class Tracker(Callback):
    """Logs a run with W&B, MLflow or TensorBoard: `federation.fit(Tracker("wandb(project='digits')"))`.

    Parameters, the numbers of every round, and at the end a table of the clients, the report and the model. A run that
    goes on goes on in the tracker, too; rounds that it has not seen are told first. A tracker that fails, or hangs,
    never stops a run: one sentence tells of it.

    Args:
        kind: `wandb`, `mlflow` or `tensorboard`, with arguments where they are wanted.
        tell: gets sentences for the user; None writes them on standard error.
        report: whether the report is handed on; without one in the run's directory, it is made for that.

    Raises:
        UsageError: if there is no such tracker, or its library is not installed.
    """

    def __init__(
        self, kind: str | TrackerKind, *, tell: Callable[[str], None] | None = None, report: bool = True
    ) -> None:
        self.kind = build_kind(kind)
        if not self.kind.is_installed:
            raise UsageError(self.kind.missing)
        self._to_user = tell or _tell_user
        self._report = report
        self._kept: dict[str, Any] = {}
        self._link: Link | None = None

    def _tell(self, text: str) -> None:
        """Tell the user, but not what stands before a host in an address: that is a password."""
        self._to_user(re.sub(r"(?<=://)[^/\s]+(?=@)", "…", text))

    @contextmanager
    def _never_stopping(self) -> Iterator[None]:
        """Whatever goes wrong in telling is no reason to end a run: a full disk, no room for a process."""
        try:
            yield
        except Exception as error:
            self._tell_failure(getattr(error, "strerror", None) or str(error) or type(error).__name__)

    def on_begin(self, federation: Followed) -> None:
        """Start the tracker's process, and tell it what runs."""
        with self._never_stopping():
            self._begin(federation)

    def _begin(self, federation: Followed) -> None:
        saved, out, self._began = federation.saved_run(), federation.out, time.time()
        kept = self._kept if out is None else read_object(out / FOLDER / f"{self.kind.name}.json")
        kind = _go_on_with(self.kind, kept)
        message = {
            "do": "begin",
            "kind": str(kind),
            "kept": kept if kept.get("kind") == str(kind) else {},
            "name": "fedstrata" if out is None else out.name,
            "out": None if out is None else str(out.resolve()),
            "parameters": parameters(saved.config),
            "versions": saved.versions,
            "rounds": [(record.round, round_values(record)) for record in federation.records],
        }
        self._link = Link()
        self._link.send(message)

    def on_round(self, federation: Followed, record: Record) -> None:
        """Pass the round on."""
        with self._never_stopping():
            if self._link is not None:
                self._link.send({"do": "round", "round": record.round, "values": round_values(record)})
                self._hear(self._link.receive())

    def on_end(self, federation: Followed, error: BaseException | None) -> None:
        """Hand over what is left of the run, and wait for the tracker, but not for ever."""
        with self._never_stopping():
            self._end(federation, error)

    def _end(self, federation: Followed, error: BaseException | None) -> None:
        self._hear(() if self._link is None else self._link.receive())
        if self._link is None:
            return
        whole = error is None or isinstance(error, Diverged)
        status = "finished" if error is None else "failed" if isinstance(error, Exception) else "stopped"
        with tempfile.TemporaryDirectory(prefix="fedstrata-") as folder:
            clients = self._clients(federation)
            files = self._files(federation, Path(folder), clients, error is None) if whole else {}
            summary = summary_values(federation.summary())
            self._link.send({"do": "end", "status": status, "summary": summary, "clients": clients, "files": files})
            self._hear(self._link.wait(self.kind.wait if whole else GRACE))
            if self._link is None:
                return
            if whole and self._link.open:
                self._tell_failure(f"it has not finished after {self.kind.wait:g} s")
        self._let_go()

    def _files(self, federation: Followed, folder: Path, clients: list[dict[str, Any]], done: bool) -> dict[str, str]:
        """What is handed over: name → path; what the run's directory does not hold is made in a folder."""
        files = {"clients.csv": folder / "clients.csv"}
        files["clients.csv"].write_text(as_csv(clients))
        own = federation.out or folder
        if done:
            files["model.safetensors"] = own / "model.safetensors"
        if self._report:
            page = own / "report.html"
            new = page.exists() and page.stat().st_mtime >= self._began
            files["report.html"] = page if new else folder / "report.html"
        try:
            if self._report and not new:
                federation.report(files["report.html"])
            if done and federation.out is None:
                _save_model(federation, files["model.safetensors"])
        except (OSError, FedstrataError, RuntimeError) as error:
            self._tell(f"{self.kind.title} does not get all files: {one_line(str(error), 300)}")
        if federation.out is not None:
            files["run.toml"] = federation.out / "run.toml"
        return {name: str(path.resolve()) for name, path in files.items() if path.exists()}

    def _clients(self, federation: Followed) -> list[dict[str, Any]]:
        size = sizes(federation.clients)
        examples = [size(client) for client in range(min(len(federation.clients), CLIENTS))]
        return client_table(federation.records, federation.client_names, examples)

    def _hear(self, messages: Iterable[dict[str, Any]]) -> None:
        """Take up what the process says."""
        failed: str | None = None
        for message in messages:
            failed = message.get("failed", failed)
            self._kept = message.get("kept", self._kept)
            if "link" in message:
                self._tell(f"{self.kind.title}: {message['link']}")
            if "ended" in message and self._link is not None:
                self._let_go()
        if failed is None and self._link is not None and not self._link.open:
            failed = self._link.how_it_ended()
        if failed is not None:
            self._tell_failure(failed)

    def _tell_failure(self, why: str) -> None:
        """Once: from then on the run goes on as if there were no tracker."""
        self._tell(f"{self.kind.title} failed: {one_line(why.rstrip('.'), 300)}; the run is good without it")
        if self._link is not None:
            self._link.kill()
            self._link = None

    def _let_go(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _go_on_with(kind: TrackerKind, kept: dict[str, Any]) -> TrackerKind:
    """The tracker as the run was begun with, where it is now named without saying how."""
    if str(kind) != kind.name or not isinstance(kept.get("kind"), str):
        return kind
    try:
        before = build_kind(kept["kind"])
    except UsageError:  # the file was edited
        return kind
    return before if before.name == kind.name else kind


def trackers_of(out: Path) -> list[TrackerKind]:
    """The trackers that a run's directory tells of."""
    found = []
    for path in sorted((out / FOLDER).glob("*.json")):
        text = read_object(path).get("kind")
        try:
            found.append(build_kind(text if isinstance(text, str) else path.stem))
        except UsageError:  # not one of ours
            continue
    return found


def _save_model(federation: Followed, path: Path) -> None:
    """Write the final model as a run's directory has it."""
    from safetensors.torch import save_model

    save_model(federation.model, str(path), {"format": "pt"})


def _tell_user(text: str) -> None:
    print(f"fedstrata: note: {one_line(text)}", file=sys.stderr)
