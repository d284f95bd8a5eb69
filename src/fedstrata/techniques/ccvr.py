"""CCVR: the classifier, refitted after training on features drawn from the clients' statistics.

Luo, Chen, Hu, Zhang, Liang and Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data", NeurIPS 2021.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import nn, torch
from fedstrata.core.optim import Sgd
from fedstrata.core.rng import generator
from fedstrata.core.technique import ClientView, Hooks, RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Into, Stratum
from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.models.strata import classifier

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Mi Luo and Fei Chen and Dapeng Hu and Yifan Zhang and Jian Liang and Jiashi Feng",
        "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data",
        "NeurIPS",
        2021,
    ),
)


def statistics(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> Tensors:
    """Each class's count n, mean μ and covariance Σ (divided by n − 1; 0 for a single example) of features.

    Summed up in double precision around the first batch's mean, so that far-away features lose nothing.
    """
    count = torch.zeros(classes, dtype=torch.float64)
    origin, first, second = torch.zeros(0), torch.zeros(0), torch.zeros(0)
    for features, labels in batches:
        rows = features.flatten(1).double().cpu()
        if not len(first):
            origin = rows.mean(0)
            first, second = rows.new_zeros(classes, rows.shape[1]), rows.new_zeros(classes, *[rows.shape[1]] * 2)
        for label in set(labels.tolist()):
            own = rows[labels.cpu() == label].sub_(origin)
            count[label] += len(own)
            first[label] += own.sum(0)
            second[label].addmm_(own.T, own)
    for label, n in _present(count):  # an absent class has zeros
        mean = first[label].div_(n)
        second[label].addr_(mean, mean, alpha=-n).div_(max(n - 1, 1))
        mean.add_(origin)
    return {"count": count.float(), "mean": first.float(), "covariance": second.float()}


def _present(count: Tensor) -> list[tuple[int, float]]:
    """The classes that there are examples of, each with their number."""
    return [(label, n) for label, n in enumerate(count.tolist()) if n > 0]


def add_statistics(total: Tensors, slot: Tensors) -> Tensors:
    """Sums over clients, in double precision: n, n·μ and (n − 1)·Σ + n·μμᵀ of each class; into the total's tensors."""
    parts = {"n": slot["count"], "first": slot["mean"], "second": slot["covariance"]}
    total = total or {name: torch.zeros_like(part, dtype=torch.float64) for name, part in parts.items()}
    for label, n in _present(parts["n"]):
        mean = parts["first"][label].double()
        total["n"][label] += n
        total["first"][label].add_(mean, alpha=n)
        total["second"][label].add_(parts["second"][label], alpha=max(n - 1, 0)).addr_(mean, mean, alpha=n)
    return total


