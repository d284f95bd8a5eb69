"""FedImpro: clients share the distributions of their features, and train the upper layers on all of them.

Tang, Zhang, Shi, Tian, Liu, Han and Chu, "FedImpro: Measuring and Improving Client Update in Federated Learning", ICLR
2024.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import nn, torch
from fedstrata.core.technique import Batch, ClientView, Hooks, RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, clone, swap_values
from fedstrata.core.types import Assignment, Into
from fedstrata.errors import UsageError, not_negative, one_of, positive
from fedstrata.models.passes import calls
from fedstrata.models.stages import cut_place, params_above, split, tap
from fedstrata.techniques.feature_gaussians import (
    Per,
    Source,
    average,
    moments,
    move_average,
    rows,
    sample,
    sample_alike,
    shape_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.batchnorm import _NormBase

Form = Literal["paper", "released"]
Loss = Literal["sum", "mean"]
Labels = Literal["balanced", "batch"]
Variance = Literal["mean", "pooled"]
SPLIT = "fedimpro's split"
"""How refusals begin."""
RAMPS = {"ramp": 1.0, "ramp-to-2": 2.0}
"""Weights that rise with the round, as 2r/R, and where they stop; in the released runs, of 1,000 rounds, λ = r/500."""
PAPERS = (
    Paper(
        "Zhenheng Tang and Yonggang Zhang and Shaohuai Shi and Xinmei Tian and Tongliang Liu and Bo Han and "
        "Xiaowen Chu",
        "FedImpro: Measuring and Improving Client Update in Federated Learning",
        "ICLR",
        2024,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedImpro(Technique):
    """The upper layers train on everybody's features: on as many sampled from shared Gaussians as on a client's own.

    The model is cut into a low and a high part. Every client follows, for each of its classes, the mean μ_m and
    variance σ_m of the features h that leave the low part: μ_m ← β_m·μ_m + (1 − β_m)·mean(h), σ_m likewise (Eq. 6). The
    server keeps μ_g ← β_g·μ_g + (1 − β_g)·mean over the clients of (μ_m + ε), σ_g likewise (Eq. 7), and sends them to
    all. The local loss is CE(high(h), y) + λ·CE(high(ĥ), ŷ), with ĥ ~ N(μ_g, σ_g) given ŷ, and ŷ balanced over the
    classes that have statistics (Eq. 5). The low part gets no gradient from ĥ.

    Where the paper and its code differ there are arguments: `form`, `loss`, `labels`, `weight`, `variance`.

    Args:
        split: the last stage of the low part, or the number of strata in it. The paper's best: half of a ResNet.
        beta_client: β_m.
        beta_server: β_g.
        noise: standard deviation of ε, which is added to every number before it leaves the client. The released code's
            default is 0.001.
        weight: λ; 0 is FedAvg. "ramp" rises from 0 to 1 in the first half of the run; "ramp-to-2" goes on to 2, as in
            the released runs.
        sampled: N̂/N, sampled features for each real one; at least one in a step, or two where there is a batch norm.
        std_cap: largest standard deviation to sample with, None for any. The released code's is 0.1.
        form: "paper" as above. "released" as in the authors' code: the high part's norm layers see real and sampled
            features together, and through their batch's mean ĥ reaches the low part after all; a visit begins with the
            received statistics, goes on with the standard deviation in place of the variance, and samples from its own.
        per: "element" for a Gaussian of every number in h, "channel" for one of every channel, which is smaller by the
            number of positions.
        counts: also tell the server how many examples of each class a client has, and weigh by them.
        loss: "sum" is Eq. 5. "mean" is that over all n + n̂ rows, for which Appendix C.3 proves Theorem 4.2:
            (n·CE(high(h), y) + λ·n̂·CE(high(ĥ), ŷ)) / (n + λ·n̂). With λ = 1 and n̂ = n its steps are half as long as
            the sum's, in the low part as well, where the theorem leaves them whole.
        labels: "balanced" as in the released code. "batch" as in Algorithm 1: ŷ are the batch's own labels, as many
            times as `sampled` says; those of classes without statistics have no weight.
        variance: "mean" is Eq. 7: σ_g is the mean of the clients' variances. "pooled" adds the variance of their means,
            so that it is that of all their features together; the released code has that, too, not as its default.

    Deviations: the paper names neither β_m nor β_g, nor where a moving average begins: here with the first batch that
    has the class. A class that a client lacks has no weight, where the released code averages what the client was sent.
    Apart from the real ones, sampled features are normalised by their own batch and move no running statistics.
    """

    name: ClassVar[str] = "fedimpro"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_classes: ClassVar[bool] = True
    split: str | int = "layer2"
    beta_client: float = 0.9
    beta_server: float = 0.5
    noise: float = 0.0
    weight: float | Literal["ramp", "ramp-to-2"] = 1.0
    sampled: float = 1.0
    std_cap: float | None = None
    form: Form = "paper"
    per: Per = "element"
    counts: bool = False
    loss: Loss = "sum"
    labels: Labels = "balanced"
    variance: Variance = "mean"

    def __post_init__(self) -> None:
        not_negative("fedimpro", noise=self.noise, beta_client=self.beta_client, beta_server=self.beta_server)
        positive("fedimpro", sampled=self.sampled)
        for name, beta in (("beta_client", self.beta_client), ("beta_server", self.beta_server)):
            if beta >= 1:
                raise UsageError(f"fedimpro's {name} must be below 1, not {beta}")
        if self.weight not in RAMPS:
            if isinstance(self.weight, str):
                ramps = " or ".join(f"'{name}'" for name in RAMPS)
                raise UsageError(f"fedimpro's weight must be a number, {ramps}, not '{self.weight}'")
            not_negative("fedimpro", weight=self.weight)
        if self.std_cap is not None:
            not_negative("fedimpro", std_cap=self.std_cap)
        for allowed, given in (
            (Form, {"form": self.form}),
            (Per, {"per": self.per}),
            (Loss, {"loss": self.loss}),
            (Labels, {"labels": self.labels}),
            (Variance, {"variance": self.variance}),
        ):
            one_of("fedimpro", get_args(allowed), **given)

    @property
    def whole_run(self) -> str:
        """The strength of what is sampled, unless it is always the same."""
        return f"weight='{self.weight}' grows over the whole run" if self.weight in RAMPS else ""

    def strength(self, assignment: Assignment) -> float:
        """λ in a round; one that is the same in all does not look which it is."""
        if isinstance(self.weight, str):
            return min(RAMPS[self.weight], 2 * assignment.round / assignment.rounds)
        return self.weight

    def check(self, setting: Setting) -> None:
        """Refuse a model that cannot be cut there, or whose cut leaves nothing to do."""
        place = cut_place(self.split, setting.model, setting.strata, SPLIT)
        idle = {name for stratum in setting.strata if stratum.idle for name in stratum.params}
        free = {n for n, p in setting.model.named_parameters() if p.requires_grad and n not in idle}
        if free.isdisjoint(params_above(setting.model, place)):
            raise UsageError(f"fedimpro's split: nothing that trains lies above '{place}'")
        self._check_kept(setting, place)
        below = {id(m) for module in split(setting.model, place)[0] for m in module.modules()}
        for name, norm in _norms_above(setting.model, place).items():
            if id(norm) in below:
                raise UsageError(f"fedimpro's split: the norm layer '{name}' is used on both sides of '{place}'")
        stage = setting.model.get_submodule(place)
        times = sum(module is stage for module in calls(setting.model, setting.sample))
        if times != 1:
            raise UsageError(f"fedimpro's split: '{place}' runs {times} times in a pass; cut after another stage")
        features = _features(setting, place)
        real = isinstance(features, torch.Tensor) and features.is_floating_point()
        if not real or len(features) != len(setting.sample):
            raise UsageError(f"fedimpro's split: '{place}' does not put out a row of real numbers for every input")

    def _check_kept(self, setting: Setting, place: str) -> None:
        """Refuse clients with features of their own; norm layers of their own make features more alike (FedBN)."""
        above = set(params_above(setting.model, place))
        low = [s for s in setting.strata if any(n in setting.kept - s.norms - above for n in s.params)]
        if self.weight and low:
            raise UsageError(
                f"fedimpro shares features from '{place}' on, and clients keep '{low[0].name}' below it to themselves: "
                "features of clients with lower layers of their own are not alike"
            )

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """No class is known yet."""
        if not self.weight:
            return {}
        place = cut_place(self.split, setting.model, setting.strata, SPLIT)
        features = _features(setting, place)
        with torch.no_grad():
            classes = copy.deepcopy(setting.model).eval()(setting.sample).shape[1]
        blank = features.new_zeros(classes, *shape_of(features, self.per))
        return {"known": torch.zeros(classes, dtype=torch.uint8), "mean": blank, "variance": blank.clone()}

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        """The Gaussians of the classes that are known."""
        if not self.weight or not assignment.trains:
            return {}
        return _pack(state["known"].bool(), state["mean"], state["variance"])

    @property
    def vectorises(self) -> bool:  # type: ignore[override]
        """Not where what is sampled depends on steps, labels, the round, or a shape that only a pass tells."""
        known = self.form == "paper" and self.per == "element" and self.labels == "balanced"
        return known and self.weight not in RAMPS

    def source(self, known: Tensor, mean: Tensor, variance: Tensor) -> Source:
        """What to sample from, where these classes are known."""
        std = variance.clamp(min=0).sqrt_()
        return known.nonzero()[:, 0], mean, std if self.std_cap is None else std.clamp_(max=self.std_cap)

    def counter(self, model: nn.Module) -> Callable[[int], int]:
        """N → N̂, the sampled features beside a batch of N examples."""
        least = 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()) else 1
        return lambda real: max(round(self.sampled * real), least)

    def draws(self, view: ClientView) -> Callable[[int], Tensors] | None:
        """Features from the Gaussians that were sent; `real` are those that are not there to fill up a batch."""
        slot = _sent(view)
        if not len(slot["mean"]):
            return None
        source, shape = self.source(slot["known"].bool(), slot["mean"], slot["variance"]), slot["mean"].shape[1:]
        count = self.counter(view.model)

        def draw(rows: int) -> Tensors:
            drawn = sample(source, count(rows), shape, view.rng)
            return {**drawn, "real": torch.ones_like(drawn["labels"], dtype=torch.float32)}

        return draw

    def local(self, view: ClientView) -> Hooks:
        """Sampled features beside the client's own, and its own statistics as they move."""
        if not self.weight or not view.assignment.trains:
            return Hooks()
        return _Visit(self, view).hooks()

    def pack(self, slot: Tensors, view: ClientView) -> Tensors:
        """The statistics of the classes that were seen, with noise and counts where these are asked for."""
        packed = _pack(slot["seen"], slot["mean"], slot["variance"])
        if self.noise:
            for name in ("mean", "variance"):
                noise = torch.randn(packed[name].shape, generator=view.rng, dtype=packed[name].dtype)
                packed[name] = packed[name] + self.noise * noise.to(packed[name].device)
        if self.counts:
            packed["count"] = view.counts()[slot["seen"].cpu()].long()
        return packed

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Refuse statistics that are incomplete, or of other shapes and types than what was sent."""
        if not self.weight or not assignment.trains:
            return "it sends statistics that nobody asked for" if slot else None
        like = assignment.slots[self.name]
        if slot.keys() != like.keys() | ({"count"} if self.counts else set()):
            return "its features' statistics are incomplete"
        known, sent = slot["known"], slot["mean"].shape[:1]
        shapes = all(slot[n].shape == (*sent, *like[n].shape[1:]) for n in ("mean", "variance"))
        types = all(slot[n].dtype == like[n].dtype for n in like)
        if not (shapes and types and known.shape == like["known"].shape and bool((known <= 1).all())):
            return "its features' statistics do not fit"
        if (int(known.sum()),) != sent or not sent[0]:
            return "its features' statistics do not fit its classes"
        if self.counts and not (
            slot["count"].dtype == torch.int64 and slot["count"].shape == sent and bool((slot["count"] > 0).all())
        ):
            return "its classes' counts do not fit"
        return None

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """Sums over clients of the means and variances, class by class."""
        if not slot:
            return total
        known = slot["known"].bool()
        share = slot["count"].double() if self.counts else torch.ones(int(known.sum()), dtype=torch.float64)
        values = {"mean": slot["mean"], "variance": slot["variance"]}
        if self.variance == "pooled":
            values["square"] = slot["mean"].double() ** 2
        if not total:
            blank = slot["mean"].new_zeros(len(known), *slot["mean"].shape[1:], dtype=torch.float64)
            total = {"weight": torch.zeros(len(known), dtype=torch.float64), **{n: blank.clone() for n in values}}
        total["weight"][known] += share
        for name, value in values.items():
            total[name][known] += value.double() * share.view(-1, *[1] * (value.dim() - 1))
        return total

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """Eq. 7: the server's moving averages."""
        total = round.totals[self.name]
        if not total:
            return delta, state
        known, here = state["known"].bool(), total["weight"] > 0
        found = average(total)
        new = {"known": (known | here).to(torch.uint8)}
        for name in ("mean", "variance"):
            new[name] = move_average(state[name], found[name].to(state[name].dtype), known, here, self.beta_server)
        return delta, new


