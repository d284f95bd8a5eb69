"""What findings cost, where remedies were tried: harm in the run's own metric, instead of an estimate by a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstrata.core.text import SHARES, metric_title
from fedstrata.diagnosis.evidence import IDEAL
from fedstrata.diagnosis.findings import Finding, Harm
from fedstrata.diagnosis.harm import FAR, NEAR, guessing_score
from fedstrata.diagnosis.thresholds import HIGH, NEVER_SERIOUS, REPORTED
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import Gain, Tried


def measure_findings(findings: Sequence[Finding], saved: SavedRun, tried: Tried | None) -> list[Finding]:
    """The findings with what each costs, by what was tried against it; others stay as they are.

    Clients without whom everybody else is worse off explain nothing that is wrong.
    """
    if tried is None:
        return list(findings)
    measured = [_measure(finding, saved, tried) for finding in findings]
    needed = {one.name for one in measured if one.clients and one.harm is not None and one.harm.high < 0}
    return [
        replace(one, explained_by=tuple(name for name in one.explained_by if name not in needed)) for one in measured
    ]


def _measure(finding: Finding, saved: SavedRun, tried: Tried) -> Finding:
    """A finding with its harm: the gain of what does best against it, of which the least is certain.

    What clients cost is what everybody else gains without them, and nothing else: a remedy may bring more than they
    have taken. The severity is what was measured, if that is certain, and what it can be at most, if it is not.
    """
    known = [(name, gain) for name, gain in _against(finding, tried) if gain.low is not None and gain.high is not None]
    if not known:
        return finding
    name, best = max(known, key=lambda pair: pair[1].low or 0.0)
    if best.gained is None or best.low is None or best.high is None:
        return finding
    harm = Harm(best.gained, best.low, best.high, name, tried.rounds)
    severity = finding.severity
    if best.low > 0:
        severity = _severity(best.gained, finding, saved, tried.metric)
    elif finding.clients:
        most = _severity(max(best.high, 0.0), finding, saved, tried.metric)
        severity = min(severity, max(most, REPORTED))
    sentence = f"{finding.sentence} {_harm_text(harm, tried.metric)}"
    return replace(finding, severity=severity, sentence=sentence, harm=harm)


def _against(finding: Finding, tried: Tried) -> list[tuple[str, Gain]]:
    """What a finding's harm is measured by: runs without its clients, or else its remedies."""
    if not finding.clients:
        return [(remedy.change, remedy) for remedy in tried.remedies if remedy.finding == finding.name]
    named = [(one.name, one) for one in tried.references] + [(one.change, one) for one in tried.remedies]
    return [(name, gain) for name, gain in named if gain.leaves_out == tuple(sorted(finding.clients))]


def _severity(gained: float, finding: Finding, saved: SavedRun, metric: str) -> float:
    """Serious from a tenth of the way from guessing to the best there is, and worst from three tenths on."""
    chance = guessing_score(saved, metric)
    if finding.name in NEVER_SERIOUS or chance is None or metric not in IDEAL or chance == IDEAL[metric]:
        return finding.severity
    share = gained / abs(IDEAL[metric] - chance)
    beyond = min(max((share - NEAR) / (FAR - NEAR), 0.0), 1.0)
    return round(HIGH * min(share / NEAR, 1.0) + (1 - HIGH) * beyond, 3)


def _harm_text(harm: Harm, metric: str) -> str:
    factor, unit = (100, "points") if metric in SHARES else (1, metric_title(metric))
    beside = f"with {harm.against}" if harm.against.startswith("--") else harm.against
    figures = [f"{factor * value:.3g}" for value in (harm.cost, harm.low, harm.high)]
    if harm.low <= 0:
        told = f"{harm.against} gained {figures[0]} {unit} [{figures[1]}, {figures[2]}]"
        return f"What was tried does not show that it costs anything: {told}."
    return f"It costs about {figures[0]} {unit} [{figures[1]}, {figures[2]}], measured against a run {beside}."


def reference_note(tried: Tried | None) -> list[str]:
    """What pooled data brings beside the run: all that there is to gain, unless a remedy brings more."""
    if tried is None:
        return []
    factor, unit = (100, "points") if tried.metric in SHARES else (1, metric_title(tried.metric))
    most = max((one.gained for one in tried.remedies if one.gained is not None), default=0.0)
    notes = []
    for one in tried.references:
        if one.name.startswith("centralised") and one.gained is not None:
            meaning = "about as much as there is to gain"
            if one.gained <= 0:
                meaning = "there is no sign that distributing the data costs anything"
            elif one.gained < most:
                meaning = "a remedy does better, so the run's trouble is not that the data are distributed"
            change = f"{'loses' if one.gained < 0 else 'gains'} {factor * abs(one.gained):.3g} {unit}"
            what = f"Training on pooled data ({one.name}) {change} against the run in {tried.rounds} rounds"
            notes.append(f"{what}: {meaning}.")
    return notes
