"""Clients whose updates are refused: their numbers, or that they come too late, or never."""

from __future__ import annotations

from collections.abc import Mapping

from fedstrata.core.results import NOT_FINITE
from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import Evidence, client_text
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.learning import has_blown_up
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import THRESHOLDS
from fedstrata.runs.reader import SavedRun

LATE = ("did not come", "did not answer", "answers round", "came too late")
"""Words of a refusal that say that an update was late, or never came."""


def refused_updates(saved: SavedRun) -> Evidence | None:
    """The share of its rounds in which a client's update was refused, of the client with the largest."""
    asked: dict[int, int] = {}
    whys: dict[int, list[str]] = {}
    for record in saved.records:
        for client in record.clients:
            asked[client] = asked.get(client, 0) + 1
        for refusal in record.refused:
            whys.setdefault(refusal["client"], []).append(refusal["why"])
    if not asked:
        return None
    shares = {client: min(len(whys.get(client, ())) / rounds, 1.0) for client, rounds in asked.items()}
    named = tuple(client for client in sorted(shares) if shares[client] > THRESHOLDS["refused-updates"].none)
    worst = max(shares, key=lambda client: shares[client])
    value = shares[worst]
    if not named or has_blown_up(saved):  # then everybody's numbers grow, and whose are refused is chance
        return Evidence(0.0 if named else value, "", {"refused": value})
    last = whys[worst][-1]
    sentence = (
        f"Updates of {client_text(saved, named)} are refused: {len(whys[worst])} of {asked[worst]} from client "
        f"{worst}, because {last}."
    )
    figure = {"refused": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_refusals(saved, {c: whys[c][-1] for c in named}), named)


def against_refusals(saved: SavedRun, whys: Mapping[int, str]) -> list[Remedy | None]:
    """What brings a client's updates in, by why they are refused; or doing without it.

    Args:
        saved: the run.
        whys: client → why its last update was refused.
    """
    builder = RemedyBuilder(saved)
    late = [client for client, why in whys.items() if any(words in why for words in LATE)]
    wild = [client for client, why in whys.items() if why == NOT_FINITE]
    rest = [client for client in whys if client not in {*late, *wild}]
    simulated = saved.config.get("deadline") is not None
    hurry = "look at the network and the log of the site of {}, give it more time to answer, or fewer local epochs"
    if simulated:
        hurry = "give {} a longer deadline, or fewer local epochs"
    advice = {
        "look at the examples of {}: missing or huge inputs do this": wild,
        hurry: late,
        "look at the log of the site of {}, and at the version and the settings that run there": rest,
    }
    return [
        *(builder.advise(words.format(client_text(saved, some))) for words, some in advice.items() if some),
        builder.change_settings("clients that would be late train fewer strata, in turns", "", stragglers="narrow")
        if simulated and late
        else None,
        builder.leave_out(tuple(whys)) if whys.keys() < {c for r in saved.records for c in r.clients} else None,
        builder.change_settings(
            "bounds every local gradient, where the client's numbers only grow too large", papers.MCMAHAN, clip=1.0
        )
        if wild
        else None,
    ]
