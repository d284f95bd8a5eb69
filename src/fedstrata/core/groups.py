"""Clients in groups that follow each other, each as large as its share: architectures and devices are dealt out so."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from fedstrata.errors import UsageError


def divide_in_groups(what: str, share: Mapping[str, float], clients: int) -> list[str]:
    """The group of each client, by its number; `what` names the setting.

    Raises:
        UsageError: if a group is left without any client.
    """
    names, ends = list(share), list(accumulate(share.values()))
    chosen = [names[min(bisect_right(ends, (client + 0.5) / clients), len(names) - 1)] for client in range(clients)]
    for name in names:
        if name not in chosen:
            raise UsageError(f"{what}: with {clients} clients none has '{name}'; take more clients or leave it out")
    return chosen
