"""A real deployment: SuperLink and SuperNodes as processes with TLS and keys; it takes minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.deployment import PATIENCE, SITES, Deployment, kill, make_app, waited
from tests.flower.worlds import CHAIN, at_home
from tests.runs import metrics, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
        deployment.register(0, 1, 2)
        for number, clients in enumerate(SITES):
            deployment.node(number, clients=clients)
        yield deployment


def test_eight_techniques_have_the_bits_of_serial(deployed: Deployment, tmp_path: Path) -> None:
    make_app(tmp_path / "chain")
    deployed.run(tmp_path / "chain", **CHAIN, out=str(tmp_path / "run"), timeout=60 * PATIENCE)
    reference = at_home(tmp_path / "reference", engine="serial")
    deployed.finished(tmp_path / "run")
    assert same(tmp_path / "run", reference)


def test_bytes_on_the_socket_are_those_accounted_for(deployed: Deployment, tmp_path: Path) -> None:
    """FedPart: one round with all strata, three with one each; all that Flower and TLS add is below 5 %."""
    make_app(tmp_path / "part", width=400, clients=3)
    out = tmp_path / "run"
    before = deployed.counter.up, deployed.counter.down
    settings = {"method": "fedpart(full_rounds=1, rounds_per_stratum=1)", "rounds": 4, "eval_every": 4}
    deployed.run(tmp_path / "part", **settings, out=str(out), timeout=60 * PATIENCE)
    deployed.finished(out)
    rows = metrics(out)
    assert not any(row["refused"] for row in rows)
    assert all(row["bytes_up"] < rows[0]["bytes_up"] / 2.5 for row in rows[1:])
    for counted, name in (
        (deployed.counter.up - before[0], "bytes_up"),
        (deployed.counter.down - before[1], "bytes_down"),
    ):
        accounted = sum(row[name] for row in rows)
        print(name, accounted, counted, counted / accounted)
        assert 1 <= counted / accounted <= 1.05


def test_nodes_that_are_not_admitted(deployed: Deployment, tmp_path: Path) -> None:
    """One without a registered key, one that trusts another authority, one that does not encrypt."""
    from fedstrata.flower.certs import write_certs

    write_certs(tmp_path / "other", [], 0, 1)
    key = ("--auth-supernode-private-key", f"{deployed.keys}/node-3.key")
    right, wrong = (
        ("--root-certificates", f"{deployed.keys}/ca.crt"),
        ("--root-certificates", f"{tmp_path}/other/ca.crt"),
    )
    few = ("--max-retries", "1")
    for name, options in {
        "unregistered": (*right, *key, *few),
        "stranger": (*wrong, "--auth-supernode-private-key", f"{deployed.keys}/node-0.key", *few),
        "insecure": ("--insecure", *few),
    }.items():
        node = deployed.node(3, *options, name=name)
        waited(lambda node=node: node.poll() is not None, 60, name)
        assert node.returncode != 0
        assert "SuperNode ID" not in deployed.log(f"{name}3")


def admitted(deployed: Deployment) -> bool:
    """Start SuperNode 1 again; a SuperLink takes it for alive for a minute after it was killed, and turns it away."""
    before = len(deployed.log("node1"))
    node = deployed.node(1, clients=SITES[1])
    waited(lambda: node.poll() is not None or "SuperNode ID" in deployed.log("node1")[before:], 60, "SuperNode 1")
    if node.poll() is None:
        return True
    kill(node)
    return False


def test_nodes_that_fail_are_refused_and_come_back(deployed: Deployment, tmp_path: Path) -> None:
    """SuperNode 1 is killed in round 2 and started again; SuperNode 2 is late in round 3 and sends garbage then."""
    timeout = 20 * PATIENCE
    make_app(tmp_path / "failing", clients=3, failing=timeout)
    out = tmp_path / "run"
    before = len(deployed.log("node1"))
    deployed.run(tmp_path / "failing", method="scaffold", rounds=10, out=str(out), timeout=timeout)
    waited(lambda: "ROUND 2]" in deployed.log("node1")[before:], 120, "round 2")
    kill(deployed.groups[2])
    waited(lambda: len(metrics(out)) >= 2, 60, "the end of round 2")
    waited(lambda: admitted(deployed), 120, "SuperNode 1's return")
    deployed.finished(out)
    rows = metrics(out)
    refused = [{row["client"]: row["why"] for row in line["refused"]} for line in rows]
    assert refused[0] == {}
    assert refused[1] == {1: "it did not answer in time"}
    assert refused[2][2] == "it did not answer in time"
    assert "garbage" in refused[3][2] or "not that of answer" in refused[3][2]
    assert "it has lost what it remembered, and will begin anew" in [line.get(1) for line in refused]
    assert refused[-1] == {}
    assert all(0 not in line for line in refused)
