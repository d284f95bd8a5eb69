"""Strata that few clients train: what they learn is these clients' alone."""

from __future__ import annotations

from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import Evidence, Rule, first_few, trained_strata, training_records
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.trainings import trained_by

ALIKE = 1.2
"""Strata that are trained by up to so many times as many clients as the one that the fewest train are named with it."""


def rarely_trained(saved: SavedRun) -> Evidence | None:
    """The share of the clients that train the stratum which the fewest train; None where all train everything."""
    records = [record for record in training_records(saved) if record.active]
    counts = trained_by(records, saved.facts.get("unaffordable", ()))
    shares = {name: few / everybody for name, (few, everybody) in counts.items()}
    value = min(shares.values(), default=1.0)
    if value >= 1:
        return None
    order = [stratum["name"] for stratum in trained_strata(saved.facts)] or list(shares)
    named = [name for name in order if shares.get(name, 1.0) <= ALIKE * value] or [min(shares, key=shares.__getitem__)]
    few, everybody = counts[min(shares, key=shares.__getitem__)]
    what, knows, keeps = (
        ("Stratum", "it knows", "it keeps its") if len(named) == 1 else ("Strata", "they know", "they keep their")
    )
    so = f"{knows} nobody else's data" if few else f"{keeps} first values"
    sentence = f"{what} {first_few(named)}: trained by {few} of {everybody} clients, so {so}."
    return Evidence(value, sentence, {"trained_by": value}, lambda: against_few_trainers(RemedyBuilder(saved)))


def against_few_trainers(builder: RemedyBuilder) -> list[Remedy | None]:
    """What lets more clients train everything."""
    batch, width = int(builder.config.get("batch_size", 32)), builder.width
    return [
        builder.change_settings(
            "half the batch: the backward pass keeps less in memory, so more clients may afford these strata",
            papers.MCMAHAN,
            batch_size=max(batch // 2, 1),
        )
        if builder.config.get("fleet")
        else None,
        builder.change_model(
            "a narrower model, which more clients can train as a whole",
            papers.MCMAHAN,
            width=None if width is None else max(width // 2, 1),
        ),
        builder.advise("let more clients train these strata: larger budgets, other groups, deeper sub-models"),
    ]


COVERAGE_RULES = (Rule("rarely-trained", rarely_trained, explains=frozenset({"no-learning", "diverging-strata"})),)
