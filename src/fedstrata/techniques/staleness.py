"""How much an update counts that answers an older model: what methods for updates as they arrive have in common.

The three functions are those of Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020.
"""

from __future__ import annotations

from collections.abc import Callable

from fedstrata.core.spec import Registry, bind
from fedstrata.errors import not_negative

SYNCHRONOUS = "its maths needs all clients of a round to begin with the same model, and here they do not"
"""Why a technique that says so is refused beside one that takes updates as they arrive."""

CAVEAT = "a round is one change of the model, by the updates that arrived since the last one"


def constant() -> Callable[[int], float]:
    """s(τ) = 1."""
    return lambda staleness: 1.0


def poly(*, a: float = 0.5) -> Callable[[int], float]:
    """s(τ) = (1 + τ)^−a."""
    not_negative("poly", a=a)
    return lambda staleness: (1.0 + staleness) ** -a


def hinge(*, a: float = 10.0, b: float = 4.0) -> Callable[[int], float]:
    """s(τ) = 1 for τ ≤ b, then 1/(a(τ − b) + 1)."""
    not_negative("hinge", a=a, b=b)
    return lambda staleness: 1.0 if staleness <= b else 1 / (a * (staleness - b) + 1)


STALENESS: Registry = {"constant": constant, "poly": poly, "hinge": hinge}


def parse_staleness(text: str) -> Callable[[int], float]:
    """Read `poly(0.5)`, `hinge(a=10, b=4)` or `constant`.

    Raises:
        UsageError: for an unknown name, or a wrong argument.
    """
    target, kwargs = bind("staleness", STALENESS, text)
    found: Callable[[int], float] = target(**kwargs)
    return found
