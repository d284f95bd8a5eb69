"""How a run begins: the state before the first round, and how much more its method's visits take than plain training.

A device that is to be in time by training fewer strata has to reckon with what techniques add: SCAFFOLD doubles the
bytes, Ditto the operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstrata.client.forecast import Forecast
from fedstrata.core.rng import preserve_rng
from fedstrata.core.tensors import clone
from fedstrata.core.types import Work
from fedstrata.models.norms import running_statistics
from fedstrata.server.budgets import Compare, Overhead
from fedstrata.server.server import Server
from fedstrata.server.setup import Setup
from fedstrata.server.state import ServerState


def build_start(server: Server, setup: Setup, work: Work, augments: bool) -> ServerState:
    """The state before the first round, once every technique has agreed to what it will run with."""
    offered = setup.settings_of(server.method, work, augments)
    for technique in server.method.at("check"):
        for setting in offered.values():
            technique.check(setting)
    whole = setup.models[""]
    return server.start(clone(dict(whole.named_parameters())), clone(running_statistics(whole)), offered[""])


@dataclass(frozen=True, eq=False)
class FirstVisits:
    """Foresees visits of the first round, if everybody trained all that the method plans.

    Args:
        server: without budgets.
        setup: models and data.
        forecast: says what visits cost.
        work: how clients train.
        augments: whether inputs are augmented.
    """

    server: Server
    setup: Setup
    forecast: Forecast
    work: Work
    augments: bool

    def overheads(self, asked: Sequence[int], compare: Compare) -> Mapping[str, Overhead]:
        """Architecture → what visits take beyond plain training, by the client with the most examples."""
        largest: dict[str, int] = {}
        for client in sorted(asked, key=lambda client: len(self.setup.clients[client])):
            largest[self.setup.arch_of(client)] = client
        with preserve_rng():
            state = build_start(self.server, self.setup, self.work, self.augments)
            visits = {arch: self.server.open(state, [client], self.work)[0] for arch, client in largest.items()}
            sizes = {arch: len(self.setup.clients[client]) for arch, client in largest.items()}
            return {arch: compare(a, sizes[arch], self.forecast.cost(a, {})) for arch, a in visits.items()}
