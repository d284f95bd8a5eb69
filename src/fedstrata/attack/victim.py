"""The victim of an attack: a finished run's low part, one client's images, and what that client shares of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedstrata.attack.search import Per, summarise_features
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.core.parts import Parts
from fedstrata.core.rng import generator
from fedstrata.core.task import Task
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.partitions import describe
from fedstrata.errors import UsageError
from fedstrata.models.stages import cut_place, tap
from fedstrata.models.strata import strata
from fedstrata.run import deal, final_model, training_parts
from fedstrata.runs.directory import RunDirectory
from fedstrata.tasks.registry import build_task
from fedstrata.techniques import method
from fedstrata.techniques.fedimpro import FedImpro

_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Pixels:
    """Converts between the model's inputs and pixels from 0 to 1: input = (pixel − shift) / scale, per channel."""

    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, examples: TensorExamples) -> Pixels:
        """The ends are 0 and 255 for stored bytes, and the smallest and largest value for real numbers."""
        if examples.x.dtype == torch.uint8:
            channels = examples.x.shape[1]
            mean, std = (examples.mean, examples.std) if examples.mean else ((0.0,) * channels, (1.0,) * channels)
            return cls(torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1))
        low, high = examples.x.min().float(), examples.x.max().float()
        span = (high - low).clamp(min=1e-12)
        return cls((-low / span).view(1, 1, 1), (1 / span).view(1, 1, 1))

    def input(self, pixels: Tensor) -> Tensor:
        """The model's inputs for pixels from 0 to 1."""
        return (pixels - self.shift) / self.scale

    def pixels(self, inputs: Tensor) -> Tensor:
        """The pixels of inputs, from 0 to 1."""
        return (inputs * self.scale + self.shift).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Victim:
    """A client of a finished run, and the low part that everybody knows.

    Args:
        model: the final global model, in eval mode.
        place: the module that the low part ends with.
        per: whether means of every element or of every channel are shared.
        pixels: converts between inputs and pixels.
        client: its number.
        data: its examples.
        classes: the names of all classes.
    """

    model: nn.Module
    place: str
    per: Per
    pixels: Pixels
    client: int
    data: TensorExamples
    classes: tuple[str, ...]

    def low_features(self, pixels: Tensor) -> Tensor:
        """The features of images, one row per image."""
        return self.features(pixels).flatten(1)

    def shared_statistics(self, pixels: Tensor) -> Tensor:
        """What a shared mean averages over images, one row per image."""
        return summarise_features(self.features(pixels), self.per)

    def features(self, pixels: Tensor) -> Tensor:
        """What leaves the low part."""
        return tap(self.model, self.pixels.input(pixels), self.place)

    def choose(self, count: int, seed: int) -> tuple[Tensor, list[int]]:
        """(images, their classes), at random, the client's classes in turn; fewer if it has not so many."""
        taken = draw_in_turns(self.data.labels(), count, seed)
        inputs, found = self.data.batch(torch.tensor(taken))
        return self.pixels.pixels(inputs.float()), [int(label) for label in found]

    def counts(self) -> list[int]:
        """How many examples of each class the client has."""
        return torch.bincount(self.data.labels(), minlength=len(self.classes)).tolist()

    def means(self) -> dict[int, Tensor]:
        """Class → the shared mean over the client's examples of it, for the classes that it has."""
        labels = self.data.labels()
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            for start in range(0, len(labels), _AT_ONCE):
                inputs, here = self.data.batch(torch.arange(start, min(start + _AT_ONCE, len(labels))))
                found = self.shared_statistics(self.pixels.pixels(inputs.float())).double()
                for label in set(here.tolist()):
                    sums[label] = sums.get(label, 0) + found[here == label].sum(0)
        counts = self.counts()
        return {label: (total / counts[label]).float() for label, total in sorted(sums.items())}


def draw_in_turns(labels: Tensor, count: int, seed: int) -> list[int]:
    """The places of some examples, at random, the classes in turn; fewer if there are not so many."""
    order = torch.randperm(len(labels), generator=generator(seed, "attack", "images"))
    turns: dict[int, int] = {}
    ranked = []
    for index in order.tolist():
        label = int(labels[index])
        turns[label] = turns.get(label, -1) + 1
        ranked.append((turns[label], label, index))
    return [index for _, _, index in sorted(ranked)[:count]]


