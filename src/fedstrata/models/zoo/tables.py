"""A perceptron for the rows of a table."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from fedstrata.core.lazy import nn
from fedstrata.errors import UsageError
from fedstrata.models.zoo.parts import check_positive, sequential

Activation = Literal["relu", "tanh", "gelu"]

ACTIVATIONS: dict[Activation, str] = {"relu": "ReLU", "tanh": "Tanh", "gelu": "GELU"}


def tablemlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "relu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """A multi-layer perceptron for tables: layer norm after every dense layer, and dropout where wanted.

    Layer norm keeps no statistics of a client's rows, so there is nothing to average but parameters. Stages: `flatten`,
    `fc1`, `fc2`, … (linear, norm, act, drop), `head`. Any input shape.
    """
    check_positive("tablemlp", input_shape=input_shape, classes=classes, hidden=hidden)
    if not 0 <= dropout < 1:
        raise UsageError(f"model 'tablemlp': dropout must be at least 0 and below 1, not {dropout}")
    sizes = (math.prod(input_shape), *hidden)
    dense: list[tuple[str, nn.Module]] = [
        (
            f"fc{index}",
            sequential(
                ("linear", nn.Linear(inputs, outputs)),
                ("norm", nn.LayerNorm(outputs)),
                ("act", getattr(nn, ACTIVATIONS[activation])()),
                *([("drop", nn.Dropout(dropout))] if dropout else []),
            ),
        )
        for index, (inputs, outputs) in enumerate(pairwise(sizes), start=1)
    ]
    return sequential(("flatten", nn.Flatten()), *dense, ("head", nn.Linear(sizes[-1], classes)))
