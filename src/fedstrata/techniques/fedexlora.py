"""FedEx-LoRA: what the mean of the factors lacks to the mean of their products is added to the frozen weight.

Singhal, Ponkshe and Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models", ACL 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.low_rank import product
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import LowRank
from fedstrata.techniques.low_rank import (
    Factors,
    arrived_adapters,
    check_products,
    collect_factors,
    mean_factors,
    mean_product,
)
from fedstrata.techniques.staleness import SYNCHRONOUS

PAPERS = (
    Paper(
        "Raghav Singhal and Kaustubh Ponkshe and Praneeth Vepakomma",
        "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models",
        "ACL",
        2025,
    ),
)


def residual(factors: Factors, adapter: LowRank, like: Tensors) -> Tensors:
    """scale·(Σ p_k B_k·A_k − (Σ p_k B_k)·(Σ p_k A_k)), by the name of W."""
    weight = like[adapter.weight]
    of_means = product(mean_factors(factors), adapter, weight)
    return {adapter.weight: mean_product(factors, adapter, weight) - of_means}


@dataclass(frozen=True, kw_only=True)
class FedExLoRA(Technique):
    """Exact means of adapters: A ← Σ p_k A_k, B ← Σ p_k B_k, W ← W + scale·(Σ p_k B_k·A_k − B·A).

    After it W + scale·B·A is the mean of the clients' W + scale·B_k·A_k, which the means of the factors alone are not.

    Deviations from the paper: W travels whole in the rounds after those in which it changed, once to each client; the
    paper sends the residual as factors of rank at most (K + 1)·r for K clients. With `fedavg(server_lr=…)` other than
    1, `fednova` or a server optimiser, the residual is still that of the plain mean, and the sum is not exact.
    """

    name: ClassVar[str] = "fedexlora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_deltas: ClassVar[bool] = True
    synchronous: ClassVar[str] = SYNCHRONOUS
    refuses: ClassVar[dict[str, str]] = {
        "fedsalora": "fedsalora leaves B with its client, and no product reaches the server",
        "ffalora": "with A frozen the mean of the products is exact, and there is no residual",
        "rolora": "with one factor frozen the mean of the products is exact, and there is no residual",
    }

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters, or without both factors of one."""
        check_products(self.name, setting)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The mean, and the residual of every adapter of which both factors came."""
        for one in arrived_adapters(round):
            delta = {**delta, **residual(collect_factors(round, one), one, round.params)}
        return delta, state
