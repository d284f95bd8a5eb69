"""How often a diagnosis is right: planted troubles and sound runs, and what `fedstrata diagnose` says of them.

Every case is a small federation (digits or a table, 8 clients, 12 rounds, plain tensors and a module of one's own)
with one trouble in it, at one of three strengths, or with none. Half of the cases (even numbers) are those that the
thresholds were set with in view; the figures that count are of the other half, whose seeds were drawn afterwards. A
case is a run directory, and is not run again if it is there.

    python benchmarks/diagnosis.py [--out runs/diagnosis] [--half view|held] [--seeds 5000] [--only gain]

Figures: how often the first finding is the planted cause; precision and recall of the clients that findings name; and
whether any sound run is told something serious, or has a client blamed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update, replace_fields
from fedstrata.diagnosis import Diagnosis, diagnose
from fedstrata.diagnosis.thresholds import HIGH
from fedstrata.errors import Diverged
from fedstrata.runs.reader import SavedRun

CLIENTS, ROUNDS = 8, 12
HELD_OUT = 1000
"""What is added to the seeds of the cases that nobody looked at while thresholds were set."""
PROBES = "divergence proxy cosine cka gradnorm calibration statistics visits exchange depth rates"

Pair = tuple[Tensor, Tensor]
ClientData = list[Pair]
Attack = Callable[[list[Update], torch.Generator], list[Update]]


# Models of one's own ------------------------------------------------------------------------------------------


class OwnNet(nn.Module):
    """A small network as somebody would write it: functions between the layers, batch norm if asked for."""

    def __init__(self, norm: bool = False, softmax: bool = False) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 32, 3, padding=1)
        self.na = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.nb = nn.BatchNorm2d(32) if norm else nn.Identity()
        self.fc = nn.Linear(32 * 4, 10)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.na(self.a(x))), 2)
        x = F.max_pool2d(F.relu(self.nb(self.b(x))), 2)
        out: Tensor = self.fc(x.flatten(1))
        return out.softmax(1) if self.softmax else out


class DeepNet(nn.Module):
    """Plain convolutions of one width, one after the other."""

    def __init__(self, depth: int, width: int = 4) -> None:
        super().__init__()
        widths = [1, *[width] * depth]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.head = nn.Linear(width * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        out: Tensor = self.head(x.flatten(1))
        return out


class OwnTable(nn.Module):
    """For rows of a table."""

    def __init__(self, inputs: int = 10, outputs: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(inputs, 32), nn.Linear(32, 16), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.second(F.relu(self.first(x)))))
        return out


def own(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A module of one's own, with weights that the seed decides."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


def zoo(text: str) -> Callable[[int], nn.Module]:
    """A model by name."""
    return lambda seed: fs.build_model(text, (1, 8, 8), 10, seed=seed)


PLAIN, NORMED, TABLE = own(OwnNet), own(lambda: OwnNet(norm=True)), own(OwnTable)
WIDE_TABLE = own(lambda: OwnTable(inputs=30))


# Cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A federation, and what is wrong with it.

    Args:
        name: of the trouble, with its strength.
        causes: findings that count as right; none for a sound run.
        guilty: the clients that must be named.
        model: seed → a model.
        data: `digits`, `diabetes` or `breast-cancer`.
        partition: how examples are dealt out; those of the regression by the tenth that a target lies in.
        clients: how many.
        spoil: changes the clients' examples.
        attack: changes the updates of a round.
        settings: of the federation.
    """

    name: str
    causes: tuple[str, ...] = ()
    guilty: tuple[int, ...] = ()
    model: Callable[[int], nn.Module] = PLAIN
    data: str = "digits"
    partition: str = "iid"
    clients: int = CLIENTS
    spoil: Callable[[ClientData, torch.Generator], ClientData] | None = None
    attack: Attack | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def at(clients: Sequence[int], change: Callable[[Tensor, Tensor, torch.Generator], Pair]) -> Any:
    """Spoils some clients' examples."""

    def spoil(held: ClientData, rng: torch.Generator) -> ClientData:
        return [change(x.clone(), y.clone(), rng) if k in clients else (x, y) for k, (x, y) in enumerate(held)]

    return spoil


