"""Actors of a Ray cluster: the same bits as one client after the other, whoever dies in between."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core import own_code
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.engines import cluster, pool
from fedstrata.engines import ray as actors
from fedstrata.engines.tensor_store import OwnMemory, SegmentedMemory, SharedMemory, plan_layout
from fedstrata.run import deal, models_of, open_run, resume_run
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Limit
from tests.engines.worlds import EIGHT, check_same, convnet, federation, flat, pictures, points, run, seeded, staged
from tests.following import OnVisit
from tests.forks import SERVER, write_script
from tests.small_runs import LONG, fedstrata, one_sentence, options, process
from tests.small_runs import config as small

ray = pytest.importorskip("ray", reason="the extra ray is not installed")


FAULTS = "labelflip(clients=(1,)) + inputs(9.0, noise=0.1, clients=(2,)) + stuck(clients=(0, 3)) + ipm(clients=(5,))"

IMPORTS = "import fedstrata.engines.ray, fedstrata.run, jsonschema, requests, tests.contract.standins, tests.small_runs"
"""What Ray's workers import, but for Ray: that reads what a worker is told by its environment when it is imported."""
ADAPTED = ("peft", "transformers.models.bert.modeling_bert")
"""And for adapters, where they are installed: each worker would take longer for them than for all the rest."""
RUN_WORKER = """
import runpy
from ray._private.workers.setup_worker import parser
_, sys.argv = parser.parse_known_args(sys.argv)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""What Ray's own script for it does, but for another start of Python."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Path]:
    """A script that starts Ray's workers as forks of one process: each would import Ray twice, and torch once."""
    path = os.pathsep.join([*filter(None, sys.path), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # paths of sockets must be short
        listens, script = Path(place, "forks"), Path(place, "worker.py")
        write_script(script, str(listens))
        there = all(importlib.util.find_spec(name.partition(".")[0]) for name in ADAPTED)
        imports = "; ".join([IMPORTS, *(f"import {name}" for name in ADAPTED if there)])
        command = [sys.executable, "-c", SERVER, str(listens), imports, RUN_WORKER]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as server:
            end = time.monotonic() + LONG
            while not listens.exists():
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield script
            server.kill()


@pytest.fixture(scope="module")
def nodes(forks: Path) -> Iterator[Any]:
    """One Ray for all tests here: starting it takes longer than any of them.

    `test_the_command_joins_a_cluster_that_asks_for_a_token` has one that starts everything as Ray does.
    """
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    head = {"num_cpus": 4, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    made = Cluster(initialize_head=True, head_node_args={**head, "setup_worker_path": str(forks)})
    ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def on_ray(nodes: Any) -> Iterator[dict[str, Any]]:
    """Settings of a federation on the cluster that this program has joined; no actor is left behind."""
    yield {"engine": "ray", "ray_address": "auto", "ray_cpus": 0.5}
    end = time.monotonic() + LONG
    while ray.available_resources().get("CPU") != 4 and time.monotonic() < end:
        time.sleep(0.1)
    assert ray.available_resources().get("CPU") == 4


# The same bits -------------------------------------------------------------------------------------------------------


def images() -> dict[str, Any]:
    clients = [pictures(size, seed) for seed, size in enumerate((7, 9, 6, 11))]
    return {"model": convnet(), "clients": clients, "test": pictures(20, 99), "participation": 3, "rounds": 3}


class Widen(nn.Module):
    """Goes on in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def two_types() -> nn.Module:
    """Parameters of two types, more of them than an actor's memory has room for at first."""
    model: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(6, 400), Widen(), nn.Linear(400, 4, dtype=torch.float64)))
    return model


class Both(nn.Module):
    """Takes two inputs by name, and gives its answer in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(7, 1)

    def forward(self, points: Tensor, sites: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([self.body(points).relu(), sites], 1))}


def numbers(size: int, seed: int) -> Any:
    x, _ = points(size, seed)
    return {"points": x, "sites": x[:, :2].square()}, x.sum(1)


def named_inputs() -> dict[str, Any]:
    """A regression on two inputs, with tests of the clients' own."""
    clients = [numbers(9 + seed, seed) for seed in range(5)]
    return {
        "model": seeded(Both),
        "clients": clients,
        "test": numbers(20, 99),
        "task": "regression(loss='huber')",
        "method": "scaffold",
        "holdout": 0.2,
    }


COMING = "slow*2(up='1kB/s', flops='5k/s'); fast*3(flops='50k/s', available='daily(p=0.5, hours=0.001)'); a"


def mixed(method: str) -> dict[str, Any]:
    shallow = staged("first", "norm", "relu", "head")
    return {
        "model": staged(),
        "archs": {"shallow": shallow},
        "arch_of": lambda client: "shallow" if client % 2 else "",
        "method": method,
    }


@pytest.mark.parametrize(
    ("world", "workers"),
    [
        (lambda: {**images(), "method": "fedavg(buffers='local') + fedpart(warmup=1) + fednlr"}, 1),
        (lambda: {"model": two_types(), "method": fs.chain(Scaffold(), Limit(limit=0.05)), "participation": 1.0}, 2),
        (lambda: {"model": staged(), "method": f"{EIGHT} + topk(share=0.5) + quantise(bits=4)", "rounds": 5}, 2),
        (lambda: mixed("inco"), 1),
        (lambda: mixed("groupavg"), 1),
        (named_inputs, 1),
        (lambda: {"faults": FAULTS, "participation": 1.0}, 2),
        (lambda: {"method": "fedbuff(buffer=2) + moon", "fleet": COMING, "participation": 3, "rounds": 5}, 2),
    ],
    ids=[
        "batch norm and fedpart",
        "two types and scaffold",
        "ten techniques",
        "inco",
        "groupavg",
        "named inputs",
        "faults",
        "updates as they arrive",
    ],
)
def test_the_same_bits(world: Any, workers: int, on_ray: dict[str, Any]) -> None:
    found, wanted = run(**world(), **on_ray, workers=workers), run(**world(), engine="serial")
    check_same(found, wanted)
    assert (found.state.clock, found.state.flights) == (wanted.state.clock, wanted.state.flights)


def test_the_same_bits_of_adapters(tmp_path: Path, on_ray: dict[str, Any]) -> None:
    from tests.tiny_transformers import adapted_texts  # where it is missing, this test alone is skipped

    world = adapted_texts(tmp_path)
    found, wanted = (open_run(small(**world, **how), None) for how in ({**on_ray, "workers": 2}, {"engine": "serial"}))
    for fed in (found, wanted):
        fed.fit()
    check_same(found, wanted)


@pytest.mark.parametrize("kind", [OwnMemory, SharedMemory])
def test_what_is_written_to_tensors_of_two_types_stays(kind: type[SegmentedMemory]) -> None:
    """Also where the segment grows as they are read: all of them are in what it has become."""
    memory = kind()
    layout, _ = plan_layout(
        {"a": torch.empty(3000), "b": torch.empty(3000, dtype=torch.float64), "c": torch.empty(0)}, 64
    )
    for tensor in memory.read(0, layout).values():
        tensor.fill_(7)
    assert all((tensor == 7).all() for tensor in memory.read(0, layout).values())
    assert memory.read(1, ()) == {}


class Shy(fs.TensorExamples):
    """Examples of a class of the user's own: Ray carries them as they are."""


def test_nothing_is_sent_twice_and_few_updates_are_held(
    on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every actor is sent a client's examples once, and the server's tensors are put once per round for all clients.

    Few of so many clients' updates are in the main process at a time.
    """
    puts: list[int] = []
    sent: list[int] = []
    put, pack = ray.put, actors.pack_examples
    monkeypatch.setattr(ray, "put", lambda value: puts.append(0) or put(value))  # type: ignore[func-returns-value]
    monkeypatch.setattr(actors, "pack_examples", lambda data: sent.append(len(data)) or pack(data))  # type: ignore[func-returns-value]
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    clients: list[Any] = flat(*range(3, 43))
    clients[3] = Shy(*clients[3])
    clients[4] = partial(points, 7, 4)
    settings: dict[str, Any] = {"clients": clients, "participation": 1.0, "rounds": 4, "test": points(13, 99)}
    fed = federation(**settings, **on_ray, workers=1, ray_gpus=0)
    waiting = watch(fed, monkeypatch)
    assert fed.clients[4]._made is None  # type: ignore[attr-defined]
    fed.fit()
    assert fed.clients[4]._made is None  # type: ignore[attr-defined]
    assert sorted(sent) == [*range(3, 14), 13, *range(14, 43)]  # forty clients, and the test set
    assert len(puts) == 1 + 5  # the context; the first parameters, and those of each round, evaluated and sent out
    assert len(waiting) == 4 * 40
    assert max(waiting) <= pool.AHEAD
    check_same(fed, run(**settings, engine="serial"))


def watch(fed: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates wait for their turn in the main process whenever a client is sent to an actor."""
    waiting: list[int] = []
    inside = fed._engine._train_job  # type: ignore[attr-defined]

    def watched(group: Any, asked: Any, recall: Any, arrived: dict[int, Any]) -> Any:
        waiting.append(len(arrived))
        return inside(group, asked, recall, arrived)

    monkeypatch.setattr(fed._engine, "_train_job", watched)
    return waiting


def test_only_a_clients_own_rows_are_sent() -> None:
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 3
    whole = fs.TensorExamples(x, y)
    rows = actors.pack_examples(whole.split([torch.tensor([3, 7, 5]), torch.tensor([1])])[0])
    assert isinstance(rows, actors.Rows)
    assert rows.x.shape == (3, 2)
    back = rows.open()
    assert torch.equal(back.x, x[[3, 7, 5]])
    assert torch.equal(back.labels(), y[[3, 7, 5]])
    strange = fs.TensorExamples(x.bfloat16(), y).select(torch.tensor([2]))
    kept = actors.pack_examples(strange)
    assert isinstance(kept, fs.TensorExamples)
    assert len(kept.x) == 1


# Deaths and exceptions -----------------------------------------------------------------------------------------------


def once(marker: Path) -> bool:
    """True for the first who asks, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Doomed(Technique):
    """Ends its process when a certain client is visited elsewhere: the first time, or every time."""

    name: ClassVar[str] = "doomed"
    main: int
    client: int = 2
    marker: str = ""

    def local(self, view: ClientView) -> Hooks:
        dies = view.assignment.client == self.client and os.getpid() != self.main
        if dies and (not self.marker or once(Path(self.marker))):
            os.kill(os.getpid(), signal.SIGKILL)
        return Hooks()


def test_an_actor_that_dies_leaves_no_trace(tmp_path: Path, on_ray: dict[str, Any]) -> None:
    """In the middle of a visit, or killed from outside between two of the next round; the run's notes tell it.

    With memories and states, which must not be written twice.
    """
    doomed = Doomed(main=os.getpid(), marker=str(tmp_path / "dead"))
    settings: dict[str, Any] = {"participation": 1.0, "method": fs.chain(Scaffold(), Limit(limit=0.05), doomed)}
    fed = federation(**settings, **on_ray, workers=2)
    killed = []

    def kill(done: int, total: int) -> None:
        if done >= 2 and fed.state.round == 1 and not killed:  # updates of a job come together
            victim = fed._engine._workers[0]  # type: ignore[attr-defined]
            ray.kill(victim.handle)
            killed.append(victim)

    fed.fit(OnVisit(kill))
    assert (tmp_path / "dead").exists()
    assert len(killed) == 1
    check_same(fed, run(**settings, engine="serial"))
    (note,) = [note for note in fed.summary()["notes"] if "round 1: " in note and "died" in note]
    # On a busy machine the answer of the visit before may be lost too: then it is that client's.
    told = r"round 1: client [23]: its Ray actor died \(worker process has died\) and was replaced"
    assert re.fullmatch(told, note)


def test_a_node_that_dies(on_ray: dict[str, Any], nodes: Any, forks: Path) -> None:
    """With it an actor, for which there is no other room: the rest go on without."""
    node = nodes.add_node(num_cpus=3, setup_worker_path=str(forks))
    settings: dict[str, Any] = {"participation": 1.0, "method": fs.chain(Scaffold()), "rounds": 4}
    fed = federation(**settings, **{**on_ray, "ray_cpus": 3}, workers=2)
    for record in fed.rounds():
        if record.round == 1:
            while not all(worker.start is None for worker in fed._engine._workers):  # type: ignore[attr-defined]
                fed._engine._wait()  # type: ignore[attr-defined]
            nodes.remove_node(node, allow_graceful=False)
    check_same(fed, run(**settings, engine="serial"))
    assert any("its Ray actor died" in note for note in fed.notes)


def test_a_client_that_kills_every_actor(on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_DEATHS", 2)
    fed = federation(participation=1.0, method=fs.chain(Doomed(main=os.getpid(), client=3)), **on_ray, workers=1)
    with pytest.raises(fs.FedstrataError, match=r"client 3: its Ray actor died 2 times \(worker process has died\)"):
        fed.fit()
    assert fed.state.round == 0


class Wrong:
    """A client's examples; reading them elsewhere raises, as long as a file is there."""

    def __init__(self, data: tuple[Tensor, Tensor], marker: Path) -> None:
        self.x, self.y, self.marker, self.main = *data, marker, os.getpid()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.getpid() != self.main and self.marker.exists():
            raise LookupError("row 3 is unreadable")
        return self.x[index], int(self.y[index])


def test_an_exception_reaches_the_main_process_and_the_run_can_go_on(tmp_path: Path, on_ray: dict[str, Any]) -> None:
    marker = tmp_path / "armed"
    clients: list[Any] = flat()
    clients[2] = Wrong(clients[2], marker)
    settings: dict[str, Any] = {"clients": clients, "participation": 1.0, "rounds": 3, "eval_every": 3}
    fed = federation(**settings, **on_ray, workers=1, out=tmp_path / "run")

    def arm(record: fs.Record) -> None:
        if record.round == 1:
            marker.touch()

    with pytest.raises(LookupError, match="row 3 is unreadable") as error:
        fed.fit(arm)
    assert type(error.value) is LookupError
    notes = "".join(error.value.__notes__)
    assert "in a Ray actor" in notes
    assert "__getitem__" in notes  # it says where
    marker.unlink()
    resumed = run(**settings, engine="processes", workers=1, out=tmp_path / "run", resume=True)
    check_same(resumed, run(**settings, engine="serial"))
    fed.fit()  # and so does the very object, with new actors
    check_same(fed, resumed)


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.low, self.head = torch.nn.Linear(192, 6), torch.nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.low(x.flatten(1)).relu())
"""


@pytest.fixture
def own_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model in a module of one's own, which is not in the working directory, of a name that no actor knows yet."""
    name = f"own_net_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_open", {})
    yield f"python('{tmp_path}/code/{name}:Net')"
    sys.modules.pop(name, None)


