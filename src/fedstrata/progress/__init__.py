"""How far is a run? As a live view in a terminal, as a live table in a notebook, or as a line per round elsewhere."""

from __future__ import annotations

from fedstrata.errors import UsageError
from fedstrata.runs.callbacks import Callback
from fedstrata.system.prompt import at_prompt, in_notebook


def progress_callbacks(progress: bool | None) -> list[Callback]:
    """What shows a run that was started from Python, on standard error: a program's own output stays its own.

    Args:
        progress: None shows it where somebody waits for the prompt to come back, in notebooks and in an interactive
            interpreter; programs are silent unless they ask.
    """
    if progress is not None and not isinstance(progress, bool):
        raise UsageError(f"progress is True, False or None, not {progress!r}")
    if not (in_notebook() or at_prompt() if progress is None else progress):
        return []
    if in_notebook():
        from fedstrata.progress.notebook import NotebookProgress

        return [NotebookProgress()]
    from rich.console import Console

    from fedstrata.progress.terminal import build_progress

    return [build_progress(Console(stderr=True, markup=False, emoji=False, highlight=False), transient=False)]
