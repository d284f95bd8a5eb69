"""What the first remedy of a diagnosis brings back: points lost by a planted trouble, and points regained.

For every planted case of `diagnosis.py`: its healthy twin, the case itself, and the case with the first remedy of the
first finding, as the diagnosis of the case's own run gives it. All three have the same seed and are scored on the same
test data, without probes. What a remedy says in words is carried out by `IN_WORDS`; where no remedy can be carried
out, nothing is regained. Points are percent of accuracy; of a regression, percent of the targets' variance that is
explained, 0 at least. Seed by seed, and what is there is not run again.

    python benchmarks/remedies.py [--out runs/remedies] [--seeds 3] [--half held] [--only gain]
        [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))  # benchmarks are scripts, and no package
from diagnosis import HELD_OUT, PLAIN, ROUNDS, Case, ClientData, DeepNet, all_cases, own, play, zoo

from fedstrata.diagnosis import Finding, diagnose
from fedstrata.runs.reader import SavedRun

AT_ONCE, OTHER = 2, 20_000
"""Cases at the same time; what is added to a case's seed for its other seeds."""
ARMS = ("healthy", "broken", "remedied")


# The three runs -----------------------------------------------------------------------------------------------


def healthy(case: Case) -> Case:
    """The case without its trouble."""
    causes, settings = set(case.causes), dict(case.settings)
    settings.pop("participation", None)
    if not causes & {"probabilities"}:
        settings.pop("lr", None)
    if "too-early" in causes:
        settings |= {"rounds": ROUNDS}
    own_fault = causes & {"probabilities", "vanishing-gradients"}
    return replace(
        case,
        spoil=None,
        attack=None,
        model=PLAIN if own_fault else case.model,
        partition="iid" if "label-skew" in causes else case.partition,
        settings=settings,
    )


def remedied(case: Case, finding: Finding | None) -> Case | None:
    """The case with the first remedy; None where there is none, or nobody could carry it out."""
    if finding is None or not finding.remedies:
        return None
    remedy = finding.remedies[0]
    if remedy.method is None and not remedy.settings:
        carry_out = IN_WORDS.get(finding.name)
        return None if carry_out is None else carry_out(case, finding)
    settings = {**case.settings, **remedy.settings}
    settings |= {} if remedy.method is None else {"method": remedy.method}
    model = settings.pop("model", None)
    return replace(case, settings=settings, model=case.model if model is None else zoo(str(model)))


def take_softmax_out(case: Case, finding: Finding) -> Case:
    """The same network without its last softmax."""
    return replace(case, model=PLAIN)


class ResidualNet(DeepNet):
    """The same convolutions, with a link around every two of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.convs
        x = F.relu(first(x))
        for place in range(0, len(rest), 2):
            inner = F.relu(rest[place](x))
            x = F.relu(x + (rest[place + 1](inner) if place + 1 < len(rest) else inner))
        out: torch.Tensor = self.head(x.flatten(1))
        return out


def let_gradients_pass(case: Case, finding: Finding) -> Case | None:
    """With residual links, or as many weight layers as the sentence says, the last of them the head."""
    why = finding.remedies[0].why
    if "residual" in why:
        (convs,) = (part for part in case.model(0).children() if isinstance(part, nn.ModuleList))
        depth = len(convs)
        return replace(case, model=own(partial(ResidualNet, depth)))
    told = re.search(r"fewer layers, (\d+)", why)
    return None if told is None else replace(case, model=own(partial(DeepNet, int(told[1]) - 1)))


def fill_missing(case: Case, finding: Finding) -> Case:
    """The clients that are named fill what is missing with the mean of their other numbers."""

    def spoil(held: ClientData, rng: torch.Generator) -> ClientData:
        spoilt = held if case.spoil is None else case.spoil(held, rng)
        pairs = enumerate(spoilt)
        return [(x.nan_to_num(float(x.nanmean())), y) if k in finding.clients else (x, y) for k, (x, y) in pairs]

    return replace(case, spoil=spoil)


def leave_out(case: Case, finding: Finding) -> Case:
    """Without the clients that are named: they have no examples any more."""

    def spoil(held: ClientData, rng: torch.Generator) -> ClientData:
        spoilt = held if case.spoil is None else case.spoil(held, rng)
        return [(x[:0], y[:0]) if k in finding.clients else (x, y) for k, (x, y) in enumerate(spoilt)]

    return replace(case, spoil=spoil)


IN_WORDS: dict[str, Callable[[Case, Finding], Case | None]] = {
    "probabilities": take_softmax_out,
    "vanishing-gradients": let_gradients_pass,
    "refused-updates": fill_missing,
    "broken-inputs": leave_out,
    "broken-labels": leave_out,
    "broken-data": leave_out,
    "hostile-updates": leave_out,
}
"""Finding → how its first remedy is carried out, where it is in words: for clients that must be put right, without."""


def forced(case: Case, finding: Finding | None, instead: str) -> Case | None:
    """What the clients that are named are met with instead: a reducer, or nobody asks them any more."""
    if finding is None or not finding.clients:
        return None
    if instead == "without":
        return leave_out(case, finding)
    return replace(case, settings={**case.settings, "method": f"fedavg(reduce='{instead}')"})


def seed_of(number: int) -> int:
    """As in `diagnosis.py`."""
    return number + (HELD_OUT if number % 2 else 0)


def points(summary: dict[str, Any], table: bool) -> float:
    """Of a run; nothing for one that diverged."""
    found = summary.get("metrics", {}).get("r2" if table else "accuracy")
    if found is None or summary.get("diverged") or found != found:
        return 0.0
    return 100 * max(0.0, float(found))


def score(case: Case, seed: int, out: Path) -> float:
    """A run's points, from its directory if it is there."""
    if not (out / "summary.json").exists():
        play(replace(case, settings={**case.settings, "probe": None}), seed, out)
    return points(json.loads((out / "summary.json").read_text()), case.data == "diabetes")


