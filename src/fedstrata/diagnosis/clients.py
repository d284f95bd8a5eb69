"""Clients one by one: whose inputs or labels are broken, whose updates are hostile, and who is rare but honest.

A client is judged against the others of the same rounds, never against a fixed number, and only where fewer than half
of them stand out. What its data explains is not held against its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.client_losses import (
    FAR,
    LOSS_FLOOR,
    Collapse,
    excess_losses,
    guessing_loss,
    is_dead,
    is_like_for_like,
    loss_doubts,
    odd_losses,
    reported_losses,
    wrecking_clients,
)
from fedstrata.diagnosis.data_cards import odd_inputs
from fedstrata.diagnosis.evidence import Evidence, Rule, client_text, first_few, percent_text, times_text
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.learning import has_blown_up
from fedstrata.diagnosis.outliers import (
    COSINE_FLOOR,
    FEW,
    column,
    direction_scores,
    length_scores,
    over_rounds,
    recent_rows,
    scores_over_rounds,
    worst_strata,
)
from fedstrata.diagnosis.refusals import refused_updates
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import REPORTED, SLIGHT, STANDING, THRESHOLDS
from fedstrata.errors import UsageError
from fedstrata.runs.reader import SavedRun
from fedstrata.techniques import method

CERTAIN = 2.33
"""Standard errors that a client's loss must exceed the others' by, which happens once in a hundred by chance: the loss
of few examples is often large."""

SAME = 1e-3
"""1 − cosine of two updates below which they may be copies of one another."""

CLOSER = 0.05
"""And they are, if they are so much nearer to each other than clients usually are."""

SURE = 20.0
"""The score of what leaves no doubt: updates that are copies, or that never change."""


def is_minority(named: Sequence[int], seen: int) -> bool:
    """Whether these are few enough of those that were looked at: who is odd is a question to the majority."""
    return 0 < len(named) < seen / 2


def is_told(finding: str, value: float) -> bool:
    """Whether a figure is enough for a finding to be reported: one that is not explains nothing away."""
    return THRESHOLDS[finding].severity(value) >= REPORTED


# Inputs -------------------------------------------------------------------------------------------------------


def broken_inputs(saved: SavedRun) -> Evidence | None:
    """How far out the inputs of the oddest client are, by its card."""
    found = odd_inputs(saved)
    if not found:
        return None
    limit = THRESHOLDS["broken-inputs"].none
    named = tuple(client for client in found if found[client].score > limit)
    worst = max(found, key=lambda client: found[client].score)
    value = max(found[worst].score, 0.0)
    if not is_minority(named, len(found)):
        return Evidence(min(value, limit), "", {"score": min(value, limit)})
    strata = worst_strata(saved, worst)
    where = f" Its updates are furthest out in {first_few(strata)}." if strata else ""
    sentence = (
        f"The inputs of {client_text(saved, named)} are unlike everybody else's: of client {worst}, "
        f"{found[worst].words}, a robust score of {value:.1f}.{where}"
    )
    figure = {"score": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_inputs(saved, named, found[worst].remedy), named)


def against_inputs(saved: SavedRun, named: Sequence[int], change: str) -> list[Remedy | None]:
    """Put them right at the client, or let no single client move the mean."""
    builder = RemedyBuilder(saved)
    leave_out, *reducers = _without_harm(builder, named)
    return [
        leave_out,
        builder.change_settings(
            "every client brings its inputs to mean 0 and deviation 1 by itself", papers.IOFFE, standardise="client"
        ),
        *reducers,
        builder.advise(f"correct the inputs of {client_text(saved, named)} before anybody trains on them: {change}"),
    ]


def _without_harm(builder: RemedyBuilder, named: Sequence[int]) -> list[Remedy | None]:
    """Nobody of those who are named, or a rule that they cannot move.

    In this order by what we measured (docs/results/diagnosis.md): where data is skewed, a median costs honest clients
    more than one client's wrong labels do.
    """
    count = "one client" if len(named) == 1 else f"{len(named)} clients"
    return [
        builder.leave_out(named),
        builder.change_reducer("median", f"{count} cannot move a median beyond the others' numbers", papers.YIN),
        builder.change_reducer(
            "geometric_median", "clients that are far from all others count for little", papers.PILLUTLA
        ),
    ]


# Labels -------------------------------------------------------------------------------------------------------


def broken_labels(saved: SavedRun) -> Evidence | None:
    """By how much a client's own examples cost the global model more than its classes do elsewhere."""
    found = odd_losses(saved, "exchange", lambda row: excess_losses(saved, row))
    innocent = _named_for_inputs(saved) | {
        client for client, (score, _) in hostile_clients(saved).items() if is_told("hostile-updates", score)
    }
    doubts = loss_doubts(saved)
    judged = {
        client: value if value > CERTAIN * doubts.get(client, 0.0) else 0.0
        for client, value in found.items()
        if client not in innocent
    }
    if not judged:
        return None
    threshold = THRESHOLDS["broken-labels"]
    named = tuple(client for client in sorted(judged) if judged[client] > threshold.none)
    value = max(judged.values())
    if not is_minority(named, len(found)):
        value = min(value, threshold.none)
        return Evidence(value, "", {"excess": value})
    if not is_like_for_like(saved):
        value = min(value, threshold.none + SLIGHT * (threshold.full - threshold.none))
    worst = max(named, key=lambda client: judged[client])
    kind = "labels" if saved.facts.get("has_classes", True) or saved.facts.get("classes") else "targets"
    sentence = (
        f"The {kind} of {client_text(saved, named)} do not fit the inputs: {_label_text(saved, worst)}"
        f"{_strata_text(saved, worst)}."
    )
    figure = {"excess": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_labels(saved, named), named)


