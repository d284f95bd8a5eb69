"""How equal a model is to its clients: the worst of them, their spread, and Jain's index."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedstrata.core.results import Fairness


def fairness_of(values: Sequence[float | None], lower_is_better: bool = False) -> Fairness | None:
    """The fairness of one number per client; clients without one are left out, and None is said of nobody.

    With n numbers x_k: mean = Σx/n, std = √(Σ(x − mean)²/n) over all clients, which are no sample, and Jain's index
    (Σx)²/(n Σx²) (Jain, Chiu and Hawe, 1984): 1 if all are equal, 1/n if one has everything. The worst is the least,
    or the largest where less is better; the worst tenth is the mean of the ⌊n/10⌋ worst, at least of one.
    """
    held = [(value, client) for client, value in enumerate(values) if value is not None]
    if not held:
        return None
    worst_first = sorted(held, key=lambda pair: (-pair[0] if lower_is_better else pair[0], pair[1]))
    tenth = [value for value, _ in worst_first[: max(1, len(held) // 10)]]
    each = [value for value, _ in held]
    total, norm = math.fsum(each), math.hypot(*each)  # no square of a huge number, which would be infinite
    mean = total / len(each)
    return Fairness(
        clients=len(held),
        worst=worst_first[0][0],
        worst_client=worst_first[0][1],
        worst_tenth=math.fsum(tenth) / len(tenth),
        mean=mean,
        std=math.hypot(*(value - mean for value in each)) / math.sqrt(len(each)),
        jain=(total / norm) ** 2 / len(each) if norm else None,
    )
