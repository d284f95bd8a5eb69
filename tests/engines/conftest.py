"""A limit against hanging, and none against slowness: alone, no test here takes more than some seconds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.small_runs import LONG


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test hangs: nothing came of it in {2 * LONG} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(2 * LONG)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
