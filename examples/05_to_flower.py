# %% [markdown]
# # From a simulation to a Flower deployment with TLS
#
# Three hospitals have found a method in a simulation. Now they want to train for real: the patients stay where they are, the
# connections are encrypted, and only known hospitals take part.
#
# This tutorial goes all the way on one machine: a server and three sites, each a process of its own, over TLS on loopback.
# On machines of your own you type the same lines with other addresses.
#
# `pip install "fedstrata[flower]"`. Nothing is downloaded.

# %% tags=["parameters"]
ROUNDS = 5
PATIENTS = 120  # per hospital

# %% [markdown]
# ## The data, one folder per site
#
# The patients are made up. Each hospital has a file of its own, and the server has one for testing.

# %%
import csv
import random
from pathlib import Path

SHARE_SICK = {"north": 0.2, "centre": 0.5, "south": 0.8, "server": 0.5}
MEASURES = {  # name: (mean if healthy, mean if sick, spread)
    "age": (51, 58, 9),
    "pressure": (128, 138, 17),
    "heart_rate": (156, 138, 22),
}

for place, share in SHARE_SICK.items():
    draw = random.Random(place)
    Path(place).mkdir()
    with open(f"{place}/patients.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*MEASURES, "sick"])
        for _ in range(PATIENTS):
            sick = int(draw.random() < share)
            values = [draw.gauss(means[sick], spread) for *means, spread in MEASURES.values()]
            table.writerow([*(f"{value:.1f}" for value in values), sick])

# %% [markdown]
# ## An app
#
# `fedstrata flower new` writes a complete Flower app. Helper functions stand in for a terminal here: `run` types a line and
# waits, `start` types one and lets it run on.

# %%
import atexit
import os
import shlex
import subprocess
import sys

home = Path.cwd()
environment = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "FLWR_HOME": str(home / "flwr-home"),  # not your own ~/.flwr
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "SERVER_DATA": str(home / "server"),
}
running = {}


