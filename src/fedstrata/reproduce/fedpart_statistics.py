"""Accuracy of the global model with one client's running statistics: FedPart's released code evaluates client 0's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from fedstrata.compare import ComparisonRow
from fedstrata.config.schema import RunConfig
from fedstrata.core.types import BUFFERS
from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.reproduce.parts import load_or_compute
from fedstrata.run import final_model
from fedstrata.runs.client_memory import DirectoryStore

_load_dataset = cache(load_dataset)


def accuracy_by_seed(row: ComparisonRow, client: int = 0) -> dict[int, float]:
    """Seed → the final model's accuracy on the test set, with the statistics that the client has kept."""
    config = row.run.config
    return {
        result.seed: load_or_compute(
            Path(result.directory) / f"client-{client}.json",
            lambda directory=Path(result.directory): {"accuracy": accuracy(directory, config, client)},  # type: ignore[misc]
        )["accuracy"]
        for result in row.sound_results
    }


def accuracy(directory: Path, config: RunConfig, client: int) -> float:
    """The accuracy of a finished run's model with a client's statistics."""
    dataset: Dataset = _load_dataset(config.dataset, config.data_dir)
    memory = directory / "memory"
    version = max(int(path.stem.partition("-")[2]) for path in memory.glob(f"{client}-*.memory"))
    own = DirectoryStore(memory).get([client], [version])[0].get(BUFFERS, {})
    model = final_model(directory, config, dataset, own).eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, len(dataset.test), 500):
            x, y = dataset.test.batch(torch.arange(start, min(start + 500, len(dataset.test))))
            right += int((model(x).argmax(1) == y).sum())
    return right / len(dataset.test)
