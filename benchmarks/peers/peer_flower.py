"""Flower: its simulation on Ray, two actors of one CPU each, with the FedAvg strategy as it comes.

A simulation cannot be held between rounds, so a burst is a whole one. Ray and its files are gone when it ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from work import LR, Count, Round, Workload, steps, workload

client_app = ClientApp()


@cache
def scratch(work: Workload) -> nn.Module:
    """The model of an actor, built once."""
    torch.set_num_threads(1)
    return work.build()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's visit."""
    start = time.perf_counter()
    config, client = message.content["config"], int(context.node_config["partition-id"])
    work = workload(str(config["workload"]), str(config["door"]))
    model = scratch(work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    count = steps(work, model, optimizer, int(config["server-round"]) - 1, client)
    metrics = {"num-examples": count.examples, "steps": count.steps, "client": client, "start": start}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)


class Flower:
    """A simulation a burst."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.first: dict[str, Tensor] = {}

    def burst(self, rounds: int) -> list[Round]:
        """A simulation of that many rounds; the seconds are the server's, from the end of one round to the next."""
        replies: list[list[MetricRecord]] = []
        begins: list[float] = []
        ends: list[float] = []

        def collect(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
            replies.append([content["metrics"] for content in contents])
            return MetricRecord({"replies": len(contents)})

        def stamp(number: int, arrays: ArrayRecord) -> None:
            ends.append(time.perf_counter())
            if number == 1:
                self.first = arrays.to_torch_state_dict()
            begins.append(time.perf_counter())

        server_app = ServerApp()

        @server_app.main()
        def serve(grid: Grid, context: Context) -> None:
            strategy = FedAvg(
                fraction_train=self.work.sampled / self.work.clients,
                fraction_evaluate=0.0,
                min_train_nodes=self.work.sampled,
                min_available_nodes=self.work.clients,
                train_metrics_aggr_fn=collect,
            )
            strategy.start(
                grid,
                ArrayRecord(self.work.build().state_dict()),
                num_rounds=rounds,
                train_config=ConfigRecord({"workload": self.work.name, "door": self.work.door}),
                evaluate_fn=stamp,
            )

        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
            init = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "_temp_dir": folder}
            backend = {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
            run_simulation(server_app, client_app, self.work.clients, backend_config=backend)
        return [self._round(*each) for each in zip(replies, begins, ends[1:], strict=False)]

    def _round(self, replies: list[MetricRecord], begin: float, end: float) -> Round:
        count = Count(sum(int(r["steps"]) for r in replies), sum(int(r["num-examples"]) for r in replies))
        clients = tuple(sorted(int(r["client"]) for r in replies))
        # The server is ready long before Ray is: the first round begins when its first client does.
        start = min(float(r["start"]) for r in replies)
        return Round(start, end, end - begin, count.steps, count.examples, clients)

    def weights(self) -> dict[str, Tensor]:
        """The global model after the first round of the last simulation."""
        return self.first

    def close(self) -> None:
        """Nothing to release."""