def _named_for_inputs(saved: SavedRun) -> set[int]:
    evidence = broken_inputs(saved)
    return set(evidence.clients) if evidence is not None and is_told("broken-inputs", evidence.value) else set()


def _exchanged(saved: SavedRun, name: str) -> dict[int, float]:
    """Client → what the probe `exchange` found, in the median over the last rounds."""
    return over_rounds(column(row, row["exchange"].get(name)) for row in recent_rows(saved, "exchange"))


def _label_text(saved: SavedRun, client: int) -> str:
    own, expected = (_exchanged(saved, name).get(client, 0.0) for name in ("own", "expected"))
    after, there = (_exchanged(saved, name).get(client, 0.0) for name in ("own_after", "shared_after"))
    others = "examples of the same classes"
    if not saved.facts.get("has_classes", True) and not saved.facts.get("classes"):
        others = "examples with targets in the same range" if is_like_for_like(saved) else "everybody's examples"
    text = (
        f"the examples of client {client} cost the global model {own:.2f}, where {others} cost {expected:.2f} "
        f"elsewhere; its own model costs {after:.2f} and {there:.2f}"
    )
    if not is_like_for_like(saved):
        text += ", which a client with other targets than most may show, too"
    right, consistent = (_exchanged(saved, name).get(client) for name in ("accuracy", "consistent"))
    if right is None or consistent is None:
        return text
    told = f"{text}; the model is right on {percent_text(right)} of them"
    if consistent > max(0.6, 1.5 * right):
        return f"{told}, and would be on {percent_text(consistent)} if labels were exchanged one for another"
    return (
        f"{told}, and on {percent_text(consistent)} at most if labels were exchanged one for another: some are random"
    )


def _strata_text(saved: SavedRun, client: int) -> str:
    strata = worst_strata(saved, client)
    return f"; its updates are furthest out in {first_few(strata)}" if strata else ""


def against_labels(saved: SavedRun, named: Sequence[int]) -> list[Remedy | None]:
    """Correct them, or let no single client move the mean."""
    builder = RemedyBuilder(saved)
    return [
        *_without_harm(builder, named),
        builder.advise(f"compare the labels of {client_text(saved, named)} with another site's: order, offset, files"),
    ]


# Data that cannot be seen -------------------------------------------------------------------------------------


