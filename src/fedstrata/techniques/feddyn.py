"""FedDyn: a dynamic regulariser that lines the clients' optima up with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization",
ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Batch, ClientView, Hooks, RoundView, Setting, Technique, Times, memory_mismatch
from fedstrata.core.tensors import Tensors, add, add_, scale, zeros_like
from fedstrata.errors import one_of, positive
from fedstrata.techniques.fedprox import pull
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Durmus Alp Emre Acar and Yue Zhao and Ramon Matas~Navarro and Matthew Mattina and Paul N. Whatmough "
        "and Venkatesh Saligrama",
        "Federated Learning Based on Dynamic Regularization",
        "ICLR",
        2021,
    ),
)

ADDED_UP = "what clients could not do is made good at once on the server, and its optimiser would add it up again"


def scaled_alpha(alpha: float, mean_examples: float, sizes: Tensor) -> Tensor:
    """α_k = α·Σn/(N·n_k): the larger a client, the weaker the pull beside its mean loss."""
    return alpha * mean_examples / sizes.double()


@dataclass(frozen=True, kw_only=True)
class FedDyn(Technique):
    """A dynamic regulariser: the local loss minus ⟨h_k, w_k⟩ plus α/2·‖w_k − w‖².

    Client: h_k ← h_k − α(w_k − w). Server: h ← h − (α/N) Σ_{k∈S} (w_k − w); w ← mean_{k∈S} w_k − h/α, all clients
    weighted alike. The terms enter as their gradient, −h_k + α(w_k − w); h_k stays on its client and nothing more than
    Δ_k travels.

    Args:
        alpha: α, the strength; the paper uses 0.1, 0.01 and 0.001. It cannot be 0: h/α does not vanish with it.
        judge: which model is evaluated and handed out: the `server`'s w, which clients are sent, or the mean of the
            `clients`' models of the last round, w + h/α, as in the authors' code.
        mean_examples: Σn/N, how many examples a client has in the mean. With it α is scaled by relative size, as in the
            authors' code: client k has α_k = α·Σn/(N·n_k) in both of its terms, so that α_k·n_k is the same for all. On
            the server nothing changes: h/α = −(1/N) Σ (w_k − w), summed over rounds, has no α in it. None: α for all.

    The authors' code has the part α/2·‖w_k‖² of the pull as weight decay of the optimiser; that is this α, and not one
    more setting.

    Deviation: N is the number of clients whose model holds the parameter, which matters only for clients of different
    depth. What does not train in a round keeps its h and h_k.
    """

    name: ClassVar[str] = "feddyn"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    synchronous: ClassVar[str] = SYNCHRONOUS
    defaults: ClassVar[dict[str, str]] = {"weight": "uniform"}
    refuses: ClassVar[dict[str, str]] = dict.fromkeys(("fedavgm", "fedadagrad", "fedadam", "fedyogi"), ADDED_UP)
    vectorises: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    sums: ClassVar[Literal["", "slot", "delta"]] = "delta"
    alpha: float = 0.1
    judge: Literal["server", "clients"] = "server"
    mean_examples: float | None = None

    def __post_init__(self) -> None:
        positive("feddyn", alpha=self.alpha)
        if self.mean_examples is not None:
            positive("feddyn", mean_examples=self.mean_examples)
        one_of("feddyn", ("server", "clients"), judge=self.judge)

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """h = 0."""
        return zeros_like(params)

    def prepare(self, view: ClientView) -> Tensors:
        """α_k, shaped so that it multiplies a parameter; nothing if all clients have the same α."""
        if self.mean_examples is None:
            return {}
        strengths, params = scaled_alpha(self.alpha, self.mean_examples, view.sizes()), view.assignment.params
        return {
            n: strengths.to(params[n].dtype).view(*strengths.shape, *[1] * params[n].dim())
            for n in view.assignment.uploads
        }

    def local(self, view: ClientView) -> Hooks:
        """Every gradient plus −h_k + α(w_k − w); at the end, h_k ← h_k − α(w_k − w)."""
        names, anchor = view.assignment.uploads, view.assignment.params
        if not names:
            return Hooks()
        if self.mean_examples is not None:
            return self._scaled_hooks(view)
        mine = view.recall(names)
        home = add({n: anchor[n] for n in names}, mine, 1 / self.alpha)

        def correct(grads: Tensors, batch: Batch) -> Times:
            return pull(batch.params, home, list(grads), self.alpha)  # −h_k + α(w_k − w) = α(w_k − (w + h_k/α))

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, {**view.memory, **add({n: mine[n] for n in delta}, delta, alpha=-self.alpha)}

        return Hooks(correct=correct, finish=finish)

    def _scaled_hooks(self, view: ClientView) -> Hooks:
        """The same with α_k."""
        anchor, mine, own = view.assignment.params, view.recall(view.assignment.uploads), view.prepared

        def correct(grads: Tensors, batch: Batch) -> Tensors:
            return {n: own[n] * (batch.params[n] - anchor[n]) - mine[n] for n in grads}

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, {**view.memory, **{n: mine[n] - own[n] * change for n, change in delta.items()}}

        return Hooks(correct=correct, finish=finish)

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters."""
        return memory_mismatch(memory, params)

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """The sum of the changes."""
        return {**delta, **add_(total, delta)}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """h ← h − (α/N) Σ (w_k − w); Δ − h/α."""
        sums = round.totals[self.name]
        moved = {n: state[n] - self.alpha / round.owners(n) * change for n, change in sums.items()}
        return add(delta, scale(moved, -1 / self.alpha)), {**state, **moved}

    def deploy(self, state: Tensors, params: Tensors) -> Tensors:
        """w, or w + h/α = mean_{k∈S} w_k."""
        return params if self.judge == "server" else {**params, **add(params, state, 1 / self.alpha)}
