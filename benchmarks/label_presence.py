"""What a client's update tells the server of the labels that the client has, method by method.

Two guesses as simple as can be, from the change of the classifier alone: a class is there whose bias rises (or falls
least), or whose row of weights moves most. No other knowledge, no shadow models: a curious server can do better. The
hit rate is the area under the ROC curve, client by client over the classes, present against absent; the mean over
clients and rounds: 0.5 is blind, 1 knows all. Where a client does not send the classifier in a round, nothing is
guessed, and the round counts as 0.5. What a technique sends of classes in so many words (ccvr, fedimpro) is not needed
here; it is in the table of docs/federation.md.

    python benchmarks/label_presence.py [--rounds 10] [--seeds 0 1 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.core.technique import RoundView, Technique
from fedstrata.core.tensors import Tensors

CLIENTS, CLASSES, SHAPE = 20, 10, (1, 8, 8)
METHODS = (
    *("fedavg", "fedavgm", "fedadam", "fedprox", "scaffold", "feddyn", "fednova", "moon", "fedrs", "fedlc", "fedspeed"),
    *("feddf", "fednlr", "fedpart(full_rounds=0, rounds_per_stratum=1)", "perturb(noise=0.1)", "perturb(noise=1.0)"),
    *("ccvr", "fedimpro(split=1)"),
)


@dataclass(frozen=True, kw_only=True)
class Curious(Technique):
    """A server that notes how each client's classifier changed, and does nothing else."""

    name: ClassVar[str] = "curious"
    needs_deltas: ClassVar[bool] = True
    notes: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list, compare=False, repr=False)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        changes = {update.client: update.delta for update in round.updates}
        if round.number < round.rounds:
            heads = {k: (d["head.bias"], d["head.weight"].norm(dim=1)) for k, d in changes.items() if "head.bias" in d}
            self.notes.append(heads)
        return delta, state


def area(scores: Tensor, present: Tensor) -> float:
    """Share of pairs (a class that is there, one that is not) that the scores put right; a draw is half a hit."""
    difference = scores[present][:, None] - scores[~present][None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def measure(method: str, rounds: int, seed: int) -> dict[str, float]:
    """How well the server guesses, in how many rounds it may, and how good the model is."""
    digits = fs.load_dataset("digits")
    parts = fs.partition(digits.train.labels(), "dirichlet(alpha=0.1)", CLIENTS, seed=seed)
    there = [torch.bincount(digits.train.labels()[part], minlength=CLASSES) > 0 for part in parts]
    curious, made = Curious(), fs.method(method)
    federation = fs.Federation(
        fs.build_model("cnn2(width=8)", SHAPE, CLASSES, seed=seed),
        digits.train.split(parts),
        digits.test,
        method=fs.Method((*made.techniques, curious), made.base),
        public=digits.test.batch(torch.arange(100))[0],
        rounds=rounds,
        epochs=2,
        lr=0.05,
        seed=seed,
        engine="serial",
    )
    accuracy = federation.fit().records[-1].accuracy
    judged = [client for client in range(CLIENTS) if 0 < there[client].sum() < CLASSES]
    blind = torch.zeros(CLASSES), torch.zeros(CLASSES)
    hits = [[area(score, there[c]) for score in seen.get(c, blind)] for seen in curious.notes for c in judged]
    rise, move = (statistics.mean(column) for column in zip(*hits, strict=True))
    shown = statistics.mean(len(seen) / CLIENTS for seen in curious.notes)
    return {"rise": rise, "move": move, "shown": shown, "accuracy": accuracy or 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print("| method | rounds that send the classifier | bias rises | row moves | accuracy |")
    print("|---|--:|--:|--:|--:|")
    for method in options.methods:
        found = [measure(method, options.rounds, seed) for seed in options.seeds]
        mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
        rows[method] = {"seeds": list(options.seeds), **mean}
        print(
            f"| `{method}` | {mean['shown']:.0%} | {mean['rise']:.2f} | {mean['move']:.2f} | {mean['accuracy']:.1%} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