def broken_data(saved: SavedRun) -> Evidence | None:
    """By how much a client's training loss exceeds the others', where nobody can look at its examples."""
    if saved.series("exchange"):
        return None
    inputs = _named_for_inputs(saved)
    wrecked = {client: how for client, how in wrecking_clients(saved).items() if client not in inputs}
    if wrecked:
        return _wreckage(saved, wrecked)
    found = odd_losses(saved, "visits", lambda row: reported_losses(saved, row))
    judged = {client: value for client, value in found.items() if client not in inputs}
    if not judged:
        return None
    threshold = THRESHOLDS["broken-data"]
    named = tuple(client for client in sorted(judged) if judged[client] > threshold.none)
    value = max(judged.values())
    if not is_minority(named, len(found)) or is_dead(saved):
        value = min(value, threshold.none)
        return Evidence(value, "", {"excess": value})
    worst = max(named, key=lambda client: judged[client])
    losses = over_rounds(column(row, row["visits"].get("loss")) for row in recent_rows(saved, "visits"))
    why = "Whether inputs or labels are at fault cannot be seen from updates alone."
    if not saved.facts.get("has_classes", True) and not saved.facts.get("classes"):
        value = min(value, threshold.none + SLIGHT * (threshold.full - threshold.none))
        why = "Whether inputs or targets are at fault, or its targets are only other than most, cannot be seen."
    sentence = (
        f"The data of {client_text(saved, named)} cannot be learnt as the others' can: client {worst} reports a "
        f"training loss of {losses[worst]:.2f}, where the median client reports {median(losses.values()):.2f}"
        f"{_strata_text(saved, worst)}. {why}"
    )
    figure = {"excess": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_labels(saved, named), named)


def _wreckage(saved: SavedRun, wrecked: Mapping[int, Collapse]) -> Evidence:
    """Clients that wrecked the model, which later rounds no longer show."""
    named = tuple(wrecked)
    worst = max(named, key=lambda client: wrecked[client].loss)
    how = wrecked[worst]
    value = (how.loss - how.usual) / guessing_loss(saved, {worst: how.usual})
    sentence = (
        f"The data of {client_text(saved, named)} has wrecked the model: in round {how.round} client {worst} reports a "
        f"training loss of {how.loss:.3g}, where the median client reports {how.usual:.3g}, and its update is "
        f"{times_text(how.ratio)} as long. Whether inputs or labels are at fault cannot be seen from updates alone, "
        "but inputs that are many times as large as the others' do this."
    )
    figure = {"excess": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_wreckage(saved, named), named)


def against_wreckage(saved: SavedRun, named: Sequence[int]) -> list[Remedy | None]:
    """Bring the inputs to the others' scale, or let no single client move the mean."""
    builder = RemedyBuilder(saved)
    look = f"compare the unit and the range of the inputs of {client_text(saved, named)} with another site's"
    return [*_without_harm(builder, named), builder.advise(look)]


# Hostile updates ----------------------------------------------------------------------------------------------


def _rises(row: Mapping[str, Any]) -> dict[int, float]:
    """Client → by how much its own training, as it says, has raised the loss on its own examples."""
    own, after = (column(row, row["exchange"].get(name)) for name in ("own", "own_after"))
    return {client: after[client] - own[client] for client in own.keys() & after.keys()}


def is_steered(saved: SavedRun) -> bool:
    """Whether local steps go by more than the client's own loss, which they then need not lower: control variates.

    That is so where a technique sends something along, or has clients remember something.
    """
    try:
        steered = method(saved.method)
    except UsageError:
        return True  # somebody's own technique, of which nothing is known here
    return any(any(steered.at(door)) for door in ("send", "validate_memory"))


def opposed_clients(saved: SavedRun) -> dict[int, tuple[float, str]]:
    """Client → (score, why) of those whose updates go against everybody's, though their own loss says otherwise."""
    rows = recent_rows(saved, "visits")
    cosines = over_rounds(column(row, row["visits"].get("whole", {}).get("cosine")) for row in rows)
    scores = over_rounds(
        found
        for row in rows
        if len(found := direction_scores(row, row["visits"].get("whole", {}).get("cosine"))) >= FEW
    )
    middle = median(cosines.values()) if cosines else 0.0
    own, after = _exchanged(saved, "own"), _exchanged(saved, "own_after")
    rises = {} if is_steered(saved) else over_rounds(_rises(row) for row in recent_rows(saved, "exchange"))
    usual = max(median(rises.values()), 0.0) if rises else 0.0
    told: dict[int, tuple[float, str]] = {}
    for client, score in scores.items():
        against = cosines[client] < -COSINE_FLOOR and middle > 0
        if rises:
            rise = rises.get(client, 0.0) - usual
            backwards = rise > LOSS_FLOOR * guessing_loss(saved, own)
            if not backwards or cosines[client] > min(middle - COSINE_FLOOR, 0.0):
                continue
            why = f"its update raises the loss on its own examples from {own[client]:.2f} to {after[client]:.2f}"
            reach = max(score, FAR * (1 + rise / max(guessing_loss(saved, own), 1e-9)))
            told[client] = reach, f"{why}, and its cosine to the others' centre is {cosines[client]:.2f}"
        elif against and score > FAR:
            told[client] = score, f"its cosine to the others' centre is {cosines[client]:.2f}, theirs {middle:.2f}"
    return told