def compare(number: int, seeds: int, out: Path, instead: str = "") -> dict[str, Any]:
    """The points of a case's three runs, seed by seed, and what the diagnosis said."""
    torch.set_num_threads(1)
    case, folder = all_cases()[number], out / f"{number:03d}"
    if not (folder / "diagnosed" / "summary.json").exists():
        play(case, seed_of(number), folder / "diagnosed")
    said = diagnose(SavedRun.read(folder / "diagnosed"))
    first = said.findings[0] if said.findings else None
    better = forced(case, first, instead) if instead else remedied(case, first)
    found: dict[str, Any] = {"number": number, "name": case.name, "finding": first.name if first else "nothing"}
    remedy = first.remedies[0] if first and first.remedies else None
    found["remedy"] = instead or ("" if remedy is None else remedy.options or remedy.why)
    found["clients"] = list(first.clients) if first else []
    found["points"] = {arm: [] for arm in ARMS}
    for k in range(seeds):
        seed = seed_of(number) + k * OTHER
        for arm, what in zip(ARMS, (healthy(case), case, better or case), strict=True):
            same = arm == "remedied" and better is None
            where = "broken" if same else arm if arm != "remedied" else f"remedied {short_name(found['remedy'])}"
            found["points"][arm].append(score(what, seed, folder / f"{where} {k}"))
    return found


def short_name(text: str) -> str:
    """For a directory: other advice has other runs."""
    return re.sub(r"[^\w.]+", "-", text)[:60].strip("-")


# Showing ------------------------------------------------------------------------------------------------------


def figures(found: dict[str, Any]) -> tuple[float, float]:
    """(points lost, points regained), each in the median over the seeds."""
    sound, broken, better = (found["points"][arm] for arm in ARMS)
    lost = [a - b for a, b in zip(sound, broken, strict=True)]
    regained = [a - b for a, b in zip(better, broken, strict=True)]
    return statistics.median(lost), statistics.median(regained)


def ratio(cases: Iterable[dict[str, Any]]) -> tuple[float, float, float]:
    """(lost, regained, regained where no case counts for more than it lost), summed over the cases."""
    pairs = [figures(one) for one in cases]
    capped = sum(min(regained, max(lost, 0.0)) for lost, regained in pairs)
    return sum(lost for lost, _ in pairs), sum(regained for _, regained in pairs), capped


def describe(results: Sequence[dict[str, Any]]) -> str:
    """Tables for docs/results/diagnosis.md."""
    kinds = sorted({one["finding"] for one in results})
    lines = [
        "| first finding | cases | lost | regained | of it, up to what was lost | share |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for title, some in [*((kind, [r for r in results if r["finding"] == kind]) for kind in kinds), ("all", results)]:
        lost, regained, capped = ratio(some)
        share = f"{capped / lost:.2f}" if lost > 0 else ""
        lines.append(f"| {title} | {len(some)} | {lost:.1f} | {regained:.1f} | {capped:.1f} | {share} |")
    lines += ["", "| | planted | healthy | broken | remedied | lost | regained | first remedy |"]
    lines += ["|--:|---|--:|--:|--:|--:|--:|---|"]
    for one in results:
        middle = " | ".join(f"{statistics.median(one['points'][arm]):.1f}" for arm in ARMS)
        lost, regained = figures(one)
        said = f"{one['finding']}: {one['remedy']}".replace("|", "/")
        lines.append(f"| {one['number']} | {one['name']} | {middle} | {lost:.1f} | {regained:.1f} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/remedies"))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--half", choices=("view", "held"), help="one half of the cases")
    parser.add_argument("--seeds", type=int, default=3, help="how many per case")
    parser.add_argument("--instead", default="", help="a reducer, or `without`, where the first finding names clients")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    numbers = [k for k, case in enumerate(all_cases()) if case.causes and given.only in case.name]
    numbers = [k for k in numbers if given.half != ("held", "view")[k % 2]]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
        for seeds in range(1, given.seeds + 1):  # one seed of every case before the next
            results = []
            for one in pool.map(partial(compare, seeds=seeds, out=given.out, instead=given.instead), numbers):
                if given.instead and not one["clients"]:
                    continue
                results.append(one)
                lost, regained = figures(one)
                print(f"{one['number']:3d} {one['name']}: lost {lost:.1f}, regained {regained:.1f}, {one}", flush=True)
            lost, regained, capped = ratio(results)
            print(f"{seeds} seeds: lost {lost:.0f}, regained {regained:.0f}, {capped:.0f} of it up to what was lost")
            for path, text in ((given.json, json.dumps(results, indent=1)), (given.markdown, describe(results))):
                if path:
                    path.write_text(text)


if __name__ == "__main__":
    main()
