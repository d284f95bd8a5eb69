"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Batch, ClientView, Hooks, RoundView, Setting, Technique, Times, memory_mismatch
from fedstrata.core.tensors import Tensors, add_, each, subtract, zeros_like
from fedstrata.core.types import Assignment
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Sai Praneeth Karimireddy and Satyen Kale and Mehryar Mohri and Sashank J. Reddi and Sebastian U. Stich "
        "and Ananda Theertha Suresh",
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        "ICML",
        2020,
    ),
)

_STEPS = "(steps)"


def _wide(tensor: Tensor) -> Tensor:
    """A copy to sum up in: half precision would lose gradients after a few hundred of them."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Technique):
    """Control variates against client drift: every gradient plus c − c_k.

    c_k⁺ = (1/τ) Σ g_k, the mean raw gradient of the visit; c ← c + (1/N) Σ_{k∈S} (c_k⁺ − c_k); w ← mean of the w_k,
    all clients weighted alike. Up travels Δ_k and c_k⁺ − c_k; c_k stays on its client.

    Under plain SGD the mean gradient is the paper's Option II, c_k⁺ = c_k − c + (w − w_k)/(τη). Under momentum, Adam or
    scaled steps, where (w − w_k)/(τη) is no gradient, it still is one. The paper's global step size η_g is
    `fedavg(server_lr=…)`.

    Deviation: N is the number of clients whose model holds the parameter, which matters only for clients of different
    depth. What does not train in a round keeps its variates on both sides.
    """

    name: ClassVar[str] = "scaffold"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    synchronous: ClassVar[str] = SYNCHRONOUS
    defaults: ClassVar[dict[str, str]] = {"weight": "uniform"}
    vectorises: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    sums: ClassVar[Literal["", "slot", "delta"]] = "slot"

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """c = 0."""
        return zeros_like(params)

    def send(self, state: Tensors, assignment: Assignment) -> Tensors:
        """c of what trains."""
        return {n: state[n] for n in assignment.uploads}

    def local(self, view: ClientView) -> Hooks:
        """Every gradient plus c − c_k; at the end, c_k⁺ − c_k travels and c_k⁺ stays."""
        names = view.assignment.uploads
        if not names:
            return Hooks()
        mine = view.recall(names)
        shift, one = Times(1.0, subtract(view.slot, mine, names)), torch.ones((), device=mine[names[0]].device)

        def tally(total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            if total:
                return add_(total, {**grads, _STEPS: one})
            first = {n: _wide(grads[n] if n in grads else torch.zeros_like(mine[n])) for n in names}
            return {**first, _STEPS: one.clone()}

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            if not tally:  # not one step was possible: the server refuses such an update
                return {}, None
            means = each("div", [tally[n] for n in names], tally[_STEPS])
            mean = {n: t.to(mine[n].dtype) for n, t in zip(names, means, strict=True)}
            return subtract(mean, mine, names), {**view.memory, **mean}

        return Hooks(correct=lambda grads, batch: shift, tally=tally, finish=finish)

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters."""
        return memory_mismatch(memory, params)

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """The sum of c_k⁺ − c_k."""
        return {**slot, **add_(total, slot)}

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Refuse control variates of other names or shapes than what trained."""
        if slot.keys() != set(assignment.uploads):
            return "its control variates are not those of what it trained"
        wrong = next((n for n, t in slot.items() if t.shape != assignment.params[n].shape), None)
        return None if wrong is None else f"its control variate of '{wrong}' has another shape"

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """c ← c + (1/N) Σ (c_k⁺ − c_k)."""
        moved = {n: state[n] + change / round.owners(n) for n, change in round.totals[self.name].items()}
        return delta, {**state, **moved}
