"""What a federation asks of its server: bytes per visit, seconds and memory by model, clients per round, population.

    python benchmarks/sizing.py [bytes visits rounds population disk flower million plan]

Clients do not train here: a stand-in answers every assignment at once with an update of the right form, and the time it
takes to make one is left out. All else is what a server does: every assignment is encoded, every answer decoded,
checked, counted and folded, and the state saved. Only `bytes` trains for real. Every measurement has a process of its
own.

bytes       a real run of each method: the lengths of its messages against 4 bytes a number
visits      seconds per visit against parameters, phase by phase, and the line through them
rounds      seconds and peak memory against clients per round, for the mean and for the median
population  what grows with the number of clients that there are
disk        what clients remember, in the run's directory
flower      finding sites, and replies that wait (needs flwr; the grid is a stand-in too)
million     whole rounds of 1,000 and 10,000 out of a million clients
plan        no measurement: what larger ones would take, from the line of `visits` (--ms, --ns, --gigabyte)
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots, Update
from fedstrata.data.examples import Split
from fedstrata.engines.pool import AHEAD, AHEAD_BYTES
from fedstrata.engines.protocol import Recall
from fedstrata.engines.serial import Serial
from fedstrata.flower.engine import Flower, Memories, RemoteExamples
from fedstrata.flower.messages import (
    ClientInfo,
    Greeting,
    TrainReply,
    TrainRequest,
    TrainSettings,
    allowance,
    from_records,
    to_records,
)
from fedstrata.flower.site_directory import SiteDirectory
from fedstrata.flower.transport import Transport
from fedstrata.runs import checkpoint
from fedstrata.runs.client_memory import DirectoryStore
from fedstrata.system.machine import peak_memory
from fedstrata.system.timing import timed

SHAPE, CLASSES, EXAMPLES = (3, 8, 8), 10, 20
AWAY = "away"
"""The phase in which a client would train."""
WIDTHS = {"1e4": 2, "1e5": 6, "1e6": 20, "1e7": 60, "5e7": 134, "2.5e8": 303}
"""About so many parameters → the width of a ResNet-18 (62 weights, 40 running statistics)."""


class StandIn(Serial):
    """An engine whose messages go through their bytes, and whose clients answer without training."""

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        change: Tensors = {}
        for assignment in assignments:
            with timed("encode"):
                wire.encode(assignment)
            with timed(AWAY):
                message = answer(assignment, change)
            with timed("decode"):
                update = wire.decode_update(message)
            yield update, {}


def answer(assignment: Assignment, change: Tensors) -> bytes:
    """An update of the right form, with the same numbers for everybody, which are kept in `change`."""
    rng = generator("sizing")
    for name in assignment.uploads:
        if name not in change:
            change[name] = 1e-6 * torch.randn(assignment.params[name].shape, generator=rng)
    delta = {n: change[n] for n in assignment.uploads}
    update = Update(
        round=assignment.round,
        client=assignment.client,
        method=assignment.method,
        examples=EXAMPLES,
        steps=1,
        delta=delta,
        buffers=dict(assignment.buffers),
        slots=dict.fromkeys(assignment.slots, delta),
        metrics={"train_loss": 1.2345678901234567, "flops": 123456789.0},
    )
    return wire.encode(update)


class Remote(fs.Federation):
    """A federation whose clients are elsewhere, and answer at once."""

    def __init__(self, model: str, clients: Sequence[Any], **settings: Any) -> None:
        module = fs.build_model(model, SHAPE, CLASSES, seed=0)
        super().__init__(module, clients, engine="serial", profile=True, **settings)
        self._engine = StandIn(self._context, self.clients)

    def spans(self, rounds: Iterator[fs.Record]) -> dict[str, float]:
        """Seconds by phase of one more round; `total` is all of them but the clients'."""
        assert self.clock is not None
        self.clock.take()
        begin = time.perf_counter()
        next(rounds)
        whole = time.perf_counter() - begin
        spent = self.clock.take()
        return {**spent, "total": whole - spent[AWAY]}


