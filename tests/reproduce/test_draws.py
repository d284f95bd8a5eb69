"""Whether the data of the scale `evidence` can be dealt out as its parts say: every partition, for every seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from fedstrata.compare import plan
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.rng import derive
from fedstrata.data.datasets import load_dataset
from fedstrata.data.partitions import partition
from fedstrata.errors import UsageError
from fedstrata.reproduce import PAPERS
from fedstrata.reproduce.parts import Grid, Part
from fedstrata.reproduce.tuning import tuning_plan
from tests.real_data import DATA

QUICK = ("mnist", "fashion-mnist")
"""Datasets that are read in a fraction of a second."""


def _configs(part: Part) -> Iterator[RunConfig]:
    """Of all of a part's runs, its trials among them."""
    if isinstance(part, Grid):
        trials = tuning_plan(part, {}, Path("out")).runs if part.tuning else ()
        yield from (run.config for run in (*plan(part.values, "out").runs, *trials))
        return
    for fields in part.trainings():
        for seed in part.seeds:
            yield validate_settings(RunConfig, {**fields, "seed": seed})


Draw = tuple[str, str, int, int]
"""Dataset, partition, clients, seed."""


def _draws(part: Part) -> set[Draw]:
    """All that differ, but for those at random (`iid`), which no seed can spoil."""
    return {(c.dataset, c.partition, c.clients, c.seed) for c in _configs(part) if c.partition != "iid"}


def _cases() -> list[ParameterSet]:
    """All parts; those of data that is slow to read are slow tests."""
    found = []
    for paper in PAPERS:
        for part in PAPERS[paper]("evidence"):
            datasets = part.values["dataset"] if isinstance(part, Grid) else part.settings["run"]["dataset"]
            several = datasets if isinstance(datasets, list) else [datasets]
            slow = not all(spec.startswith(QUICK) for spec in several)
            found.append(pytest.param(paper, part.name, marks=[pytest.mark.slow] if slow else []))
    return found


@cache
def _read(spec: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The labels and, where they are known, the groups of a dataset."""
    dataset = load_dataset(spec, str(DATA))
    return dataset.labels, dataset.groups


@pytest.mark.parametrize(("paper", "name"), _cases())
def test_the_data_of_every_part_can_be_dealt_out(paper: str, name: str) -> None:
    """Nothing is trained: a partition that cannot be drawn would be found only hours later, by the runs."""
    (part,) = (part for part in PAPERS[paper]("evidence") if part.name == name)
    for spec, kind, clients, seed in sorted(_draws(part)):
        try:
            labels, groups = _read(spec)
        except UsageError as error:
            pytest.skip(f"real data is not there: {error}")
        parts = partition(labels, kind, clients, derive(seed, "partition"), groups)
        assert len(parts) == clients
        assert min(map(len, parts)) > 0
