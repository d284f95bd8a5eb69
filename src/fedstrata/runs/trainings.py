"""Which clients trained which strata, read from a run's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedstrata.runs.records import Record


def trained_shares(record: Record) -> dict[str, float]:
    """Stratum → the share of the round's clients that trained it."""
    counts: Counter[str] = Counter()
    for part in record.trainings:
        counts.update(dict.fromkeys(part.strata, len(part.clients)))
    return {name: count / len(record.clients) for name, count in counts.items()} if record.clients else {}


def trained_rounds(records: Sequence[Record]) -> dict[int, Counter[str]]:
    """Client → stratum → in how many rounds it trained it."""
    found: dict[int, Counter[str]] = {}
    for record in records:
        for part in record.trainings:
            for client in part.clients:
                found.setdefault(client, Counter()).update(part.strata)
    return found


def trained_by(records: Sequence[Record]) -> dict[str, tuple[int, int]]:
    """Stratum → (how many clients trained it, how many took part in the rounds in which anybody did).

    Clients that take turns all train it in the end; of a round in which nobody does, nobody is counted.
    """
    trained: dict[str, set[int]] = {}
    present: dict[str, set[int]] = {}
    for record in records:
        for part in record.trainings:
            for name in part.strata:
                trained.setdefault(name, set()).update(part.clients)
                present.setdefault(name, set()).update(record.clients)
    return {name: (len(clients), len(present[name])) for name, clients in trained.items()}
