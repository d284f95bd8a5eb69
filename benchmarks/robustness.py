"""Attacks against reducers, on a part of Fashion-MNIST: accuracy, how far each attack gets, and what papers say of it.

20 clients of 200 examples each on average (IID and Dirichlet(0.3)), pictures of 14×14, a perceptron, 40 rounds of one
epoch. Four clients are hostile, or one that brings in a backdoor; in two smaller tables nine (nearly half) and twelve
(a majority). A seed decides the partition, the first weights, who is hostile and every batch, so two runs of one seed
differ by the attack or the reducer alone. Runs that are there are not run again, so it goes on where it was stopped.

    FEDSTRATA_DATA=… python benchmarks/robustness.py [--plan] [--out runs/robustness] [--seeds 0 1 2] [--only alie]
        [--json docs/results/robustness/summary.json] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fedstrata as fs
from fedstrata.errors import Diverged
from fedstrata.reproduce.verdicts import Verdict, judge_figure, t_interval
from fedstrata.system.machine import processor

CLIENTS, EXAMPLES, TRUSTED, TEST, ROUNDS, HIDDEN = 20, 4000, 200, 2000, 40, 64
GUESSING, HARM, AT_ONCE, SECONDS = 0.1, 5.0, 2, 1.5
"""Accuracy by guessing; points that count as broken; runs at the same time; of one run, for the plan."""
PARTITIONS = {"IID": "iid", "Dirichlet(0.3)": "dirichlet(alpha=0.3)"}
ATTACKS = {
    "nobody": "",
    "signflip": "signflip(scale=4)",
    "scale": "scale(factor=100)",
    "labelflip": "labelflip",
    "inputs": "inputs(gain=255)",
    "alie": "alie",
    "alie, z 1.5": "alie(z=1.5)",
    "ipm, ε 0.5": "ipm(epsilon=0.5)",
    "ipm, ε 10": "ipm(epsilon=10)",
    "backdoor": "backdoor(value=2.0, size=2)",
    "1 backdoor": "backdoor(value=2.0, size=2, share=0.05)",
    "1 backdoor ×20": "backdoor(value=2.0, size=2, boost=20, share=0.05)",
}
FEW, HALF, MOST = 4, 9, 12
"""How many clients are hostile, in the tables."""
STRONG = ("nobody", "signflip", "alie", "ipm, ε 0.5")
"""The attacks of the table with nearly half of the clients."""
REDUCERS = (
    *("mean", "median", "trimmed_mean(share={f})", "krum(share={f})", "multi_krum(share={f})", "geometric_median"),
    *("bulyan", "norm_clip", "fltrust", "multi_krum(share={f}, per='stratum')"),
)
"""{f} is the share that is hostile: the rules are told the truth, nearly a half at most."""


def reducer_title(reducer: str) -> str:
    """What a column is called."""
    layered = "per='stratum'" in reducer
    return reducer.partition("(")[0] + (" per stratum" if layered else "")


@dataclass(frozen=True)
class Job:
    """One run."""

    attack: str
    reducer: str
    partition: str
    hostile: int
    seed: int

    @property
    def path(self) -> str:
        """The file that its result is in."""
        parts = (self.attack, reducer_title(self.reducer), self.partition, str(self.hostile), str(self.seed))
        return re.sub(r"[^\w.]+", "-", "_".join(parts)) + ".json"

    @property
    def faults(self) -> str | None:
        """As the run's setting says them; None for no attack."""
        text = ATTACKS[self.attack]
        name, _, rest = text.partition("(")
        given = rest.rstrip(")") + ", " if rest else ""
        if not text or "share=" in text:  # a backdoor that one client brings in
            return text or None
        return f"{name}({given}share={self.hostile / CLIENTS:g})"

    @property
    def method(self) -> str:
        """FedAvg, with the reducer."""
        share = min(self.hostile / CLIENTS, 0.45)
        return f'fedavg(reduce="{self.reducer.format(f=f"{share:g}")}")'


def all_jobs(seeds: Iterable[int]) -> Iterator[Job]:
    """Seed by seed, so that what is there of a stopped run is whole."""
    for seed in seeds:
        for partition in PARTITIONS:
            yield from (Job(a, r, partition, FEW, seed) for a in ATTACKS for r in REDUCERS)
        yield from (Job(a, r, "IID", HALF, seed) for a in STRONG for r in REDUCERS)
        yield from (Job("signflip", r, "IID", MOST, seed) for r in REDUCERS)


