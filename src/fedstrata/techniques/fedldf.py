"""FedLDF: each layer is sent by the clients in which it diverges most.

Wang, Li, Chen, Wu and Ding, "Communication-Efficient Model Aggregation with Layer Divergence Feedback in Federated
Learning", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import ClientView, Figures, Hooks, RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError, whole_number
from fedstrata.techniques.selection import (
    CHOICE,
    REFUSED,
    key_of,
    last_reports,
    names_by_stratum,
    read_scores,
    recall_report,
    remember_reports,
    score_tensors,
    scores_in,
    squared_norm,
    train_only,
    validate_scores,
    weighted_means,
)

if TYPE_CHECKING:
    from torch import Tensor

_LIMIT, _WHOLE = "limit/", "whole"


PAPERS = (
    Paper(
        "Liwei Wang and Jun Li and Wen Chen and Qingqing Wu and Ming Ding",
        "Communication-Efficient Model Aggregation with Layer Divergence Feedback in Federated Learning",
        "arXiv",
        2024,
        arxiv="2404.08324",
    ),
)


def least_of_top(values: Tensor, share: float) -> float:
    """The smallest of the n largest values, n the share of them, rounded up."""
    count = max(math.ceil(share * len(values) - 1e-9), 1)
    return float(values.kthvalue(len(values) - count + 1).values)


@dataclass(frozen=True, kw_only=True)
class FedLDF(Technique):
    """Layer divergence feedback: a client sends the layers in which it is among those that diverge most.

    Client k tells ΔΘ_k,l = ‖θ_k,l − θ_l‖ of every layer l that it trained. A layer is sent by the clients of the n
    largest ΔΘ_·,l; its mean over those that sent it is weighted by examples.

    Args:
        share: n/K, of the clients that ever told of the layer; 1 is FedAvg.
        refresh: rounds after which what a client told last is too old, and it trains and sends all layers again, as it
            does at its first visit.

    Deviations: the paper's feedback goes up after training and the server asks for layers within the same round; here a
    round has one message each way, so a client is chosen by what it told at its last visits, among all that did, and
    trains only what it sends, which saves computation, too. Layers are strata.
    """

    name: ClassVar[str] = "fedldf"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[Mapping[str, str]] = {**REFUSED, "select": CHOICE}
    vectorises: ClassVar[bool] = True
    share: float = 0.2
    refresh: int = 5

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise UsageError(f"fedldf's share must be above 0 and at most 1, not {self.share!r}")
        whole_number("fedldf", 1, refresh=self.refresh)

    @property
    def per_client(self) -> bool:
        """True: each client is asked for layers of its own."""
        return True

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """The layers in which this client diverges most."""
        told = recall_report(state, assignment.client)
        if self._is_due(told, assignment.round):
            return assignment
        limits = {n.removeprefix(_LIMIT): float(t) for n, t in state.items() if n.startswith(_LIMIT)}
        keys = ((s, key_of(s)) for s in strata)
        return train_only(assignment, (s for s, key in keys if key not in told or told[key] >= limits[key]))

    def _is_due(self, told: Mapping[str, float], number: int) -> bool:
        """True if a client trains all layers in a round, by what it told before."""
        return number - told.get(_WHOLE, -math.inf) >= self.refresh

    def local(self, view: ClientView) -> Hooks:
        """Tell how far each trained layer went."""
        groups = names_by_stratum(view.strata, view.assignment.uploads)

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {key: squared_norm(delta[n] for n in names).sqrt() for key, names in groups.items()}, None

        return Hooks(finish=finish)

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Refuse what is no divergence of a layer."""
        return validate_scores(slot, assignment)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """What every client told last, and for each layer the least divergence with which it is sent."""
        keys = [key_of(s) for s in round.strata if not s.idle]
        reports = {u.client: read_scores(u.slots.get(self.name, {})) for u in round.updates}
        means = weighted_means(list(reports.values()), round.weights)
        due = {a.client for a in round.asked if self._is_due(recall_report(state, a.client), a.round)}
        whole = {_WHOLE: float(round.number)}
        told = {c: {**report, **(whole if c in due else {})} for c, report in reports.items() if report}
        rows = remember_reports(state, told, [*keys, _WHOLE])
        limits = {
            _LIMIT + key: torch.tensor(least_of_top(values, self.share), dtype=torch.float64)
            for key, values in last_reports(rows).items()
            if len(values) and key != _WHOLE
        }
        scores = score_tensors({key: means[key] for key in keys if key in means})
        return delta, {**state, **rows, **limits, **scores}

    def publish(self, state: Tensors) -> Figures:
        """The mean divergence of each layer over those that told of it last."""
        return {"score": scores_in(state)}
