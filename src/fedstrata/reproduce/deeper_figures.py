"""What the tables of deeper models are made of: a centralised run and a federated one, and three gaps between them.

"Unlocking the Potential of Federated Learning for Deeper Models". The paper's Gap is between best accuracies after the
same steps in all. But clients train side by side: of as many steps, a federation of K clients makes only a K-th one
after the other. And an averaged model is judged with running statistics that clients took under other weights. So
there is a gap without the first difference, and one without the second.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstrata.compare import ComparisonRow
from fedstrata.compare.runner import read_finished_records
from fedstrata.config.schema import RunConfig
from fedstrata.core.rng import derive
from fedstrata.core.types import Examples
from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.data.partitions import partition
from fedstrata.models.strata import strata
from fedstrata.probes.measures import reestimate_statistics
from fedstrata.probes.measures.reading import batches, scratch_copy
from fedstrata.reproduce.deeper_measures import LayerFigures, Measure, by_gradients, layer_halves
from fedstrata.reproduce.parts import figures_by_seed, highest_accuracy, load_or_compute
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.run import final_model
from fedstrata.runs.reader import read_probes
from fedstrata.runs.records import Record, rounds_to
from fedstrata.system.devices import devices_by_name
from fedstrata.system.machine import compute_with

Layers = Mapping[str, float]
"""Layer → its divergence."""


@dataclass(frozen=True)
class GapKind:
    """A way to compare centralised with federated training.

    Args:
        name: in report.json.
        claim: how a claim says that it is judged by this one.
    """

    name: str
    claim: str


BEST = GapKind("best", "by best accuracies")
EQUAL_STEPS = GapKind("equal sequential steps", "at equal sequential steps")
REESTIMATED = GapKind("re-estimated statistics", "with re-estimated statistics")
GAPS = (BEST, EQUAL_STEPS, REESTIMATED)


@dataclass(frozen=True)
class SettingFigures:
    """Centralised and federated training under one setting: every seed's figures.

    Args:
        cl: centralised training's best accuracy.
        fl: federated training's.
        layers: a measure's name → layer → its divergence at the end of the federated run.
        curves: the federated run's rounds.
        cl_curves: the centralised run's.
        cl_again: its last model's accuracy with re-estimated running statistics.
        fl_again: the federated run's.
        updates: round by round of the federated run, layer → the divergence of what the clients sent.
    """

    cl: Seeds
    fl: Seeds
    layers: Mapping[int, LayerFigures]
    curves: Mapping[int, Sequence[Record]]
    cl_curves: Mapping[int, Sequence[Record]] = field(default_factory=dict)
    cl_again: Seeds = field(default_factory=dict)
    fl_again: Seeds = field(default_factory=dict)
    updates: Mapping[int, Sequence[Layers]] = field(default_factory=dict)

    @property
    def gap(self) -> dict[int, float]:
        """CL − FL."""
        return differences(self.cl, self.fl)

    @property
    def loss(self) -> dict[int, float]:
        """(CL − FL)/CL."""
        return {seed: gap / self.cl[seed] for seed, gap in self.gap.items() if self.cl[seed]}

    @property
    def cl_early(self) -> dict[int, float]:
        """CL's best accuracy by the time that it has made as many sequential steps as a client of FL in all."""
        found = {
            seed: best_by(self.cl_curves[seed], sequential_steps(curve)[-1])
            for seed, curve in self.curves.items()
            if seed in self.cl_curves
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def gap_by(self, kind: GapKind) -> dict[int, float]:
        """CL − FL in one of the three ways."""
        if kind is EQUAL_STEPS:
            return differences(self.cl_early, self.fl)
        return differences(self.cl_again, self.fl_again) if kind is REESTIMATED else self.gap

    @property
    def regained(self) -> dict[int, float]:
        """What FL's last model gains by statistics that are estimated again."""
        last = {seed: curve[-1].accuracy for seed, curve in self.curves.items()}
        return differences(self.fl_again, {seed: value for seed, value in last.items() if value is not None})

    def div(self, measure: Measure) -> dict[int, float]:
        """The mean over all layers."""
        return {seed: statistics.fmean(found[measure.name].values()) for seed, found in self.layers.items()}

    def deep(self, measure: Measure) -> dict[int, float]:
        """The mean over the second half of the layers."""
        return {seed: layer_halves(found[measure.name])[1] for seed, found in self.layers.items()}

    @property
    def falls(self) -> dict[int, float]:
        """The mean loss of accuracy per round of the federated run; a gain counts as 0."""
        return {seed: _mean_fall(rounds) for seed, rounds in self.curves.items()}


def figures_of_setting(central: ComparisonRow, federated: ComparisonRow) -> SettingFigures:
    """The figures of a setting's finished runs."""
    cl, fl = ({r.seed: Path(r.directory) for r in row.sound_results} for row in (central, federated))
    curves = {seed: read_finished_records(directory) for seed, directory in fl.items()}
    return SettingFigures(
        figures_by_seed(central, highest_accuracy),
        figures_by_seed(federated, highest_accuracy),
        {seed: final_divergences(directory, federated.run.config, seed) for seed, directory in fl.items()},
        curves,
        {seed: read_finished_records(directory) for seed, directory in cl.items()},
        {seed: final_accuracy(directory, central.run.config, seed) for seed, directory in cl.items()},
        {seed: final_accuracy(directory, federated.run.config, seed) for seed, directory in fl.items()},
        {seed: _update_divergences(directory, len(curves[seed])) for seed, directory in fl.items()},
    )


# --- from a run's rounds ---------------------------------------------------------------------------------------------


def sequential_steps(rounds: Sequence[Record]) -> list[float]:
    """Round by round, the steps so far that were made one after the other: clients of one round train side by side.

    They hold equally many examples here, or one more: their mean is each one's.
    """
    made, found = 0.0, []
    for record in rounds:
        made += record.steps / max(len(record.clients), 1)
        found.append(made)
    return found


def best_by(rounds: Sequence[Record], steps: float) -> float | None:
    """The best accuracy up to the first evaluation after so many sequential steps; None if there is none."""
    best = None
    for record, made in zip(rounds, sequential_steps(rounds), strict=True):
        if record.accuracy is not None:
            best = record.accuracy if best is None else max(best, record.accuracy)
            if made >= steps:
                return best
    return None


def steps_read(cell: SettingFigures) -> tuple[float, float] | None:
    """(the sequential steps of FL, those after which CL is read), of the first seed; None without one."""
    for seed, curve in cell.curves.items():
        asked = sequential_steps(curve)[-1]
        central = cell.cl_curves.get(seed, ())
        for record, made in zip(central, sequential_steps(central), strict=True):
            if record.accuracy is not None and made >= asked:
                return asked, made
    return None


def _mean_fall(rounds: Sequence[Record]) -> float:
    known = [record.accuracy for record in rounds if record.accuracy is not None]
    falls = [max(before - after, 0.0) for before, after in pairwise(known)]
    return statistics.fmean(falls) if falls else 0.0


def rounds_to_share(cells: Mapping[str, SettingFigures], share: float) -> dict[str, dict[int, int | None]]:
    """Label → seed → the first round of FL that reaches a share of the lowest best accuracy of all labels."""
    shared = set.intersection(*(set(cell.fl) for cell in cells.values()))
    targets = {seed: share * min(cell.fl[seed] for cell in cells.values()) for seed in sorted(shared)}
    return {
        label: {seed: rounds_to(cell.curves[seed], target) for seed, target in targets.items()}
        for label, cell in cells.items()
    }


def _update_divergences(directory: Path, rounds: int) -> list[Layers]:
    """What the probe `proxy` has found, round by round."""
    return [row["proxy"] for row in read_probes(directory / "probes.jsonl", rounds, ended=True) if "proxy" in row]


# --- from a run's last model -----------------------------------------------------------------------------------------

_load_dataset = lru_cache(maxsize=1)(load_dataset)


def final_divergences(directory: Path, config: RunConfig, seed: int) -> LayerFigures:
    """A measure's name → layer → divergence at a finished run's model; measured once, and kept beside it."""
    return load_or_compute(directory / "divergences.json", lambda: _measure_divergences(directory, config, seed))


def _measure_divergences(directory: Path, config: RunConfig, seed: int) -> dict[str, Any]:
    model, clients, _ = _finished(directory, config, seed)
    with compute_with(1):
        return by_gradients(model, clients, strata(model))


def final_accuracy(directory: Path, config: RunConfig, seed: int) -> float:
    """A finished run's accuracy with running statistics that are estimated again; measured once, and kept beside it."""
    found = load_or_compute(directory / "reestimated.json", lambda: _measure_accuracy(directory, config, seed))
    return float(found["accuracy"])


def _measure_accuracy(directory: Path, config: RunConfig, seed: int) -> dict[str, Any]:
    model, clients, dataset = _finished(directory, config, seed)
    with compute_with(1):
        return {"accuracy": accuracy_on(reestimate_statistics(model, clients), dataset.test)}


def _finished(directory: Path, config: RunConfig, seed: int) -> tuple[nn.Module, list[Examples], Dataset]:
    """(its model, its clients' data, the whole dataset): centralised training has that of all clients, too."""
    dataset = _load_dataset(config.dataset, config.data_dir)
    dealt = partition(dataset.labels, config.partition, config.clients, derive(seed, "partition"), dataset.groups)
    model = final_model(directory, config, dataset).to(devices_by_name(config.device)[0])
    return model, list(dataset.train.split(dealt)), dataset


def accuracy_on(model: nn.Module, examples: Examples) -> float:
    """The share of examples that a model is right about, in evaluation mode."""
    right = 0
    with scratch_copy(model) as scratch, torch.no_grad():
        for _, x, y in batches(scratch, examples):
            right += int((scratch(x).argmax(1) == y).sum())
    return right / len(examples)