def test_a_model_of_ones_own_is_found_from_another_directory(
    own_net: str, on_ray: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run, and by one that is resumed."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = {"model": own_net, "rounds": 2, "workers": 1}
    begun = open_run(small(**given, **on_ray), tmp_path / "run")
    with closing(begun.rounds()) as rounds:
        assert next(rounds).round == 1
    begun.close()
    own_code._open.clear()
    check_same(fitted(resume_run(tmp_path / "run")), fitted(open_run(small(**given, engine="serial"), None)))


def fitted(fed: fs.Federation) -> fs.Federation:
    fed.fit()
    return fed


def test_a_node_without_the_users_module(own_net: str, on_ray: dict[str, Any], tmp_path: Path) -> None:
    """One sentence, and nothing is written."""
    config = small(model=own_net, rounds=1, workers=1, **on_ray)
    dataset, _ = deal(config)
    models_of(config, dataset)  # this process has imported it
    (tmp_path / "code").rename(tmp_path / "moved")
    module = own_net.split("'")[1].rpartition("/")[2].partition(":")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_code, "_file_of", lambda folder, name: Path(sys.modules[module].__file__ or ""))
        with pytest.raises(fs.UsageError, match=r"Ray's node [\d.]+ cannot read model or data: .*") as error:
            open_run(config, tmp_path / "run")
    assert f"No module named '{module}'" in str(error.value)
    assert str(error.value).endswith(f"modules of your own must be at every node, in {tmp_path}/code")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_sent(on_ray: dict[str, Any]) -> None:
    """One sentence that names the reason."""
    clients: list[Any] = flat()
    clients[1] = Locked(clients[1])
    fed = federation(clients=clients, participation=1.0, **on_ray, workers=1)
    with pytest.raises(fs.UsageError, match="model or data cannot be handed to Ray's actors") as error:
        fed.fit()
    assert "\n" not in str(error.value)


