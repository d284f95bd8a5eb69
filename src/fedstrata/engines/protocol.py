"""What an engine is: it turns a round's assignments into updates, in client order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fedstrata.core.types import Assignment, Visit
    from fedstrata.engines.serial import Recall
    from fedstrata.evaluation.evaluate import EvalRequest
    from fedstrata.system.timing import Clock


class Engine(Protocol):
    """Runs one round's assignments."""

    @property
    def workers(self) -> int:
        """How many processes train clients at the same time."""
        ...

    @property
    def overlaps(self) -> bool:
        """True if an evaluation goes on while the next round trains."""
        ...

    @property
    def spent(self) -> Clock:
        """Seconds by phase that workers spent, where a clock is in use."""
        ...

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visit]: ...

    def evaluate(self, request: EvalRequest) -> Callable[[], tuple[float, float]]: ...

    def told(self) -> tuple[str, ...]: ...

    def close(self) -> None: ...