@dataclass(frozen=True, eq=False)
class RunClient:
    """A client of a finished run.

    Args:
        config: the run's.
        dataset: the run's.
        task: what is learnt.
        train: everybody's training examples, with targets as the task reads them.
        number: the client's.
        data: its examples.
        classes: the names of all classes; none where examples have no class.
    """

    config: RunConfig
    dataset: Dataset
    task: Task
    train: TensorExamples
    number: int
    data: TensorExamples
    classes: tuple[str, ...]


def open_client(directory: Path, client: int | None, data_dir: str | None, classes: bool) -> RunClient:
    """Read a finished run, and choose a client: by its number, else by how many classes, or examples, it has.

    Raises:
        UsageError: if there is no finished run, or, where the attack needs `classes`, no class for every example.
    """
    config = _read_config(directory, data_dir)
    dataset, parts = deal(config)
    task = build_task(config.task or dataset.task)
    if classes and not task.has_labels:
        raise UsageError(f"the attack needs a class for every example, and the task '{task.name}' has none")
    train = replace(dataset.train, y=task.read_targets(dataset.train.y, config.dataset))
    names = _class_names(dataset, train) if task.has_labels else ()
    chosen = _choose_client(client, train, len(names), training_parts(config, dataset, parts))
    return RunClient(config, dataset, task, train, *chosen, names)


def open_victim(directory: Path, split: str | int | None, client: int | None, data_dir: str | None) -> Victim:
    """Read a finished run.

    Raises:
        UsageError: if there is no finished run, or it cannot be attacked, or not at this split.
    """
    own = _read_config(directory, data_dir).method
    impro = next((t for t in method(own).techniques if isinstance(t, FedImpro)), None)
    if split is None:
        if impro is None:
            raise UsageError(
                f"the run's method, {own}, does not cut the model: say where to cut it, as in split='layer1'"
            )
        split = impro.split
    found = open_client(directory, client, data_dir, classes=True)
    if not has_images(found.dataset):
        raise UsageError(f"only images can be rebuilt, and the examples of {found.config.dataset} are not images")
    model = final_model(directory, found.config, found.dataset).eval().requires_grad_(False)
    return Victim(
        model,
        cut_place(split, model, strata(model), "the split"),
        "element" if impro is None else impro.per,
        Pixels.of(found.dataset.train),
        found.number,
        found.data,
        found.classes,
    )


def has_images(dataset: Dataset) -> bool:
    """True if its inputs are images."""
    return not isinstance(dataset.train.x, Parts) and len(dataset.input_shape) == 3


def _class_names(dataset: Dataset, train: TensorExamples) -> tuple[str, ...]:
    """The names of all classes; a yes or no has two of them, though the model has one output."""
    count = max(dataset.classes, len(dataset.class_names), int(train.labels().max()) + 1)
    return dataset.class_names if len(dataset.class_names) == count else tuple(map(str, range(count)))


def _read_config(directory: Path, data_dir: str | None) -> RunConfig:
    path = directory / "run.toml"
    if not path.exists():
        raise UsageError(f"{directory} has no run.toml: there is no run to attack")
    values = read_toml(path)
    if "dataset" not in values:
        raise UsageError(
            f"{directory} was run from Python with a model and data of its own: only runs of the command line can "
            "be read back"
        )
    RunDirectory(directory).check_unedited()
    config = validate_settings(RunConfig, values if data_dir is None else values | {"data_dir": data_dir})
    if not (directory / "model.safetensors").exists():
        raise UsageError(
            f"{directory} has no model.safetensors: finish the run first, with "
            f"fedstrata resume {shlex.quote(str(directory))}"
        )
    return config


def _choose_client(
    client: int | None, train: TensorExamples, classes: int, parts: Sequence[Tensor]
) -> tuple[int, TensorExamples]:
    """The client with that number, else the one with most classes, and of these with most examples."""
    if client is None and not classes:
        client = max(range(len(parts)), key=lambda k: (len(parts[k]), -k))
    if client is None:
        counts = describe(parts, train.labels(), classes).counts
        kinds, sizes = (counts > 0).sum(0).tolist(), counts.sum(0).tolist()
        client = max(range(len(parts)), key=lambda k: (kinds[k], sizes[k], -k))
    if not 0 <= client < len(parts):
        raise UsageError(f"the run has no client {client}: its clients are 0 to {len(parts) - 1}")
    return client, train.select(parts[client])
