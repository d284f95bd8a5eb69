"""What each technique's own code adds to a FedAvg round, beyond the arithmetic that its formula needs.

    python benchmarks/techniques.py [--repeats 150] [--models M …] [--techniques fedprox scaffold …] [--json]

Four loops take rounds in turn, so that the machine's mood hits all alike:

    F   Federation's FedAvg round: serial, one thread, no evaluation
    T   the same with the technique
    f   FedAvg by hand: plain torch, the steps and the mean, nothing counted or checked
    t   the same with the technique's formula, written as sparingly as we could

A sample is the processor's seconds (each loop has one thread) for one round of each, one after the other, in turns
forwards and backwards. Rounds are short and samples many, so that the machine's mood is the same in all four, and the
table shows medians over the samples: of T/F, of what the formula needs, (t − f)/f, and of the technique's own code,
((T − F) − (t − f))/F, with the standard error of the median, from the quartiles. A median above 5 % is marked. CCVR's
closing round comes on top of the others: its own code is (T − t)/F. In the row of FedAvg itself the two loops of a kind
are the same: what stands there is the error of the measurement.

Before the clock starts every client has its memory. What is written by hand is checked to be the formula: on less data
and in double precision, where rounding cannot hide a difference, a technique's two loops must end at the same
parameters, and these must not be FedAvg's.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.core.rng import derive, generator

Clients = list[fs.TensorExamples]
Loop = Callable[[], object]

MODELS = ("cnn4(width=8)", "mlp(hidden=(64,))")
SIZES = (450, 550)  # ten steps on average, but not the same number for all, or FedNova would have nothing to do
FEW = (100, 150) * 4  # for the check
BATCH, LR, CLASSES = 50, 0.005, 10
WARM_UP = 3  # rounds: in the first clients have no memory yet, and what is new in the second is counted there
TOLERANCE = 1e-6
GOAL = 0.05


def make_clients(sizes: Sequence[int], dtype: torch.dtype) -> Clients:
    """Clients with two or three classes each."""
    train = fs.load_dataset(f"synthetic(shape=(1, 28, 28), examples={sum(sizes)})").train
    train = fs.TensorExamples(train.x.to(dtype), train.y)
    return [train.select(part) for part in train.labels().argsort(stable=True).split(list(sizes))]


class FedAvg:
    """FedAvg by hand; a technique adds its arithmetic where its formula has some.

    `here` is w_k, the tensors of the model that trains, and `there` is w, the global parameters.
    """

    method: ClassVar[str] = "fedavg"
    uniform: ClassVar[bool] = False

    def __init__(self, model: nn.Sequential, clients: Clients) -> None:
        sample = clients[0].batch(torch.arange(2))[0]
        context = ClientContext(
            lambda arch: copy.deepcopy(model), fs.method("fedavg"), sample=sample, channels_last=True
        )
        self.model, self.inputs = (
            context.replica("").model,
            context.replica("").inputs,
        )  # in the layout that Federation trains in
        self.clients, self.number = clients, 0
        self.leaves = list(self.model.parameters())
        self.here = [p.detach() for p in self.leaves]
        self.there = [p.clone() for p in self.here]
        sizes = [1 if self.uniform else len(data) for data in clients]
        self.weights = [size / sum(sizes) for size in sizes]
        self.prepare()

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p) for p in self.there]

    def round(self) -> None:
        self.open()
        mean = self.zeros()
        for client, data in enumerate(self.clients):
            rng = generator(derive(0, "visit", self.number, client), "order")  # as Federation draws it
            torch._foreach_copy_(self.here, self.there)
            self.begin(client)
            for index in torch.randperm(len(data), generator=rng).split(BATCH):
                x, y = data.batch(index)
                grads = self.gradient(client, self.inputs(x), y)
                torch._foreach_add_(self.here, grads, alpha=-LR)
            delta = torch._foreach_sub(self.here, self.there)
            self.end(client, delta)
            torch._foreach_add_(mean, delta, alpha=self.weights[client])
        self.close(mean)
        self.number += 1

    def prepare(self) -> None:
        """Once, before the first round."""

    def open(self) -> None:
        """Before a round's visits."""

    def begin(self, client: int) -> None:
        """Before a visit's steps."""

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """What a step goes down along."""
        return torch.autograd.grad(F.cross_entropy(self.model(x), y), self.leaves)

    def end(self, client: int, delta: list[Tensor]) -> None:
        """After a visit's steps; what is to travel is left in `delta`."""

    def close(self, mean: list[Tensor]) -> None:
        """After the visits: move the global parameters."""
        torch._foreach_add_(self.there, mean)

    def closing(self) -> None:
        """A round after the last one, in which nobody trains; called again, once more after the same last one."""


