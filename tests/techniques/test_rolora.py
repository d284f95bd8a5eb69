"""RoLoRA in NumPy: B and A take turns."""

from __future__ import annotations

import pytest

import fedstrata as fs
from tests.techniques.adapted_worlds import adapted, by_hand, check, counts, means, run_adapted
from tests.techniques.worlds import differ, parties


@pytest.mark.parametrize(
    ("method", "turns"), [("rolora", "BAB"), ("rolora(first='A')", "ABA"), ("rolora(rounds_per_factor=2)", "BBA")]
)
def test_three_rounds(method: str, turns: str) -> None:
    """A round of B is one of FFA-LoRA; in a round of A the same with the factors changed."""
    clients = parties()
    fed = run_adapted(method, clients)
    now = by_hand(adapted())
    for factor in turns:
        now = means([now.train(c, factor) for c in clients], counts(clients))
    check(fed, now)
    differ(now.whole(), by_hand(run_adapted("ffalora", clients).state.params).whole())


def test_settings_are_checked() -> None:
    for wrong, why in (("rounds_per_factor=0", "1 or more, not 0"), ("first='C'", "should be 'A' or 'B'")):
        with pytest.raises(fs.UsageError, match=why):
            fs.method(f"rolora({wrong})")
