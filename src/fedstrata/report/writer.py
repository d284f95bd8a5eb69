"""The report of a run, written when the run has ended."""

from __future__ import annotations

from collections.abc import Callable

from fedstrata.errors import Diverged, one_line
from fedstrata.report.page import write
from fedstrata.runs.callbacks import Callback, Followed
from fedstrata.runs.reader import SavedRun


class ReportWriter(Callback):
    """Writes report.html into the run's directory once the run is done or has diverged.

    Args:
        tell: gets a sentence where that fails; the run is good all the same.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_end(self, federation: Followed, error: BaseException | None) -> None:
        """Write the page, from the run's files."""
        if federation.out is None or not (error is None or isinstance(error, Diverged)):
            return
        try:
            write([SavedRun.read(federation.out)], federation.out / "report.html")
        except Exception as failed:
            self._tell(f"the report failed: {one_line(str(failed) or repr(failed), 300)}")
