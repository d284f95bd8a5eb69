"""The measures of divergence that deeper models' claims are judged by, side by side.

Eq. 1 divides a layer's distance by √d_L, and that decides claims: a large layer looks calmer by it, and so does a wide
model. Theorem 1 is about distances without that division; and both are in the gradients' own units, so that a model
that learns less diverges less.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fedstrata.core.types import Examples, Stratum
from fedstrata.models.norms import normalises_batches
from fedstrata.probes.measures import (
    client_gradients,
    divergence,
    reestimate_statistics,
    relative_divergence,
    unscaled_divergence,
)
from fedstrata.reproduce.claims import Unit, plain_unit

MILLI = plain_unit(3, 1000)
"""Of divergences, in thousandths: they are as small as entries of a gradient."""


@dataclass(frozen=True)
class Measure:
    """A measure of divergence.

    Args:
        name: in report.json.
        claim: how a claim says that it is judged by this one.
        column: over its figures.
        unit: how they are written.
        factor: how many times the figure is shown; the column says so.
    """

    name: str
    claim: str
    column: str
    unit: Unit
    factor: int = 1


EQ1 = Measure("Eq. 1", "by Eq. 1", "Eq. 1, ×10⁻³", MILLI, 1000)
UNSCALED = Measure("un-normalised", "un-normalised", "un-normalised", plain_unit(4))
RELATIVE = Measure("relative", "relative to the mean", "relative", plain_unit(4))
UPDATES = Measure("updates", "from updates", "updates, ×10⁻³", MILLI, 1000)

GRADIENTS = (EQ1, UNSCALED, RELATIVE)
"""Those that need nothing but a model and the clients' data."""
MEASURES = (*GRADIENTS, UPDATES)

LayerFigures = Mapping[str, Mapping[str, float]]
"""A measure's name → layer → its figure."""

NOTE = (
    "Eq. 1: (1/N) Σ ‖g_i − ḡ‖/√d over each client's whole data, without augmentation and with the running statistics; "
    "un-normalised: the same without its division by √d, which is what Theorem 1 is about; relative: (1/N) Σ "
    "‖g_i − ḡ‖/‖ḡ‖, with running statistics that are estimated again on all clients' data under the present weights"
)


def by_gradients(
    model: nn.Module, clients: Sequence[Examples], layers: Sequence[Stratum]
) -> dict[str, dict[str, float]]:
    """A measure's name → layer → how far the clients' exact gradients are apart at this model."""
    gradients = client_gradients(model, clients)
    again = gradients
    if normalises_batches(model):
        again = client_gradients(reestimate_statistics(model, clients), clients)
    return {
        EQ1.name: divergence(gradients, layers),
        UNSCALED.name: unscaled_divergence(gradients, layers),
        RELATIVE.name: relative_divergence(again, layers),
    }


def layer_halves(layers: Mapping[str, float]) -> tuple[float, float]:
    """The means over the first and over the second half of the layers, which are in order from the input."""
    values = list(layers.values())
    middle = (len(values) + 1) // 2
    return statistics.fmean(values[:middle]), statistics.fmean(values[middle:])
