"""What trackers are told of a run: parameters, numbers of each round, a table of clients."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.core.results import Fairness
from fedstrata.runs.records import Record

CLIENTS = 10_000
"""Clients that the table tells of; of more, the first ones."""


def round_values(record: Record) -> dict[str, float]:
    """A round's numbers by the names under which trackers show them: what stands before a slash is a group."""
    primary = record.primary
    values: dict[str, float | None] = {
        **{f"{name}/test": value for name, value in record.all_metrics.items()},
        "loss/test": record.loss,
        "loss/train": record.train_loss,
        "cost/bytes_up": record.bytes_up,
        "cost/bytes_down": record.bytes_down,
        "cost/flops": record.flops,
        "cost/steps": record.steps,
        "cost/seconds": record.seconds,
        "cost/memory": record.memory,
        "cost/simulated_seconds": record.simulated_seconds,
        "round/lr": record.lr,
        "round/clients": len(record.clients),
        "round/refused": len(record.refused),
        "round/strata": len(record.active),
        **_fairness_values(primary, "", record.fairness),
        **_fairness_values(primary, "global ", record.global_fairness),
        **{f"{primary}/newcomers {kind}": value for kind, value in record.newcomers.items()},
        **{f"{primary}/{arch}": score for arch, score in record.arch_accuracy.items()},
        **{f"attack/{fault}": share for fault, share in record.attack_success.items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _fairness_values(primary: str, whose: str, found: Fairness | None) -> dict[str, float | None]:
    """How the primary metric is spread over clients."""
    if found is None:
        return {}
    spread = {"worst": found.worst, "worst tenth": found.worst_tenth, "mean": found.mean, "std": found.std}
    return {f"{primary}/{whose}clients {name}": value for name, value in {**spread, "Jain": found.jain}.items()}


def parameters(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """A configuration as trackers take it: plain values; what is not set is left out."""
    plain = (str, int, float, bool)
    return {n: v if isinstance(v, plain) else str(v) for n, v in config.items() if v is not None}


def summary_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a run's summary."""
    names = ("rounds", "score", "best_score", "best_round", "loss", "rounds_to_target", "refused")
    costs = {f"costs_{name}": value for name, value in summary["costs"].items()}
    found = {**{name: summary.get(name) for name in names}, **costs}
    return {n: v for n, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def client_table(
    records: Sequence[Record], names: Sequence[str] = (), examples: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """One row per client: how often it took part and was refused, and how the models do on its own test examples."""
    rounds, refused = dict[int, int](), dict[int, int]()
    for record in records:
        for client in record.clients:
            rounds[client] = rounds.get(client, 0) + 1
        for row in record.refused:
            refused[row["client"]] = refused.get(row["client"], 0) + 1
    last = next((record for record in reversed(records) if record.loss is not None), None)
    judged = (last.client_metrics if last else None) or []
    own = (last.own_metrics if last else None) or []
    count = max(len(examples), len(judged), len(own), max(rounds, default=-1) + 1)
    return [
        {
            "client": client,
            **({"name": names[client]} if client < len(names) else {}),
            **({"examples": examples[client]} if client < len(examples) else {}),
            "rounds": rounds.get(client, 0),
            "refused": refused.get(client, 0),
            **((judged[client] or {}) if client < len(judged) else {}),
            **{f"own_{name}": v for name, v in ((own[client] or {}) if client < len(own) else {}).items()},
        }
        for client in range(min(count, CLIENTS))
    ]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a file of comma-separated values, with every column that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
