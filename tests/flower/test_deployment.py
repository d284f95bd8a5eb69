"""A real deployment: SuperLink and SuperNodes as processes with TLS and keys; it takes minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.deployment import PATIENCE, Deployment, make_app
from tests.flower.worlds import CHAIN, EIGHT, at_home
from tests.small_runs import metrics, same

pytestmark = pytest.mark.slow
COUNTED = True
ONCE = EIGHT.replace("full_rounds=1", "full_rounds=1, rounds_per_stratum=1")
LINKED = {**CHAIN, "method": ONCE, "rounds": 5, "participation": 3}
"""A round with all strata, and one with each; every visit starts a process that imports everything."""


def test_eight_techniques_have_the_bits_of_serial(deployed: Deployment, tmp_path: Path) -> None:
    make_app(tmp_path / "chain")
    deployed.run(tmp_path / "chain", **LINKED, out=str(tmp_path / "run"), timeout=60 * PATIENCE)
    reference = at_home(tmp_path / "reference", engine="serial", **LINKED)
    deployed.finished(tmp_path / "run")
    rows = metrics(reference)
    assert len({stratum for row in rows[1:] for stratum in row["active"]}) == len(rows[0]["active"]) == 4
    visits = Counter(client for row in rows for client in row["clients"])
    assert max(visits.values()) > 1  # somebody remembers something
    assert same(tmp_path / "run", reference)


def test_bytes_on_the_socket_are_those_accounted_for(deployed: Deployment, tmp_path: Path) -> None:
    """FedPart: one round with all strata, three with one each; all that Flower and TLS add is below 5 %."""
    make_app(tmp_path / "part", width=400, clients=3)
    out = tmp_path / "run"
    counter = deployed.counter
    assert counter is not None
    before = counter.up, counter.down
    settings = {"method": "fedpart(full_rounds=1, rounds_per_stratum=1)", "rounds": 4, "eval_every": 4}
    deployed.run(tmp_path / "part", **settings, out=str(out), timeout=60 * PATIENCE)
    deployed.finished(out)
    rows = metrics(out)
    assert not any(row["refused"] for row in rows)
    assert all(row["bytes_up"] < rows[0]["bytes_up"] / 2.5 for row in rows[1:])
    for counted, name in (
        (counter.up - before[0], "bytes_up"),
        (counter.down - before[1], "bytes_down"),
    ):
        accounted = sum(row[name] for row in rows)
        print(name, accounted, counted, counted / accounted)
        assert 1 <= counted / accounted <= 1.05