class FedProx(FedAvg):
    """g + μ(w_k − w)."""

    method = "fedprox(mu=0.1)"

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        grads = super().gradient(client, x, y)
        torch._foreach_add_(grads, torch._foreach_sub(self.here, self.there), alpha=0.1)
        return grads


class Scaffold(FedAvg):
    """g + c − c_k; c_k⁺ = mean of the g; c ← c + (1/N) Σ (c_k⁺ − c_k)."""

    method, uniform = "scaffold", True

    def prepare(self) -> None:
        self.c, self.sums = self.zeros(), self.zeros()
        self.own = [self.zeros() for _ in self.clients]

    def open(self) -> None:
        self.change = self.zeros()

    def begin(self, client: int) -> None:
        self.shift = torch._foreach_sub(self.c, self.own[client])
        torch._foreach_zero_(self.sums)

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        grads = super().gradient(client, x, y)
        torch._foreach_add_(self.sums, grads)
        torch._foreach_add_(grads, self.shift)
        return grads

    def end(self, client: int, delta: list[Tensor]) -> None:
        mean = torch._foreach_div(self.sums, len(self.clients[client]) / BATCH)
        torch._foreach_add_(self.change, torch._foreach_sub(mean, self.own[client]))
        self.own[client] = mean

    def close(self, mean: list[Tensor]) -> None:
        super().close(mean)
        torch._foreach_add_(self.c, self.change, alpha=1 / len(self.clients))


class FedNova(FedAvg):
    """w + (Σ p_k a_k) Σ p_k Δ_k/a_k: other weights of the mean, and no more arithmetic than with FedAvg's."""

    method = "fednova"

    def prepare(self) -> None:
        steps = [len(data) / BATCH for data in self.clients]
        moved = sum(p * a for p, a in zip(self.weights, steps, strict=True))
        self.weights = [p * moved / a for p, a in zip(self.weights, steps, strict=True)]


class FedDyn(FedAvg):
    """g + α(w_k − (w + h_k/α)); h_k ← h_k − αΔ_k; h ← h − (α/N) Σ Δ_k; w ← w + mean − h/α."""

    method, uniform = "feddyn(alpha=0.1)", True

    def prepare(self) -> None:
        self.h, self.own = self.zeros(), [self.zeros() for _ in self.clients]

    def begin(self, client: int) -> None:
        self.home = torch._foreach_add(self.there, self.own[client], alpha=10.0)

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        grads = super().gradient(client, x, y)
        torch._foreach_add_(grads, torch._foreach_sub(self.here, self.home), alpha=0.1)
        return grads

    def end(self, client: int, delta: list[Tensor]) -> None:
        torch._foreach_add_(self.own[client], delta, alpha=-0.1)

    def close(self, mean: list[Tensor]) -> None:
        super().close(mean)
        torch._foreach_add_(self.h, mean, alpha=-0.1)  # everybody takes part: (1/N) Σ Δ_k is the mean
        torch._foreach_add_(self.there, self.h, alpha=-10.0)


