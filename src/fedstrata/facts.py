"""What a run's model and data are, in the few numbers that a diagnosis and a report need: facts.json."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.anatomy import describe_model
from fedstrata.data.examples import Examples, TensorExamples
from fedstrata.strata import Stratum

SHOWN = 200
"""Clients whose class counts are written."""
COUNTED = 1000
"""Clients over which the skew is taken, at most."""


def facts(
    model: nn.Module,
    strata: Sequence[Stratum],
    clients: Sequence[Examples],
    sample: Tensor,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """The facts of a federation.

    Args:
        model: the server's.
        strata: its strata.
        clients: everybody's data; labels are counted where they are at hand without reading everything.
        sample: some inputs.
        names: of the classes.
    """
    with torch.no_grad():
        classes = copy.deepcopy(model).eval()(sample).shape[1]
    found: dict[str, Any] = {
        "input_shape": list(sample.shape[1:]),
        "classes": classes,
        "class_names": list(names) if names else [str(label) for label in range(classes)],
        "clients": len(clients),
        "model": describe_model(model, sample.shape[1:]).as_dict(),
        "buffers": any(stratum.buffers for stratum in strata),
    }
    every = -(-len(clients) // COUNTED)
    counted = [_counts(clients[client], classes) for client in range(0, len(clients), every)]
    known = [counts for counts in counted if counts is not None]
    if known and len(known) == len(counted):
        found["skew"] = round(skew(torch.stack(known)), 6)
        shown = [_counts(clients[client], classes) for client in range(min(len(clients), SHOWN))]
        found["counts"] = [counts.tolist() for counts in shown if counts is not None]
        found["examples"] = [sum(counts) for counts in found["counts"]]
    return found


def skew(counts: Tensor) -> float:
    """The mean over clients of the total-variation distance between a client's labels and everybody's.

    ½ Σ_c |p_k(c) − p(c)|: 0 where all hold the same mixture, near 1 where each holds a rare class of its own. Clients
    without examples are left out.

    Args:
        counts: a row for each client, a column for each class.
    """
    held = counts[counts.sum(1) > 0].double()
    if not len(held):
        return 0.0
    everybody = held.sum(0) / held.sum()
    return float((held / held.sum(1, keepdim=True) - everybody).abs().sum(1).mean() / 2)


def _counts(examples: Examples, classes: int) -> Tensor | None:
    if not isinstance(examples, TensorExamples):
        return None
    return torch.bincount(examples.labels(), minlength=classes)[:classes]
