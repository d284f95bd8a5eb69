"""A real deployment in which things go wrong; it takes minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.deployment import PATIENCE, SITES, Deployment, kill, make_app, waited
from tests.flower.worlds import CHAIN, at_home
from tests.small_runs import metrics, rounds_written, same

pytestmark = pytest.mark.slow
COUNTED = False


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


def test_a_superlink_that_is_killed(deployed: Deployment, tmp_path: Path) -> None:
    """With it dies the server. Both are started again, and the run goes on to the bits of one that never stopped."""
    make_app(tmp_path / "long", keep=tmp_path / "memory")
    settings = {**CHAIN, "rounds": 4, "participation": 2, "checkpoint_seconds": 0.0}
    given = {**settings, "out": str(tmp_path / "run"), "timeout": 60 * PATIENCE}
    deployed.run(tmp_path / "long", **given)
    waited(lambda: rounds_written(tmp_path / "run"), 360, "a round")
    kill(deployed.superlink)
    done = rounds_written(tmp_path / "run")
    deployed.superlink = deployed.start_superlink()
    deployed.run(tmp_path / "long", **given, resume=True)
    reference = at_home(tmp_path / "reference", engine="serial", **settings)
    deployed.finished(tmp_path / "run")
    assert 0 < done < 4
    assert same(tmp_path / "run", reference)


def admitted(deployed: Deployment) -> bool:
    """Start SuperNode 1 again; a SuperLink takes it for alive for a minute after it was killed, and turns it away."""
    before = len(deployed.log("node1"))
    node = deployed.node(1, clients=SITES[1])
    waited(lambda: node.poll() is not None or "SuperNode ID" in deployed.log("node1")[before:], 180, "SuperNode 1")
    if node.poll() is None:
        return True
    kill(node)
    return False


def test_nodes_that_fail_are_refused_and_come_back(deployed: Deployment, tmp_path: Path) -> None:
    """SuperNode 1 is killed in round 2 and started again; SuperNode 2 is late in round 3, and then sends garbage."""
    timeout = 45 * PATIENCE
    make_app(tmp_path / "failing", clients=3, failing=timeout)
    out = tmp_path / "run"
    before = len(deployed.log("node1"))
    deployed.run(tmp_path / "failing", method="scaffold", rounds=9, out=str(out), timeout=timeout)
    waited(lambda: "ROUND 2]" in deployed.log("node1")[before:], 360, "round 2")
    kill(deployed.nodes[1])
    waited(lambda: rounds_written(out) >= 2, 180, "the end of round 2")
    waited(lambda: admitted(deployed), 360, "SuperNode 1's return")
    deployed.finished(out)
    rows = metrics(out)
    refused = [{row["client"]: row["why"] for row in line["refused"]} for line in rows]
    assert refused[0] == {}
    assert refused[1] in ({1: "it did not answer in time"}, {1: "its SuperNode is not connected"})
    assert refused[2][2] == "it did not answer in time"
    garbage = [line[2] for line in refused[3:5] if line.get(2) != "it did not answer in time"]  # it may still be busy
    assert garbage
    assert all("not that of answer" in why for why in garbage)
    assert "it has lost what it remembered, and will begin anew" in [line.get(1) for line in refused]
    assert refused[-1] == {}
    assert all(0 not in line for line in refused)
