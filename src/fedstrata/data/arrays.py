"""From arrays of inputs and targets to a `Dataset`: what is learnt is found from the targets where nobody says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.spec import parse_call
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.tables import FEW, Array, tenths
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = {"segmentation": 255, "next_token": -100}
"""Targets that these tasks pass over, unless they are told otherwise."""


@dataclass(frozen=True, eq=False)
class Targets:
    """All targets of a dataset, as numbers.

    Args:
        task: what is learnt.
        values: a row per example.
        outputs: how many outputs a model has for them.
        class_names: one name per class, where there are any.
    """

    task: str
    values: Array
    outputs: int
    class_names: tuple[str, ...] = ()

    def classes(self) -> Array:
        """A class per example, to hold out and to deal by: its own, or what stands for it."""
        name = parse_call(self.task).name
        y = self.values
        if name in ("classification", "binary"):
            return y
        if name == "regression":
            return tenths(y if y.ndim == 1 else np.asarray(y[:, 0]))
        if name == "multilabel":  # the first label; without any, one more
            return np.asarray(np.where(y.any(1), y.argmax(1), y.shape[1]))
        if y.ndim == 2:
            return np.array([_last(tokens) for tokens in y], dtype=np.int64)
        return np.array([_likeliest(mask) for mask in y], dtype=np.int64)


def _last(tokens: Array) -> int:
    """The last token that counts; 0 where none does."""
    counted = tokens[tokens != _IGNORED["next_token"]]
    return int(counted[-1]) if len(counted) else 0


def _likeliest(mask: Array) -> int:
    """The class with most pixels beside 0, which is mostly background; 0 where there is none."""
    counts = np.bincount(mask[(mask > 0) & (mask != _IGNORED["segmentation"])], minlength=1)
    return int(counts.argmax())


def read_targets(name: str, given: Array, task: str, tokens: tuple[int, ...] | None = None) -> Targets:
    """Targets of any type as numbers.

    Args:
        name: of the dataset, for messages.
        given: a row per example.
        task: what is learnt; found from type and shape where empty: whole numbers and words are classes (two of them
            are yes and no), other numbers are predicted as such, and further axes are labels, positions or pixels.
        tokens: the shape of the inputs where these are whole numbers.
    """
    if given.dtype.kind not in "biufUS" or not given.ndim:
        raise UsageError(f"{name}: targets are numbers or words, not of the type {given.dtype}")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise UsageError(f"{name}: the target of example {int(np.argwhere(~np.isfinite(given))[0][0])} is no number")
    found = task or _guess_task(name, given, tokens)
    kind = parse_call(found).name
    if kind in ("classification", "binary"):
        return _classes(name, given, found, kind)
    if given.dtype.kind in "US":
        raise UsageError(f"{name}: targets are words, which the task '{found}' has no use for")
    if kind == "regression":
        return Targets(found, given.astype(np.float32), given.shape[1] if given.ndim > 1 else 1)
    y = _whole(name, given)
    if kind == "multilabel":
        return Targets(found, y, y.shape[1] if y.ndim > 1 else 1)
    counted = y[y != _IGNORED.get(kind, -1)]
    return Targets(found, y, max(int(counted.max(initial=0)) + 1, 2))


def _guess_task(name: str, y: Array, tokens: tuple[int, ...] | None) -> str:
    whole = y.dtype.kind != "f" or bool((y == np.round(y)).all())
    if y.ndim == 1:
        distinct = len(np.unique(y))
        few = y.dtype.kind in "US" or (whole and (distinct <= FEW or (y.dtype.kind != "f" and y.min() >= 0)))
        return "binary" if few and distinct == 2 else "classification" if few else "regression"
    if y.dtype.kind not in "US":
        if y.ndim == 2 and y.dtype.kind in "iu" and y.shape == tokens:
            return "next_token"
        if y.ndim == 2 and y.shape[1] > 1 and whole and np.isin(y, (0, 1)).all():
            return "multilabel"
        if y.ndim == 2 and y.dtype.kind == "f":
            return "regression"
        if y.ndim == 3 and whole:
            return "segmentation"
    raise UsageError(f"{name}: what is learnt from targets of shape {list(y.shape)} and type {y.dtype} must be said")


def _classes(name: str, given: Array, task: str, kind: str) -> Targets:
    """Classes as numbers from 0 on: words and two values in their order, other whole numbers as they are."""
    if given.ndim != 1:
        raise UsageError(
            f"{name}: the task '{task}' has one class per example, not targets of shape {list(given.shape)}"
        )
    words = given.dtype.kind in "US"
    y = given if words else _whole(name, given)
    distinct, places = np.unique(y, return_inverse=True)
    if kind == "binary" and len(distinct) > 2:
        raise UsageError(f"{name}: the targets have {len(distinct)} different values, and binary needs 2")
    if words or kind == "binary" or int(distinct[0]) < 0:
        if kind == "binary" and not words and set(distinct.tolist()) <= {0, 1}:
            return Targets(task, y, 1, ("0", "1"))
        names = tuple(one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in distinct)
        return Targets(task, places.reshape(-1).astype(np.int64), 1 if kind == "binary" else len(distinct), names)
    return Targets(task, y, max(int(distinct[-1]) + 1, 2))


def _whole(name: str, given: Array) -> Array:
    if given.dtype.kind == "f" and not (given == np.round(given)).all():
        raise UsageError(f"{name}: targets are whole numbers here, and one is {given[given != np.round(given)][0]}")
    return given.astype(np.int64)


def as_input(name: str, given: Array) -> tuple[Array, str]:
    """(inputs as a model takes them, what was done to them): bytes are images, whole numbers tokens, others float32."""
    if given.dtype.kind not in "biuf" or not given.ndim:
        raise UsageError(f"{name}: inputs are numbers, not of the type {given.dtype}")
    if given.dtype == np.uint8 and given.ndim == 3:
        return given[:, None], "grey images"
    if given.dtype == np.uint8 and given.ndim == 4 and given.shape[3] in (1, 3) and given.shape[1] not in (1, 3):
        return np.ascontiguousarray(given.transpose(0, 3, 1, 2)), "the images' channels, which are last, put first"
    if given.dtype == np.uint8 and given.ndim == 4:
        return given, ""
    if given.dtype.kind in "iu" and given.ndim == 2:
        return given.astype(np.int64), ""
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise UsageError(f"{name}: the input of example {int(np.argwhere(~np.isfinite(given))[0][0])} is not finite")
    return given.astype(np.float32), ""


def examples_dataset(
    name: str,
    train: TensorExamples,
    test: TensorExamples,
    targets: Targets,
    groups: Sequence[Tensor] = (),
    group_names: Sequence[str] = (),
    note: str = "",
) -> Dataset:
    """The dataset of examples whose targets were read: those of `train` first, then those of `test`."""
    dealt = targets.classes()[: len(train)].astype(np.int64)
    return Dataset(
        name,
        train,
        test,
        targets.outputs,
        targets.class_names,
        tuple(groups),
        tuple(group_names),
        note,
        targets.task,
        torch.from_numpy(dealt),
    )


def as_array(name: str, what: str, given: Any) -> Array:
    """Anything that is an array of numbers or words, as one."""
    try:
        found = given.numpy(force=True) if isinstance(given, torch.Tensor) else np.asarray(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {what} cannot be read as an array: {one_line(str(error), 100)}") from None
    return found
