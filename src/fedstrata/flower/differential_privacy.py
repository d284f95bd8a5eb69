"""Central differential privacy: clients clip their changes with Flower's mod, and the server adds noise to their mean.

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018: with changes
of at most norm C and equal weights, one client moves the mean of n by at most C/n, and the noise has the deviation
z·C/n.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstrata.core.method import Method
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError
from fedstrata.runs.closed_round import ClosedRound

SLACK = 1.001
"""How much longer than C a change may be through rounding."""


@dataclass(frozen=True)
class Privacy:
    """How changes are clipped and the mean is noised.

    Args:
        clip: C, the largest norm of a client's change; 0 for no privacy at all.
        noise: z, the noise's deviation over C/n.
    """

    clip: float = 0.0
    noise: float = 0.0

    def check(self, method: Method, archs: int) -> None:
        """Refuse what would make the bound on one client's influence wrong.

        Raises:
            UsageError: with what it is.
        """
        if not self.clip:
            if self.noise:
                raise UsageError("dp_noise is a multiple of dp_clip: give both")
            return
        for door in ("rescale", "accumulate", "apply"):
            for technique in method.at(door):
                raise UsageError(f"'{technique.name}' makes something else of the mean than dp_clip bounds")
        for encoder in method.encoders:
            raise UsageError(
                f"'{encoder.name}' sends something else than the change that dp_clip bounds, and what it leaves out of "
                "one round comes in another"
            )
        if method.reducer is not None or method.weight != "uniform":
            raise UsageError("dp_clip bounds a client's part in a plain mean: write fedavg(weight='uniform')")
        if archs > 1:
            raise UsageError("dp_clip bounds a client's part in a mean of one model: leave archs out")

    @property
    def note(self) -> str:
        """What a reader of the results must know."""
        return f"differential privacy: changes of norm {self.clip:g} at most, noise of {self.noise:g} times that over n"

    def add_noise(self, trained: ClosedRound, server_lr: float) -> ClosedRound:
        """A closed round with noise on what travelled; from a source that no seed tells."""
        accepted = len(trained.outcome.accepted)
        if not (self.clip and self.noise and accepted):
            return trained
        deviation = server_lr * self.noise * self.clip / accepted
        rng = np.random.Generator(np.random.Philox(secrets.randbits(128)))  # torch's have seeds of 32 bits
        params: Tensors = dict(trained.after.params)
        for name in trained.assignments[0].uploads:
            like = params[name]
            noise = np.asarray(deviation * rng.standard_normal(like.shape))
            params[name] = like + torch.from_numpy(noise).to(like.dtype)
        return replace(trained, after=replace(trained.after, params=params))


def check_length(delta: Tensors, clip: float) -> None:
    """Refuse a change that is longer than its client was told.

    Raises:
        UsageError: if it is.
    """
    if clip and math.sqrt(sum(float(d.double().square().sum()) for d in delta.values())) > SLACK * clip:
        raise UsageError("its change is longer than dp_clip allows")