def gain(factor: float) -> Any:
    return lambda x, y, rng: (x * factor, y)


def shift(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    return x, (y + 1) % 10


def shuffle(share: float) -> Any:
    def change(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
        rows = torch.randperm(len(y), generator=rng)[: round(share * len(y))]
        y[rows] = y[rows[torch.randperm(len(rows), generator=rng)]]
        return x, y

    return change


def randomise(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    """Labels at random, whatever the client held: shuffling a client of two classes would leave half of them right."""
    return x, torch.randint(0, 10, (len(y),), generator=rng)


def invert(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    return x.min() + x.max() - x, y


def missing(share: float) -> Any:
    def change(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
        x.view(-1)[torch.randperm(x.numel(), generator=rng)[: max(round(share * x.numel()), 1)]] = math.nan
        return x, y

    return change


def constant(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    return torch.full_like(x, float(x.mean())), y


def reverse(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    """Of real numbers: large ones become small."""
    return x, y.min() + y.max() - y


def deny(x: Tensor, y: Tensor, rng: torch.Generator) -> Pair:
    """Of answers: a yes becomes a no, and a no a yes."""
    return x, 1 - y


def contrast(strength: float) -> Any:
    """Another contrast and brightness for every client."""

    def spoil(held: ClientData, rng: torch.Generator) -> ClientData:
        return [(x * (1 + strength * k) + 1.5 * strength * k, y) for k, (x, y) in enumerate(held)]

    return spoil


def imbalance(share: float) -> Any:
    """One class has this share of everybody's examples; the test set stays as it is."""

    def spoil(held: ClientData, rng: torch.Generator) -> ClientData:
        found = []
        for x, y in held:
            first, rest = (y == 0).nonzero().flatten(), (y != 0).nonzero().flatten()
            size = len(y)
            many = first[torch.randint(0, len(first), (round(share * size),), generator=rng)]
            few = rest[torch.randperm(len(rest), generator=rng)[: size - len(many)]]
            rows = torch.cat([many, few])
            found.append((x[rows] + 0.05 * torch.randn(x[rows].shape, generator=rng), y[rows]))
        return found

    return spoil


def scaled(delta: Tensors, factor: float) -> Tensors:
    return {n: t * factor for n, t in delta.items()}


def multiply(clients: Sequence[int], factor: float) -> Attack:
    """Updates of some clients, multiplied: a sign flip where the factor is negative."""

    def attack(updates: list[Update], rng: torch.Generator) -> list[Update]:
        return [replace_fields(u, delta=scaled(u.delta, factor)) if u.client in clients else u for u in updates]

    return attack


def collude(clients: Sequence[int], deviations: float) -> Attack:
    """A little is enough: the mean of all minus some deviations, the same from everybody (Baruch et al., 2019)."""

    def attack(updates: list[Update], rng: torch.Generator) -> list[Update]:
        honest = [u.delta for u in updates if u.client not in clients]
        together = {n: torch.stack([d[n] for d in honest]) for n in honest[0]}
        sent = {n: t.mean(0) - deviations * t.std(0) for n, t in together.items()}
        return [replace_fields(u, delta=dict(sent)) if u.client in clients else u for u in updates]

    return attack


def oppose(clients: Sequence[int], strength: float) -> Attack:
    """Minus a share of the others' mean (inner-product manipulation, Xie et al., 2019)."""

    def attack(updates: list[Update], rng: torch.Generator) -> list[Update]:
        honest = [u.delta for u in updates if u.client not in clients]
        sent = {n: -strength * torch.stack([d[n] for d in honest]).mean(0) for n in honest[0]}
        return [replace_fields(u, delta=dict(sent)) if u.client in clients else u for u in updates]

    return attack


def client_cases() -> Iterator[Case]:
    """Troubles of single clients."""
    for factor, who in ((8, 3), (32, 5), (255, 3)):
        for partition in ("iid", "dirichlet(alpha=0.5)"):
            yield Case(
                f"gain x{factor}, {partition}",
                ("broken-inputs",),
                (who,),
                partition=partition,
                spoil=at([who], gain(factor)),
            )
    for guilty in ((2,), (2, 5), (1, 4, 6)):
        name = f"{len(guilty)} with labels"
        yield Case(f"{name} shifted", ("broken-labels",), guilty, spoil=at(guilty, shift))
        yield Case(
            f"{name} shifted, skewed",
            ("broken-labels",),
            guilty,
            partition="dirichlet(alpha=0.5)",
            spoil=at(guilty, shift),
        )
        yield Case(
            f"{name} shuffled", ("broken-labels",), guilty, spoil=at(guilty, randomise), model=zoo("cnn2(width=8)")
        )
        yield Case(
            f"{name} shuffled, skewed",
            ("broken-labels",),
            guilty,
            partition="dirichlet(alpha=0.5)",
            spoil=at(guilty, randomise),
        )
        yield Case(f"{len(guilty)} with inverted images", ("broken-inputs",), guilty, spoil=at(guilty, invert))
    for share in (0.5, 0.75):
        yield Case(f"labels {share:.0%} shuffled", ("broken-labels",), (6,), spoil=at([6], shuffle(share)))
    for share in (0.001, 0.05, 0.5):
        yield Case(f"missing {share:.1%}", ("broken-inputs", "refused-updates"), (1,), spoil=at([1], missing(share)))
    yield Case("constant inputs", ("broken-inputs",), (4,), spoil=at([4], constant))
    yield Case(
        "constant inputs, skewed", ("broken-inputs",), (0,), partition="dirichlet(alpha=0.5)", spoil=at([0], constant)
    )
    for factor, guilty in ((-1.0, (3,)), (-2.0, (1, 6)), (-4.0, (5,))):
        yield Case(f"sign flip x{factor:g}", ("hostile-updates",), guilty, attack=multiply(guilty, factor))
        yield Case(
            f"sign flip x{factor:g}, skewed",
            ("hostile-updates",),
            guilty,
            partition="dirichlet(alpha=0.5)",
            attack=multiply(guilty, factor),
        )
    for factor in (10.0, 30.0, 1000.0):
        yield Case(f"scaled x{factor:g}", ("hostile-updates",), (2,), attack=multiply((2,), factor))
    for guilty, z in (((0, 1), 1.0), ((2, 5, 7), 0.5), ((2, 5, 7), 1.5)):
        yield Case(f"{len(guilty)} collude, z={z:g}", ("hostile-updates",), guilty, attack=collude(guilty, z))
    for guilty, strength in (((0, 1), 0.5), ((2, 5), 1.0), ((2, 5, 7), 2.0)):
        yield Case(f"{len(guilty)} oppose x{strength:g}", ("hostile-updates",), guilty, attack=oppose(guilty, strength))


def run_cases() -> Iterator[Case]:
    """Troubles of the whole run."""
    slow, fast = ("rate-too-small",), ("rate-too-large", "exploded-loss", "diverged", "dead-units")
    for lr in (0.003, 0.001, 0.0005):
        yield Case(f"lr {lr:g}", slow, settings={"lr": lr})
        yield Case(
            f"lr {lr:g}, skewed",
            slow,
            partition="dirichlet(alpha=0.5)",
            model=zoo("cnn2(width=8)"),
            settings={"lr": lr},
        )
    for lr in (1.5, 3.0, 10.0):
        yield Case(f"lr {lr:g}", fast, settings={"lr": lr})
        yield Case(f"lr {lr:g}, zoo", fast, model=zoo("cnn2(width=8)"), settings={"lr": lr})
    soft = own(lambda: OwnNet(softmax=True))
    for partition, lr in (("iid", 0.1), ("iid", 0.05), ("dirichlet(alpha=0.5)", 0.1)):
        yield Case(
            f"softmax, lr {lr:g}, {partition}", ("probabilities",), model=soft, partition=partition, settings={"lr": lr}
        )
    for depth in (14, 17, 24):
        yield Case(
            f"{depth} plain convolutions", ("vanishing-gradients",), model=own(lambda depth=depth: DeepNet(depth))
        )
    for share in (0.85, 0.9, 0.94):
        yield Case(f"{share:.0%} of one class", ("class-imbalance",), spoil=imbalance(share))
    for partition in ("dirichlet(alpha=0.1)", "shards(classes=2)", "dirichlet(alpha=0.05)"):
        yield Case(f"skew {partition}", ("label-skew",), partition=partition)
    for strength in (0.5, 1.0, 2.0):
        yield Case(f"contrast {strength:g}", ("running-statistics",), model=NORMED, spoil=contrast(strength))
    for count in (1, 2):
        noise = {"participation": count, "rounds": 24, "probe_every": 8}
        yield Case(
            f"{count} of 8 in a round",
            ("participation-noise", "label-skew"),
            partition="shards(classes=2)",
            settings=noise,
        )
    for rounds in (1, 2, 3):
        early = {"rounds": rounds, "probe_every": 1, "method": "scaffold", "lr": 0.01, "batch_size": 32}
        yield Case(f"scaffold, {rounds} rounds", ("too-early", "rate-too-small"), settings=early)


def table_cases() -> Iterator[Case]:
    """Troubles of a regression on rows of a table."""
    common: dict[str, Any] = {"data": "diabetes", "model": TABLE}
    for factor in (8, 32, 255):
        yield Case(f"table: gain x{factor}", ("broken-inputs",), (4,), spoil=at([4], gain(factor)), **common)
    for guilty in ((2,), (2, 5)):
        yield Case(
            f"table: {len(guilty)} with targets reversed",
            ("broken-labels",),
            guilty,
            spoil=at(guilty, reverse),
            **common,
        )
    for factor in (-2.0, -4.0):
        yield Case(f"table: sign flip x{factor:g}", ("hostile-updates",), (6,), attack=multiply((6,), factor), **common)
    yield Case("table: scaled x30", ("hostile-updates",), (1,), attack=multiply((1,), 30.0), **common)
    for lr in (0.0003, 0.0001):
        yield Case(f"table: lr {lr:g}", ("rate-too-small",), settings={"lr": lr}, **common)
    yield Case("table: missing 5%", ("broken-inputs", "refused-updates"), (3,), spoil=at([3], missing(0.05)), **common)


def sound_cases() -> Iterator[Case]:
    """Runs with nothing wrong, honest skew included: there is enough training to cope with it."""
    for model in (PLAIN, NORMED, zoo("cnn2(width=8)"), zoo("mlp(hidden=(64,))")):
        for partition in ("iid", "dirichlet(alpha=0.5)"):
            yield Case(f"sound, {partition}", model=model, partition=partition)
    for partition in ("dirichlet(alpha=0.2)", "shards(classes=3)", "dirichlet(alpha=0.1)", "shards(classes=2)"):
        more = {"rounds": 40, "probe_every": 10, "lr": 0.05}
        hard = partition in ("dirichlet(alpha=0.1)", "shards(classes=2)")  # it takes the plain mean longer to cope
        longer = {"rounds": 120, "probe_every": 40, "lr": 0.05} if hard else more
        yield Case(f"sound, {partition}, {longer['rounds']} rounds", partition=partition, settings=longer)
        yield Case(f"sound, feddyn, {partition}", partition=partition, settings={**more, "method": "feddyn"})
    yield Case("sound, adam", settings={"optimizer": "adam", "lr": 0.003})
    yield Case("sound, half of the clients", settings={"participation": 0.5, "rounds": 24, "probe_every": 6})
    for partition in ("iid", "iid"):
        yield Case("sound, table", data="diabetes", model=TABLE, partition=partition)


def skewed_table_cases() -> Iterator[Case]:
    """Tables whose clients differ in their answers or targets: sound ones, and then one trouble each."""
    answers: dict[str, Any] = {"data": "breast-cancer", "model": WIDE_TABLE, "settings": {"lr": 0.05}}
    numbers: dict[str, Any] = {"data": "diabetes", "model": TABLE, "settings": {"rounds": 30, "probe_every": 10}}
    for common, alphas in ((answers, (0.1, 0.1, 0.5)), (numbers, (0.1, 0.1, 0.5))):
        for clients in (6, 8):
            for alpha in alphas:
                dealt = {"partition": f"dirichlet(alpha={alpha:g})", "clients": clients}
                name = f"sound, {common['data']}, {dealt['partition']}, {clients} clients"
                yield Case(name, **dealt, **common)
    for common, spoil, what in ((answers, deny, "answers denied"), (numbers, reverse, "targets reversed")):
        dealt = {"partition": "dirichlet(alpha=0.5)", **common}
        for who, factor in ((4, 8), (2, 255)):
            name = f"{common['data']}, skewed: gain x{factor}"
            yield Case(name, ("broken-inputs",), (who,), spoil=at([who], gain(factor)), **dealt)
        for who in (5, 1):
            name = f"{common['data']}, skewed: {what}"
            yield Case(name, ("broken-labels",), (who,), spoil=at([who], spoil), **dealt)


def all_cases() -> list[Case]:
    """In an order of which every second one was in view when thresholds were set; new ones come last."""
    return [*client_cases(), *run_cases(), *table_cases(), *sound_cases(), *skewed_table_cases()]


# Running ------------------------------------------------------------------------------------------------------


def load(case: Case, seed: int) -> tuple[ClientData, Any, dict[str, Any]]:
    """(the clients' tensors, the test set, settings that belong to the data)."""
    data = fs.load_dataset(case.data)
    parts = fs.partition(data.labels, case.partition, clients=case.clients, seed=seed)
    held = [data.train.select(part).batch(torch.arange(len(part))) for part in parts]
    return held, data.test, {} if case.data == "digits" else {"task": data.task}


def play(case: Case, seed: int, out: Path) -> None:
    """Run a case into a directory."""
    rng = torch.Generator().manual_seed(1000 + seed)
    held, test, about = load(case, seed)
    held = held if case.spoil is None else case.spoil(held, rng)
    lr = 0.01 if case.data == "diabetes" else 0.1
    settings = {"rounds": ROUNDS, "lr": lr, "batch_size": 32, "probe": PROBES, "probe_every": 4, "engine": "serial"}
    settings |= {"epochs": 2, "seed": seed, "workers": 1, **about, **case.settings}
    settings["epochs"] = 1 if "scaffold" in str(settings.get("method")) else settings["epochs"]
    fed = fs.Federation(case.model(seed), held, test, out=out, **settings)
    if case.attack is not None:
        inside, attack = fed._engine.run, case.attack

        def attacked(assignments: Sequence[Assignment], recall: Any) -> Iterator[Any]:
            visits = [(u, m) for u, m in inside(assignments, recall)]
            changed = attack([u for u, _ in visits], rng)
            yield from zip(changed, (m for _, m in visits), strict=True)

        fed._engine.run = attacked
    with suppress(Diverged):
        fed.fit()


@dataclass(frozen=True)
class Result:
    """What was said of a case."""

    number: int
    case: Case
    said: Diagnosis
    score: float | None

    @property
    def first(self) -> str:
        return self.said.findings[0].name if self.said.findings else "nothing"

    @property
    def hit(self) -> bool:
        return self.first in self.case.causes

    @property
    def named(self) -> set[int]:
        return {client for finding in self.said.findings for client in finding.clients}

    @property
    def serious(self) -> bool:
        return any(finding.severity >= HIGH for finding in self.said.findings)


def judge(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of some cases."""
    planted, sound = [r for r in results if r.case.causes], [r for r in results if not r.case.causes]
    named = sum(len(r.named) for r in results)
    guilty = sum(len(r.case.guilty) for r in results)
    right = sum(len(r.named & set(r.case.guilty)) for r in results)
    return {
        "planted": len(planted),
        "hits": sum(r.hit for r in planted),
        "hit_rate": statistics.fmean([r.hit for r in planted] or [0]),
        "clients": guilty,
        "precision": right / named if named else 1.0,
        "recall": right / guilty if guilty else 1.0,
        "sound": len(sound),
        "serious": sum(r.serious for r in sound),
        "blamed": sum(bool(r.named) for r in sound),
    }


def describe(results: Sequence[Result]) -> str:
    """Tables for docs/results/diagnosis.md."""
    head = ("cases", "first cause right", "clients: precision", "recall", "sound, but told serious", "client blamed")
    lines = [f"| {' | '.join(head)} |", "|---|--:|--:|--:|--:|--:|"]
    for title, some in (("in view", 0), ("not in view", 1), ("all", None)):
        found = judge([r for r in results if some is None or r.number % 2 == some])
        lines.append(
            f"| {title} | {found['hits']} of {found['planted']} ({100 * found['hit_rate']:.0f} %) | "
            f"{found['precision']:.2f} | {found['recall']:.2f} | {found['serious']} of {found['sound']} | "
            f"{found['blamed']} of {found['sound']} |"
        )
    lines += [
        "",
        "| | planted | score | first finding | severity | clients named | guilty |",
        "|--:|---|--:|---|--:|---|---|",
    ]
    for r in results:
        first = r.said.findings[0] if r.said.findings else None
        mark = "" if r.hit or not r.case.causes else " ✗"
        score = "" if r.score is None else f"{r.score:.3g}"
        severity = "" if first is None else f"{first.severity:.2f}"
        named, guilty = (", ".join(map(str, sorted(who))) for who in (r.named, r.case.guilty))
        lines.append(f"| {r.number} | {r.case.name} | {score} | {r.first}{mark} | {severity} | {named} | {guilty} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/diagnosis"))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seeds", type=int, default=0, help="added to the seed of every case, for other runs")
    parser.add_argument("--half", choices=("view", "held"), help="one half of the cases")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results, spent = [], time.process_time()
    for number, case in enumerate(all_cases()):
        if given.only not in case.name or given.half == ("view", "held")[1 - number % 2]:
            continue
        out = given.out / f"{number:03d}"
        if not (out / "summary.json").exists():
            play(case, given.seeds + number + (HELD_OUT if number % 2 else 0), out)
        saved = SavedRun.read(out)
        results.append(Result(number, case, diagnose(saved), saved.summary.get("score")))
        r = results[-1]
        right = r.hit or (not case.causes and not r.serious and not r.named)
        print(
            f"{number:3d} {'ok' if right else 'NO'} {case.name}: "
            f"{r.score} {[(f.name, round(f.severity, 2), f.clients) for f in r.said.findings[:3]]} {case.guilty}",
            flush=True,
        )
    print(describe(results).partition("\n\n")[0])
    print(f"{time.process_time() - spent:.0f} seconds of processor time", file=sys.stderr)
    if given.json:
        given.json.write_text(
            json.dumps(
                [
                    {
                        "number": r.number,
                        "name": r.case.name,
                        "causes": r.case.causes,
                        "guilty": r.case.guilty,
                        "score": r.score,
                        "diagnosis": r.said.as_dict(),
                    }
                    for r in results
                ],
                indent=1,
            )
        )
    if given.markdown:
        given.markdown.write_text(describe(results))


if __name__ == "__main__":
    main()
