"""From which value on a figure is reported: one table for all findings, each row with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

REPORTED = 0.1
"""Findings less severe than this are left out: their evidence is weak."""

HIGH = 0.5
"""From here on a finding is called serious."""


@dataclass(frozen=True)
class Threshold:
    """Where the severity of a finding begins and ends: it rises in a straight line from 0 at `none` to 1 at `full`.

    Args:
        none: what a sound federation may show. It may be the larger of the two.
        full: what counts as the worst, for the purpose of ranking.
        reason: why these values.
        ratio: whether the figure is a ratio, so that the line is straight in its logarithm.
    """

    none: float
    full: float
    reason: str
    ratio: bool = False

    def severity(self, value: float) -> float:
        """The severity of a value, between 0 and 1, to three digits."""
        low, high, at = self.none, self.full, value
        if self.ratio:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-9))
        return round(min(max((at - low) / (high - low), 0.0), 1.0), 3)


THRESHOLDS: dict[str, Threshold] = {
    "label-skew": Threshold(
        0.15,
        0.9,
        "the share of a client's examples that would have to change their class, beyond what chance deals out: 0.35 "
        "under Dirichlet(1), 0.7 under Dirichlet(0.1), 0.8 with two classes of ten, 0.9 with one",
    ),
    "running-statistics": Threshold(
        0.04,
        0.2,
        "accuracy lost with the running statistics against each batch's own: within 0.02 in sound runs; 256 examples "
        "tell accuracies apart to about 0.04",
    ),
    "receptive-field": Threshold(
        4.0,
        15.0,
        "the largest field against the image's side: 3.4 for ResNet-18 on 32×32 images; the deeper-models paper loses "
        "10 points to centralised training at 15 (ResNet-101, 64×64) and 2 to 7 at 4, with a small stem",
        ratio=True,
    ),
    "no-learning": Threshold(
        0.15,
        0.0,
        "how far the metric that judges the run is from guessing, as a share of the way to the best there is, once a "
        "client has taken 30 steps",
    ),
    "diverged": Threshold(0.0, 1.0, "1 where training left the finite numbers"),
    "exploded-loss": Threshold(
        4.0,
        40.0,
        "the last loss, of test and training the better one, against that of guessing, or against the first evaluated "
        "round's if that was larger: at most 1 in runs that learn anything",
        ratio=True,
    ),
    "opposed-updates": Threshold(
        0.05,
        -0.1,
        "the cosine between two clients' updates, in the median over the strata: 0.2 to 0.9 in sound runs that learn, "
        "0.04 once they have; n clients cannot go below -1/(n - 1)",
    ),
    "layer-mismatch": Threshold(
        1.5,
        10.0,
        "the gradient's norm after averaging against that of going on alone: up to 1.2 in sound runs, 2 to 13 with two "
        "classes per client; under IID data FedPart's spikes were at 1.3 in our runs",
        ratio=True,
    ),
    "unlike-features": Threshold(
        0.2,
        0.7,
        "1 - CKA of clients' models at the stage where they are least alike: at most 0.1 in sound runs with 100 "
        "examples per client, up to 0.4 with fewer, 0.4 to 0.9 under skew and in networks too deep to learn",
    ),
    "forgetting": Threshold(
        0.1,
        0.5,
        "accuracy that local training takes from the classes a client lacks; 0.2 to 0.6 with two classes per client",
    ),
    "neuron-drift": Threshold(
        0.02,
        0.2,
        "the share of their activation that neurons bound to missing classes lose: 0.09 to 0.15 on MNIST and 0.04 to "
        "0.07 on digits with one or two classes per client and 25 hidden neurons, at 88 % accuracy; 0.09 in the FedNLR "
        "paper's Table 4; in even runs no class is missing, and the neurons of a class gain 0.02 or more",
    ),
    "accumulation": Threshold(
        0.75,
        1.0,
        "minus the rank correlation of depth and divergence: small residual networks that learn well show 0.5 to 0.85",
    ),
    "diverging-strata": Threshold(
        5.0,
        50.0,
        "the most divergent stratum against the median one: stems and heads are at 2 to 6 in sound runs",
        ratio=True,
    ),
}
