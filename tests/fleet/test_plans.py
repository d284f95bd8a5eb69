"""Groups of strata: which are affordable, which of them cover all, and whose turn each is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.fleet.plans import affordable_groups, covering, turn


def test_by_hand() -> None:
    """Costs 5, 3, 1, 1, 4 with a budget of 5, and of 4, which stratum 0 exceeds."""
    costs = [5, 3, 1, 1, 4]
    assert affordable_groups(5, lambda a, b: sum(costs[a : b + 1]) <= 5) == ((0, 0), (1, 3), (3, 4))
    assert affordable_groups(5, lambda a, b: sum(costs[a : b + 1]) <= 4) == ((1, 2), (2, 3), (4, 4))
    assert covering(((1, 2), (2, 3), (4, 4))) == ((1, 2), (2, 3), (4, 4))
    assert covering(((0, 2), (1, 3), (2, 4), (3, 5))) == ((0, 2), (3, 5))
    assert affordable_groups(3, lambda a, b: True) == ((0, 2),)
    assert affordable_groups(3, lambda a, b: False) == ()
    assert covering(()) == ()


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 20))
def test_the_largest_groups_and_the_fewest_that_cover(costs: list[int], budget: int) -> None:
    """Against all groups, and all choices among the largest."""
    asked: list[tuple[int, int]] = []

    def fits(first: int, last: int) -> bool:
        asked.append((first, last))
        return sum(costs[first : last + 1]) <= budget

    found = affordable_groups(len(costs), fits)
    assert len(asked) <= 2 * len(costs)
    every = [(a, b) for a in range(len(costs)) for b in range(a, len(costs)) if sum(costs[a : b + 1]) <= budget]
    inner = {(a, b) for a, b in every for c, d in every if c <= a and b <= d and (a, b) != (c, d)}
    assert list(found) == [group for group in every if group not in inner]

    def held(groups: tuple[tuple[int, int], ...]) -> set[int]:
        return {s for a, b in groups for s in range(a, b + 1)}

    chosen = covering(found)
    assert held(chosen) == held(tuple(every))
    fewer = combinations(found, max(len(chosen) - 1, 0))
    assert not chosen or all(held(some) != held(chosen) for some in fewer)


@pytest.mark.parametrize("groups", range(1, 9))
@pytest.mark.parametrize("there", range(1, 9))
def test_every_group_has_its_turn(groups: int, there: int) -> None:
    """In any 2⌈groups/there⌉ − 1 rounds by somebody, in any 2 · groups − 1 by everybody, whoever else is there."""
    window, long = 2 * -(-groups // there) - 1, 2 * groups - 1
    for begin in range(5 * groups):
        rounds = range(begin, begin + window)
        assert {turn(7, r, place, there, groups) for r in rounds for place in range(there)} == set(range(groups))
        for place in range(there):
            own = {turn(7, r, place, there, groups) for r in range(begin, begin + long)}
            assert own == set(range(groups))
        assert {turn(7, r, 0, 1 + r % 5, groups) for r in range(begin, begin + long)} == set(range(groups))


@pytest.mark.parametrize("period", range(1, 9))
def test_turns_do_not_fall_in_step_with_a_schedule(period: int) -> None:
    """Whatever trains every so many rounds meets every group, and at each client, also where 4 divides the period."""
    for phase in range(period):
        met = {turn(0, r, 0, 1, 4) for r in range(phase, 60 * period, period)}
        assert met == set(range(4))