class Locked(Wrong):
    """Examples that cannot be pickled."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        super().__init__(data, Path("/nowhere"))
        self.lock = threading.Lock()


def test_a_cluster_without_room(on_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing will ever fit, a run gives up sooner than where it has to wait for its turn."""
    monkeypatch.setattr(actors, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(actors, "START_SECONDS", 1.0)
    fed = federation(**{**on_ray, "ray_cpus": 64}, workers=1)
    with pytest.raises(
        fs.UsageError,
        match=r"in \d+ seconds: each wants ray_cpus = 64 .* has \d+ CPUs and 0 GPUs, \d+ and 0 of them free",
    ):
        fed.fit()
    monkeypatch.setattr(actors, "BUSY_SECONDS", 2.0)
    with taken(4), pytest.raises(fs.UsageError, match=r"in \d+ seconds: .* of them free"):
        federation(**on_ray, workers=1, rounds=1).fit()
    monkeypatch.setattr(actors, "START_SECONDS", 0.0)
    monkeypatch.setattr(actors, "BUSY_SECONDS", float(LONG))
    assert federation(**on_ray, workers=1, rounds=1).fit().records


@contextmanager
def taken(cpus: int) -> Iterator[None]:
    """Somebody else uses the cluster."""
    there = ray.util.placement_group([{"CPU": cpus}])
    try:
        ray.get(there.ready())
        yield
    finally:
        ray.util.remove_placement_group(there)


def test_closed_before_the_first_round(on_ray: dict[str, Any], tmp_path: Path) -> None:
    """By the user, or because a run is finished already; whether the cluster is known as auto or by its HOST:PORT."""
    there = {**on_ray, "ray_address": ray.get_runtime_context().gcs_address}
    for address in (on_ray, there):
        fed = federation(rounds=1, workers=1, **address, out=tmp_path / address["ray_address"])
        fed.close()
        fed.close()
    fed.fit()
    for address in (on_ray, there):
        finished = federation(rounds=1, workers=1, **address, out=tmp_path / there["ray_address"], resume=True)
        finished.fit()
        check_same(finished, fed)


# Addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "here", "ray://host:1", "host", "host:port", "host:1:2"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(fs.UsageError, match=r"ray_address = .* does not fit: give local, auto or the HOST:PORT"):
        federation(engine="ray", ray_address=address)


def test_nobody_at_the_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence and exit code 2, at once, and nothing is written; whether nobody answers or somebody else does."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    begin = time.monotonic()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        command = ("run", *options(), "--engine", "ray", "--workers", "1", "--out", tmp_path / "run")
        assert fedstrata(*command, "--ray-address", address) == 2
    assert one_sentence(capsys).startswith(f"there is no Ray cluster at {address}: ")
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - begin < 20


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of somebody who says always the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as pipe:
                        pipe.recv(4096)
                        pipe.sendall(answer)
                        pipe.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a server of HTTP/2 begins."""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "timed out"),
        (b"220 mail.example ESMTP", "something else answers there"),
        (SETTINGS, "something else answers there"),
        (SETTINGS + b"\x0bgrpc-status\x0212", "something else answers there"),
    ],
    ids=["nothing", "another protocol", "HTTP/2", "gRPC"],
)
def test_somebody_else_at_the_address(answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.5)
    says = pytest.raises(fs.UsageError, match=f"there is no Ray cluster at .*: {why}")
    with answering(answer) as address, says:
        cluster._ask(address)


def test_lengths_in_headers() -> None:
    """The examples of HPACK's specification (RFC 7541, C.1), for seven bits: 1337 - 127 = 1210 = 9 · 128 + 58."""
    assert [*cluster._length(10)] == [10]
    assert [*cluster._length(126)] == [126]
    assert [*cluster._length(127)] == [127, 0]
    assert [*cluster._length(1337)] == [127, 128 + 58, 9]


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a token: where it is."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_where_a_token_is(no_token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Ray's order, the last first."""
    assert cluster._read_token() == ""
    (no_token / ".ray").mkdir()
    (no_token / ".ray/auth_token").write_text("home\n")
    assert cluster._read_token() == "home"
    (no_token / "file").write_text("file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(no_token / "file"))
    assert cluster._read_token() == "file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "told")
    assert cluster._read_token() == "told"


@pytest.mark.parametrize(
    ("theirs", "ours", "mode", "agreed"),
    [
        ("", "", None, None),
        ("", "a", None, None),  # with the token of a Ray of our own, say: no actor could answer
        ("", "a", "disabled", "disabled"),
        ("", "a", "token", "was started without a token: unset RAY_AUTH_MODE"),
        ("a", "a", None, "token"),
        ("a", "a", "token", "token"),
        ("a", "", "token", "token"),  # Ray may know another place
        ("a", "", None, r"asks for a token, and there is none: .*ray get-auth-token"),
        ("a", "b", None, r"asks for a token, and refuses the one that is here: .*ray get-auth-token"),
        ("a", "a", "disabled", "asks for a token, but RAY_AUTH_MODE = disabled"),
    ],
)
def test_a_token_is_used_where_it_is_asked_for(
    theirs: str, ours: str, mode: str | None, agreed: str | None, no_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is put back
    monkeypatch.delenv("RAY_AUTH_MODE")
    for name, value in (("RAY_AUTH_TOKEN", ours), ("RAY_AUTH_MODE", mode)):
        if value:
            monkeypatch.setenv(name, value)

    def ask(address: str, token: str = "") -> int:
        return cluster.OPEN if theirs in ("", token) else cluster.ASKS

    monkeypatch.setattr(cluster, "_ask", ask)
    if agreed in (None, "token", "disabled"):
        cluster._choose_mode(None, "host:1")
        assert os.environ.get("RAY_AUTH_MODE") == agreed
    else:
        with pytest.raises(fs.UsageError, match=f"the Ray cluster at host:1 {agreed}"):
            cluster._choose_mode(None, "host:1")
        assert os.environ.get("RAY_AUTH_MODE") == mode


def test_the_cluster_that_auto_means_is_asked_too(no_token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would use a token there because this machine has one, whether the cluster asks for it or not."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.9:6379")
    assert cluster._find_running(ray) == "192.0.2.9:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://192.0.2.9:10001")
    assert cluster._find_running(ray) == "auto"  # another protocol, which is left to Ray


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def started(home: Path) -> Iterator[str]:
    """The address of a cluster that the command `ray start` has made."""
    port = free_port()
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place:
        command = f"ray start --head --block --num-cpus 1 --include-dashboard false --disable-usage-stats --port {port}"
        words = [*command.split(), "--ray-client-server-port", str(free_port()), "--temp-dir", place]
        path = os.pathsep.join(map(str, (Path(fs.__file__).parents[1], Path(__file__).parents[2])))
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": path}
        code = "from ray.scripts.scripts import main; main()"
        with open(home / "head.log", "w") as log:
            head = subprocess.Popen(
                [sys.executable, "-c", code, *words[1:]],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + LONG
            while "Ray runtime started" not in (home / "head.log").read_text():
                assert head.poll() is None, (home / "head.log").read_text()
                assert time.monotonic() < end, (home / "head.log").read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            with suppress(subprocess.TimeoutExpired):
                head.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            head.wait()


@pytest.mark.slow
def test_the_command_joins_a_cluster_that_asks_for_a_token(no_token: Path) -> None:
    """With the token that is here, and nothing on standard error; without it one sentence says what is missing."""
    home, token = no_token / "home", "0123456789abcdef" * 10
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(token)
    with started(home) as address:
        with pytest.raises(fs.UsageError, match=f"{address} asks for a token, and there is none: "):
            cluster._choose_mode(None, address)
        assert cluster._ask(address, "wrong") == cluster.ASKS
        assert cluster._ask(address, token) == cluster.OPEN
        shutil.copytree(home / ".ray", no_token / ".ray")
        command = ("run", *options(rounds=1), "--engine", "ray", "--workers", "1", "--ray-address", address)
        member = process(*command, "--out", "run", cwd=no_token)
        try:
            _, error = member.communicate(timeout=LONG)
        finally:
            member.kill()
        assert (member.returncode, error) == (0, "")


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(fs.UsageError, match=r"pip install 'fedstrata\[ray\]'"):
        federation(engine="ray")


def test_another_cluster_than_the_one_that_was_joined(on_ray: dict[str, Any]) -> None:
    joined = ray.get_runtime_context().gcs_address
    assert federation(**{**on_ray, "ray_address": joined}).engine == "ray"
    with pytest.raises(fs.UsageError, match="this program has joined the Ray cluster"):
        federation(**{**on_ray, "ray_address": "127.0.0.1:1"})
    room = int(ray.cluster_resources()["CPU"] / 0.5)  # eight, and more as long as Ray thinks that a dead node lives
    assert federation(**on_ray, workers="auto").workers == room >= 8
