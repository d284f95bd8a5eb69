"""Datasets by name, `load_dataset("fashion-mnist", "data")`: the table, and a dataset that is drawn.

Every entry is a function of the data folder and, for data of one's own, of the task that a run asks for, and for texts,
of the tokenizer of the model that is to read them; the arguments a user may give are its keyword-only ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.spec import bind, parse_call
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.readers.ag_news import ag_news
from fedstrata.data.readers.build import join_notes
from fedstrata.data.readers.cifar import cifar10, cifar100
from fedstrata.data.readers.csv_table import csv_table
from fedstrata.data.readers.digits import digits, digits_segmentation
from fedstrata.data.readers.hospitals import breast_cancer, diabetes, heart_disease
from fedstrata.data.readers.idx import fashion_mnist, mnist
from fedstrata.data.readers.leaf import femnist
from fedstrata.data.readers.npz_file import npz
from fedstrata.data.readers.own_code import python
from fedstrata.data.readers.photos import cinic10, svhn, tiny_imagenet
from fedstrata.data.readers.picture_folder import folder
from fedstrata.data.readers.shakespeare import shakespeare
from fedstrata.data.readers.sst2 import sst2
from fedstrata.data.readers.text_file import text
from fedstrata.errors import UsageError

_GRID = 4


def load_dataset(name: str, data_dir: str | Path | None = None, task: str = "", tokenizer: str = "") -> Dataset:
    """Read a dataset.

    Args:
        name: a name of `DATASETS`, with arguments where wanted: `"cifar-100(coarse=True)"`.
        data_dir: the folder with the dataset's files, or one that holds it; the environment's FEDSTRATA_DATA
            where None. Datasets without files need none.
        task: what is to be learnt, where that is not left to the dataset: data of one's own (`READ_FOR_TASK`) is read
            for it, and goes by its text instead of what it would find. The others are what they are.
        tokenizer: of texts (`READ_AS_TEXT`) that do not name one themselves, as a folder or by its name on the Hub:
            that of the model which is to read them.
    """
    call = parse_call(name)
    loader, arguments = bind("dataset", DATASETS, call)
    asked: tuple[str, ...] = (task,) if call.name in READ_FOR_TASK else ()
    asked += (tokenizer,) if call.name in READ_AS_TEXT else ()
    dataset: Dataset = loader(None if data_dir is None else Path(data_dir), *asked, **arguments)
    return dataset


def synthetic(
    data_dir: Path | None,
    *,
    shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 10,
    examples: int = 1000,
    test_examples: int = 200,
    separation: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Gaussian examples of any shape around one pattern per class, for tests and benchmarks; needs no files.

    x = (separation · pattern[y] + noise · ε) / √(separation² + noise²), with ε and the patterns standard
    normal. The pattern of an image (C, H, W) is coarse, at most 4×4 blocks per channel, so that convolutions
    find it too. Classes are of equal size, up to one example, in random order.

    Args:
        data_dir: not needed.
        shape: of one example.
        classes: number of classes.
        examples: training examples.
        test_examples: test examples.
        separation: how far the classes lie apart; 0 leaves nothing to learn.
        noise: how far the examples of a class lie apart.
        seed: of everything random here.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"synthetic needs a shape of positive lengths, not {shape}")
    if classes < 2 or examples < 1 or test_examples < 1:
        raise UsageError("synthetic needs at least two classes and one example in each part")
    if separation < 0 or noise < 0 or not 0 < separation + noise < math.inf:
        raise UsageError("synthetic needs a separation and a noise that are not negative and not both 0")
    if not 0 <= seed < 2**63:
        raise UsageError(f"synthetic needs a seed from 0 to 2**63 - 1, not {seed}")
    random = torch.Generator().manual_seed(seed)
    if len(shape) == 3:
        coarse = torch.randn(classes, shape[0], *(min(_GRID, side) for side in shape[1:]), generator=random)
        rows, columns = (torch.arange(side) * min(_GRID, side) // side for side in shape[1:])
        patterns = coarse[:, :, rows][:, :, :, columns]
    else:
        patterns = torch.randn(classes, *shape, generator=random)
    scale = math.hypot(separation, noise)

    def part(count: int) -> TensorExamples:
        y = torch.randperm(count, generator=random) % classes
        x = torch.randn(count, *shape, generator=random).mul_(noise / scale)
        return TensorExamples(x.add_(patterns[y], alpha=separation / scale), y)

    train = part(examples)
    return Dataset("synthetic", train, part(test_examples), classes, tuple(str(label) for label in range(classes)))


def with_image_options(load: Callable[..., Dataset]) -> Callable[..., Dataset]:
    """The image dataset with three more arguments.

    - `examples`, `test_examples`: only so many of them, the same in every run;
    - `resolution`: images of that many pixels per side, resized once. They are scaled by the statistics of the original
      ones.
    """

    @wraps(load)
    def load_with_options(
        data_dir: Path | None,
        *,
        examples: int | None = None,
        test_examples: int | None = None,
        resolution: int | None = None,
        **others: Any,
    ) -> Dataset:
        return _resize(_draw_examples(load(data_dir, **others), examples, test_examples), resolution)

    known, more = inspect.signature(load), ("examples", "test_examples", "resolution")
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None") for name in more
    ]
    load_with_options.__signature__ = known.replace(parameters=[*known.parameters.values(), *own])  # type: ignore[attr-defined]
    load_with_options.__annotations__ = {**load.__annotations__, **dict.fromkeys(more, "int | None")}
    return load_with_options


def _draw_examples(whole: Dataset, examples: int | None, test_examples: int | None) -> Dataset:
    """So many of a dataset's examples, the same every time; all of them where None."""
    asked = {"training": (whole.train, examples), "test": (whole.test, test_examples)}
    said, kept = [], []
    for part, (there, count) in asked.items():
        if count is not None and not 1 <= count <= len(there):
            raise UsageError(f"{whole.name} has {len(there):,} {part} examples: ask for 1 or more, not {count:,}")
        chosen = None if count is None else torch.randperm(len(there), generator=generator(whole.name, part))[:count]
        kept.append(there if chosen is None else there.select(chosen.sort().values))
        said.append("" if chosen is None else f"{count:,} of {len(there):,} {part} examples")
    return replace(whole, train=kept[0], test=kept[1], note=join_notes(whole.note, *said))


