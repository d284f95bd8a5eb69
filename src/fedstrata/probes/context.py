"""All that a probe may see of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fedstrata.core.lazy import nn
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.client.context import ClientContext
    from fedstrata.server.state import Architecture, ServerState


@dataclass(frozen=True, eq=False)
class ObservedVisit:
    """A client's part in a round: its architecture, the change of what it sent, its running statistics, what it says.

    Args:
        loss: its training loss, as it says; None where nothing trained.
        examples: how many it has, as it says.
        steps: that it took.
    """

    client: int
    arch: str
    delta: Tensors
    buffers: Tensors
    loss: float | None = None
    examples: int = 0
    steps: int = 0


@dataclass(frozen=True, eq=False)
class ProbeContext:
    """All that a probe may see of a round; nothing of it may be changed.

    Args:
        before: the server's state that the round began with.
        after: the one that it ended with.
        visits: those of the observed clients whose updates were used.
        last: True for the run's last round.
        work: how clients trained.
        data: client → some of its examples; empty where no probe needs any.
        classes: client → the classes of all its examples, or of these where reading all would take long.
        shared: labelled examples that all models are shown.
        strata: the server model's.
        architectures: by name.
        context: builds models.
    """

    before: ServerState
    after: ServerState
    visits: Sequence[ObservedVisit]
    last: bool
    work: Work
    data: Mapping[int, TensorExamples]
    classes: Mapping[int, frozenset[int]]
    shared: tuple[Tensor, Tensor]
    strata: tuple[Stratum, ...]
    architectures: Mapping[str, Architecture]
    context: ClientContext

    def model(self, state: ServerState, arch: str) -> nn.Module:
        """An architecture's part of a state, as the run would evaluate it."""
        return self.context.model(state.params, state.buffers, arch)

    def without_idle(self, by_stratum: Mapping[str, float]) -> dict[str, float]:
        """What was found stratum by stratum, without idle ones: nothing parts there, which would look like unity."""
        idle = {stratum.name for stratum in self.strata if stratum.idle}
        return {name: value for name, value in by_stratum.items() if name not in idle}

    @cached_property
    def _starts(self) -> dict[str, nn.Module]:
        """Architecture → the model that its clients began the round with."""
        return {arch: self.model(self.before, arch) for arch in dict.fromkeys(visit.arch for visit in self.visits)}

    @cached_property
    def start_models(self) -> list[nn.Module]:
        """The model that each client began with."""
        return [self._starts[visit.arch] for visit in self.visits]

    @cached_property
    def local_models(self) -> list[nn.Module]:
        """Each client's model after its training."""
        if self.context.method.incomplete:
            raise UsageError("clients keep what they train: their models are not in their updates")
        return [self._local_model(visit) for visit in self.visits]

    def _local_model(self, visit: ObservedVisit) -> nn.Module:
        params = {n: t + visit.delta[n] if n in visit.delta else t for n, t in self.before.params.items()}
        return self.context.model(params, {**self.before.buffers, **visit.buffers}, visit.arch)

    @cached_property
    def classes_held(self) -> list[frozenset[int]]:
        """For each client, the classes that it has."""
        return [self.classes[visit.client] for visit in self.visits]
