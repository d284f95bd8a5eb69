"""How a command ends when it is told to: Ctrl-C, SIGTERM and SIGHUP all raise the same KeyboardInterrupt.

For processes that are ours alone: a program that uses the library keeps its own handlers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What tells a process to end."""
PATIENCE = 1.0
"""Seconds in which several signals are one wish to end: launchers pass Ctrl-C on, so that it comes twice."""
AGAIN = 0.01
"""Seconds after which an interrupt comes again that was lost, or came in the middle of an import."""


class Interrupt(KeyboardInterrupt):
    """A signal's wish that the process end. It comes again where it is lost, as in finalizers."""

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop, stop.raised = stop, id(self)

    def __del__(self) -> None:
        self._stop.repeat(self)


class Stop:
    """What signals have asked for so far."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that came."""
        self.working = False
        """True once there is something to lose."""
        self.raised = 0
        """The interrupt that is on its way, by its id; 0 for none, or for one that was lost."""
        self._since = 0.0
        self._heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one interrupts, and a Ctrl-C of somebody who has lost patience does again."""
        if self._heard:
            return
        if number not in ENDING:  # the timer's
            wanted, impatient = self.signal is not None and not self.raised, False
        else:
            impatient = number == signal.SIGINT and time.monotonic() - self._since > PATIENCE
            wanted = self.signal is None or impatient
        if wanted:
            self.signal = self.signal or number
            if _in_import(frame) and not (impatient and self._since):
                self._wait_for_import()
                return
            self._since = time.monotonic()
            raise Interrupt(self)  # no variable may hold it: with its traceback it would never be freed

    def _wait_for_import(self) -> None:
        """In the middle of an import: end at once if nothing is lost by that, else wait for its end."""
        if not self.working:
            with suppress(OSError):
                os.write(2, b"fedstrata: stopped\n")
            os._exit(self.code)
        self._since = self._since or time.monotonic()
        _set_timer(AGAIN)

    def repeat(self, interrupt: Interrupt) -> None:
        """Let an interrupt that nobody holds any more come again, unless the process is about to end.

        By a timer, and not from here: what a finalizer raises is lost.
        """
        if id(interrupt) == self.raised and not self._heard:
            self.raised = 0
            _set_timer(AGAIN)

    def acknowledge(self) -> bool:
        """Interrupt no more, since the process is about to end; True if a signal asked for that."""
        self._heard = True
        return self.signal is not None

    @property
    def code(self) -> int:
        """The exit code of a process that a signal has ended, as shells have it."""
        return 128 + (self.signal or signal.SIGINT)


def _set_timer(seconds: float) -> None:
    """Let SIGALRM come after some seconds, where the platform has it; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _in_import(frame: FrameType | None) -> bool:
    """True in the middle of an import: those of torch and NumPy abort, or break for good, where one interrupts them."""
    while frame is not None and hasattr(signal, "setitimer"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


_stop: Stop | None = None


def begin_work() -> None:
    """Say that from now on the command has something to save when it is told to end."""
    if _stop is not None:
        _stop.working = True


def acknowledge_interrupt() -> None:
    """Say that the command has caught a KeyboardInterrupt and ends by itself: it need not come again."""
    if _stop is not None:
        _stop.acknowledge()


@contextmanager
def handle_signals() -> Iterator[Stop]:
    """Let every signal that ends a process raise KeyboardInterrupt; those that were ignored stay so, as under nohup."""
    global _stop
    if _stop is not None or threading.current_thread() is not threading.main_thread():
        yield _stop or Stop()  # only the main thread may handle signals
        return
    stop = _stop = Stop()
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    numbers += [signal.SIGALRM] if hasattr(signal, "setitimer") else []
    before = {number: signal.signal(number, stop) for number in numbers}
    unraisable = sys.unraisablehook

    def report(about: Any) -> None:
        """An interrupt that a finalizer swallows is no news: it comes again."""
        if not isinstance(about.exc_value, Interrupt):
            unraisable(about)

    sys.unraisablehook = report
    try:
        yield stop
    finally:
        stop.acknowledge()
        _set_timer(0)
        sys.unraisablehook, _stop = unraisable, None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def block_signals() -> Iterator[None]:
    """Signals that end a process wait until this is over: a new child must first set its own handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a child that was started while signals were blocked: leave Ctrl-C to the parent, and drop its handlers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
