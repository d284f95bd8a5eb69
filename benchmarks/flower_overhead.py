"""What fedstrata adds to a Flower deployment: its FedAvg against Flower's own, on the same SuperLink and SuperNodes.

A SuperLink and three SuperNodes run on this machine, with TLS and keys. Whole runs of the apps take turns on them, in
an order that is turned around every time. Both train the same model on the same data, in the same full-batch steps, so
their accuracies agree; both judge the model on the server after every round, and note the time then. The first round is
not counted, nor is what comes before it.

seconds    from the end of a round to the end of the next, the median of all runs' rounds. Much of it is waiting:
           SuperNodes look for messages every three seconds, and Flower's own server for replies
CPU        processor seconds per round, of the SuperLink with the ServerApp, and of the SuperNodes with their ClientApps
up, down   bytes per round on the SuperNodes' sockets, encrypted
echo       an app that sends nothing and trains nothing: what Flower needs for itself
by hand    Flower's app without torch.optim, whose first optimiser imports torch's compiler in every process
fedpart    FedPart over one cycle, a full round and one for every layer; with `keep`, clients hold the other layers in a
           directory, and not in Flower's context

    python benchmarks/flower_overhead.py [--models small middle large] [--extras echo "by hand" …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fedstrata.flower.template import write_app
from tests.flower.deployment import Deployment

NODES, INPUTS, CLASSES = 3, 784, 10
MODELS = {"small": (32,), "middle": (800, 460), "large": (1700, 1700, 1700, 1700)}
SETTINGS = {"epochs": 4, "batch-size": 64, "lr": 0.05}
PARTS = "fedpart(full_rounds=1, rounds_per_stratum=1)"
EXTRAS: dict[str, tuple[str, str, dict[str, str]]] = {
    "echo": ("echo", "–", {}),
    "by hand": ("theirs", "large", {"optimizer": "by hand"}),
    "fedpart": ("ours", "large", {"method": PARTS}),
    "fedpart, keep": ("keeping", "large", {"method": PARTS}),
}
PAUSE = 6.0
"""Seconds after a run, for its processes to end."""
LIMIT = 300.0
"""Seconds that a round may take."""

TASK = """
import torch
from torch import nn

SIZES, EXAMPLES, CLIENTS = {sizes}, 64, {clients}


def model():
    torch.manual_seed(7)
    layers = [nn.Linear(SIZES[0], SIZES[1])]
    for inside, outside in zip(SIZES[1:], SIZES[2:]):
        layers += [nn.ReLU(), nn.Linear(inside, outside)]
    return nn.Sequential(*layers)


def points(size, seed):
    rng = torch.Generator().manual_seed(seed)
    centres = 0.2 * torch.randn(SIZES[-1], SIZES[0], generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, SIZES[-1], (size,), generator=rng)
    return torch.randn(size, SIZES[0], generator=rng) + centres[y], y


def data(partition):
    return points(EXAMPLES, 10 + partition)


def test():
    return points(500, 2)


def mark(context, *what):
    import time

    with open(context.run_config["marks"], "a") as file:
        print(time.time(), *what, file=file)
"""

OUR_CLIENT = """
from fedstrata.flower import client_app
from {package}.task import data, model

app = client_app(model, data, keep={keep!r})
"""

OUR_SERVER = """
import logging
import re

from flwr.serverapp import ServerApp

from fedstrata.flower import server_app
from {package}.task import CLIENTS, mark, model, test

inner = server_app(model(), test=test, clients=CLIENTS)
app = ServerApp()


@app.main()
def main(grid, context):
    def told(record):
        if found := re.match(r"round \\d+/\\d+, accuracy (\\S+), (.*)", record.getMessage()):
            mark(context, found[1], found[2].replace(" ", "-"))
        return True

    logging.getLogger("flwr").addFilter(told)
    inner(grid, context)
