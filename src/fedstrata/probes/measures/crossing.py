"""InCo's coefficients, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fedstrata.core.technique import Figures


@dataclass(frozen=True)
class Crossing:
    """Layer → θ, and β, of the rounds in which it was crossed (InCo Aggregation, Fig. 9)."""

    theta: dict[str, list[float]]
    beta: dict[str, list[float]]

    @property
    def positive(self) -> dict[str, float]:
        """Layer → the share of its rounds in which β > 0: it went the way of its stage's layer 0 (Table 3)."""
        return {layer: fmean(value > 0 for value in values) for layer, values in self.beta.items()}


def crossing(rounds: Iterable[Figures]) -> Crossing:
    """From what the method publishes after each round: `federation.method.publish(federation.state.techniques)`."""
    theta: dict[str, list[float]] = {}
    beta: dict[str, list[float]] = {}
    for published in rounds:
        for figure, by_round in (("theta", theta), ("beta", beta)):
            for layer, value in published.get(figure, {}).items():
                by_round.setdefault(layer, []).append(value)
    return Crossing(theta, beta)