def _features(setting: Setting, place: str) -> Tensor:
    """What leaves a stage for the setting's sample."""
    with torch.no_grad():
        return tap(copy.deepcopy(setting.model).eval(), setting.sample, place)


def _norms_above(model: nn.Module, place: str) -> dict[str, _NormBase]:
    """The norm layers after a stage that look at the whole batch, or keep statistics of it, by name."""
    after = {id(m) for module in split(model, place)[1] for m in module.modules()}
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase) and id(m) in after}
    return {n: m for n, m in norms.items() if isinstance(m, nn.modules.batchnorm._BatchNorm) or m.track_running_stats}


def _scale_gradient(values: Tensor, factor: Tensor) -> Tensor:
    """The same values, through which a gradient passes so many times as large."""
    still = values.detach()
    return still + factor * (values - still)


def _pack(known: Tensor, mean: Tensor, variance: Tensor) -> Tensors:
    """What travels: which classes there are, and their rows."""
    return {"known": known.to(torch.uint8), "mean": mean[known], "variance": variance[known]}


def _sent(view: ClientView) -> Tensors:
    """The Gaussians that were sent, where the model is."""
    device = next(iter(view.assignment.params.values())).device
    return {name: tensor.to(device) for name, tensor in view.slot.items()}


class _Visit:
    """One client's visit: what it has been sent, what it has seen, what it samples."""

    def __init__(self, technique: FedImpro, view: ClientView) -> None:
        a, self.technique, self.view = view.assignment, technique, view
        self.place = cut_place(technique.split, view.model, view.strata, SPLIT)
        self.sent = _sent(view)
        self.known = self.sent["known"].bool()
        self.strength = technique.strength(a)
        trains_above = not set(a.trains).isdisjoint(params_above(view.model, self.place))
        self.samples = bool(self.strength) and trains_above and len(self.sent["mean"]) > 0
        self.together = technique.form == "released"
        self.features, self.logits = (torch.empty(0),) * 2
        self.sampled, self.beside = Tensors(), Tensors()
        self.real, self.source, self.count = 0, self._own_source(), technique.counter(view.model)
        self.own = self._start()

    def hooks(self) -> Hooks:
        """What the visit does to features, loss and statistics."""
        features: dict[str, Callable[[Batch, Tensor], Tensor]] = {self.place: self._tap}
        if self.samples:
            features[""] = self._leave
        if self.samples and not self.together:
            for name, norm in _norms_above(self.view.model, self.place).items():
                features[Into(name)] = partial(self._real_alone, norm, name)
                features[name] = partial(self._both_again, norm, name)
        return Hooks(
            features=features,
            loss=self._loss if self.samples else None,
            tally=self._tally,
            finish=self._finish,
            variant=self.samples,
        )

    def _own_source(self) -> Source | None:
        """What this visit samples from, where it may change or its shape is not known; else `draws` knows it."""
        if self.technique.vectorises:
            return None
        return self.technique.source(self.known, self.sent["mean"], self.sent["variance"])

    def _start(self) -> Tensors:
        """The moving averages before the first step; `seen` are the classes of this visit."""
        sent, classes = self.sent, len(self.known)
        start = {name: sent[name].new_zeros(classes, *sent[name].shape[1:]) for name in ("mean", "variance")}
        known = torch.zeros_like(self.known)
        if self.together:
            known = self.known.clone()
            for name, rows in start.items():
                rows[known] = sent[name].clamp(min=0) if name == "variance" else sent[name]
        return {**start, "known": known, "seen": torch.zeros_like(known)}

    def _tap(self, batch: Batch, features: Tensor) -> Tensor:
        """Note the features that leave the low part, and let sampled ones follow them."""
        if not batch.again:  # a second look at a batch is at the same sampled features
            self.features = features[: len(batch.y)].detach()
            if not self.samples:  # the next layer may change them in place; else it gets a copy
                self.features = self.features.clone()
            shape = shape_of(features, self.technique.per)
            if shape != self.sent["mean"].shape[1:]:
                given, wanted = (list(s) for s in (shape, self.sent["mean"].shape[1:]))
                raise UsageError(
                    f"fedimpro's split: a client's sub-model has features of shape {given} at '{self.place}', "
                    f"and the server's model {wanted}"
                )
            if self.samples:
                self.sampled = self._draw(batch)
        self.real = len(features)
        return torch.cat([features, self.sampled["features"]]) if self.samples else features

    def _draw(self, batch: Batch) -> Tensors:
        """N̂ features, their labels and, where some may be there to fill up the batch, which ones are real."""
        count, shape = self.count(len(batch.y)), self.features.shape[1:]
        if self.source is None:
            drawn = self.view.draw(batch)
        elif self.technique.labels == "batch":
            drawn = sample_alike(self.source, batch.y, count, shape, self.view.rng)
        else:
            drawn = sample(self.source, count, shape, self.view.rng)
        sampled = drawn["features"]
        turned = sampled.dim() == 4 and self.features.is_contiguous(memory_format=torch.channels_last)
        return {**drawn, "features": sampled.contiguous(memory_format=torch.channels_last) if turned else sampled}

    def _split_rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows that were there, the sampled ones); a layer may have made several rows of one."""
        real = len(values) * self.real // (self.real + len(self.sampled["labels"]))
        own, sampled = torch.split(values, [real, len(values) - real])
        return own, sampled

    def _real_alone(self, norm: _NormBase, name: str, batch: Batch, values: Tensor) -> Tensor:
        """A norm layer gets the real rows only, so that its running statistics are theirs."""
        if not norm.training:
            return values
        real, self.beside[name] = self._split_rows(values)
        return real

    def _both_again(self, norm: _NormBase, name: str, batch: Batch, values: Tensor) -> Tensor:
        if not norm.training:
            return values
        sampled = self.beside.pop(name)
        if type(norm).forward is nn.modules.batchnorm._BatchNorm.forward:
            sampled = F.batch_norm(sampled, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        else:
            own = dict(norm.named_buffers())
            with swap_values(own, clone(own)):
                sampled = norm.forward(sampled)
        return torch.cat([values, sampled])

    def _leave(self, batch: Batch, logits: Tensor) -> Tensor:
        real, self.logits = self._split_rows(logits)
        if self.technique.loss == "sum":
            return real
        own, sampled = self._weights(batch)
        return _scale_gradient(real, own / (own + sampled).clamp(min=1))

    def _weights(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n, λ·n̂): how many rows the means of the client's own loss and of the sampled one are over."""
        own = self.logits.new_tensor(len(batch.y)) if batch.rows is None else batch.rows.sum()
        sampled = self.sampled.get("real")
        count = self.logits.new_tensor(len(self.logits)) if sampled is None else sampled.sum()
        return own, self.strength * count

    def _loss(self, batch: Batch) -> Tensor:
        labels = self.sampled["labels"]
        if batch.rows is None and self.technique.labels == "balanced":
            loss = F.cross_entropy(self.logits, labels)
        else:
            losses, real = F.cross_entropy(self.logits, labels, reduction="none"), self.sampled["real"]
            loss = (losses * real).sum() / real.sum().clamp(min=1)
        if self.technique.loss == "sum":
            return self.strength * loss
        own, sampled = self._weights(batch)
        return sampled / (own + sampled).clamp(min=1) * loss

    def _tally(self, total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
        """Eq. 6."""
        own, technique, beta = self.own, self.technique, self.technique.beta_client
        values, labels = rows(self.features, batch.y, self.technique.per)
        count, mean, variance = moments(values, labels, len(self.known), batch.rows)
        mean, variance = (t.view_as(own["mean"]) for t in (mean, variance))
        known, here = own["known"], count > 0
        new = {
            "mean": move_average(own["mean"], mean, known, here, beta),
            "known": known | here,
            "seen": own["seen"] | here,
        }
        if self.together:
            several = count > 1  # a single row has no spread
            std = move_average(own["variance"].sqrt(), variance.sqrt(), known, here & (several | ~known), beta)
            new["variance"] = std.square_()
            self.source = technique.source(new["known"], new["mean"][new["known"]], new["variance"][new["known"]])
        else:
            new["variance"] = move_average(own["variance"], variance, known, here, beta)
        self.own = new
        return new

    def _finish(self, delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
        return {n: tally[n] for n in ("seen", "mean", "variance") if tally}, None