"""

THEIR_CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from {package}.task import data, model

app = ClientApp()


@app.train()
def train(message, context):
    torch.set_num_threads(1)
    net, settings = model(), context.run_config
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(int(context.node_config["partition-id"]))
    loader = DataLoader(TensorDataset(x, y), batch_size=settings["batch-size"], shuffle=True)
    parameters = list(net.parameters())
    by_hand = settings["optimizer"] == "by hand"
    optimizer = None if by_hand else torch.optim.SGD(parameters, lr=settings["lr"])
    total = 0.0
    for _ in range(settings["epochs"]):
        for inputs, labels in loader:
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            if by_hand:
                with torch.no_grad():
                    for parameter in parameters:
                        parameter -= settings["lr"] * parameter.grad
            else:
                optimizer.step()
            total += loss.item()
    metrics = MetricRecord({{"train_loss": total / settings["epochs"], "num-examples": len(y)}})
    return Message(RecordDict({{"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}}), reply_to=message)
"""

THEIR_SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from {package}.task import CLIENTS, mark, model, test

app = ServerApp()


@app.main()
def main(grid, context):
    torch.set_num_threads(1)
    net = model()
    x, y = test()

    def judge(number, arrays):
        if number:
            net.load_state_dict(arrays.to_torch_state_dict())
            with torch.no_grad():
                right = (net(x).argmax(1) == y).sum().item()
            mark(context, f"{{right / len(y):.4f}}")

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    rounds = context.run_config["rounds"]
    strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=rounds, evaluate_fn=judge)
"""

ECHO_CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()
app.query()(lambda message, context: Message(message.content, reply_to=message))
"""

ECHO_SERVER = """
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    for number in range(context.run_config["rounds"]):
        nodes = list(grid.get_node_ids())
        content = RecordDict({{"said": ConfigRecord({{"round": number}})}})
        replies = list(grid.send_and_receive([Message(content, node, "query") for node in nodes], timeout=600))
        with open(context.run_config["marks"], "a") as file:
            print(time.time(), "-", len(replies), file=file)
"""

APPS = {
    "ours": (OUR_CLIENT, OUR_SERVER),
    "keeping": (OUR_CLIENT, OUR_SERVER),
    "theirs": (THEIR_CLIENT, THEIR_SERVER),
    "echo": (ECHO_CLIENT, ECHO_SERVER),
}


def sizes(name: str) -> tuple[int, ...]:
    """The widths of a model, from its inputs to its outputs."""
    return (INPUTS, *MODELS[name], CLASSES)


def make_app(directory: Path, name: str, layers: tuple[int, ...]) -> Path:
    """An app of the command's template, with a model, data and code of its own."""
    app = directory / f"{name}_app"
    write_app(app, "fedavg", NODES)
    client, server = APPS[name]
    files = {"task": TASK.format(sizes=layers, clients=NODES)}
    keep = str(directory / "kept") if name == "keeping" else None
    files["client_app"] = client.format(package=app.name, keep=keep)
    files["server_app"] = server.format(package=app.name)
    for file, text in files.items():
        (app / app.name / f"{file}.py").write_text(text)
    with open(app / "pyproject.toml", "a") as project:
        project.write('marks = ""\n')
    return app


