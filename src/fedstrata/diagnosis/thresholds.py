"""From which value on a figure is reported: one table for all findings, each row with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

REPORTED = 0.1
"""Findings less severe than this are left out: their evidence is weak."""

HIGH = 0.5
"""From here on a finding is called serious."""


SLIGHT = HIGH - 0.005
"""What a finding weighs at most that is not serious."""


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


STANDING = frozenset(
    {
        *("broken-inputs", "refused-updates", "hostile-updates", "broken-labels", "broken-data"),
        *("probabilities", "class-imbalance", "receptive-field", "label-skew", "few-examples", "rarely-trained"),
    }
)
"""Findings that stand in the facts, or are about single clients: nothing else that is measured explains them."""

NEVER_SERIOUS = frozenset({"too-early", "unfinished"})
"""Findings that say to wait, not that something is wrong."""

DRIFT = frozenset({"opposed-updates", "layer-mismatch", "unlike-features", "diverging-strata", "no-learning"})
"""Symptoms of clients that part, or of a network that does not learn."""

STOPPED = DRIFT | {"unfinished", "too-early"}
"""What a run shows that cannot get on."""

THRESHOLDS: dict[str, Threshold] = {
    "broken-inputs": Threshold(
        5.0,
        15.0,
        "the robust score of a client's inputs against the other clients' of the same classes, by mean, deviation and "
        "what is missing: at most 5 in sound runs, skewed tables included",
        ratio=True,
    ),
    "refused-updates": Threshold(0.3, 1.0, "the share of its rounds in which a client's update is refused"),
    "hostile-updates": Threshold(
        4.5,
        20.0,
        "the robust score of a client's update against the others', by length and direction, if its data does not "
        "explain it; 20 for updates that are copies",
        ratio=True,
    ),
    "broken-labels": Threshold(
        0.2,
        1.0,
        "what a client's examples cost the global model beyond what their classes, or targets in the same range, cost "
        "elsewhere, against the median client, in losses of guessing",
    ),
    "broken-data": Threshold(
        0.25,
        1.0,
        "by how much a client's training loss exceeds the median client's, in losses of guessing, where only updates "
        "can be seen; in the round in which the model was wrecked, if a client did that",
    ),
    "probabilities": Threshold(0.0, 1.0, "1 where the model puts out probabilities and the loss takes logits"),
    "class-imbalance": Threshold(
        0.3,
        0.8,
        "the share of all training examples that would have to change class to match the test set's mixture, in a run "
        "that has not learnt",
    ),
    "vanishing-gradients": Threshold(
        1e3,
        1e6,
        "the gradient against the weights, in the last third of the strata over the first: 0.1 to 30 in networks that "
        "learn",
        ratio=True,
    ),
    "exploding-gradients": Threshold(1e3, 1e6, "the same, in the first third of the strata over the last", ratio=True),
    "rate-too-large": Threshold(
        0.1,
        1.0,
        "the share of the held-out loss by which a tenth of the learning rate ends lower after a few steps, where the "
        "run's own does not lower it",
    ),
    "rate-too-small": Threshold(
        4.0,
        12.0,
        "how many times as far a ten or a hundred times larger learning rate lowers the held-out loss in a few steps: "
        "1 to 4 at rates that are usual; progress in proportion to the rate is 10 or 100",
        ratio=True,
    ),
    "dead-units": Threshold(
        0.5, 1.0, "the share of a stratum's units that no example activates: up to 0.4 in small networks that learn"
    ),
    "rarely-trained": Threshold(
        0.3,
        0.05,
        "the share of the clients that train the stratum which the fewest train: 1 where all train everything, a third "
        "for the upper layers of the deepest of three sub-models",
    ),
    "few-examples": Threshold(12.0, 1.5, "examples of the median client, in a run that has not learnt", ratio=True),
    "participation-noise": Threshold(
        0.05,
        0.3,
        "by how much the metric swings up and down from round to round, where half of the clients or fewer take part",
    ),
    "unfinished": Threshold(0.2, 0.5, "the share of what is missing that the last third of the rounds has gained"),
    "too-early": Threshold(
        1.0, 0.0, "the local steps that a client has taken, against the 30 before which little can be said"
    ),
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
    "inexact-adapters": Threshold(
        0.05,
        0.5,
        "what the product of the mean factors misses of the mean of the products, in the mean over the strata: at most "
        "0.02 under IID data and Dirichlet(1), 0.1 and in the first rounds 0.2 under Dirichlet(0.1), on digits",
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