def pool_statistics(total: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """(n_c, μ_c, Σ_c) of all clients' features together, from the sums.

    μ_c = Σ_k n_ck μ_ck / n_c; Σ_c = [Σ_k (n_ck − 1)Σ_ck + Σ_k n_ck μ_ck μ_ckᵀ − n_c μ_c μ_cᵀ]/(n_c − 1).
    """
    count = total["n"]
    mean = total["first"] / count.clamp(min=1)[:, None]
    spread = total["second"] - count[:, None, None] * torch.einsum("ci,cj->cij", mean, mean)
    return count, mean, spread / (count - 1).clamp(min=1)[:, None, None]


def draw_features(mean: Tensor, covariance: Tensor, samples: int, rng: torch.Generator) -> Tensor:
    """Rows from N(μ, Σ); what rounding left below zero in Σ's spectrum counts as zero.

    By the symmetric root of Σ, which is a continuous function of it: eigenvectors alone change signs by rounding.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    rows: Tensor = torch.randn(samples, len(mean), generator=rng, dtype=mean.dtype) @ root
    return mean + rows


def _last(strata: Sequence[Stratum]) -> str:
    """The layer that is refitted, which `check` has seen."""
    last = classifier(strata)
    assert last is not None
    return last.name


def _shares_parameters(head: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of the head is another module's as well, which a refit would change with it."""
    own, inside = set(head.parameters()), set(head.modules())
    return any(p in own for m in model.modules() if m not in inside for p in m.parameters(recurse=False))


@dataclass(frozen=True, kw_only=True)
class CCVR(Technique):
    """The classifier refitted after training, on virtual features drawn from each class's Gaussian.

    One more round follows the last one, in which every client takes part and nobody trains: each sends the count n_ck,
    mean μ_ck and covariance Σ_ck of its features for each class it has (features: what goes into the last, linear
    layer). The server merges them into those of all features together, draws `samples` from N(μ_c, Σ_c) for every
    class, and trains the last layer on them.

    Args:
        samples: M_c, virtual features per class; 0 leaves the model as it is. The paper uses 100 for CIFAR-10, 500 for
            CIFAR-100.
        epochs: passes over the virtual features.
        lr: learning rate of SGD with momentum 0.9.
        batch_size: virtual features per step.

    Deviations: the paper does not say how the classifier is trained; epochs, lr and batch size are ours. Clients of
    different depth send the features of different networks, which one Gaussian per class then has to fit.
    """

    name: ClassVar[str] = "ccvr"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_whole: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    epilogue: ClassVar[int] = 1
    vectorises: ClassVar[bool] = True
    samples: int = 100
    epochs: int = 10
    lr: float = 0.01
    batch_size: int = 64

    def __post_init__(self) -> None:
        not_negative("ccvr", samples=self.samples)
        positive("ccvr", epochs=self.epochs, lr=self.lr, batch_size=self.batch_size)

    def check(self, setting: Setting) -> None:
        """Refuse a model whose logits are not put out by one linear layer of its own."""
        model = copy.deepcopy(setting.model).eval()
        last = classifier(setting.strata)
        if last is None:
            raise UsageError(
                "ccvr refits the last layer, and no single last layer was found in this model: let it end with one "
                "nn.Linear that is called once and puts the logits out"
            )
        head = model.get_submodule(last.name)
        if not isinstance(head, nn.Linear):
            raise UsageError(f"ccvr refits a linear last layer, and this model's is a {type(head).__name__}")
        if not head.weight.requires_grad:
            raise UsageError("ccvr refits the last layer, and this model's is frozen")
        if _shares_parameters(head, model):
            raise UsageError("ccvr refits the last layer alone, and this model's shares its parameters with another")
        seen: list[Tensor] = []
        head.register_forward_hook(lambda module, args, output: seen.append(output))
        with torch.no_grad():
            logits = model(setting.sample)
        if not (seen and seen[-1].shape == logits.shape and torch.equal(seen[-1], logits)):
            raise UsageError("ccvr refits a last layer that puts the logits out, and this model changes them after it")

    def local(self, view: ClientView) -> Hooks:
        """In the round after the last, the statistics of the client's features."""
        if view.assignment.trains or not self.samples:
            return Hooks()
        found = statistics(view.outputs(Into(_last(view.strata))), len(view.counts()))
        return Hooks(finish=lambda delta, tally: (found, None))

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Refuse statistics that are incomplete, or of other shapes than the last layer's."""
        if assignment.trains or not self.samples:
            return "it sends statistics that nobody asked for" if slot else None
        if slot.keys() != {"count", "mean", "covariance"}:
            return "its features' statistics are incomplete"
        classes, width = slot["mean"].shape if slot["mean"].dim() == 2 else (0, 0)
        fits = slot["count"].shape == (classes,) and slot["covariance"].shape == (classes, width, width)
        known = any(p.shape == (classes, width) for p in assignment.params.values())
        return None if fits and known and bool((slot["count"] >= 0).all()) else "its features' statistics do not fit"

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """Sums over clients, class by class."""
        return add_statistics(total, slot) if slot else total

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The last layer, refitted on features drawn from each class's Gaussian."""
        total = round.totals[self.name]
        if not total:
            return delta, state
        count, mean, covariance = pool_statistics(total)
        rng = generator(round.seed, self.name)
        present = [c for c in range(len(count)) if count[c] > 0]
        features = torch.cat([draw_features(mean[c], covariance[c], self.samples, rng) for c in present])
        labels = torch.tensor(present).repeat_interleave(self.samples)
        name = _last(round.strata)
        head = round.model(round.params, round.buffers, "").get_submodule(name)
        self._refit(head, features.to(next(head.parameters()).dtype), labels, rng)
        prefix = f"{name}." if name else ""
        fitted = {f"{prefix}{n}": p.detach() for n, p in head.named_parameters()}
        return {**delta, **{n: p - round.params[n] for n, p in fitted.items()}}, state

    def _refit(self, head: nn.Module, features: Tensor, labels: Tensor, rng: torch.Generator) -> None:
        leaves = list(head.parameters())
        move = Sgd(momentum=0.9).start([p.detach() for p in leaves], self.lr, None)
        for _ in range(self.epochs):
            for index in torch.split(torch.randperm(len(labels), generator=rng), self.batch_size):
                move(torch.autograd.grad(F.cross_entropy(head(features[index]), labels[index]), leaves))
