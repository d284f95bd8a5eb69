"""A run as TensorBoard's event files (extra `tensorboard`), written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.errors import UsageError
from fedstrata.tracking.kinds import TensorBoard
from fedstrata.tracking.worker import Values

SHOWN = 200
"""Clients in the table that is shown as text."""


class TensorBoardRun:
    """Event files; a step is a round.

    Args:
        kind: what the user wants.
    """

    def __init__(self, kind: TensorBoard) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

        self._kind, self._text_data = kind, TextPluginData
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2

    def begin(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Open a file that takes the place of all before it: no round shows twice, and none is missing."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._kind.dir is None and told["out"] is None:
            raise UsageError("events need a directory: Federation(…, out=…), or tensorboard(dir='events')")
        self._writer: Any = EventFileWriter(self._kind.dir or str(Path(told["out"]) / "tensorboard"))
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(1, session_log=log)
        rows = {**told["parameters"], **{f"version: {name}": value for name, value in told["versions"].items()}}
        self._write(1, summary=self._text("parameters", [{"": n, "value": value} for n, value in rows.items()]))
        return {}, 0

    @property
    def link(self) -> str | None:
        """None: files are shown by `tensorboard --logdir`."""
        return None

    def log(self, number: int, values: Values) -> None:
        """Write down a round."""
        found = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(number, summary=self._summary.Summary(value=found))
        self._writer.flush()
        self._last = number

    def end(self, status: str, summary: Values, clients: list[dict[str, Any]], files: Mapping[str, str]) -> None:
        """The clients as a text; event files hold no others."""
        if clients:
            self._write(getattr(self, "_last", 1), summary=self._text("clients", clients[:SHOWN]))
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))

    def _text(self, name: str, rows: list[dict[str, Any]]) -> Any:
        """Rows as a table of Markdown, which TensorBoard shows as a text."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [columns, ["---"] * len(columns), *([_cell(row.get(column, "")) for column in columns] for row in rows)]
        markdown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        data = self._text_data(version=0).SerializeToString()
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text", content=data)
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        tensor.tensor_shape.dim.add().size = 1
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        value = self._summary.Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        return self._summary.Summary(value=[value])


def _cell(value: Any) -> str:
    """A value in a cell of a table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
