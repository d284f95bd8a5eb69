"""InCo's coefficients, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fedstrata.core.tensors import Tensors


@dataclass(frozen=True)
class Crossing:
    """Layer → θ, and β, of the rounds in which it was crossed (InCo Aggregation, Fig. 9)."""

    theta: dict[str, list[float]]
    beta: dict[str, list[float]]

    @property
    def positive(self) -> dict[str, float]:
        """Layer → the share of its rounds in which β > 0: it went the way of its stage's layer 0 (Table 3)."""
        return {layer: fmean(value > 0 for value in values) for layer, values in self.beta.items()}


def crossing(states: Iterable[Tensors]) -> Crossing:
    """From what `inco` keeps after each round: `federation.state.techniques["inco"]`."""
    found: dict[str, dict[str, list[float]]] = {"theta": {}, "beta": {}}
    for state in states:
        for key, value in state.items():
            kind, _, layer = key.partition("/")
            found[kind].setdefault(layer, []).append(float(value))
    return Crossing(found["theta"], found["beta"])