def sites(count: int) -> list[RemoteExamples]:
    """What the server of a Flower federation holds of its clients."""
    return [RemoteExamples(EXAMPLES, SHAPE, torch.float32) for _ in range(count)]


def shared(count: int) -> Split:
    """As many clients of one dataset on this machine, four examples each."""
    x = torch.zeros(10_000, *SHAPE, dtype=torch.uint8)
    whole = fs.TensorExamples(x, torch.arange(10_000) % CLASSES)
    return Split(whole, (torch.arange(4 * count) % 10_000).int(), np.arange(0, 4 * count + 1, 4))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def watermark() -> int:
    """Bytes of the largest resident set since `lower`."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def lower() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def parameters(model: str) -> int:
    return sum(p.numel() for p in fs.build_model(model, SHAPE, CLASSES, seed=0).parameters())


# ---- bytes ------------------------------------------------------------------------------------------------------


def one_bytes(model: str, method: str, rounds: int) -> dict[str, Any]:
    """Bytes per visit of a real run in which all take part: the mean of the second half, and in the first round."""
    rng = generator("bytes")
    archs = ("resnet10(width=16)", "resnet14(width=16)", "resnet18(width=16)")
    mixed = model == "resnet10, 14, 18"
    shape = (1, 28, 28) if model.startswith("mlp") else (3, 32, 32)
    clients = [
        (torch.randn(4, *shape, generator=rng), torch.randint(0, CLASSES, (4,), generator=rng)) for _ in range(3)
    ]
    modules = [fs.build_model(name, shape, CLASSES, seed=0) for name in (archs if mixed else (model,))]
    settings: dict[str, Any] = {"rounds": rounds, "batch_size": 4, "lr": 1e-3, "engine": "wire"}
    if mixed:
        settings |= {"archs": dict(zip(archs, modules, strict=True)), "arch_of": lambda client: archs[client]}
    federation = fs.Federation(modules[-1], clients, method=method, **settings)
    records = list(federation.rounds())
    numbers = [sum(p.numel() for p in m.parameters()) for m in modules]
    statistics_of = [sum(b.numel() for b in m.buffers() if b.is_floating_point()) for m in modules]
    half = records[rounds // 2 :]
    return {
        "model": model,
        "method": method,
        "P": sum(numbers) / len(numbers),
        "S": sum(statistics_of) / len(modules),
        "first": records[0].bytes_down / 3,
        "down": sum(r.bytes_down for r in half) / 3 / len(half),
        "up": sum(r.bytes_up for r in half) / 3 / len(half),
        "tensors": sum(len(list(m.parameters())) for m in modules) / len(modules),
    }


def closed(row: dict[str, Any]) -> float:
    """4 bytes a number, one way, without heads: parameters P, running statistics S, and control variates."""
    copies = 2 if "scaffold" in row["method"] else 1
    share = (5 + 2) / (5 + 2 * STRATA[row["model"]]) if "fedpart" in row["method"] else 1
    return 4 * share * (copies * row["P"] + row["S"])


STRATA = {"resnet8(width=16)": 10, "mlp(hidden=(64,))": 2}


def bytes_table(options: argparse.Namespace) -> None:
    rows = []
    for model in ("mlp(hidden=(64,))", "resnet8(width=16)"):
        for method in ("fedavg", "feddyn", "fednlr", "scaffold", "fedpart", "scaffold + fedpart"):
            cycle = 5 + 2 * STRATA[model] if "fedpart" in method else 2
            rows.append(ask("one_bytes", model, method, 2 * cycle))
    rows.append(ask("one_bytes", "resnet10, 14, 18", "inco", 4))
    print("| model | method | down | up | 4 bytes a number | heads | down, a newcomer |\n|---|---|--:|--:|--:|--:|--:|")
    for row in rows:
        numbers = closed(row)
        heads = f"{row['down'] - numbers:,.0f}, {row['up'] - numbers:,.0f}"
        sent = " | ".join(f"{size:,.0f}" for size in (row["down"], row["up"], numbers))
        print(f"| {row['model']} | {row['method']} | {sent} | {heads} | {row['first']:,.0f} |")


# ---- visits -----------------------------------------------------------------------------------------------------

PHASES = ("encode", "decode", "check updates", "count bytes", "fold updates", "open the round", "train and close")


def one_visits(model: str, method: str, count: int, rounds: int) -> dict[str, Any]:
    """Seconds per visit, by phase: the median over rounds, after one that is not counted."""
    federation = Remote(model, sites(count), method=method, rounds=rounds + 1)
    running = federation.rounds()
    federation.spans(running)
    before = resident()
    lower()
    spans = [federation.spans(running) for _ in range(rounds)]
    return {
        "P": parameters(model),
        "visits": count,
        "peak": watermark(),
        "before": before,
        **{phase: statistics.median(s[phase] for s in spans) / count for phase in (*PHASES, "total")},
    }


NEAR = 1e8
"""Parameters of a model beyond the line: what its updates take no longer stays with the process, but is faulted in."""


def line_through(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """a and b of a + b·P, the least squares of relative errors, for models up to 200 MB."""
    near = [row for row in rows if row["P"] < NEAR]
    sizes, seconds = (np.array([row[key] for row in near], dtype=float) for key in ("P", "total"))
    design = np.stack([1 / seconds, sizes / seconds], 1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(near)), rcond=None)
    return float(a), float(b)


def visits_table(options: argparse.Namespace) -> None:
    plans = [("1e4", 200, 5), ("1e5", 200, 5), ("1e6", 50, 5), ("1e7", 20, 3), ("5e7", 8, 3), ("2.5e8", 2, 2)]
    head = [
        "parameters",
        "MB",
        *("encode", "decode", "check", "count", "fold", "open", "close"),
        "sum, ms",
        "line",
        "peak, GB",
    ]
    for method in ("fedavg", "scaffold"):
        chosen = plans if method == "fedavg" else plans[:-1]
        rows = [ask("one_visits", f"resnet18(width={WIDTHS[size]})", method, k, r) for size, k, r in chosen]
        a, b = line_through(rows)
        print(f"\n{method}: {1e3 * a:.2f} ms + {1e9 * b:.2f} ns a parameter, {1 / b / 1e6:.0f} million a second\n")
        print(f"| {' | '.join(head)} |\n|{'--:|' * len(head)}")
        for row in rows:
            cells = " | ".join(f"{1e3 * row[phase]:.2f}" for phase in PHASES)
            fitted = f"{1e3 * (a + b * row['P']):.2f}" if row["P"] < NEAR else ""
            seen = f"{4e-6 * row['P']:,.2f} | {cells} | {1e3 * row['total']:.2f} | {fitted} | {row['peak'] / 1e9:.2f}"
            print(f"| {row['P']:,} | {seen} |")


# ---- rounds -----------------------------------------------------------------------------------------------------


def rounds_table(options: argparse.Namespace) -> None:
    print("| method | clients per round | s per round | ms per visit | peak, MB |\n|---|--:|--:|--:|--:|")
    for method in ("fedavg", "fedavg(reduce='median')"):
        for count in (10, 100, 1000):
            row = ask("one_visits", f"resnet18(width={WIDTHS['1e6']})", method, count, 2 if count < 1000 else 1)
            whole = row["total"] * count
            print(f"| {method} | {count:,} | {whole:.2f} | {1e3 * row['total']:.2f} | {row['peak'] / 1e6:,.0f} |")


# ---- population -------------------------------------------------------------------------------------------------


def one_population(kind: str, count: int) -> dict[str, Any]:
    """What a population costs its server, at 50 clients per round."""
    start = resident()
    clients: Sequence[Any] = sites(count) if kind == "sites" else shared(count)
    with tempfile.TemporaryDirectory() as place:
        begin = time.perf_counter()
        federation = _populated(clients, place)
        begun = time.perf_counter() - begin
        found = _cost_of(federation, Path(place) / "run" / "checkpoints")
        memory = resident() - start
        del federation
        begin = time.perf_counter()
        _populated(clients, place, resume=True)
        resumed = time.perf_counter() - begin
    sizes = {"memory_MB": memory / 1e6, "peak_MB": (peak_memory() - start) / 1e6}
    return {"clients": count, "begin_s": begun, "resume_s": resumed, **found, **sizes}


def _populated(clients: Sequence[Any], place: str, **more: Any) -> Remote:
    settings: dict[str, Any] = {"method": "scaffold", "participation": 50, "rounds": 100, "checkpoint_seconds": 1e9}
    return Remote("mlp(hidden=(64,))", clients, out=Path(place) / "run", **settings, **more)


def _cost_of(federation: Remote, checkpoints: Path) -> dict[str, float]:
    running = federation.rounds()
    federation.spans(running)
    spans = [federation.spans(running) for _ in range(30)]
    saving = timed_median(lambda: checkpoint.save(checkpoints, federation.state), 5)
    path = checkpoint.paths(checkpoints)[0]
    loading = timed_median(lambda: checkpoint.load(path), 5)
    running.close()
    phases = ("open the round", "train and close", "write to disk", "total")
    return {
        **{f"{phase}_ms": 1e3 * statistics.median(s[phase] for s in spans) for phase in phases},
        "checkpoint_MB": path.stat().st_size / 1e6,
        "save_ms": 1e3 * saving,
        "load_ms": 1e3 * loading,
    }


def timed_median(action: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def population_table(options: argparse.Namespace) -> None:
    columns = {
        "begin, s": "begin_s",
        "resume, s": "resume_s",
        "open, ms": "open the round_ms",
        "close, ms": "train and close_ms",
        "round, ms": "total_ms",
        "checkpoint, MB": "checkpoint_MB",
        "save, ms": "save_ms",
        "load, ms": "load_ms",
        "memory, MB": "memory_MB",
        "peak, MB": "peak_MB",
    }
    for kind in ("sites", "split"):
        print(f"\n{kind}\n\n| clients | {' | '.join(columns)} |\n|{'--:|' * (len(columns) + 1)}")
        for count in (1_000, 10_000, 100_000, 1_000_000):
            row = ask("one_population", kind, count)
            print(f"| {count:,} | {' | '.join(f'{row[key]:,.1f}' for key in columns.values())} |", flush=True)


# ---- disk -------------------------------------------------------------------------------------------------------


def one_disk(present: int, place: str) -> dict[str, Any]:
    """Milliseconds to keep and to read one client's memory of a million parameters, beside so many others'."""
    module = fs.build_model(f"resnet18(width={WIDTHS['1e6']})", SHAPE, CLASSES, seed=0)
    memory = {"scaffold": {n: p.detach() for n, p in module.named_parameters()}}
    with tempfile.TemporaryDirectory(dir=place or None) as directory:
        folder = Path(directory) / "memory"
        folder.mkdir()
        for other in range(present):  # names are what a directory is slow by, if by anything
            (folder / f"{other}-0.memory").touch()
        store = DirectoryStore(folder)
        clients = iter(range(present, present + 1000))
        put = timed_median(lambda: store.put(next(clients), 1, memory, before=-1), 30)
        again = iter(range(present, present + 30))
        get = timed_median(lambda: store.get(next(again), 1), 30)
        size = (folder / f"{present}-1.memory").stat().st_size
        remembers = torch.full((present + 1000,), -1, dtype=torch.int32)
        remembers[:present], remembers[present : present + 30] = 0, 1
        begin = time.perf_counter()
        store.sweep([remembers])
        swept = time.perf_counter() - begin
        shutil.rmtree(folder)
    numbers = 4 * sum(p.numel() for p in module.parameters())
    return {"put": put, "get": get, "size": size, "head": size - numbers, "sweep": swept}


def disk_table(options: argparse.Namespace) -> None:
    print("| clients that remember | write, ms | read, ms | sweep at a resume, s | bytes per client | head |")
    print("|--:|--:|--:|--:|--:|--:|")
    for present in (1_000, 10_000, 100_000, 1_000_000):
        row = ask("one_disk", present, options.place)
        print(
            f"| {present:,} | {1e3 * row['put']:.1f} | {1e3 * row['get']:.1f} | {row['sweep']:.2f} "
            f"| {row['size']:,} | {row['head']:,} |"
        )


# ---- flower -----------------------------------------------------------------------------------------------------


class Grid:
    """A stand-in for Flower's: every node answers at once, and the first one asked to train is the last to be heard."""

    def __init__(self, nodes: int, reply: Callable[[Any], Any]) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1
        self.nodes, self._reply = list(range(1, nodes + 1)), reply
        self._waiting: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(len(self._waiting) + 1))
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, ids: Sequence[str]) -> list[Any]:
        return [self._made(number) for number in ids if len(ids) == 1 or not self._first(number)]

    def _first(self, number: str) -> bool:
        metadata = self._waiting[number].metadata
        return bool(metadata.message_type == "train" and metadata.dst_node_id == self.nodes[0])

    def _made(self, number: str) -> Any:
        message = self._waiting[number]
        content = self._reply(message)
        metadata = SimpleNamespace(reply_to_message_id=number)
        return SimpleNamespace(content=content, metadata=metadata, has_content=lambda: True)


