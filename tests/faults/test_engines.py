"""Runs with faults have the same bits on every engine, for any number of workers, and after a resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.faults import parse_faults
from fedstrata.runs.client_memory import pack_memory, unpack_memory
from fedstrata.runs.files import read_sealed, write_sealed
from fedstrata.runs.reader import SavedRun
from tests.engines.worlds import check_same, federation, points, records, run, tensors
from tests.faults.rows import ROWS

EACH = pytest.mark.parametrize("faults", ROWS)


def world(**more: Any) -> dict[str, Any]:
    """Everybody takes part, so that every client that is hit is there."""
    return {"participation": 1.0, "rounds": 3, **more}


@cache
def clean() -> fs.Federation:
    return run(**world())


@cache
def reference(faults: str) -> fs.Federation:
    return run(**world(faults=faults))


@EACH
def test_a_fault_does_something(faults: str) -> None:
    hit, honest = reference(faults), clean()
    assert any(not torch.equal(hit.state.params[n], p) for n, p in honest.state.params.items())


@EACH
def test_worker_processes_and_the_wire(faults: str) -> None:
    check_same(run(**world(faults=faults, engine="processes", workers=2)), reference(faults))
    check_same(run(**world(faults=faults, engine="wire")), reference(faults))


@EACH
def test_many_clients_at_once(faults: str) -> None:
    """Equal to one by one up to rounding, and the same bits for any number of workers."""
    alone, several = (run(**world(faults=faults, engine="vmap", workers=workers)) for workers in (1, 2))
    check_same(several, alone)
    pairs = [(p, reference(faults).state.params[n]) for n, p in alone.state.params.items()]
    assert all(torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4) for ours, theirs in pairs)
    assert [r["refused"] for r in records(alone)] == [r["refused"] for r in records(reference(faults))]


@EACH
def test_a_resumed_run(faults: str, tmp_path: Path) -> None:
    stopped = federation(**world(faults=faults, out=tmp_path / "run", checkpoint_seconds=0))
    rounds = stopped.rounds()
    next(rounds)
    rounds.close()
    resumed = federation(**world(faults=faults, out=tmp_path / "run", checkpoint_seconds=0, resume=True))
    resumed.fit()
    check_same(resumed, reference(faults))


@pytest.mark.parametrize("method", ["scaffold", "feddyn + moon", "fedpart(full_rounds=1, rounds_per_stratum=1)"])
@pytest.mark.parametrize("faults", ["stuck(clients=(0, 1)) + signflip(clients=(2,))", "alie(share=0.4)"])
def test_clients_that_remember_more(faults: str, method: str, tmp_path: Path) -> None:
    """What a fault remembers stands beside what techniques do, and neither gets into the other's way."""
    settings = world(faults=faults, method=method, rounds=4, buffers="local")
    whole = run(**settings)
    assert whole.records[-1].refused == []
    stopped = federation(**settings, out=tmp_path / "run", checkpoint_seconds=0, engine="processes", workers=2)
    rounds = stopped.rounds()
    next(rounds), next(rounds)
    rounds.close()
    resumed = federation(**settings, out=tmp_path / "run", checkpoint_seconds=0, resume=True, engine="wire")
    resumed.fit()
    check_same(resumed, whole)


@pytest.mark.parametrize("faults", ["signflip(share=0)", "labelflip(share=0) + alie(share=0) + stuck(share=0.0)"])
@pytest.mark.parametrize("engine", ["serial", "vmap"])
def test_a_share_of_nobody_is_no_fault(faults: str, engine: str) -> None:
    check_same(run(**world(faults=faults, engine=engine)), run(**world(engine=engine)))


def test_nobody_else_is_touched() -> None:
    """The first round's updates of clients that are not hit have the bits of a run without faults."""
    seen: dict[str, dict[int, Any]] = {}
    for faults in (None, "signflip(clients=(1,)) + labelflip(clients=(3,)) + ipm(clients=(4,))"):
        fed = federation(**world(faults=faults, rounds=1))
        original, found = fed._engine.run, seen.setdefault(str(faults), {})

        def overheard(assignments: Any, recall: Any, original: Any = original, found: Any = found) -> Any:
            for update, memory in original(assignments, recall):
                found[update.client] = {n: t.clone() for n, t in update.delta.items()}
                yield update, memory

        fed._engine.run = overheard  # type: ignore[method-assign]
        fed.fit()
    honest, hit = seen.values()
    for client in range(6):
        same = all(torch.equal(honest[client][n], t) for n, t in hit[client].items())
        assert same == (client not in (1, 3, 4))


