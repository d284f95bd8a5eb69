"""fedstrata's columns: the same Federation with one engine or another."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from work import LR, SEED, Count, Round, Workload, client_data, timed

import fedstrata as fs

COLUMNS: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial", "workers": 1},
    "workers": {"engine": "processes", "workers": 2},
    "vmap": {"engine": "vmap", "workers": 2},
    "vmap+compile": {"engine": "vmap", "workers": 2, "compile": True},
    "workers+compile": {"engine": "processes", "workers": 2, "compile": True},
    "auto": {"engine": "auto", "workers": 2},
    "auto+compile": {"engine": "auto", "workers": 2, "compile": True},
}


class Ours:
    """A Federation, round by round, without evaluation."""

    def __init__(self, work: Workload, column: str) -> None:
        self.federation = fs.Federation(
            work.build(),
            client_data(work),
            rounds=10**6,
            participation=work.sampled,
            batch_size=work.batch,
            epochs=1,
            lr=LR,
            seed=SEED,
            eval_every=10**9,
            **COLUMNS[column],
        )
        self.records = self.federation.rounds()
        self.engine = self.federation.engine

    def burst(self, rounds: int) -> list[Round]:
        """Some rounds."""
        return [self.round() for _ in range(rounds)]

    def round(self) -> Round:
        """One round; the record counts steps and examples."""
        start = time.perf_counter()
        record = next(self.records)
        return timed(start, Count(record.steps, record.examples), record.clients)

    def weights(self) -> dict[str, Tensor]:
        """The global model."""
        return self.federation.model.state_dict()

    def close(self) -> None:
        """End the workers."""
        self.federation.close()
