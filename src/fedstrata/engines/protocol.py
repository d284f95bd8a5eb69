"""What an engine is: it turns a round's assignments into updates, in client order.

`fedstrata.engines.registry` has the table of those that can be named. The server does not know which one runs: whatever
keeps to this protocol may be an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from fedstrata.core.types import Slots

if TYPE_CHECKING:
    from fedstrata.core.stacks import Visits
    from fedstrata.core.types import Assignment
    from fedstrata.evaluation.evaluate import EvalRequest, Scores
    from fedstrata.system.timing import Clock

Recall = Callable[[Sequence[int]], Sequence[Slots]]
"""Clients → what each remembers of its earlier visits, before this round: technique name → its tensors."""


class Engine(Protocol):
    """Trains the clients of one round after the other, and evaluates the global model.

    An engine keeps nothing that a result depends on. It may be closed between any two rounds, and a federation that is
    resumed gets a new one: what must last is in the server's state and in clients' memories, and both are the caller's.
    """

    @property
    def workers(self) -> int:
        """How many workers (processes, actors) train clients at the same time; 1 if this process does."""
        ...

    @property
    def overlaps(self) -> bool:
        """True if an evaluation goes on while the next round trains.

        The caller then asks for the next round's updates before it waits for an evaluation. An engine that says False
        does the work of an evaluation when its result is asked for.
        """
        ...

    @property
    def spent(self) -> Clock:
        """Seconds by phase that all workers have spent so far, where a clock is in use; empty without workers.

        It grows as answers arrive. What this process spends is measured by the caller's own clock.
        """
        ...

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visits]:
        """Train the clients of a round: one visit for each assignment, in the order of the assignments.

        Clients may be trained in any order and, in processes of their own, at the same time: a visit seeds its
        process's random generators and uses its model replicas, so two never share a process. Visits are yielded in
        order, so that sums round the same on every engine.

        Args:
            assignments: what the server asks of each client, in client order. Their tensors are shared, and must not be
                changed.
            recall: gives the memories of some clients, `Memories` where they are rows of stacked tensors; to be called
                right before these clients are trained, since memories are read from disk where there are many clients.
                They are good until the round is over.

        Yields:
            (update, what the client will remember if the update is accepted). The tensors of both are good until the
            next visit is asked for: an engine may use their memory again, so whoever wants to keep them copies them.
            The engine keeps no memories: the caller does, and only those of updates that the server accepted.

            Where visits are alike, several that follow each other may come as one `VisitBlock`, rows of stacked
            tensors: the server then checks, counts and folds them together.

            In place of an update there may be an `Absence`: nothing that can be used came from the client, and why. The
            round goes on without it, and the client's memory stays as it was. It is for clients that are out of reach
            (Flower's sites). What goes wrong in a client's own code is raised as it is, and ends the round; a worker
            that dies is the engine's affair, which trains its clients again elsewhere.

        The iterator may be given up at any point. The engine is then ready for another round.
        """
        ...

    def evaluate(self, request: EvalRequest) -> Callable[[], Scores]:
        """Begin to evaluate a model on the test set, and return at once.

        Returns:
            A function that waits for the result, and raises what went wrong. It may be called
            after later rounds were run, and after `close`, but it is called at most once.
        """
        ...

    def take_events(self) -> tuple[str, ...]:
        """What has happened to workers since this was last called, one sentence each, for a run's notes.

        Such as a worker that died and was replaced: it changes no result, but whoever reads the run should know.
        """
        ...

    def close(self) -> None:
        """End all workers and release what they use; nothing that would be missed is lost.

        It may be called at any time, and more than once. An engine is as good as new afterwards: the next `run` or
        `evaluate` starts what it needs again. A round under way is given up, and must not be asked for more visits; an
        evaluation under way begins anew when its result is asked for.
        """
        ...
