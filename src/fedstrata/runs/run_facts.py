"""What a run's model and data are, in the few numbers that a diagnosis and a report need: facts.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedstrata.core.parts import Parts
from fedstrata.core.rng import preserve_rng
from fedstrata.core.task import Task
from fedstrata.core.types import Examples, Stratum
from fedstrata.data.examples import Split, TensorExamples, labels_at_hand, sizes
from fedstrata.models.passes import preserve_model
from fedstrata.models.strata import classifier
from fedstrata.models.summary import describe_model
from fedstrata.runs.data_cards import data_cards

SHOWN = 200
"""Clients whose class counts are written."""
NAMED = 1000
"""Clients whose names are written."""


def run_facts(
    model: nn.Module,
    strata: Sequence[Stratum],
    clients: Sequence[Examples],
    sample: Tensor,
    task: Task,
    test: Examples | None = None,
    names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    seen: Sequence[Examples] | None = None,
) -> dict[str, Any]:
    """The facts of a federation.

    Args:
        model: the server's.
        strata: its strata.
        clients: everybody's data; labels are counted where they are at hand without reading everything.
        sample: some inputs.
        task: what is learnt.
        test: the test set, for what guessing would score on it.
        names: of the classes.
        client_names: of the clients, where they have any.
        seen: everybody's data as clients see it, where faults on purpose change that.
    """
    with preserve_rng(), torch.no_grad():  # a model may draw random numbers
        about = describe_model(model, sample[:1] if isinstance(sample, Parts) else sample.shape[1:]).as_dict()
        idle = {stratum.name for stratum in strata if stratum.idle}
        about["strata"] = [{**row, "idle": row["name"] in idle} for row in about["strata"]]  # sub-models may run some
        with preserve_model(model):
            outputs = model(sample)
            width = task.width(outputs)
            probabilities = puts_out_probabilities(model, sample, outputs, task, strata)
    classes = width if task.has_classes else 2 if task.has_labels else 0
    size = sizes(clients)
    found: dict[str, Any] = {
        "input_shape": dict(sample.shape[1:]) if isinstance(sample, Parts) else list(sample.shape[1:]),
        "task": str(task),
        "classes": classes,
        "has_classes": task.has_classes,
        "class_names": list(names) if names else [str(label) for label in range(classes)],
        "clients": len(clients),
        "examples": [size(client) for client in range(min(len(clients), SHOWN))],
        "model": about,
        "buffers": any(stratum.buffers for stratum in strata),
        **({"adapters": True} if any(stratum.low_rank for stratum in strata) else {}),
        "probabilities": probabilities,
    }
    if client_names:
        found["client_names"] = list(client_names[:NAMED])
    cards = data_cards(clients, SHOWN, seen)
    found |= {} if cards is None else {"cards": cards}
    return found | _label_facts(clients, task, test, width, classes)


def _label_facts(
    clients: Sequence[Examples], task: Task, test: Examples | None, width: int, classes: int
) -> dict[str, Any]:
    """What guessing scores on the test set, and how many examples of each class there are, where that is at hand."""
    found: dict[str, Any] = {}
    known = None if test is None else labels_at_hand(test)
    if known is not None and (guess := task.guess(known, width)) is not None:
        found["guess"] = round(guess, 6)
    if known is not None and task.has_labels:
        found["test_counts"] = torch.bincount(known.flatten().long(), minlength=classes).tolist()
    counts = _counts(clients, classes) if task.has_labels else None
    if counts is not None:
        found |= {"skew": round(skew(counts), 6), "counts": counts[:SHOWN].tolist()}
    return found


def puts_out_probabilities(
    model: nn.Module, sample: Tensor, outputs: Tensor, task: Task, strata: Sequence[Stratum] = ()
) -> bool:
    """True if the model gives probabilities where the task's loss takes logits: its last layer is one too many.

    With classes: no output is negative, and those of each example add up to 1. With one answer of yes and no: all
    outputs are between 0 and 1, and stay there for inputs that are a thousand times as large, and with a classifier
    that is, which a model that normalises its features notices, too.
    """
    if not task.has_labels or not isinstance(outputs, Tensor):
        return False
    if task.has_classes:
        sums = outputs.sum(1) if outputs.dim() > 1 and outputs.shape[1] > 1 else torch.zeros(1)
        return bool((outputs >= 0).all() and ((sums - 1).abs() < 1e-3).all())
    if isinstance(sample, Parts) or not sample.is_floating_point():
        return False
    if not _are_shares(outputs):
        return False
    last, held = classifier(strata), dict(model.named_parameters())
    try:
        for factor in (1000, -1000):
            if not _are_shares(model(factor * sample)):
                return False
            larger = {name: factor * held[name] for name in (last.params if last else ()) if name in held}
            if not _are_shares(functional_call(model, larger, (sample,))):
                return False
    except Exception:  # a user's model may refuse such inputs
        return False
    return True


def _are_shares(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _counts(clients: Sequence[Examples], classes: int) -> Tensor | None:
    """A row for each client, a column for each class; None where labels would have to be read one by one."""
    size = sizes(clients)
    held = [clients.all()] if isinstance(clients, Split) else list(clients)
    if not all(isinstance(examples, TensorExamples) for examples in held):
        return None
    owners = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([size(c) for c in range(len(clients))]))
    labels = torch.cat([examples.labels() for examples in held])
    counted = torch.bincount(owners * classes + labels, minlength=len(clients) * classes)
    return counted.reshape(len(clients), classes)


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