def processor(root: int) -> float:
    """Processor seconds of a process and all that it started, those that have ended among them."""
    known: dict[int, tuple[int, float]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        known[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, (parent, _) in known.items() if parent in family}
    return sum(known[pid][1] for pid in family if pid in known)


@dataclass(frozen=True)
class Count:
    """What has been spent by the end of a round."""

    time: float
    link: float
    nodes: float
    up: int
    down: int
    said: tuple[str, ...]


def counts(deployed: Deployment, marks: Path, rounds: int) -> list[Count]:
    """Watch a run: what has been spent by the end of every round."""
    link, *nodes = (group.pid for group in deployed.groups)
    found: list[Count] = []
    patience = time.monotonic() + LIMIT
    while len(found) < rounds:
        time.sleep(0.02)
        lines = marks.read_text().splitlines(keepends=True) if marks.exists() else []
        whole = [line.split() for line in lines if line.endswith("\n")]
        if len(whole) > len(found):
            moment, *said = whole[len(found)]
            spent = processor(link), sum(map(processor, nodes))
            found.append(Count(float(moment), *spent, deployed.counter.up, deployed.counter.down, tuple(said)))
            patience = time.monotonic() + LIMIT
        if time.monotonic() > patience:
            raise TimeoutError(f"a round took more than {LIMIT:g} seconds; the logs are in {deployed.directory}")
    return found


def one_run(deployed: Deployment, app: Path, rounds: int, **settings: str) -> dict[str, Any]:
    """A run, and what each of its rounds but the first took."""
    marks = app.parent / "marks"
    marks.unlink(missing_ok=True)
    deployed.run(app, marks=str(marks), rounds=rounds, **SETTINGS, **settings)
    seen = counts(deployed, marks, rounds)
    time.sleep(PAUSE)
    laps: dict[str, Any] = {
        name: [getattr(b, name) - getattr(a, name) for a, b in pairwise(seen)]
        for name in ("time", "link", "nodes", "up", "down")
    }
    return {**laps, "said": [count.said for count in seen]}


def summary(name: str, app: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row: medians of seconds over all rounds, means of what is counted."""
    row: dict[str, Any] = {"model": name, "app": app, "runs": runs, "accuracy": runs[0]["said"][-1][0]}
    row["seconds"] = statistics.median([s for run in runs for s in run["time"]])
    for what in ("link", "nodes", "up", "down"):
        row[what] = statistics.mean([n for run in runs for n in run[what]])
    return row


def measure(deployed: Deployment, name: str, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Both apps on one size of model, in turns."""
    directory = Path(tempfile.mkdtemp(dir=deployed.directory))
    apps = {app: make_app(directory, app, sizes(name)) for app in ("ours", "theirs")}
    runs: dict[str, list[dict[str, Any]]] = {app: [] for app in apps}
    for number in range(repeats):
        for app in sorted(apps, reverse=bool(number % 2)):
            runs[app].append(one_run(deployed, apps[app], rounds))
    return [summary(name, app, taken) for app, taken in runs.items()]


def extra(deployed: Deployment, name: str, rounds: int, repeats: int) -> dict[str, Any]:
    """A row of an app that is not compared with another."""
    app, model, settings = EXTRAS[name]
    layers = sizes("large")
    if "fedpart" in name:  # the first full round is not counted: a cycle is the layers' rounds and the next full one
        rounds = len(layers) + 1
    made = make_app(Path(tempfile.mkdtemp(dir=deployed.directory)), app, layers)
    return summary(model, name, [one_run(deployed, made, rounds, **settings) for _ in range(repeats)])


def deploy(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, on one deployment."""
    often = options.rounds, options.repeats
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory)) as deployed:
        deployed.register(*range(NODES))
        for number in range(NODES):
            deployed.node(number)
        rows = [row for name in options.models for row in measure(deployed, name, *often)]
        return rows + [extra(deployed, name, *often) for name in options.extras]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown; ratios are to Flower's own app at the same model."""
    lines = [
        "| model | app | s per round | ratio | CPU, server | CPU, sites | ratio | MB up | MB down | ratio | accuracy |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    theirs = {row["model"]: row for row in rows if row["app"] == "theirs"}
    for row in rows:
        base = theirs.get(row["model"], row)
        ratios = [row["seconds"] / base["seconds"]]
        ratios += [(row[a] + row[b]) / (base[a] + base[b]) for a, b in (("link", "nodes"), ("up", "down"))]
        first, second, third = ("" if base is row else f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {row['model']} | {row['app']} | {row['seconds']:.2f} | {first} | {row['link']:.2f} "
            f"| {row['nodes']:.2f} | {second} | {row['up'] / 1e6:.3f} | {row['down'] / 1e6:.3f} "
            f"| {third} | {row['accuracy']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=6, help="of a run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=2, help="runs of every app and model")
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), choices=EXTRAS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = deploy(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