def scaled_clients(saved: SavedRun) -> dict[int, tuple[float, str]]:
    """Client → (score, why) of those whose updates are many times as long as the others', or nothing at all."""
    rows = recent_rows(saved, "visits")
    norms = over_rounds(column(row, row["visits"].get("whole", {}).get("norm")) for row in rows)
    middle = median(norms.values()) if norms else 0.0
    scores = over_rounds(
        found for row in rows if len(found := length_scores(row, row["visits"].get("whole", {}).get("norm"))) >= FEW
    )
    told: dict[int, tuple[float, str]] = {}
    for client, score in scores.items():
        if score > THRESHOLDS["hostile-updates"].none:
            ratio = times_text(norms[client] / max(middle, 1e-30))
            told[client] = score, f"its update is {ratio} as long as the median client's"
        elif score < -FAR and norms[client] < 1e-3 * middle:
            told[client] = -score, "its update is next to nothing"
    return told


def copied_clients(saved: SavedRun) -> dict[int, tuple[float, str]]:
    """Client → (score, why) of those whose updates are copies of another's, or of their own of the round before."""
    rows = recent_rows(saved, "visits")
    apart: list[dict[int, float]] = []
    for row in rows:
        nearest = column(row, row["visits"].get("whole", {}).get("nearest"))
        distances = {client: 1 - cosine for client, cosine in nearest.items()}
        if len(distances) >= FEW:
            usual = median(distances.values())
            apart.append({c: d / max(usual, 1e-9) if d < SAME else math.inf for c, d in distances.items()})
    copies = {client: ratio for client, ratio in over_rounds(apart).items() if ratio < CLOSER}
    found = {}
    if len(copies) > 1:
        others = ", ".join(map(str, copies))
        found = dict.fromkeys(copies, (SURE, f"the updates of clients {others} are all but the same"))
    norms = [column(row, row["visits"].get("whole", {}).get("norm")) for row in rows]
    for client in {c for seen in norms for c in seen} - found.keys():
        lengths = [seen[client] for seen in norms if client in seen]
        if len(lengths) > 2 and lengths[0] > 0 and len({f"{length:.5g}" for length in lengths}) == 1:
            found[client] = SURE, f"its update has had the same norm, {lengths[0]:.4g}, in {len(lengths)} rounds"
    return found


def unstable_clients(saved: SavedRun) -> set[int]:
    """Clients that report a larger training loss than they began with: their training fails, and they say so."""

    def rise(row: Mapping[str, Any]) -> dict[int, float]:
        own, told = column(row, row["exchange"].get("own")), column(row, row.get("visits", {}).get("loss"))
        scale = guessing_loss(saved, own)
        return {client: (told[client] - own[client]) / scale for client in own.keys() & told.keys()}

    found = over_rounds(rise(row) for row in recent_rows(saved, "exchange"))
    return {client for client, value in found.items() if value > LOSS_FLOOR}


def hostile_clients(saved: SavedRun) -> dict[int, tuple[float, str]]:
    """Client → (score, why) of those whose updates are hostile whatever their data is.

    Who admits that its training fails is not: its steps are too long for its examples. Nor is one whose update is only
    somewhat unlike the others' where the model is dead for everybody: all who train the last bias alone are alike.
    """
    inputs = _named_for_inputs(saved) | unstable_clients(saved)
    found: dict[int, tuple[float, str]] = {}
    dead, looked = is_dead(saved), bool(saved.series("exchange"))
    judgements = (
        ({} if has_blown_up(saved) else copied_clients(saved), 0.0),
        (opposed_clients(saved), SURE if dead and not looked else 0.0),
        (scaled_clients(saved), SURE if dead else 0.0),
    )
    for judged, least in judgements:
        for client, (score, why) in judged.items():
            if client not in inputs and score >= least and score > found.get(client, (0.0, ""))[0]:
                found[client] = score, why
    return found


