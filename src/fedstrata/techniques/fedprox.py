"""FedProx: a pull towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique, Times
from fedstrata.core.tensors import Tensors, subtract
from fedstrata.errors import not_negative

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Tian Li and Anit Kumar Sahu and Manzil Zaheer and Maziar Sanjabi and Ameet Talwalkar and Virginia Smith",
        "Federated Optimization in Heterogeneous Networks",
        "MLSys",
        2020,
    ),
)


def pull(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor], names: Sequence[str], mu: float) -> Times:
    """∇ of μ/2·‖w_k − w‖²: μ(w_k − w), for the given names."""
    return Times(mu, subtract(params, anchor, names))


@dataclass(frozen=True, kw_only=True)
class FedProx(Technique):
    """A pull towards the global model: the local loss plus μ/2·‖w_k − w‖².

    The term enters as its gradient μ(w_k − w), which is exact and needs no backward pass.

    Args:
        mu: μ, the strength of the pull; 0 is FedAvg. The paper tunes it in {0.001, 0.01, 0.1, 1}.

    Deviation: the paper's γ-inexact solutions (stragglers that do less work) are not part of it.
    """

    name: ClassVar[str] = "fedprox"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    vectorises: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    mu: float = 0.01

    def __post_init__(self) -> None:
        not_negative("fedprox", mu=self.mu)

    def local(self, view: ClientView) -> Hooks:
        """Every gradient plus μ(w_k − w)."""
        if not self.mu:
            return Hooks()
        anchor = view.assignment.params

        def correct(grads: Tensors, batch: Batch) -> Times:
            return pull(batch.params, anchor, list(grads), self.mu)

        return Hooks(correct=correct)