def _resize(dataset: Dataset, side: int | None) -> Dataset:
    """The dataset with images of that many pixels per side; as they are where None."""
    before = dataset.input_shape[1:]
    if side is None or before == (side, side):
        return dataset
    if side < 1:
        raise UsageError(f"{dataset.name}: a resolution is 1 or more pixels per side, not {side}")
    note = f"images resized from {before[0]}×{before[1]} to {side}×{side}"
    try:
        train, test = dataset.train.resize(side), dataset.test.resize(side)
    except (RuntimeError, MemoryError, OverflowError):  # torch, of sizes that no machine holds
        count = len(dataset.train) + len(dataset.test)
        raise UsageError(
            f"{dataset.name}: there is not enough memory for {count:,} images of {side}×{side} pixels; "
            "ask for fewer examples, or a lower resolution"
        ) from None
    return replace(dataset, train=train, test=test, note=join_notes(dataset.note, note))


DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": with_image_options(digits),
    "digits-segmentation": digits_segmentation,
    "synthetic": synthetic,
    "mnist": with_image_options(mnist),
    "fashion-mnist": with_image_options(fashion_mnist),
    "cifar-10": with_image_options(cifar10),
    "cifar-100": with_image_options(cifar100),
    "svhn": with_image_options(svhn),
    "cinic-10": with_image_options(cinic10),
    "tiny-imagenet": with_image_options(tiny_imagenet),
    "femnist": femnist,
    "shakespeare": shakespeare,
    "sst-2": sst2,
    "ag-news": ag_news,
    "heart-disease": heart_disease,
    "diabetes": diabetes,
    "breast-cancer": breast_cancer,
    "csv": csv_table,
    "npz": npz,
    "folder": folder,
    "text": text,
    "python": python,
}
"""Every dataset by name: a function of the data folder and the arguments a user may give."""

READ_FOR_TASK = frozenset({"csv", "npz", "python", "text"})
"""Those that find out what their targets are; their functions take the task that a run asks for, too."""

READ_AS_TEXT = frozenset({"ag-news", "sst-2", "text"})
"""Texts; their functions take the tokenizer of the model that is to read them, after the task where they take one."""
