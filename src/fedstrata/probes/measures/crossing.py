"""InCo's coefficients, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from statistics import fmean

from fedstrata.core.technique import Figures


@dataclass(frozen=True)
class Crossing:
    """Layer → what was published of it, in the rounds in which it was crossed (InCo Aggregation, Fig. 9).

    Args:
        theta: θ.
        beta: β.
        cosine: cos(g_0, g_k), of what is crossed.
        length: ‖g'_k‖/‖g_k‖, of the crossed step g'_k.
        kept: cos(g'_k, g_k).
    """

    theta: dict[str, list[float]] = field(default_factory=dict)
    beta: dict[str, list[float]] = field(default_factory=dict)
    cosine: dict[str, list[float]] = field(default_factory=dict)
    length: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, list[float]] = field(default_factory=dict)

    @property
    def positive(self) -> dict[str, float]:
        """Layer → the share of its rounds in which β > 0: it went the way of its stage's layer 0 (Table 3)."""
        return {layer: fmean(value > 0 for value in values) for layer, values in self.beta.items()}


def crossing(rounds: Iterable[Figures]) -> Crossing:
    """From what the method publishes after each round: `federation.method.publish(federation.state.techniques)`."""
    found = Crossing()
    for published in rounds:
        for figure in CROSSING_FIGURES:
            by_layer = getattr(found, figure)
            for layer, value in published.get(figure, {}).items():
                by_layer.setdefault(layer, []).append(value)
    return found


CROSSING_FIGURES = tuple(part.name for part in fields(Crossing))
