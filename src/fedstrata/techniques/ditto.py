"""Ditto: beside the global model every client trains one of its own, which is pulled towards it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique, memory_mismatch
from fedstrata.core.tensors import Tensors, add, scale, subtract
from fedstrata.errors import not_negative

PAPERS = (
    Paper(
        "Tian Li and Shengyuan Hu and Ahmad Beirami and Virginia Smith",
        "Ditto: Fair and Robust Federated Learning Through Personalization",
        "ICML",
        2021,
    ),
)

ANOTHER_MODEL = "both give every client a model of its own"


def pulled_step(own: Tensors, gradient: Tensors, anchor: Tensors, lr: float, strength: float) -> Tensors:
    """v − η(∇F(v) + λ(v − w)), for the names of the gradient."""
    slope = add(gradient, subtract(own, anchor, list(gradient)), strength)
    return {**own, **subtract(own, scale(slope, lr), list(gradient))}


@dataclass(frozen=True, kw_only=True)
class Ditto(Technique):
    """A model of its own for every client beside the global one: v_k ← v_k − η(∇F_k(v_k) + λ(v_k − w)).

    w is the global model as the client received it. It is trained and averaged as ever, so the global model is that of
    the method without Ditto. v_k moves once per local step, on the same batch, by plain SGD with the run's learning
    rate, and stays with its client; at first it is w.

    Args:
        lambda_: λ, how strongly v_k is pulled towards w; 0 is training alone.

    F_k is the client's loss with what other techniques add to it. A step costs a second forward and backward pass.
    Steps in which nothing that travels trains, such as those of FedRep's head, are none of v_k's. Where running
    statistics are averaged, v_k is judged with those that the client's last visit ended with.
    """

    name: ClassVar[str] = "ditto"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    personalised: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = dict.fromkeys(("apfl", "finetune", "fedbabu"), ANOTHER_MODEL)
    lambda_: float = 0.1

    def __post_init__(self) -> None:
        not_negative("ditto", lambda_=self.lambda_)

    def local(self, view: ClientView) -> Hooks:
        """At every step v_k moves, too."""
        a = view.assignment
        if not a.trains:
            return Hooks()
        begin, moving = {**{n: a.params[n] for n in a.trains}, **view.memory}, frozenset(a.trains)

        def tally(own: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            own = own or begin
            gradient = {n: g for n, g in batch.gradient(own).items() if n in moving}
            return pulled_step(own, gradient, a.params, a.work.lr, self.lambda_)

        return Hooks(tally=tally, finish=lambda delta, own: ({}, own or None), variant=frozenset(begin))

    def own(self, memory: Tensors, params: Tensors) -> Tensors:
        """v_k, and w where there is no v_k yet."""
        return {**params, **memory}

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters."""
        return memory_mismatch(memory, params)