class Moon(FedAvg):
    """Two more passes up to the last layer, without gradients, and the difference of two cosines in the loss."""

    method = "moon(mu=1.0, tau=0.5)"

    def prepare(self) -> None:
        self.body, self.head = self.model[:-1], self.model[-1]
        self.near, self.far = copy.deepcopy(self.body), copy.deepcopy(self.body)
        self.global_, self.last = ([p.detach() for p in m.parameters()] for m in (self.near, self.far))
        self.own: list[list[Tensor]] = [[] for _ in self.clients]

    def open(self) -> None:
        torch._foreach_copy_(self.global_, self.there[: len(self.global_)])

    def begin(self, client: int) -> None:
        if self.own[client]:
            torch._foreach_copy_(self.last, self.own[client])

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        if not self.own[client]:
            return super().gradient(client, x, y)
        with torch.no_grad():
            apart = F.normalize(self.far(x)).sub_(F.normalize(self.near(x)))
        z = self.body(x)
        contrast = F.softplus((F.normalize(z) * apart).sum(1) / 0.5).mean()
        return torch.autograd.grad(F.cross_entropy(self.head(z), y) + contrast, self.leaves)

    def end(self, client: int, delta: list[Tensor]) -> None:
        self.own[client] = [p.clone() for p in self.here[: len(self.last)]]


class FedRS(FedAvg):
    """α · logit, for the classes that a client lacks."""

    method = "fedrs(alpha=0.5)"

    def prepare(self) -> None:
        counts = [torch.bincount(data.labels(), minlength=CLASSES) for data in self.clients]
        self.factors = [torch.where(count > 0, 1.0, 0.5) for count in counts]

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(F.cross_entropy(self.model(x) * self.factors[client], y), self.leaves)


class FedLC(FedAvg):
    """logit − τ·n^(−1/4), and nothing left of the classes that a client lacks."""

    method = "fedlc(tau=1.0)"

    def prepare(self) -> None:
        counts = [torch.bincount(data.labels(), minlength=CLASSES) for data in self.clients]
        self.margins = [torch.where(n > 0, n.clamp(min=1).float().pow(-0.25), 1e30) for n in counts]

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(F.cross_entropy(self.model(x) - self.margins[client], y), self.leaves)


class FedSpeed(FedAvg):
    """(1 − α)·g₁ + α·g₂ + (w_k − (w + λ·ĝ_k))/λ, g₂ at w_k + ρ·g₁/‖g₁‖; ĝ_k ← ĝ_k − Δ_k/λ; up goes Δ_k − λ·ĝ_k."""

    method, uniform = "fedspeed(rho=0.1, lambda_=10.0, alpha=0.9375, normalised=True)", True

    def prepare(self) -> None:
        self.own = [self.zeros() for _ in self.clients]

    def begin(self, client: int) -> None:
        self.home = torch._foreach_add(self.there, self.own[client], alpha=10.0)

    def gradient(self, client: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        first = super().gradient(client, x, y)
        pull = torch._foreach_sub(self.here, self.home)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(first)))
        along = torch._foreach_mul(first, 0.1 / (norm + 1e-7))
        torch._foreach_add_(self.here, along)
        ahead = super().gradient(client, x, y)
        torch._foreach_sub_(self.here, along)
        torch._foreach_lerp_(first, ahead, 0.9375)
        torch._foreach_add_(first, pull, alpha=0.1)
        return first

    def end(self, client: int, delta: list[Tensor]) -> None:
        torch._foreach_add_(self.own[client], delta, alpha=-0.1)
        torch._foreach_add_(delta, self.own[client], alpha=-10.0)


