"""What `--quick` chooses."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import FEW, MOST, SLOW_FIXTURES, choose_quick, spread


@pytest.mark.parametrize(
    ("count", "few", "places"),
    [(0, 3, []), (1, 3, [0]), (3, 3, [0, 1, 2]), (4, 3, [0, 1, 3]), (101, 3, [0, 50, 100]), (5, 2, [0, 4])],
)
def test_cases_are_spread_from_the_first_to_the_last(count: int, few: int, places: list[int]) -> None:
    assert spread(list(range(count)), few) == places


def test_a_few_cases_of_what_is_not_slow(request: pytest.FixtureRequest) -> None:
    """Asked of the tests of this very run, of which some file at least has nothing slow."""
    quick = [item for item in request.session.items if item.get_closest_marker("slow") is None]
    chosen = choose_quick(quick)
    assert chosen <= set(quick)
    names = Counter(item.nodeid.partition("[")[0] for item in chosen)
    assert max(names.values()) <= FEW
    assert max(Counter(item.path for item in chosen).values()) <= MOST
    assert {name.partition("::")[0] for name in names} == {item.nodeid.partition("::")[0] for item in quick}


def test_what_needs_a_slow_fixture_is_slow(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))]
    assert all(item.get_closest_marker("slow") for item in items)
