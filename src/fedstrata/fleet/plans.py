"""What a device trains when: groups of strata that lie next to each other, and whose turn each is.

Pure functions of whole numbers, and of the run's seed: strata are numbered from the input to the output, and whoever
knows models says what a group of them takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fedstrata.core.rng import derive

Span = tuple[int, int]
"""The first and the last stratum of a group."""


def affordable_groups(strata: int, fits: Callable[[int, int], bool]) -> tuple[Span, ...]:
    """The largest groups that can be trained, from the shallowest to the deepest; none lies within another.

    Args:
        strata: how many there are.
        fits: (first, last) → whether they can be trained together; a part of what fits must fit as well. It is asked
            two times per stratum at most.
    """
    found: list[Span] = []
    last = -1
    for first in range(strata):
        reached = max(last, first - 1)
        if reached < first and not fits(first, first):
            continue
        reached = max(reached, first)
        while reached + 1 < strata and fits(first, reached + 1):
            reached += 1
        if reached > last:
            found.append((first, reached))
            last = reached
    return tuple(found)


def covering(groups: Sequence[Span]) -> tuple[Span, ...]:
    """As few of the groups as hold every stratum that any of them holds, from the shallowest to the deepest.

    Whatever is the shallowest stratum that is not held yet, of the groups that hold it the one that goes deepest is
    taken.
    """
    chosen: list[Span] = []
    held = -1
    for number, group in enumerate(groups):
        following = groups[number + 1] if number + 1 < len(groups) else None
        if group[1] <= held or (following is not None and following[0] <= held + 1):
            continue
        chosen.append(group)
        held = group[1]
    return tuple(chosen)


def turn(seed: int, round: int, place: int, there: int, groups: int) -> int:
    """Which of a device's groups a client trains in a round: (round + z + place · ⌈groups/there⌉) mod groups.

    z is drawn by the seed for every `groups` rounds that follow each other; else a technique with a period of its own,
    which trains one stratum after the other, would meet some groups never. In any 2 · ⌈groups/there⌉ − 1 rounds in
    which as many clients with the device take part all its groups are trained, and if but one takes part in each, in
    any 2 · groups − 1. A client that takes part in all rounds trains every group in as many.

    Args:
        seed: of the run.
        round: its number.
        place: of the client among those of the round that have the same device.
        there: how many these are.
        groups: how many groups the device has.
    """
    z = random.Random(derive(seed, "turn", round // groups)).randrange(groups)
    return (round + z + place * -(-groups // there)) % groups