class FedDF(FedAvg):
    """Every client's logits on the server's inputs, and steps of Adam towards their mean.

    The models have neither dropout nor batch norm, so that training and evaluation mode are the same.
    """

    steps: ClassVar[int] = 10
    method = f"feddf(noise=True, steps={steps})"

    def open(self) -> None:
        rng = generator(derive(0, "server", self.number), "feddf")
        dtype = self.there[0].dtype
        drawn = (torch.randn(128, 1, 28, 28, generator=rng, dtype=dtype) for _ in range(self.steps))
        self.public = [self.inputs(x) for x in drawn]
        self.taught = [torch.zeros(128, CLASSES, dtype=dtype) for _ in range(self.steps)]

    def end(self, client: int, delta: list[Tensor]) -> None:
        with torch.no_grad():
            for x, total in zip(self.public, self.taught, strict=True):
                total.add_(self.model(x), alpha=1 / len(self.clients))

    def close(self, mean: list[Tensor]) -> None:
        torch._foreach_add_(self.there, mean)
        torch._foreach_copy_(self.here, self.there)
        optimizer = torch.optim.Adam(self.leaves, lr=1e-3, fused=True)
        for step, (x, teacher) in enumerate(zip(self.public, self.taught, strict=True)):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / self.steps)) / 2
            student, teacher = self.model(x).log_softmax(1), teacher.log_softmax(1)
            optimizer.zero_grad()
            torch.autograd.backward(F.kl_div(student, teacher, reduction="batchmean", log_target=True))
            optimizer.step()
        torch._foreach_copy_(self.there, self.here)


class FedAvgM(FedAvg):
    """v ← β·v + Δ; w ← w + v."""

    method = "fedavgm(beta=0.9)"

    def prepare(self) -> None:
        self.v = self.zeros()

    def close(self, mean: list[Tensor]) -> None:
        torch._foreach_mul_(self.v, 0.9)
        torch._foreach_add_(self.v, mean)
        torch._foreach_add_(self.there, self.v)


class FedAdagrad(FedAvg):
    """v ← v + Δ²; w ← w + lr·Δ/(√v + τ)."""

    method = "fedadagrad(lr=0.01, beta1=0.0, tau=0.001)"

    def prepare(self) -> None:
        self.m, self.v = self.zeros(), [torch.full_like(p, 1e-6) for p in self.there]

    def close(self, mean: list[Tensor]) -> None:
        torch._foreach_addcmul_(self.v, mean, mean)
        self.move(mean, 0.01)

    def move(self, along: list[Tensor], lr: float) -> None:
        root = torch._foreach_sqrt(self.v)
        torch._foreach_add_(root, 1e-3)
        torch._foreach_addcdiv_(self.there, along, root, lr)


class FedAdam(FedAdagrad):
    """m ← β₁m + (1 − β₁)Δ; v ← β₂v + (1 − β₂)Δ²; w ← w + lr·m/(√v + τ)."""

    method = "fedadam(lr=0.003, beta1=0.9, beta2=0.99, tau=0.001)"

    def close(self, mean: list[Tensor]) -> None:
        torch._foreach_lerp_(self.m, mean, 0.1)
        torch._foreach_mul_(self.v, 0.99)
        torch._foreach_addcmul_(self.v, mean, mean, 0.01)
        self.move(self.m, 0.003)


class FedYogi(FedAdagrad):
    """As Adam, with v ← v − (1 − β₂)Δ²·sign(v − Δ²)."""

    method = "fedyogi(lr=0.003, beta1=0.9, beta2=0.99, tau=0.001)"

    def close(self, mean: list[Tensor]) -> None:
        torch._foreach_lerp_(self.m, mean, 0.1)
        square = torch._foreach_mul(mean, mean)
        sign = torch._foreach_sub(self.v, square)
        torch._foreach_sign_(sign)
        torch._foreach_addcmul_(self.v, square, sign, -0.01)
        self.move(self.m, 0.003)


