"""Which clients trained which strata, read from a run's records; what was refused, or came too late, is not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fedstrata.runs.records import Record


def _counted(record: Record) -> Iterator[tuple[list[str], list[int]]]:
    """(strata, the clients that trained these and whose updates were used), part by part."""
    refused = {one["client"] for one in record.refused}
    for part in record.trainings:
        yield part.strata, [client for client in part.clients if client not in refused]


def trained_shares(record: Record) -> dict[str, float]:
    """Stratum → the share of the round's clients that trained it."""
    counts: Counter[str] = Counter()
    for strata, clients in _counted(record):
        counts.update(dict.fromkeys(strata, len(clients)))
    return {name: count / len(record.clients) for name, count in counts.items()} if record.clients else {}


def strata_trained_by(record: Record, client: int) -> list[str] | None:
    """What a client trained in a round; None if it did not take part."""
    own = (name for strata, clients in _counted(record) if client in clients for name in strata)
    return list(own) if client in record.clients else None


def trained_rounds(records: Sequence[Record]) -> dict[int, Counter[str]]:
    """Client → stratum → in how many rounds it trained it."""
    found: dict[int, Counter[str]] = {}
    for record in records:
        for client in record.clients:
            found.setdefault(client, Counter())
        for strata, clients in _counted(record):
            for client in clients:
                found.setdefault(client, Counter()).update(strata)
    return found


def trained_by(records: Sequence[Record], unaffordable: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Stratum → (how many clients trained it, how many took part in the rounds in which anybody was asked to).

    Clients that take turns all train it in the end; of a round in which nobody is asked to, nobody is counted. Of the
    unaffordable strata, which nobody could be asked to train, all count that took part.
    """
    everybody = {client for record in records for client in record.clients}
    nobodys = unaffordable if everybody else ()
    trained: dict[str, set[int]] = {name: set() for name in nobodys}
    present: dict[str, set[int]] = {name: set(everybody) for name in nobodys}
    for record in records:
        for strata, clients in _counted(record):
            for name in strata:
                trained.setdefault(name, set()).update(clients)
                present.setdefault(name, set()).update(record.clients)
    return {name: (len(clients), len(present[name])) for name, clients in trained.items()}
