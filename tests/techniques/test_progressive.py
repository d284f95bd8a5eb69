"""Progressive growing, Wu, Li and Xu 2025."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.core.types import Stratum
from fedstrata.techniques.progressive import Progressive, effective_movement
from tests.contract.test_matrix import federation as small
from tests.techniques.worlds import FIRST, flat, mean, parties, run, trained, two_layers

SIZES = [3, 5, 2]


def test_blocks_train_until_they_only_go_to_and_fro() -> None:
    """The first layer and the classifier, until Σ|ΣU|/ΣΣ|U| of the former is below the threshold in a window of two
    rounds; then the classifier alone, likewise; then both.
    """
    clients, threshold, rounds, lr = parties(), 0.8, 12, 8.0
    fed = run(f"progressive(window=2, threshold={threshold})", clients, two_layers(), rounds=rounds, lr=lr)
    w, block, window = flat(two_layers()), 0, []
    trains = (slice(None), slice(FIRST, None), slice(None))
    measured = (slice(0, FIRST), slice(FIRST, None))
    turns, moved = [], {}
    for record in fed.records:
        turns.append(block)
        assert record.active == (["2"] if block == 1 else ["0", "2"])
        change = mean([trained(w, c, trains[block], lr) for c in clients], SIZES)
        w = w + change
        if block == 2:
            continue
        window.append(change[measured[block]])
        movement = np.abs(sum(window)).sum() / np.abs(window).sum()
        moved["0.weight" if block == 0 else "2.weight"] = movement
        if len(window) == 2:
            block, window = block + int(movement < threshold), []
    np.testing.assert_allclose(flat(fed), w, atol=1e-9)
    found = fed.method.publish(fed.state.techniques)["score"]
    assert found == pytest.approx(moved, rel=1e-9)
    assert turns.count(0) == turns.count(1) == 4
    assert set(turns) == {0, 1, 2}


def test_effective_movement() -> None:
    """(1, −2) and (1, 2): ‖(2, 0)‖₁/(3 + 3); nothing moved at all."""
    assert effective_movement({"w": torch.tensor([2.0, 0.0])}, 6.0) == pytest.approx(1 / 3)
    assert effective_movement({}, 0.0) == 0.0


def test_blocks_are_stages_or_patterns() -> None:
    strata = tuple(Stratum(n, n.split(".")[0], (n,), ()) for n in ("stem", "a.0", "a.1", "head"))
    assert [[s.name for s in b] for b in Progressive().blocks(strata)] == [["stem"], ["a.0", "a.1"], ["head"]]
    chosen = Progressive(strata=("a*", "stem")).blocks(strata)
    assert [[s.name for s in b] for b in chosen] == [["a.0", "a.1"], ["stem"]]
    chosen = Progressive(strata=("stem", "*", "a*")).blocks(strata)  # the first pattern that names a stratum counts
    assert [[s.name for s in b] for b in chosen] == [["stem"], ["a.0", "a.1", "head"]]
    with pytest.raises(fs.UsageError, match="none that trains is called 'secnd'"):
        small(Progressive(strata=("secnd",)))


def test_a_pattern_for_all_that_is_left() -> None:
    """It takes no stratum from the block before it, which would have been empty, and the end of all growing."""
    fed = small(Progressive(strata=("first", "*"), threshold=0.0, longest=1), rounds=2)
    assert [record.active for record in fed.rounds()] == [["first", "head"], ["second.0", "second.1", "head"]]


def test_the_longest_time_of_a_block() -> None:
    """Three blocks of two rounds each, whatever moves; then everything."""
    fed = small(Progressive(threshold=0.0, longest=2), rounds=7)
    active = [record.active for record in fed.rounds()]
    first, second, head = ["first", "head"], ["second.0", "second.1", "head"], ["head"]
    assert active == [first, first, second, second, head, head, [s.name for s in fed.strata]]