class CCVR(FedAvg):
    """Nothing in the rounds that train, and one more after them."""

    method = "ccvr"

    def prepare(self) -> None:
        self.trained: list[Tensor] = []

    def closing(self) -> None:
        """Each class's features drawn from the Gaussian of all clients' together, and the last layer refitted."""
        self.trained = self.trained or self.there
        torch._foreach_copy_(self.here, self.trained)
        body, head = self.model[:-1], self.model[-1]
        count = torch.zeros(CLASSES, dtype=torch.float64)
        first = torch.zeros(CLASSES, head.in_features, dtype=torch.float64)
        second = torch.zeros(CLASSES, head.in_features, head.in_features, dtype=torch.float64)
        for data in self.clients:
            for label, (n, mean, covariance) in self.statistics(body, data).items():
                mean = mean.double()
                count[label] += n
                first[label].add_(mean, alpha=n)
                second[label].add_(covariance.double(), alpha=n - 1).addr_(mean, mean, alpha=n)
        rng = generator(derive(0, "server", self.number), "ccvr")
        present = count.nonzero().flatten().tolist()
        rows = []
        for label in present:
            n, mean = count[label], first[label] / count[label]
            covariance = second[label].addr_(mean, mean, alpha=-n.item()).div_((n - 1).clamp(min=1))
            values, vectors = torch.linalg.eigh(covariance)
            root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
            rows.append(torch.addmm(mean, torch.randn(100, len(mean), generator=rng, dtype=mean.dtype), root))
        features, labels = torch.cat(rows).to(head.weight.dtype), torch.tensor(present).repeat_interleave(100)
        leaves, here = list(head.parameters()), [p.detach() for p in head.parameters()]
        velocity = [torch.zeros_like(p) for p in here]
        for _ in range(10):
            for index in torch.randperm(len(labels), generator=rng).split(64):
                grads = torch.autograd.grad(F.cross_entropy(head(features[index]), labels[index]), leaves)
                torch._foreach_mul_(velocity, 0.9)
                torch._foreach_add_(velocity, grads)
                torch._foreach_add_(here, velocity, alpha=-0.01)
        self.there = [*self.trained[: -len(here)], *(p.clone() for p in here)]

    def statistics(self, body: nn.Module, data: fs.TensorExamples) -> dict[int, tuple[int, Tensor, Tensor]]:
        """Class → (count, mean, covariance) of a client's features, for the classes that it has."""
        features, labels = [], []
        with torch.no_grad():
            for index in torch.arange(len(data)).split(256):
                x, y = data.batch(index)
                features.append(body(self.inputs(x)))
                labels.append(y)
        rows, y = torch.cat(features).double(), torch.cat(labels)
        found = {}
        for label in y.unique().tolist():
            own = rows[y == label]
            mean = own.mean(0)
            own.sub_(mean)
            found[label] = len(own), mean.float(), (own.T @ own).div_(max(len(own) - 1, 1)).float()
        return found


CLOSING = "ccvr-closing"
BY_HAND: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "moon": Moon,
    "fedrs": FedRS,
    "fedlc": FedLC,
    "fedspeed": FedSpeed,
    "feddf": FedDF,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "ccvr": CCVR,
    CLOSING: CCVR,
}


class Ours:
    """Federation's rounds, one at a time."""

    def __init__(self, model: nn.Module, clients: Clients, method: str, rounds: int) -> None:
        settings: dict[str, Any] = {"engine": "serial", "workers": 1, "threads": 1, "eval_every": 10**9}
        settings |= {"batch_size": BATCH, "epochs": 1, "lr": LR, "seed": 0}
        self.federation = fs.Federation(model, clients, method=method, rounds=rounds, **settings)
        self.records = self.federation.rounds()
        self.trained: Any = None

    def round(self) -> None:
        next(self.records)

    def closing(self) -> None:
        """The round after the last one; called again, once more after the same last one."""
        self.trained = self.federation.state = self.trained or self.federation.state
        next(self.records)

    @property
    def params(self) -> list[Tensor]:
        return list(self.federation.state.params.values())


def warmed(name: str, model: nn.Sequential, clients: Clients) -> tuple[Ours, FedAvg]:
    """A technique's two loops after the warm-up, at the same round."""
    hand = BY_HAND[name](model, clients)
    ours = Ours(model, clients, hand.method, rounds=WARM_UP if name == CLOSING else 10**6)
    for _ in range(WARM_UP):
        ours.round()
        hand.round()
    if name == CLOSING:
        ours.closing()
        hand.closing()
    return ours, hand


def apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference between parameters."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


