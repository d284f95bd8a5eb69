"""What is learnt from targets: the one rule for it, where nobody says it, and what a task's text tells a reader.

Tasks lie above data, so their names and the targets they pass over are known here by name alone; a test holds both
together.
"""

from __future__ import annotations

import numpy as np

from fedstrata.core.spec import parse_call
from fedstrata.data.cells import Array
from fedstrata.errors import UsageError, did_you_mean

FEW = 20
"""At most so many different whole numbers are classes."""
MANY = 1000
"""Integers that count from 0 on are classes up to here, and are their own class numbers."""
IGNORED = {"segmentation": 255, "next_token": -100}
"""Targets that these tasks pass over, unless they are told otherwise."""
NEEDS = {
    "classification": ((1,), "one class"),
    "binary": ((1,), "one class"),
    "multilabel": ((2,), "a row of 0 and 1"),
    "regression": ((1, 2), "a number or a row of them"),
    "segmentation": ((3,), "a class for every pixel"),
    "next_token": ((2,), "a token for every position"),
}
"""Task → (how many axes targets have, what an example has)."""


def kind_of(name: str, task: str) -> str:
    """The name of the task in its text, such as `regression(loss='l1')`."""
    kind = parse_call(task).name
    if kind not in NEEDS:
        raise UsageError(f"{name}: there is no task '{kind}'{did_you_mean(kind, NEEDS)}")
    return kind


def ignored_by(task: str) -> int | None:
    """The target that a task passes over, if any."""
    call = parse_call(task)
    said = dict(call.kwargs).get("ignore")
    return said if isinstance(said, int) else IGNORED.get(call.name)


def guess_task(targets: Array) -> str:
    """What is learnt from one target per example, words or numbers.

    Words are classes, and so are at most `FEW` different whole numbers; two of either are yes and no. Up to `MANY`
    integers that count from 0 or 1 on, of which at most a tenth is missing, are classes too, if there are two examples
    of each on average: prices and ages are not like that. All other numbers are predicted as such.
    """
    distinct = np.unique(targets)
    if targets.dtype.kind not in "US" and not _are_classes(distinct, len(targets)):
        return "regression"
    return "binary" if len(distinct) == 2 else "classification"


def _are_classes(distinct: Array, examples: int) -> bool:
    if distinct.dtype.kind == "f" and not (distinct == np.round(distinct)).all():
        return False
    count = len(distinct)
    counted = distinct.dtype.kind in "iu" and int(distinct[0]) in (0, 1) and int(distinct[-1]) <= 1.1 * count
    return count <= FEW or (counted and count <= MANY and 2 * count <= examples)