def run(line):
    """Type a line in a terminal; returns what it prints."""
    print("$", line)
    done = subprocess.run(shlex.split(line), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def start(name, line):
    """Type a line in a terminal of its own, and let it run; what it prints goes into a file."""
    print("$", line)
    with open(f"{name}.log", "w") as log:
        running[name] = subprocess.Popen(shlex.split(line), env=environment, stdout=log, stderr=subprocess.STDOUT)
    return running[name]


def end():
    """End all that was started, the sites before the server."""
    for process in reversed(running.values()):
        process.terminate()
        process.wait(timeout=60)
    running.clear()


atexit.register(end)  # also where a cell fails
_ = run("fedstrata flower new hospitals --clients 3")
print(*sorted(str(path) for path in Path("hospitals").rglob("*.py")), sep="\n")

# %% [markdown]
# Three files are ours to edit. `task.py` holds the model and the data. What a site's own command line says, such as where its
# files are, comes in `node_config`. The model begins with the same weights wherever it is built.

# %%
TASK = '''
import csv
import os
from pathlib import Path

import torch


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hidden = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 16), torch.nn.ReLU())
        return torch.nn.Sequential(hidden, torch.nn.Linear(16, 1))


def read(folder):
    with open(Path(folder, "patients.csv"), newline="") as file:
        rows = [[float(value) for value in row.values()] for row in csv.DictReader(file)]
    table = torch.tensor(rows)
    return table[:, :-1], table[:, -1].long()


def data(partition, node_config):
    """One site's patients; `partition` is its number."""
    return read(node_config["folder"])


def test():
    """The server's patients."""
    return read(os.environ["SERVER_DATA"])
'''
CLIENT = """
from fedstrata.flower import client_app
from hospitals.task import data, model

app = client_app(model, data)
"""
SERVER = """
from fedstrata.flower import server_app
from hospitals.task import model, test

app = server_app(model, test=test, clients=3, task="binary")
"""
for name, text in {"task": TASK, "client_app": CLIENT, "server_app": SERVER}.items():
    Path(f"hospitals/hospitals/{name}.py").write_text(text.lstrip())

# %% [markdown]
# ## Simulate first
#
# The same functions, all in this process. Here you try methods, look at reports and ask for a diagnosis. What you find is the
# string that goes to the server.

# %%
import fedstrata as fs

sys.path.insert(0, "hospitals")
os.environ["SERVER_DATA"] = environment["SERVER_DATA"]
from hospitals import task

SITES = [place for place in SHARE_SICK if place != "server"]
METHODS = ["fedavg", "scaffold", "feddyn + fedpart(full_rounds=1, rounds_per_stratum=1)"]


def simulate(method):
    clients = [task.data(number, {"folder": place}) for number, place in enumerate(SITES)]
    return fs.Federation(task.model(), clients, task.test(), task="binary", method=method, rounds=ROUNDS).fit()


simulated = {method: simulate(method) for method in METHODS}
for method, history in simulated.items():
    print(f"AUROC {history.score:.3f}   {method}")

chosen = max(METHODS, key=lambda method: simulated[method].score)

# %% [markdown]
# ## Certificates and keys
#
# A certificate for the server, which every site checks, and a key pair per site. The fourth pair is for a stranger: we do not
# register it.

# %%
_ = run("fedstrata flower certs keys --nodes 4")
print(*sorted(path.name for path in Path("keys").iterdir()))

# %% [markdown]
# ## Start the server
#
# The SuperLink is Flower's server. It shows its certificate, and lets in only sites whose key is registered.

# %%
import socket
import time


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def listens(host, port):
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


host, port = "127.0.0.1", free_port()
_ = start(
    "superlink",
    f"flower-superlink --host {host} --port {port} --enable-supernode-auth "
    "--disable-runtime-dependency-installation --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt "
    "--ssl-keyfile keys/server.key",
)
until = time.monotonic() + 180
while not listens(host, port):
    if running["superlink"].poll() is not None or time.monotonic() > until:
        raise RuntimeError(Path("superlink.log").read_text())
    time.sleep(0.5)

# %% [markdown]
# Tell Flower where it is, and which keys to let in. On your machines this goes into `~/.flwr/config.toml`.

# %%
Path("flwr-home").mkdir(exist_ok=True)
Path("flwr-home/config.toml").write_text(
    f'[superlink.loopback]\naddress = "{host}:{port}"\nroot-certificates = "{home}/keys/ca.crt"\n'
)
for number in range(3):
    run(f"flwr supernode register keys/node-{number}.pub loopback")

# %% [markdown]
# ## Start the sites
#
# Each site needs the authority's certificate, its own key, and the path to its own patients. Here all sites are on one
# machine, so each also needs a port of its own.


# %%
def supernode(name, *options):
    line = ["flower-supernode", "--superlink", f"{host}:{port}", "--port", str(free_port()), *options]
    return start(name, shlex.join(line))


def trusted(number):
    return "--root-certificates", "keys/ca.crt", "--auth-supernode-private-key", f"keys/node-{number}.key"


for number, place in enumerate(SITES):
    supernode(place, *trusted(number), "--node-config", f'partition-id={number} folder="{place}"')

# %% [markdown]
# Two strangers knock: one has a key that nobody registered, one does not encrypt. Both are turned away.

# %%
strangers = [
    supernode("stranger", *trusted(3), "--max-retries", "1"),
    supernode("in-the-clear", "--insecure", "--max-retries", "1"),
]
assert all(stranger.wait(timeout=180) != 0 for stranger in strangers)
assert "Failed to activate SuperNode" in Path("stranger.log").read_text()
assert "SuperNode ID" not in Path("in-the-clear.log").read_text()

# %% [markdown]
# ## Run it
#
# The method is the string from the simulation. The server waits for its sites, runs all rounds, and leaves a directory like
# any other run.

# %%
config = f'method="{chosen}" rounds={ROUNDS} out="runs/deployed" wait=180'
said = run(f"flwr run hospitals loopback --stream --run-config {shlex.quote(config)}")
print(*[line[line.index("round ") :] for line in said.splitlines() if "round " in line and "AUROC" in line], sep="\n")

# %% [markdown]
# Is it the model of the simulation? In every bit:

# %%
import torch
from safetensors.torch import load_file

deployed = load_file("runs/deployed/model.safetensors")
expected = simulated[chosen].model.state_dict()
assert deployed.keys() == expected.keys()
assert all(torch.equal(deployed[name], expected[name]) for name in expected)
print(f"{len(expected)} tensors, equal in every bit")

# %% [markdown]
# The bytes are the same, too, round by round. So a simulation shows in advance what a deployment will send.

# %%
from fedstrata.runs.reader import SavedRun

there = SavedRun.read(Path("runs/deployed"))
for here, record in zip(simulated[chosen].records, there.records, strict=True):
    assert (here.bytes_up, here.bytes_down) == (record.bytes_up, record.bytes_down)
print(f"{simulated[chosen].costs.bytes_up:,} bytes up, {simulated[chosen].costs.bytes_down:,} down, in both")

# %% [markdown]
# ## Stop
#
# The server's directory is a run like any other: `fedstrata report` and `fedstrata diagnose` read it. End the processes:

# %%
end()
assert not listens(host, port)

# %% [markdown]
# **What was learnt.** The same string names the method in a simulation and in a deployment, and both end with the same model,
# in every bit. A site without a registered key, or without TLS, cannot take part.
#
# Before you go live, read [what to think of](../docs/howto/deploy-with-flower.md#before-you-go-live): who can reach the port,
# what the server sees of a site, and what happens when a site fails.