class ModelReplica:
    """All that is measured on one model; FedAvg's loops are the same for all techniques."""

    def __init__(self, spec: str) -> None:
        self.spec, self.model = spec, fs.build_model(spec, (1, 28, 28), CLASSES, seed=0)
        self.clients = make_clients(SIZES, torch.float32)
        self.fedavg = warmed("fedavg", self.model, self.clients)
        self.exact = copy.deepcopy(self.model).double(), make_clients(FEW, torch.float64)
        self.plain = warmed("fedavg", *self.exact)[0].params

    def check(self, name: str) -> tuple[float, float]:
        """(how far apart a technique's two loops end, how far from FedAvg's)."""
        ours, hand = warmed(name, *self.exact)
        found, effect = apart(ours.params, hand.there), apart(ours.params, self.plain)
        if found > TOLERANCE:
            raise SystemExit(f"{name}: Federation and the loop by hand end {found:.1e} apart")
        if effect <= TOLERANCE and name not in ("fedavg", "ccvr"):
            raise SystemExit(f"{name}: this is FedAvg, up to {effect:.1e}")
        return found, effect

    def samples(self, name: str, repeats: int) -> list[dict[str, float]]:
        """The processor's seconds for a round of the four loops."""
        plain, by_hand = self.fedavg
        ours, hand = warmed(name, self.model, self.clients)
        loops: dict[str, Loop] = {"F": plain.round, "T": ours.round, "f": by_hand.round, "t": hand.round}
        if name == CLOSING:
            loops |= {"T": ours.closing, "t": hand.closing}
        return [_sample(list(loops.items())[:: 1 if repeat % 2 == 0 else -1]) for repeat in range(repeats)]

    def measure(self, name: str, repeats: int) -> dict[str, Any]:
        """A technique's row."""
        found, effect = self.check(name)
        samples = self.samples(name, repeats)
        base = 0 if name == CLOSING else 1
        own = [_own(s, base) for s in samples]
        return {
            "model": self.spec,
            "technique": name,
            "method": BY_HAND[name].method,
            "fedavg_ms": 1000 * statistics.median(s["F"] for s in samples),
            "by_hand_ms": 1000 * statistics.median(s["f"] for s in samples),
            "round": statistics.median(s["T"] / s["F"] for s in samples),
            "formula": statistics.median((s["t"] - base * s["f"]) / s["f"] for s in samples),
            "own": statistics.median(own),
            "error": _error(own),
            "above": statistics.median(own) > GOAL,
            "apart": found,
            "effect": effect,
            "samples": samples,
        }


def _sample(order: list[tuple[str, Loop]]) -> dict[str, float]:
    seconds = {}
    for loop, run in order:
        begin = time.process_time()
        run()
        seconds[loop] = time.process_time() - begin
    return seconds


def _error(values: list[float]) -> float:
    """The median's standard error, of as many normal values with the same quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return math.sqrt(math.pi / 2 / len(values)) * (high - low) / 1.349


def _own(seconds: dict[str, float], base: int) -> float:
    """A technique's own code as a share of FedAvg's round."""
    return (seconds["T"] - seconds["t"] - base * (seconds["F"] - seconds["f"])) / seconds["F"]


HEAD = "| model | technique | FedAvg, ms | with it | formula | own code | ≤ 5 % |\n|---|---|--:|--:|--:|--:|:-:|"


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['model']} | {row['technique']} | {row['fedavg_ms']:.1f} | {row['round']:.2f}× | {row['formula']:+.1%} "
        f"| {row['own']:+.1%} ± {row['error']:.1%} | {'**no**' if row['above'] else 'yes'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=150, help="samples of each technique")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--techniques", nargs="+", choices=BY_HAND, default=list(BY_HAND), metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error("--repeats must be 2 or more")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as Federation's rounds have it
    rows = []
    if not options.json:
        print(HEAD, flush=True)
    for spec in options.models:
        replica = ModelReplica(spec)
        for name in options.techniques:
            rows.append(replica.measure(name, options.repeats))
            if not options.json:
                print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