def _greeted(message: Any) -> Any:
    party = ClientInfo(client=message.metadata.dst_node_id - 1, examples=20, shape=list(SHAPE), dtype="float32")
    return to_records(Greeting(parties=[party]))


def one_sites(count: int) -> dict[str, Any]:
    """Seconds until as many sites have said who they are, and what a round then needs to see who is there."""
    start = resident()
    directory = SiteDirectory(Transport(Grid(count, _greeted), 60.0), 0.0, print)
    begin = time.perf_counter()
    directory.gather(count)
    gathered = time.perf_counter() - begin
    directory.transport.grid._waiting.clear()
    found = timed_median(lambda: directory.find(range(50)), 5)
    return {"gather": gathered, "find": found, "rss": resident() - start}


def one_replies(count: int, width: int) -> dict[str, Any]:
    """Peak memory of a round whose replies have all arrived when the server looks, but for the first client's."""
    change: Tensors = {}

    def trained(message: Any) -> Any:
        if message.metadata.message_type == "query":
            return _greeted(message)
        _, letter = from_records(message.content, TrainRequest, 1 << 40)
        return to_records(TrainReply(), answer(wire.decode_assignment(letter), change))

    federation = Remote(f"resnet18(width={width})", sites(count), rounds=2)
    transport = Transport(Grid(count, trained), 600.0)
    directory = SiteDirectory(transport, 0.0, print)
    directory.gather(count)
    regime = TrainSettings(method="fedavg", buffers="average")
    limit = allowance(4 * 10**9)
    few = max(AHEAD, AHEAD_BYTES // sum(p.nbytes for p in federation.state.params.values()))
    engine = Flower(
        transport=transport,
        directory=directory,
        regime=regime,
        limit=limit,
        holds=False,
        memories=Memories(),
        few=few,
        state=federation.state,
    )
    federation._engine = engine
    before = resident()
    lower()
    record = next(federation.rounds())
    assert not record.refused
    letters = sum(len(m.content.array_records["fedstrata.message"][""].data) for m in _send(transport))
    return {"peak": watermark() - before - letters, "bytes": record.bytes_up}


def _send(transport: Any) -> list[Any]:
    return [m for m in transport.grid._waiting.values() if m.metadata.message_type == "train"]


def flower_table(options: argparse.Namespace) -> None:
    print("| sites | greet all, s | look who is there, ms per round | memory, MB |\n|--:|--:|--:|--:|")
    for count in (1_000, 10_000, 100_000, 1_000_000):
        row = ask("one_sites", count)
        print(f"| {count:,} | {row['gather']:.1f} | {1e3 * row['find']:.1f} | {row['rss'] / 1e6:,.0f} |")
    print("\n| replies that wait | their bytes, MB | memory, MB |\n|--:|--:|--:|")
    for count in (10, 100, 400):
        row = ask("one_replies", count, WIDTHS["1e6"])
        print(f"| {count:,} | {row['bytes'] / 1e6:,.0f} | {row['peak'] / 1e6:,.0f} |")


# ---- a million --------------------------------------------------------------------------------------------------


def one_million(width: int, sampled: int) -> dict[str, Any]:
    """A whole round out of a million clients, with the checkpoint after it."""
    with tempfile.TemporaryDirectory() as place:
        settings: dict[str, Any] = {"participation": sampled, "checkpoint_seconds": 0.0}
        federation = Remote(f"resnet18(width={width})", sites(1_000_000), rounds=1, out=Path(place) / "run", **settings)
        running = federation.rounds()
        before = resident()
        lower()
        spans = federation.spans(running)
        record = federation.records[-1]
        peak = watermark()
        kept = next((Path(place) / "run" / "checkpoints").iterdir()).stat().st_size
    P = sum(p.numel() for p in federation.state.params.values())
    sizes = {"up": record.bytes_up, "down": record.bytes_down, "checkpoint": kept, "before": before, "peak": peak}
    return {"P": P, "sampled": sampled, "total": spans["total"], **sizes}


def million_table(options: argparse.Namespace) -> None:
    print("| MB | clients per round | GB down | GB up | s | ms per visit | peak, GB | checkpoint, MB |\n|" + "--:|" * 8)
    for width, sampled in ((9, 1_000), (9, 10_000), (96, 1_000)):
        row = ask("one_million", width, sampled)
        print(
            f"| {4e-6 * row['P']:.1f} | {sampled:,} | {row['down'] / 1e9:.2f} | {row['up'] / 1e9:.2f} "
            f"| {row['total']:.1f} | {1e3 * row['total'] / sampled:.2f} | {row['peak'] / 1e9:.2f} "
            f"| {row['checkpoint'] / 1e6:.1f} |",
            flush=True,
        )


def plan_table(options: argparse.Namespace) -> None:
    """Arithmetic alone: K visits of a + b·P seconds, their bytes both ways through one link, 11 models and 0.5 GB."""
    head = "GB down and up | server, s | 1 Gbit/s, s | 10 Gbit/s, s | memory, GB"
    print(f"| model | clients per round | {head} |\n|" + "--:|" * 7)
    for size in (1e6, 1e8, 1e9):
        visit = options.gigabyte if size > 4 * NEAR else 1e-3 * options.ms + 1e-9 * options.ns * size / 4
        for sampled in (1_000, 10_000):
            sent = 2 * sampled * size
            links = " | ".join(f"{8 * sent / rate:,.0f}" for rate in (1e9, 1e10))
            took = f"{sent / 1e9:,.0f} | {sampled * visit:,.0f} | {links} | {0.5 + 11e-9 * size:,.1f}"
            print(f"| {size / 1e6:,.0f} MB | {sampled:,} | {took} |")


def ask(function: str, *arguments: Any) -> dict[str, Any]:
    """What a function of this file finds, in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([function, *arguments])]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    row: dict[str, Any] = json.loads(found)
    return row


TABLES = {
    "bytes": bytes_table,
    "visits": visits_table,
    "rounds": rounds_table,
    "population": population_table,
    "disk": disk_table,
    "flower": flower_table,
    "million": million_table,
    "plan": plan_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="all of them, if none is named")
    parser.add_argument("--place", default="", help="where `disk` writes")
    parser.add_argument(
        "--ms", type=float, default=2.5, help="a visit's milliseconds without its parameters, for `plan`"
    )
    parser.add_argument("--ns", type=float, default=2.5, help="nanoseconds a parameter")
    parser.add_argument("--gigabyte", type=float, default=2.4, help="seconds per visit of a model of 1 GB")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        function, *arguments = json.loads(options.one)
        print(json.dumps(globals()[function](*arguments)))
        return
    for part in options.parts or TABLES:
        print(f"\n## {part}\n", flush=True)
        TABLES[part](options)


if __name__ == "__main__":
    main()