def test_a_memory_that_was_edited_is_refused(tmp_path: Path) -> None:
    settings = world(faults="stuck(clients=(2,))", out=tmp_path / "run", checkpoint_seconds=0)
    stopped = federation(**settings)
    rounds = stopped.rounds()
    next(rounds)
    rounds.close()
    path = tmp_path / "run" / "memory" / "2-0.memory"
    memory = unpack_memory(read_sealed(path))
    assert list(memory) == ["(fault 0)"]
    for wrong, why in (({"0.weight": torch.zeros(2)}, "another shape"), ({"x": torch.zeros(2)}, "nothing as 'x'")):
        write_sealed(path, pack_memory({"(fault 0)": wrong}))
        with pytest.raises(fs.UsageError, match=why):
            federation(**settings, resume=True).fit()


def test_a_run_goes_on_with_the_faults_that_it_began_with(tmp_path: Path) -> None:
    fed = federation(**world(faults="signflip", out=tmp_path / "run"))
    next(iter(fed.rounds()))
    fed.close()
    with pytest.raises(fs.UsageError, match="faults"):
        federation(**world(faults="signflip(scale=2)", out=tmp_path / "run", resume=True))
    with pytest.raises(fs.UsageError, match="faults"):
        federation(**world(out=tmp_path / "run", resume=True))


def test_the_directory_knows_who_was_hit(tmp_path: Path) -> None:
    """The facts do; neither the notes nor the records say it."""
    fed = run(**world(faults="signflip(share=0.4) + drop(1.0, clients=(5,))", out=tmp_path / "run"))
    saved = SavedRun.read(tmp_path / "run")
    told = saved.facts["faults"]
    assert [row["fault"] for row in told] == ["signflip(share=0.4)", "drop(rate=1.0, clients=(5,))"]
    assert len(told[0]["clients"]) == 2 and told[1]["clients"] == [5]  # noqa: PT018
    assert saved.config["faults"] == "signflip(share=0.4) + drop(rate=1.0, clients=(5,))"
    assert any("faults on purpose: signflip(share=0.4) (2 clients), drop" in note for note in fed.notes)
    assert all(r.refused == [{"client": 5, "why": "it did not come"}] for r in fed.records)


def test_an_engine_of_ones_own() -> None:
    """It is hit like any other, but for the data, which it has itself."""

    class Own:
        def __init__(self, fed: fs.Federation) -> None:
            self._engine = fed._engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    own = run(**world(faults="signflip(clients=(0,))", engine=Own(federation(**world()))))
    check_same(own, run(**world(faults="signflip(clients=(0,))")))
    with pytest.raises(fs.UsageError, match="an engine of your own"):
        federation(**world(faults="labelflip(clients=(0,))", engine=Own(federation(**world()))))


def test_one_party_with_everybodys_data() -> None:
    with pytest.raises(fs.UsageError, match="one party"):
        federation(**world(faults="signflip", method="centralised"))
    spoilt = run(**world(faults="labelflip", method="centralised"))
    honest = run(**world(method="centralised"))
    assert any(not torch.equal(t, tensors(honest)[n]) for n, t in tensors(spoilt).items())


def test_probes_see_what_the_server_sees() -> None:
    """The mean cosine of two clients' changes is that of what they send."""
    clients = [points(20, 0), points(20, 0)]
    for faults, sign in ((None, 1), ("signflip(clients=(1,))", -1)):
        fed = run(clients=clients, participation=1.0, rounds=1, faults=faults, probe="cosine")
        values = fed.probes[0]["cosine"].values()
        assert all(value * sign > 0 for value in values)


def test_faults_read_back() -> None:
    for row in ROWS:
        faults = parse_faults(row)
        assert parse_faults(" + ".join(map(str, faults))) == faults
