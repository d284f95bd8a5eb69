"""The files of a new Flower app: a model, data, and three lines for each side."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from fedstrata.errors import UsageError
from fedstrata.runs.files import disk_errors

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "0.1.0"
description = "A federation, layer by layer"
license = "Apache-2.0"
requires-python = ">=3.11"
# What Flower installs at every site before a run. It needs a network for that; where all is installed already, start
# the SuperLink with --disable-runtime-dependency-installation.
dependencies = ["flwr>=1.41", "fedstrata[flower]"]

[tool.flwr.app]
publisher = "{project}"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Settings of fedstrata's Federation, for `flwr run . --run-config 'method="fedavg" rounds=20'`. Only what stands here
# can be changed that way; add others by their names.
[tool.flwr.app.config]
method = "{method}"
rounds = 3
participation = 1.0
epochs = 1
batch-size = 32
lr = 0.1
optimizer = "sgd"
schedule = "constant"
seed = 0
eval-every = 1
out = ""
resume = false
checkpoint-seconds = 20.0
timeout = 600.0
wait = 600.0
"""

TASK = '''\
"""The model and the data of this federation: put your own here."""

import fedstrata as fs

CLIENTS = {clients}


def model():
    """Any torch.nn.Module that maps a batch of inputs to logits."""
    return fs.build_model("cnn2", (1, 8, 8), classes=10, seed=0)


def data(partition, node_config):
    """One client's data: a pair of tensors (inputs, labels), or a map-style Dataset.

    Here it is a part of the digits that come with fedstrata. At a real site, read your own files: what stands in the
    SuperNode's --node-config, such as data-dir="/srv/scans", is in `node_config`.
    """
    train = fs.load_dataset("digits").train
    parts = fs.partition(train.labels(), "dirichlet(alpha=0.5)", CLIENTS, seed=0)
    return train.select(parts[partition])


def test():
    """What the server judges the global model on."""
    return fs.load_dataset("digits").test
'''

CLIENT = '''\
"""Runs at every site."""

from fedstrata.flower import client_app
from {package}.task import data, model

app = client_app(model, data)
'''

SERVER = '''\
"""Runs beside the SuperLink."""

from fedstrata.flower import server_app
from {package}.task import CLIENTS, model, test

app = server_app(model, test=test, clients=CLIENTS)
'''

GITIGNORE = """\
# Private keys and certificates, wherever they lie
keys/
*.key
*.pem
# What runs leave: the server's files, the SuperLink's database, what sites remember
/runs/
/memory/
*.db
*.db-*
# What Flower and Python make
*.fab
.flwr/
__pycache__/
*.egg-info/
.venv/
"""

README = """\
# {project}

A federation of {clients} clients, as a Flower app. `{package}/task.py` holds the model and the data; what is run stands
in `pyproject.toml` and is changed for one run with `--run-config`.

## On this machine

    flwr run . --federation-config 'num-supernodes={clients}' --stream
    flwr run . --federation-config 'num-supernodes={clients}' --stream --run-config 'method="fedprox" rounds=20'

Flower installs the app's dependencies into an environment of its own; where there is no network, and all is installed
already, say so first: `export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1`.

With `--run-config 'out="/srv/runs/first"'` the server writes metrics, checkpoints and the final model there. A run that
was stopped goes on with `out="/srv/runs/first" resume=true`; so that clients, too, remember what they knew, give them a
directory: `client_app(model, data, keep="/srv/memory")`. Files of runs that are over stay there until you delete them.

## Across sites

Certificates and keys, once; `--host` names the server as the sites reach it:

    fedstrata flower certs keys --host server.example.org --nodes {clients}

They stay out of a repository: `.gitignore` names them, and `keys` has one of its own.

A site that comes later needs `ca.crt` and a key pair, made by `ssh-keygen -t ecdsa -b 384` without a passphrase. When
certificates end (`--days`), or the server gets another name, make all of them anew: the authority's key is not kept.

The server:

    flower-superlink --host 0.0.0.0 --port 8000 --enable-supernode-auth --database superlink.db \\
        --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key

With a database it knows its sites again after a restart. Whoever reaches its port may register a key and start a run:
let only sites and operators reach it.

Tell Flower where it is, in `~/.flwr/config.toml`, and which sites may take part:

    [superlink.federation]
    address = "server.example.org:8000"
    root-certificates = "{directory}/keys/ca.crt"

    flwr supernode register keys/node-0.pub federation

Every site, with a key and a `partition-id` of its own; it needs `ca.crt` and its own `node-0.key`, nothing else:

    flower-supernode --superlink server.example.org:8000 --root-certificates keys/ca.crt \\
        --auth-supernode-private-key keys/node-0.key --node-config 'partition-id=0'

Several on one machine need a port each, too: `--port 9095`, and so on.

Then, from anywhere: `flwr run . federation --stream`.
"""


def _hides_another(package: str) -> bool:
    """True if a package of this name would hide another; what stands in the current directory is the user's own."""
    if package in {*sys.stdlib_module_names, "flwr", "fedstrata", "torch", "test", "tests"}:
        return True
    places = [place for place in sys.path if Path(place).resolve() != Path.cwd()]
    return any(finder.find_spec(package, places) for finder in sys.meta_path)


def write_app(directory: Path, method: str, clients: int) -> None:
    """Write a whole app.

    Raises:
        UsageError: if something exists there.
    """
    project = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "federation"
    package = project.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package) or _hides_another(package):
        project, package = f"app-{project}", f"app_{package}"
    names = {"project": project, "package": package, "method": method, "clients": clients}
    names["directory"] = directory.resolve()
    files = {
        "pyproject.toml": PYPROJECT,
        ".gitignore": GITIGNORE,
        "README.md": README,
        f"{package}/__init__.py": "",
        f"{package}/task.py": TASK,
        f"{package}/client_app.py": CLIENT,
        f"{package}/server_app.py": SERVER,
    }
    with disk_errors(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} exists and is not empty")
        (directory / package).mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text.format(**names), encoding="utf-8")
