"""Where the time goes: seconds by phase, each counted once, in this process and in workers. Off, it costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType


class Lap:
    """Called, tells the seconds since it was called before."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> float:
        """Seconds since the call before, or since it was made."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class Clock:
    """Adds up seconds by phase. A phase inside another stops the outer one's clock, so the sums add up to the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """A context that counts as this phase."""
        return _Phase(self, phase)

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._charge()
        self._open.append(phase)

    def leave(self) -> None:
        """End the phase that began last."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """The seconds since the last call, and begin again at 0."""
        taken, self.seconds = self.seconds, {}
        return taken

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add another clock's seconds."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


class _Phase(AbstractContextManager[None]):
    def __init__(self, clock: Clock, phase: str) -> None:
        self._clock, self._phase = clock, phase

    def __enter__(self) -> None:
        self._clock.enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()


_clock: Clock | None = None
_OFF = nullcontext()


def set_clock(clock: Clock | None) -> None:
    """Let phases of this process be counted by a clock, or by none."""
    global _clock
    _clock = clock


@contextmanager
def use_clock(clock: Clock | None) -> Iterator[None]:
    """Let phases be counted by a clock, or by none, and as before afterwards."""
    before = _clock
    set_clock(clock)
    try:
        yield
    finally:
        set_clock(before)


def current_clock() -> Clock | None:
    """The clock in use."""
    return _clock


def timed(phase: str) -> AbstractContextManager[None]:
    """Count what happens inside as a phase, if a clock is in use."""
    return _OFF if _clock is None else _clock(phase)
