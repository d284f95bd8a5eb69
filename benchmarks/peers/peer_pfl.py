"""pfl-research: FederatedAveraging on its simulated backend, in two processes that reduce with gloo.

Rank 0 is the worker's process and tells rank 1, which runs this file, how many rounds to run. pfl does not average
buffers: each rank's running statistics just go on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F
from work import LR, Round, Workload, batch, client_data, order, sampled, workload

MANY = 10**6


class Clock(TrainingProcessCallback):
    """The time at the start of a run and after each of its rounds, with the counts of this rank so far."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.stamps, self.totals = counts, [0.0], [[0, 0]]

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """A run begins: forget the last one."""
        self.stamps, self.totals = [time.perf_counter()], [list(self.counts)]
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round is done."""
        self.stamps.append(time.perf_counter())
        self.totals.append(list(self.counts))
        return False, Metrics()


class Pfl:
    """One rank of the simulation; rank 0 holds the process of rank 1."""

    def __init__(self, work: Workload, second: subprocess.Popen[bytes] | None = None) -> None:
        self.second = second
        torch.set_num_threads(1)
        self.work, self.number, self.counts = work, 0, [0, 0]
        self.module = work.build()
        self.module.loss, self.module.metrics = self._loss, self._metrics
        central = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.model = PyTorchModel(self.module, torch.optim.SGD, central)
        visits = self._visits()
        data = FederatedDataset(self._dataset, lambda: next(visits))
        self.backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
        self.algorithm = FederatedAveraging()
        self.clock = Clock(self.counts)
        client_data(work)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.counts[0] += 1
        self.counts[1] += len(y)
        return F.cross_entropy(self.module(x), y)

    def _metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"examples": Weighted(len(y), len(y))}  # pfl evaluates in the first round, whatever it is told

    def _visits(self) -> Iterator[tuple[int, int]]:
        """(round, client) after (round, client), the same in all ranks; pfl deals them out to the ranks."""
        for number in range(MANY):
            for client in sampled(self.work, number):
                yield number, client

    def _dataset(self, visit: tuple[int, int]) -> PyTorchTensorDataset:
        """A client's examples in this round's order: pfl itself takes batches in the order of the data."""
        number, client = visit
        rows = batch(client_data(self.work)[client], order(self.work, number, client))
        return PyTorchTensorDataset(rows, str(client))

    def run(self, rounds: int) -> Tensor:
        """Some rounds; the steps and examples of each, summed over the ranks."""
        self.number += rounds
        self.algorithm.run(
            NNAlgorithmParams(
                central_num_iterations=self.number,
                evaluation_frequency=MANY,
                train_cohort_size=self.work.sampled,
                val_cohort_size=0,
            ),
            self.backend,
            self.model,
            NNTrainHyperParams(
                local_batch_size=self.work.batch,
                local_num_epochs=1,
                local_learning_rate=LR,
            ),
            NNEvalHyperParams(local_batch_size=self.work.batch),
            callbacks=[self.clock],
            send_metrics_to_platform=False,
        )
        counts = torch.tensor(self.clock.totals).diff(dim=0)
        torch.distributed.all_reduce(counts)
        return counts

    def burst(self, rounds: int) -> list[Round]:
        """Some rounds, in both ranks."""
        first = self.number
        torch.distributed.broadcast(torch.tensor(rounds), src=0)
        counts = self.run(rounds).tolist()
        stamps = self.clock.stamps
        return [
            Round(start, end, end - start, *count, tuple(sampled(self.work, first + i)))
            for i, (start, end, count) in enumerate(zip(stamps, stamps[1:], counts, strict=False))
        ]

    def follow(self) -> None:
        """Rank 1: run as many rounds as rank 0 says, until it says none."""
        while True:
            rounds = torch.tensor(0)
            torch.distributed.broadcast(rounds, src=0)
            if rounds == 0:
                return
            self.run(int(rounds))

    def weights(self) -> dict[str, Tensor]:
        """The global model."""
        return self.module.state_dict()

    def close(self) -> None:
        """End rank 1."""
        torch.distributed.broadcast(torch.tensor(0), src=0)
        if self.second is not None:
            self.second.wait(10)


if __name__ == "__main__":
    Pfl(workload(*sys.argv[1:])).follow()