@cache
def load() -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(inputs, labels, test set); the last `TRUSTED` examples are the server's, and no client's."""
    data = fs.load_dataset(f"fashion-mnist(examples={EXAMPLES + TRUSTED}, test_examples={TEST}, resolution=14)")
    x, y = data.train.batch(torch.arange(EXAMPLES + TRUSTED))
    return x, y, data.test


def play(job: Job, rounds: int = ROUNDS, data: Any = None) -> dict[str, Any]:
    """A run's last accuracy and attack success; one that diverged guesses."""
    x, y, test = data or load()
    split = len(y) - TRUSTED
    parts = fs.partition(y[:split], PARTITIONS[job.partition], clients=CLIENTS, seed=job.seed)
    model = fs.build_model(f"mlp(hidden=({HIDDEN},))", tuple(x.shape[1:]), 10, seed=job.seed)
    more: dict[str, Any] = {"trusted": (x[split:], y[split:])} if job.reducer.startswith("fltrust") else {}
    more |= {"faults": job.faults} if job.faults else {}
    how: dict[str, Any] = {"rounds": rounds, "eval_every": rounds, "lr": 0.2, "batch_size": 32, "engine": "vmap"}
    began = time.perf_counter()
    fed = fs.Federation(model, [(x[p], y[p]) for p in parts], test, method=job.method, seed=job.seed, **how, **more)
    found: dict[str, Any] = {"accuracy": GUESSING, "success": None, "diverged": True}
    try:
        last = fed.fit().records[-1]
        found = {"accuracy": last.accuracy, "success": last.attack_success.get("backdoor"), "diverged": False}
    except Diverged:
        pass
    return {**vars(job), **found, "seconds": round(time.perf_counter() - began, 2)}


def run(job: Job, out: Path) -> dict[str, Any]:
    """A run's result, from its file if it is there."""
    torch.set_num_threads(1)
    path = out / job.path
    if not path.exists():
        found = play(job)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found, ensure_ascii=False))
        part.replace(path)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


# Figures ------------------------------------------------------------------------------------------------------


class Table:
    """All results, in points, by attack, reducer, partition and number of hostile clients."""

    def __init__(self, results: Iterable[dict[str, Any]]) -> None:
        self._found: dict[tuple[str, str, str, int], dict[int, dict[str, Any]]] = {}
        for one in results:
            key = one["attack"], reducer_title(one["reducer"]), one["partition"], one["hostile"]
            self._found.setdefault(key, {})[one["seed"]] = one

    def figure(self, what: str, attack: str, reducer: str, partition: str, hostile: int = FEW) -> dict[int, float]:
        """Seed → `accuracy` or `success`, in percent."""
        runs = self._found.get((attack, reducer, partition, hostile), {})
        return {seed: 100 * one[what] for seed, one in runs.items() if one[what] is not None}

    def lost(self, attack: str, reducer: str, partition: str, hostile: int = FEW) -> dict[int, float]:
        """Seed → points that an attack takes from a reducer, against the same reducer without it."""
        calm = self.figure("accuracy", "nobody", reducer, partition, HALF if hostile > FEW else FEW)
        return minus(calm, self.figure("accuracy", attack, reducer, partition, hostile))