def hostile_updates(saved: SavedRun) -> Evidence | None:
    """How far out the update is of the client that stands out most, where its data does not explain it."""
    seen = {client for row in recent_rows(saved, "visits") for client in column(row, row["visits"].get("loss"))}
    if len(seen) < FEW:
        return None
    found = hostile_clients(saved)
    data = broken_data(saved)
    blamed = set() if data is None else set(data.clients)
    found = {client: told for client, told in found.items() if client not in blamed or told[0] >= SURE}
    limit = THRESHOLDS["hostile-updates"].none
    named = tuple(sorted(client for client, (score, _) in found.items() if score > limit))
    if not is_minority(named, len(seen)):
        return Evidence(0.0, "", {"score": 0.0})
    worst = max(named, key=lambda client: found[client][0])
    value, why = found[worst]
    unseen = "" if saved.series("exchange") else " Whether its examples explain that cannot be seen from updates alone."
    sentence = (
        f"Updates of {client_text(saved, named)} are not what honest training gives: of client {worst}, {why}"
        f"{_strata_text(saved, worst)}.{unseen}"
    )
    figure = {"score": value, "clients": float(len(named))}
    return Evidence(value, sentence, figure, lambda: against_hostility(saved, named), named)


def against_hostility(saved: SavedRun, named: Sequence[int]) -> list[Remedy | None]:
    """A rule that a minority cannot move, or doing without the client."""
    builder = RemedyBuilder(saved)
    share = min(0.45, math.ceil(100 * (len(named) + 1) / max(int(saved.facts.get("clients", 10)), 1)) / 100)
    return [
        *_without_harm(builder, named),
        builder.change_reducer(
            f"multi_krum(share={share:g})", "only updates that are near many others count", papers.BLANCHARD
        ),
    ]


# Rare but honest ----------------------------------------------------------------------------------------------


def rare_clients(saved: SavedRun, named: set[int]) -> str | None:
    """What is worth knowing of clients that are unlike the others and nothing worse."""
    rows = recent_rows(saved, "visits")
    ways = scores_over_rounds(
        rows, lambda row: {c: -v for c, v in column(row, row["visits"].get("whole", {}).get("cosine")).items()}, 0.1
    )
    odd = [client for client, score in ways.items() if score > 3 and client not in named]
    if not odd or len(odd) >= len(ways) / 2:
        return None
    told = [f"{client_text(saved, [client])}, {_rarity_text(saved, client)}" for client in odd]
    return f"Unlike the others, and by no sign broken: {'; '.join(told)}."


def _rarity_text(saved: SavedRun, client: int) -> str:
    """What of a client's data explains that its updates go another way."""
    counts, examples = saved.facts.get("counts", []), saved.facts.get("examples", [])
    told = []
    if client < len(counts) and sum(counts[client]):
        totals = [sum(each) for each in zip(*counts, strict=True)]
        shares = [n / sum(counts[client]) for n in counts[client]]
        apart = sum(abs(p - n / sum(totals)) for p, n in zip(shares, totals, strict=True)) / 2
        if apart > 0.3:
            told.append(f"{percent_text(apart)} of its labels are not everybody's")
    held = [n for n in examples if n]
    if client < len(examples) and held and examples[client] < median(held) / 3:
        told.append(f"it has {examples[client]} examples, the median client {median(held):g}")
    return f"because {' and '.join(told)}" if told else "for no reason that can be seen"


ALL = THRESHOLDS.keys() - STANDING
"""What a single client may cause: all that is measured."""

CLIENT_RULES = (
    Rule("broken-inputs", broken_inputs, explains=frozenset({*ALL, "refused-updates", "broken-data"})),
    Rule("refused-updates", refused_updates, explains=frozenset({"no-learning", "rarely-trained"})),
    Rule("hostile-updates", hostile_updates, probes=("visits",), explains=frozenset(ALL)),
    Rule("broken-labels", broken_labels, probes=("exchange",), explains=frozenset(ALL)),
    Rule("broken-data", broken_data, probes=("visits",), explains=frozenset(ALL)),
)
