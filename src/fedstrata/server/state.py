"""All that the server knows after a round, what a round came to, and which names an architecture holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from fedstrata.core.low_rank import RankCut, cut_ranks, find_rank_cuts
from fedstrata.core.results import RoundOutcome
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots, Stratum
from fedstrata.models.adapted import base_digest, base_names
from fedstrata.models.norms import running_statistics
from fedstrata.models.strata import strata


@dataclass(frozen=True)
class Flight:
    """A visit under way: of which client, begun with the state after how many rounds, and when it ends."""

    client: int
    round: int
    ends: float


@dataclass(frozen=True, eq=False)
class Version:
    """What is kept of an earlier state for visits that began with it: fields of that, by their names."""

    round: int
    params: Tensors
    buffers: Tensors
    techniques: Slots
    changed: Mapping[str, int]

    @staticmethod
    def of(state: ServerState) -> Version:
        """What is kept of a state; its tensors are shared."""
        return Version(state.round, state.params, state.buffers, state.techniques, state.changed)


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that the server knows after a number of rounds; what a checkpoint holds.

    Args:
        round: number of rounds done, which is the number of the next one.
        params: global parameters.
        buffers: the mean of the clients' running statistics.
        techniques: each technique's own state.
        changed: name of a parameter or of a running statistic → the last round that changed it, −1 for none.
        held: client → the last round of which it holds the parameters (its last accepted one), −1 for none.
        remembers: client → the round in which it last wrote its memory, −1 for never.
        clock: the simulated second; 0 where there is no fleet.
        flights: visits under way, where updates are taken as they arrive.
        versions: of each earlier state that a visit under way began with.
        base: digest of the model's frozen base beneath adapters, which everybody holds; empty where there is none.
    """

    round: int
    params: Tensors
    buffers: Tensors
    techniques: Slots
    changed: Mapping[str, int]
    held: Tensor
    remembers: Tensor
    clock: float = 0.0
    flights: tuple[Flight, ...] = ()
    versions: tuple[Version, ...] = ()
    base: str = ""

    def at(self, round: int) -> ServerState:
        """The state that a visit under way began with; a client under way is to the server what it was then."""
        if round == self.round:
            return self
        version = next(version for version in self.versions if version.round == round)
        return replace(self, **vars(version))


@dataclass(frozen=True)
class Architecture:
    """A client's sub-model by names: which parameters and buffers it holds, its strata, and what its user froze.

    `base` is the frozen base beneath adapters, which every client has by itself, and `digest` says that it is the same.
    `cuts` are the factors of adapters of which it holds a part, for its rank is lower than the server's.
    """

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    strata: tuple[Stratum, ...]
    frozen: frozenset[str] = frozenset()
    base: frozenset[str] = frozenset()
    digest: str = ""
    cuts: Mapping[str, RankCut] = field(default_factory=dict)

    def part_of(self, params: Tensors) -> Tensors:
        """What it holds of the server's parameters, as it holds it."""
        return cut_ranks({n: params[n] for n in self.params}, self.cuts)

    def cut_from(self, whole: Architecture, module: nn.Module, server: nn.Module) -> Architecture:
        """The same, with what it holds less of than the server's model."""
        params, own = dict(server.named_parameters()), dict(module.named_parameters())
        return replace(self, cuts=find_rank_cuts(whole.strata, self.strata, params, own))

    @staticmethod
    def of(module: nn.Module, sample: Tensor) -> Architecture:
        """A module's names; a sample of inputs shows the order in which its layers run."""
        return Architecture(
            params=tuple(n for n, _ in module.named_parameters()),
            buffers=tuple(running_statistics(module)),
            strata=strata(module, sample),
            frozen=frozenset(n for n, p in module.named_parameters() if not p.requires_grad),
            base=base_names(module),
            digest=base_digest(module),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome(RoundOutcome):
    """What happened in a round: what is told of it, whose updates were used, and whether it left the finite numbers."""

    accepted: tuple[int, ...]
    diverged: bool
