"""FedSpeed: a prox-correction, and gradients from a perturbed point.

Sun, Shen, Huang, Ding and Tao, "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy", ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique, Times, memory_mismatch
from fedstrata.core.tensors import Tensors, add, add_, scale, subtract, whole_norm
from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.techniques.feddyn import ADDED_UP
from fedstrata.techniques.fedprox import pull
from fedstrata.techniques.staleness import SYNCHRONOUS

PAPERS = (
    Paper(
        "Yan Sun and Li Shen and Tiansheng Huang and Liang Ding and Dacheng Tao",
        "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy",
        "ICLR",
        2023,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedSpeed(Technique):
    """A prox-correction and perturbed gradients: w_k ← w_k − η(g̃ − ĝ_k + (w_k − w)/λ).

    g̃ = (1 − α)·g₁ + α·g₂ with g₁ = ∇f(w_k) and g₂ = ∇f(w_k + ρ·g₁/‖g₁‖) on the same batch. After the visit
    ĝ_k ← ĝ_k − (w_k − w)/λ, which stays on its client; up travels w_k − λ·ĝ_k, and the server takes the plain mean.

    Args:
        rho: ρ, how far the perturbation goes.
        normalised: False perturbs by ρ·g₁, to the letter of the paper's Algorithm 1. At ρ = 0.1 that is a step uphill
            as long as the one downhill, and training with it collapsed here; the released code normalises.
        lambda_: λ; the pull towards the global model has the strength 1/λ, which the released code calls `lamb = 0.1`.
        alpha: α, the share of the perturbed gradient.

    The released code also takes g₂ alone (α = 1), and its server adds the mean over all clients of their accumulated
    changes, as FedDyn does, where the paper's takes it over those that take part. With everybody taking part that is
    the same; with few, and much skew, the paper's server is restless, and a smaller λ helps.
    """

    name: ClassVar[str] = "fedspeed"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    synchronous: ClassVar[str] = SYNCHRONOUS
    defaults: ClassVar[dict[str, str]] = {"weight": "uniform"}
    refuses: ClassVar[dict[str, str]] = {
        "feddyn": "both pull with a memory of their own, and what fedspeed adds to an upload would enter feddyn's h",
        "feddf": "fedspeed sends a corrected point, not the model whose logits feddf would average",
        "fednova": "fedspeed sends a corrected point, which fednova cannot divide by the number of steps",
    } | dict.fromkeys(("fedavgm", "fedadagrad", "fedadam", "fedyogi"), ADDED_UP)
    vectorises: ClassVar[bool] = True
    rho: float = 0.1
    lambda_: float = 10.0
    alpha: float = 0.9375
    normalised: bool = True

    def __post_init__(self) -> None:
        not_negative("fedspeed", rho=self.rho)
        positive("fedspeed", lambda_=self.lambda_)
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"fedspeed's alpha must lie between 0 and 1, not {self.alpha}")

    def local(self, view: ClientView) -> Hooks:
        """Every gradient as g̃ − ĝ_k + (w_k − w)/λ; the upload is w_k − λ·ĝ_k."""
        names, anchor = view.assignment.uploads, view.assignment.params
        if not names:
            return Hooks()
        mine = view.recall(names)
        home = add({n: anchor[n] for n in names}, mine, self.lambda_)

        def correct(grads: Tensors, batch: Batch) -> Times:
            here = list(grads)
            back = pull(batch.params, home, here, 1 / self.lambda_)  # (w_k − w)/λ − ĝ_k = (w_k − (w + λ·ĝ_k))/λ
            if not (self.alpha and self.rho):
                return back
            along = scale(grads, self.rho / (whole_norm(grads) + 1e-7) if self.normalised else self.rho)
            ahead = batch.gradient(add_(along, batch.params))
            return Times(self.alpha, add_(subtract(ahead, grads, here), back.tensors, back.factor / self.alpha))

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, {**view.memory, **add({n: mine[n] for n in delta}, delta, -1 / self.lambda_)}

        # What is added to Δ_k is −λ·ĝ_k as it is after the visit: Δ_k − λ·ĝ_k as it was before.
        return Hooks(correct=correct, upload=lambda delta: add(delta, mine, -self.lambda_), finish=finish)

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters."""
        return memory_mismatch(memory, params)