def minus(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    """Seed → one − other, for the seeds of both."""
    return {seed: value - other[seed] for seed, value in one.items() if seed in other}


@dataclass(frozen=True)
class Claim:
    """What a paper says, as a figure per seed that must be above `low` or below `high`."""

    paper: str
    text: str
    figure: Callable[[Table], dict[int, float]]
    low: float | None = None
    high: float | None = None

    def judge(self, table: Table) -> tuple[Verdict, float | None]:
        """(the verdict, the mean over seeds)."""
        found = list(self.figure(table).values())
        return judge_figure(found, self.low, self.high), statistics.fmean(found) if found else None


def broken(paper: str, attack: str, reducer: str, partition: str, hostile: int = FEW) -> Claim:
    """An attack breaks a reducer: it loses more than `HARM` points."""
    text = f"{_attack(attack, hostile)} breaks {reducer}, {partition}"
    return Claim(paper, text, lambda t: t.lost(attack, reducer, partition, hostile), low=HARM)


def held(paper: str, attack: str, reducer: str, partition: str, hostile: int = FEW) -> Claim:
    """A reducer holds against an attack: it loses less than `HARM` points."""
    text = f"{reducer} holds against {_attack(attack, hostile)}, {partition}"
    return Claim(paper, text, lambda t: t.lost(attack, reducer, partition, hostile), high=HARM)


def ahead(paper: str, text: str, what: str, one: tuple[Any, ...], other: tuple[Any, ...], low: float = 0.0) -> Claim:
    """A figure of one kind of run is above that of another."""
    return Claim(paper, text, lambda t: minus(t.figure(what, *one), t.figure(what, *other)), low=low)


def _attack(attack: str, hostile: int) -> str:
    return f"{attack} ({hostile} of {CLIENTS})"


BLANCHARD, YIN, PILLUTLA = "Krum, Blanchard et al. 2017", "Median, Yin et al. 2018", "RFA, Pillutla et al. 2022"
BARUCH, XIE, MHAMDI = "ALIE, Baruch et al. 2019", "IPM, Xie et al. 2019", "Bulyan, El Mhamdi et al. 2018"
CAO, SUN, BAGDASARYAN = (
    "FLTrust, Cao et al. 2021",
    "Norm clipping, Sun et al. 2019",
    "Backdoor, Bagdasaryan et al. 2020",
)
KARIMIREDDY = "Bucketing, Karimireddy et al. 2022"


def reducer_claims(p: str) -> Iterator[Claim]:
    """What papers say of their reducers."""
    for attack in ("signflip", "scale"):
        yield broken(BLANCHARD, attack, "mean", p)
        yield held(BLANCHARD, attack, "krum", p)
        yield held(YIN, attack, "median", p)
        yield held(YIN, attack, "trimmed_mean", p)
        yield held(PILLUTLA, attack, "geometric_median", p)
        yield held(MHAMDI, attack, "bulyan", p)
    yield held(PILLUTLA, "labelflip", "geometric_median", p)
    for attack in ("alie, z 1.5", "ipm, ε 0.5"):
        gain = partial(lambda t, a: minus(t.lost(a, "krum", p), t.lost(a, "bulyan", p)), a=attack)
        yield Claim(MHAMDI, f"krum loses more than bulyan by {attack}, {p}", gain, low=0.0)
    for attack in ("signflip", "scale", "labelflip", "alie, z 1.5"):
        yield held(CAO, attack, "fltrust", p)
    backdoor = ("1 backdoor ×20", "mean", p), ("1 backdoor ×20", "norm_clip", p)
    yield ahead(SUN, f"norm_clip lowers the success of 1 backdoor ×20, {p}", "success", *backdoor)
    stopped = partial(Table.figure, what="success", attack="1 backdoor ×20", reducer="norm_clip", partition=p)
    yield Claim(SUN, f"norm_clip stops 1 backdoor ×20 (success below 20 %), {p}", lambda t: stopped(t), high=20.0)


def attack_claims(p: str) -> Iterator[Claim]:
    """What papers say of their attacks."""
    for attack in ("alie", "alie, z 1.5"):
        yield from (broken(BARUCH, attack, reducer, p) for reducer in ("krum", "trimmed_mean", "median", "bulyan"))
    for other in ("krum", "trimmed_mean", "bulyan"):
        sides = ("alie, z 1.5", "mean", p), ("alie, z 1.5", other, p)
        yield ahead(BARUCH, f"by alie, z 1.5, the mean ends above {other}, {p}", "accuracy", *sides)
    yield from (broken(XIE, "ipm, ε 0.5", reducer, p) for reducer in ("krum", "median"))
    boosted = ("1 backdoor ×20", "mean", p), ("1 backdoor", "mean", p)
    yield ahead(BAGDASARYAN, f"the boost raises a backdoor's success with the mean, {p}", "success", *boosted)


def skew_claims() -> Iterator[Claim]:
    """What skewed data costs the reducers, without any attack."""
    for reducer, low in (("krum", HARM), ("median", 0.0), ("trimmed_mean", 0.0), ("geometric_median", 0.0)):
        sides = [("nobody", one, "Dirichlet(0.3)") for one in ("mean", reducer)]
        least = f"more than {low:g} points" if low else "something"
        text = f"{reducer} costs {least} against the mean, Dirichlet(0.3)"
        yield ahead(KARIMIREDDY, text, "accuracy", sides[0], sides[1], low)


def many_claims() -> Iterator[Claim]:
    """With nearly half of the clients, as in the papers on ALIE and IPM, and with most of them."""
    for attack, paper in (("alie", BARUCH), ("ipm, ε 0.5", XIE)):
        yield from (broken(paper, attack, one, "IID", HALF) for one in ("krum", "median", "trimmed_mean"))
    yield held(CAO, "signflip", "fltrust", "IID", MOST)
    yield broken(CAO, "signflip", "median", "IID", MOST)


def all_claims() -> list[Claim]:
    """Everything that is judged."""
    each = [claim for p in PARTITIONS for claim in (*reducer_claims(p), *attack_claims(p))]
    return [*each, *skew_claims(), *many_claims()]


# Showing ------------------------------------------------------------------------------------------------------


def cell(values: Iterable[float]) -> str:
    """The mean and the sample standard deviation over the seeds."""
    found = list(values)
    if not found:
        return ""
    return f"{statistics.fmean(found):.1f}" + (f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else "")


def show_table(table: Table, attacks: Sequence[str], partition: str, hostile: int) -> str:
    """Reducers down, attacks across: accuracy, and after it the success of a backdoor."""
    lines = [f"| | {' | '.join(attacks)} |", "|---|" + "--:|" * len(attacks)]
    for title in map(reducer_title, REDUCERS):
        cells = []
        for attack in attacks:
            text = cell(table.figure("accuracy", attack, title, partition, hostile).values())
            success = table.figure("success", attack, title, partition, hostile).values()
            cells.append(text + (f" ({cell(success)})" if success else ""))
        lines.append(f"| `{title}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def show_claims(table: Table) -> str:
    """One row per claim."""
    lines = ["| paper | claim | points, mean [90 % interval] | must be | verdict |", "|---|---|--:|--:|---|"]
    for claim in all_claims():
        verdict, mean = claim.judge(table)
        span = t_interval(list(claim.figure(table).values()))
        figure = "" if mean is None else f"{mean:+.1f}" + (f" [{span[0]:+.1f}, {span[1]:+.1f}]" if span else "")
        limit = f"> {claim.low:g}" if claim.low is not None else f"< {claim.high:g}"
        lines.append(f"| {claim.paper} | {claim.text} | {figure} | {limit} | {verdict} |")
    return "\n".join(lines)


def show(table: Table) -> str:
    """The tables of docs/results/robustness.md."""
    parts = []
    for partition in PARTITIONS:
        parts += [f"### {partition}, {FEW} of {CLIENTS} hostile", show_table(table, [*ATTACKS], partition, FEW)]
    parts += [f"### IID, {HALF} of {CLIENTS} hostile", show_table(table, STRONG, "IID", HALF)]
    parts += [f"### IID, {MOST} of {CLIENTS} hostile", show_table(table, ["signflip"], "IID", MOST)]
    return "\n\n".join([*parts, "### Claims", show_claims(table)]) + "\n"


def summarise(results: Sequence[dict[str, Any]], table: Table) -> dict[str, Any]:
    """What is kept: every run, and every verdict."""
    verdicts: list[dict[str, Any]] = []
    for claim in all_claims():
        verdict, mean = claim.judge(table)
        verdicts.append({"paper": claim.paper, "claim": claim.text, "mean": mean, "verdict": str(verdict)})
        verdicts[-1] |= {"interval": verdict.interval, "reason": verdict.reason, "low": claim.low, "high": claim.high}
    about: dict[str, Any] = {"processor": processor(), "torch": torch.__version__, "runs": len(results)}
    about["seconds"] = round(sum(one["seconds"] for one in results))
    return {**about, "claims": verdicts, "results": results}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="say what would be run, and how long it takes")
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    given = parse()
    jobs = [job for job in all_jobs(given.seeds) if given.only in job.attack]
    left = [job for job in jobs if not (given.out / job.path).exists()]
    minutes = len(left) * SECONDS / AT_ONCE / 60
    print(f"{len(jobs)} runs, {len(left)} to do, about {SECONDS:g} s each, {AT_ONCE} at once: {minutes:.0f} minutes")
    if given.plan:
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
        for one in pool.map(partial(run, out=given.out), jobs):
            results.append(one)
            shown = (one[key] for key in ("attack", "reducer", "partition", "hostile", "seed", "accuracy", "success"))
            print(len(results), *shown, flush=True)
    table = Table(results)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(summarise(results, table), indent=1, ensure_ascii=False) + "\n")
    if given.markdown:
        given.markdown.write_text(show(table))


if __name__ == "__main__":
    main()
