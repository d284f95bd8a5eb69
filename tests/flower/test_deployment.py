"""A real deployment: SuperLink and SuperNodes as processes with TLS and keys; it takes minutes.

Every message starts a process, which the first time imports everything: few rounds of few clients. First comes what
counts bytes, and last what kills.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedstrata.runs.files import LOCK
from tests.flower import task
from tests.flower.deployment import PATIENCE, SITES, Deployment, kill, make_app, waited
from tests.flower.worlds import CHAIN, at_home
from tests.small_runs import metrics, rounds_written, same

pytestmark = pytest.mark.slow


def test_nodes_that_are_not_admitted(deployed: Deployment, tmp_path: Path) -> None:
    """One without a registered key, one that trusts another authority, one that does not encrypt."""
    from fedstrata.flower.certs import write_certs

    write_certs(tmp_path / "other", [], 0, 1)
    known, unknown = (("--auth-supernode-private-key", f"{deployed.keys}/node-{n}.key") for n in (0, 3))
    right, wrong = (
        ("--root-certificates", f"{deployed.keys}/ca.crt"),
        ("--root-certificates", f"{tmp_path}/other/ca.crt"),
    )
    few = ("--max-retries", "1")
    for number in range(len(SITES)):  # those that are admitted say so; else the absence of these words proves nothing
        waited(lambda number=number: "SuperNode ID" in deployed.log(f"node{number}"), 180, f"SuperNode {number}")
    for name, options, why in (
        ("unregistered", (*right, *unknown, *few), "failed to activate"),
        ("stranger", (*wrong, *known, *few), "certificate verify"),
        ("insecure", ("--insecure", *few), "server disconnected|connection reset"),
    ):
        node = deployed.node(3, *options, name=name)
        waited(lambda node=node: node.poll() is not None, 180, name)
        said = deployed.log(f"{name}3")
        assert node.returncode != 0
        assert "SuperNode ID" not in said
        assert re.search(why, said, re.IGNORECASE), said
    assert deployed.superlink.poll() is None
    assert re.search("no supernode found with the given public key", deployed.log("superlink"), re.IGNORECASE)


@dataclass(frozen=True)
class Linked:
    """A run of eight techniques that was deployed, the same where all data is, and the bytes that went both ways."""

    run: Path
    reference: Path
    up: int
    down: int


@pytest.fixture(scope="module")
def linked(deployed: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Linked:
    """So wide that what Flower and TLS add to each message is little, and that Flower keeps contexts late.

    Clients 3 and 6 share a SuperNode and a round, and so would a context: memories are in a directory.
    """
    place, width = tmp_path_factory.mktemp("linked"), 400
    settings: dict[str, Any] = {**CHAIN, "participation": 2, "eval_every": 5}
    make_app(place / "chain", width=width, keep=place / "memory")
    (place / "go").touch()
    up, down = deployed.counter.up, deployed.counter.down
    deployed.run(place / "chain", **settings, out=str(place / "run"), timeout=60 * PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "WIDTH", width)
        at_home(place / "reference", engine="serial", **settings)
    deployed.finished(place / "run")
    return Linked(place / "run", place / "reference", deployed.counter.up - up, deployed.counter.down - down)


def test_eight_techniques_have_the_bits_of_serial(linked: Linked) -> None:
    rows = metrics(linked.reference)
    assert len({stratum for row in rows[1:] for stratum in row["active"]}) == len(rows[0]["active"]) == 4
    visits = Counter(client for row in rows for client in row["clients"])
    assert max(visits.values()) > 1  # somebody remembers something
    assert same(linked.run, linked.reference)


def test_bytes_on_the_socket_are_those_accounted_for(linked: Linked) -> None:
    """One round with all strata, four with one each; all that Flower and TLS add is below 5 %."""
    rows = metrics(linked.run)
    assert not any(row["refused"] for row in rows)
    assert all(row["bytes_up"] < rows[0]["bytes_up"] / 2.5 for row in rows[1:])
    for counted, name in ((linked.up, "bytes_up"), (linked.down, "bytes_down")):
        accounted = sum(row[name] for row in rows)
        print(name, accounted, counted, counted / accounted)
        assert 1 <= counted / accounted <= 1.05


def is_free(run: Path) -> bool:
    """True if no process is at work in a run's directory."""
    with open(run / LOCK, "rb+") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_superlink_that_is_killed(deployed: Deployment, tmp_path: Path) -> None:
    """With it dies the server. Both are started again, and the run goes on to the bits of one that never stopped."""
    make_app(tmp_path / "long", keep=tmp_path / "memory")
    settings = {**CHAIN, "rounds": 2, "participation": 2, "checkpoint_seconds": 0.0}
    given = {**settings, "out": str(tmp_path / "run"), "timeout": 60 * PATIENCE}
    deployed.run(tmp_path / "long", **given)
    waited(lambda: rounds_written(tmp_path / "run"), 360, "a round")
    deployed.kill_superlink()
    (tmp_path / "go").touch()
    waited(lambda: is_free(tmp_path / "run"), 60, "the end of the server")  # which may hear of it a little later
    done = rounds_written(tmp_path / "run")
    deployed.revive_superlink()
    deployed.run(tmp_path / "long", **given, resume=True)
    reference = at_home(tmp_path / "reference", engine="serial", **settings)
    deployed.finished(tmp_path / "run")
    assert done == 1
    first, second = (row["clients"] for row in metrics(reference))
    assert {*first} & {*second}  # somebody remembers something from before
    assert same(tmp_path / "run", reference)


FORGOTTEN = 60
"""Seconds for which a SuperLink may take a SuperNode for alive that was killed, and turn it away when it comes back."""


def admitted(deployed: Deployment) -> bool:
    """Start SuperNode 1 again; True if the SuperLink lets it in."""
    before = len(deployed.log("node1"))
    node = deployed.node(1, clients=SITES[1])
    waited(lambda: node.poll() is not None or "SuperNode ID" in deployed.log("node1")[before:], 180, "SuperNode 1")
    if node.poll() is None:
        return True
    kill(node)
    return False


def test_nodes_that_fail_are_refused_and_come_back(deployed: Deployment, tmp_path: Path) -> None:
    """In round 2 SuperNode 1 is killed, and started again later; SuperNode 2 is late, and then sends garbage."""
    timeout = 45 * PATIENCE
    make_app(tmp_path / "failing", clients=3, failing=timeout)
    out = tmp_path / "run"
    before = len(deployed.log("node1"))
    deployed.run(tmp_path / "failing", method="scaffold", rounds=5, out=str(out), timeout=timeout)
    waited(lambda: "ROUND 2]" in deployed.log("node1")[before:], 360, "round 2")
    kill(deployed.nodes[1])
    time.sleep(FORGOTTEN)  # every start costs seconds of the processor
    waited(lambda: admitted(deployed), 360, "SuperNode 1's return")
    (tmp_path / "back").touch()
    deployed.finished(out)
    refused = [{row["client"]: row["why"] for row in line["refused"]} for line in metrics(out)]
    print(refused)
    assert refused[0] == {}
    assert refused[1][1] in ("it did not answer in time", "its SuperNode is not connected")
    assert refused[1][2] == "it did not answer in time"
    garbage = [line[2] for line in refused[2:4] if line.get(2) != "it did not answer in time"]  # it may still be busy
    assert garbage
    assert all("not that of answer" in why for why in garbage)
    assert "it has lost what it remembered, and will begin anew" in [line.get(1) for line in refused]
    assert refused[-1] == {}
    assert all(0 not in line for line in refused)
