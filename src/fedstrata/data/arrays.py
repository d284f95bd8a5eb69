"""From arrays of inputs and targets to a `Dataset`: what is learnt is found from the targets where nobody says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.spec import parse_call
from fedstrata.data.cells import Array
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.learnt import MANY, NEEDS, guess_task, ignored_by, kind_of
from fedstrata.data.single_precision import as_float32, refuse_beyond
from fedstrata.data.tables import tenths
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from torch import Tensor


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
        stands_for = _last if name == "next_token" else _likeliest
        ignored = ignored_by(self.task)
        return np.array([stands_for(one[one != ignored]) for one in y], dtype=np.int64)


def _last(tokens: Array) -> int:
    """The last token of those that count; 0 where there is none."""
    return int(tokens[-1]) if len(tokens) else 0


def _likeliest(pixels: Array) -> int:
    """The class with most pixels beside 0, which is mostly background; 0 where there is none."""
    return int(np.bincount(pixels[pixels > 0], minlength=1).argmax())


def read_targets(name: str, given: Array, task: str, tokens: tuple[int, ...] | None = None) -> Targets:
    """Targets of any type as numbers.

    Args:
        name: of the dataset, for messages.
        given: a row per example.
        task: what is learnt; found where empty: from the values where there is one per example (`guess_task`), else
            from type and shape, for further axes are labels, positions or pixels.
        tokens: the shape of the inputs where these are whole numbers.
    """
    if given.dtype.kind not in "biufUS" or not given.size:
        raise UsageError(f"{name}: targets are numbers or words, not {list(given.shape)} of the type {given.dtype}")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise UsageError(f"{name}: the target of example {int(np.argwhere(~np.isfinite(given))[0][0])} is no number")
    found = task or (guess_task(given) if given.ndim == 1 else _guess_by_shape(name, given, tokens))
    kind = kind_of(name, found)
    axes, needed = NEEDS[kind]
    if given.ndim not in axes:
        raise UsageError(
            f"{name}: the task '{found}' has {needed} per example, not targets of shape {list(given.shape)}"
        )
    if kind in ("classification", "binary"):
        return _classes(name, given, found, kind)
    if given.dtype.kind in "US":
        raise UsageError(f"{name}: targets are words, which the task '{found}' has no use for")
    if kind == "regression":
        y = as_float32(name, given, lambda row: f"{name}: the target of example {row}")
        return Targets(found, y, y.shape[1] if y.ndim > 1 else 1)
    y = _whole(name, given)
    if kind == "multilabel":
        return Targets(found, _flags(name, y), y.shape[1])
    counted = y[y != ignored_by(found)]
    return Targets(found, y, max(int(counted.max(initial=0)) + 1, 2))


def _guess_by_shape(name: str, y: Array, tokens: tuple[int, ...] | None) -> str:
    """What is learnt from several targets per example."""
    if y.dtype.kind not in "US":
        whole = y.dtype.kind != "f" or bool((y == np.round(y)).all())
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
    """Classes as numbers from 0 on: those that are such numbers as they are, all others in their order, by name."""
    words = given.dtype.kind in "US"
    if not words:
        _check_whole(name, given)
    distinct, places = np.unique(given, return_inverse=True)
    names = tuple(_name(one) for one in distinct)
    if len(distinct) == 1:
        raise UsageError(f"{name}: the target is '{names[0]}' in every example: there is nothing to tell apart")
    if kind == "binary" and len(distinct) > 2:
        raise UsageError(f"{name}: the targets have {len(distinct)} different values, and binary needs 2")
    # A label of millions is a price or a code, and no model has an output for every number below it.
    if not words and kind == "classification" and distinct[0] >= 0 and distinct[-1] < max(MANY, 2 * len(distinct)):
        return Targets(task, given.astype(np.int64), int(distinct[-1]) + 1)
    return Targets(task, places.reshape(-1).astype(np.int64), 1 if kind == "binary" else len(distinct), names)


def _name(one: Any) -> str:
    """A class by its value."""
    if isinstance(one, bytes):
        return one.decode("utf-8", "replace")
    return str(one) if isinstance(one, str) else str(int(one))


def _check_whole(name: str, given: Array) -> None:
    if given.dtype.kind == "f" and not (given == np.round(given)).all():
        raise UsageError(f"{name}: targets are whole numbers here, and one is {given[given != np.round(given)][0]}")


def _whole(name: str, given: Array) -> Array:
    _check_whole(name, given)
    largest = max(int(given.max()), -int(given.min()))
    if largest >= 2**63:
        raise UsageError(f"{name}: a target is {largest:g}, which is too large for the number of a class")
    return given.astype(np.int64)


def _flags(name: str, y: Array) -> Array:
    wrong = ~np.isin(y, (0, 1))
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        raise UsageError(f"{name}: labels are 0 or 1, and one of example {row} is {y[wrong][0]}")
    return y


def check_shapes(name: str, targets: Targets, inputs: tuple[int, ...]) -> None:
    """Refuse targets of pixels or positions that the inputs do not have."""
    kind, given = parse_call(targets.task).name, targets.values.shape[1:]
    there = {"segmentation": inputs[1:][-2:], "next_token": inputs[1:2]}.get(kind, given)
    if given != there:
        shown = ["×".join(map(str, shape)) for shape in (given, inputs[1:])]
        raise UsageError(
            f"{name}: the task '{targets.task}' has {NEEDS[kind][1]}, and targets of {shown[0]} do not fit inputs of "
            f"{shown[1]}"
        )


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
        if given.dtype.kind == "u" and given.max(initial=0) >= 2**63:
            raise UsageError(f"{name}: a token is {given.max()}, which is too large for one")
        return given.astype(np.int64), ""
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise UsageError(f"{name}: the input of example {int(np.argwhere(~np.isfinite(given))[0][0])} is not finite")
    refuse_beyond(given, lambda row: f"{name}: the input of example {row}")
    return given.astype(np.float32), ""


def examples_dataset(
    name: str,
    train: TensorExamples,
    test: TensorExamples,
    targets: Targets,
    groups: Sequence[Tensor] = (),
    group_names: Sequence[str] = (),
    note: str = "",
    test_groups: Sequence[Tensor] = (),
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
        tuple(test_groups),
    )


def as_array(name: str, what: str, given: Any) -> Array:
    """Anything that is an array of numbers or words, as one."""
    try:
        found = given.numpy(force=True) if isinstance(given, torch.Tensor) else np.asarray(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {what} cannot be read as an array: {one_line(str(error), 100)}") from None
    return found
