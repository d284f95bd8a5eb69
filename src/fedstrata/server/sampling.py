"""Who takes part: the clients that have examples, which of them are asked in a round, and for how many steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fedstrata.core.rng import derive
from fedstrata.core.types import Examples, Work
from fedstrata.data.batching import batch_sizes
from fedstrata.data.examples import join_examples, sizes
from fedstrata.errors import UsageError


class ClientSampler:
    """The clients of a run, and who of them is asked in each round.

    Args:
        clients: everybody's examples.
        arch_of: client → the name of its architecture.
        participation: clients per round: a fraction (float) or a number (int).
        seed: of the run.
        rounds: number of rounds; in those after them everybody takes part.
        centralised: one party holds everybody's examples. In every round it takes as many steps as the clients that
            would have been asked take together.
        drop_single: a last batch of one example is left out.
        without: clients that are never asked, and whose examples nobody gets. Where fewer than `participation` are
            left, all of them are asked.
        newcomers: share of the others that are asked only after the last round, drawn by the seed.
    """

    def __init__(
        self,
        clients: Sequence[Examples],
        arch_of: Callable[[int], str],
        participation: int | float,
        seed: int,
        rounds: int,
        centralised: bool,
        drop_single: bool,
        without: Collection[int] = (),
        newcomers: float | None = None,
    ) -> None:
        self._size, everyone = sizes(clients), range(len(clients))
        _check_without(without, len(clients))
        whole = not without and all(map(self._size, everyone))
        self._eligible = everyone if whole else [c for c in everyone if self._size(c) and c not in without]
        if without and not self._eligible:
            raise UsageError("without leaves no client that has examples")
        self._all = self._eligible
        self.newcomers = self._draw_newcomers(newcomers, seed, centralised) if newcomers is not None else frozenset()
        if self.newcomers:
            self._eligible = [c for c in self._all if c not in self.newcomers]
        count = participation if isinstance(participation, int) else max(1, round(participation * len(self._eligible)))
        if count > len(self._eligible) + sum(bool(self._size(client)) for client in without):
            raise UsageError(f"participation = {count}, but only {len(self._eligible)} clients have examples")
        count = min(count, len(self._eligible))
        self._count, self._seed, self._rounds, self._drop_single = count, seed, rounds, drop_single
        self._centralised = centralised
        self.clients: Sequence[Examples] = (
            [self._join(clients) if without else join_examples(clients)] if centralised else clients
        )
        self.arch_of: Callable[[int], str] = (lambda client: "") if centralised else arch_of

    def _draw_newcomers(self, share: float, seed: int, centralised: bool) -> frozenset[int]:
        """Who takes part only after the last round."""
        if centralised:
            raise UsageError("newcomers need clients: 'centralised' has one party that holds everybody's examples")
        count = max(1, round(share * len(self._all)))
        if count >= len(self._all):
            raise UsageError(f"newcomers = {share} leaves none of {len(self._all)} clients to train the model")
        return frozenset(random.Random(derive(seed, "newcomers")).sample(list(self._all), count))

    def _join(self, clients: Sequence[Examples]) -> Examples:
        return join_examples([clients[client] for client in self._eligible])

    @property
    def per_round(self) -> int:
        """How many clients take part in a round."""
        return 1 if self._centralised else self._count

    @property
    def everybody(self) -> Sequence[int]:
        """All clients that have examples and take part in rounds."""
        return [0] if self._centralised else self._eligible

    def _draw(self, among: Sequence[int], *stream: int | str) -> list[int]:
        """As many as take part in a round, or all if fewer are left."""
        return random.Random(derive(self._seed, *stream)).sample(among, min(self._count, len(among)))

    def candidates(self, number: int) -> Sequence[int]:
        """The clients that may be asked in a round."""
        return self.everybody if number < self._rounds else self._all

    def sample(self, number: int, there: Sequence[int] | None = None) -> Sequence[int]:
        """The clients of a round, drawn among those of its candidates that are there, among all without a word of it.

        In rounds after the last one it is everybody.
        """
        if self._centralised:
            return self.everybody
        if number < self._rounds:
            return self._draw(self._eligible if there is None else there, "sample", number)
        return self._all

    def work(self, number: int, work: Work) -> Work:
        """What a client of this round is asked to do: its share of the work, or all of it where one party does it."""
        if not self._centralised:
            return work
        steps = (
            len(batch_sizes(self._size(client), work, self._drop_single))
            for client in self._draw(self._eligible, "sample", number)
        )
        return replace(work, steps=sum(steps))


def _check_without(without: Collection[int], population: int) -> None:
    for client in sorted(c for c in without if c >= population):
        raise UsageError(f"without names client {client}, and the clients are 0 to {population - 1}")
