"""Callbacks that tests follow runs with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedstrata as fs


class OnVisit(fs.Callback):
    """Calls a function after every visit, with (done, total)."""

    def __init__(self, hear: Callable[[int, int], object]) -> None:
        self.hear = hear

    def on_visit(self, federation: Any, done: int, total: int) -> None:
        self.hear(done, total)
