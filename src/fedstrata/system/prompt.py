"""Does somebody wait at a prompt, and can it show HTML?"""

from __future__ import annotations

import sys
from typing import Any


def ipython_shell() -> Any:
    """IPython's shell, where the code runs in one; None elsewhere. Imports nothing."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def in_notebook() -> bool:
    """Whether what is displayed goes to a notebook: the shell is that of a Jupyter kernel."""
    return getattr(ipython_shell(), "kernel", None) is not None


def at_prompt() -> bool:
    """Whether the code was typed at a prompt in a terminal: Python's own, or IPython's."""
    typed = hasattr(sys, "ps1") or bool(sys.flags.interactive) or ipython_shell() is not None
    return typed and not in_notebook() and sys.stderr.isatty()
