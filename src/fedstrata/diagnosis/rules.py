"""All rules applied to one run: what is found, what is left out, and in which order it is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedstrata.diagnosis.causes import CAUSES
from fedstrata.diagnosis.cleaning import drop_malformed
from fedstrata.diagnosis.clients import rare_clients
from fedstrata.diagnosis.evidence import IDEAL, LARGEST, WARM, Evidence, Rule, is_remote
from fedstrata.diagnosis.explosions import EXPLOSIONS
from fedstrata.diagnosis.findings import TRY_COMMAND, Diagnosis, Finding
from fedstrata.diagnosis.harm import largest_severity, learned_share
from fedstrata.diagnosis.measured import measure_findings, reference_note
from fedstrata.diagnosis.symptoms import SYMPTOMS
from fedstrata.diagnosis.thresholds import REPORTED, THRESHOLDS
from fedstrata.probes.registry import READ_UPDATES
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import Tried, read_tried

RULES: tuple[Rule, ...] = (*CAUSES, *SYMPTOMS)

FIRST = frozenset(rule.name for rule in EXPLOSIONS)
"""Findings that come before all others: other figures of a run that has exploded mean little."""

CAUSE_NAMES = frozenset(rule.name for rule in CAUSES)
"""A cause is explained by another only if that is certain; a symptom by any."""

POOR = 0.5
"""Share of the way from guessing to the best there is: in a run that has not come so far, a fact that may do harm is
told though no symptom of it was found, and that nothing was found does not mean that nothing is wrong."""

CERTAIN = 0.2
"""Severity from which on a cause is more than a suspicion."""

MISSED = "missed"
"""The key under which a row has the reasons why probes found nothing."""


def diagnose(saved: SavedRun, tried: Tried | None = None) -> Diagnosis:
    """Say what is wrong with a run, layer by layer, and what to try.

    Explosions come first. Other causes (label skew, running statistics, a network too deep for its input) rank above
    the symptoms that they explain; otherwise the more severe finding comes first. Nothing is run: all figures are those
    that the run has written. Where remedies were tried, findings tell what they cost.

    Args:
        saved: the run, finished or going on; with `--probe all` there is most to read.
        tried: what was tried; None for what the run's directory tells of it.
    """
    tried = tried or read_tried(saved.path)
    saved = drop_malformed(saved)
    read = {rule.name: rule.read(saved) for rule in RULES}
    seen = {name: evidence for name, evidence in read.items() if evidence is not None}
    severity = {name: _weigh(saved, name, evidence) for name, evidence in seen.items()}
    reported = {name for name in seen if severity[name] >= REPORTED}
    share = learned_share(saved)
    if share is None or share >= POOR:
        reported -= {rule.name for rule in CAUSES if not _is_backed(rule, seen, reported)}
    findings = [_finding(rule, seen[rule.name], severity, reported) for rule in RULES if rule.name in reported]
    return Diagnosis(
        saved.name,
        saved.method,
        tuple(rank_findings(measure_findings(findings, saved, tried))),
        {name: _round_figure(evidence.value) for name, evidence in seen.items()},
        (*_notes(saved, seen, reported), *reference_note(tried)),
        {rule.name: rule.probes for rule in _unread_rules(saved, seen) if not _was_used(rule, saved, unseen=True)},
        None if share is None or share >= POOR else share,
        _way_to_try(saved),
    )


def _way_to_try(saved: SavedRun) -> str:
    """What tries remedies of such a run: its files tell where the data of a command is from, and of nothing else."""
    if is_remote(saved):
        return ""
    return TRY_COMMAND if saved.config.get("dataset") else "fedstrata.trials.try_federation(federation)"


def _weigh(saved: SavedRun, name: str, evidence: Evidence) -> float:
    """The severity by the table, as far as the run suffers at all."""
    return min(THRESHOLDS[name].severity(evidence.value), round(largest_severity(saved, name), 3))


def _is_backed(rule: Rule, seen: Mapping[str, Evidence], reported: set[str]) -> bool:
    """Whether some symptom confirms a cause; if none of them was looked for, no confirmation is needed."""
    return not rule.backed_by & seen.keys() or bool(rule.backed_by & reported)


def _finding(rule: Rule, evidence: Evidence, severity: Mapping[str, float], reported: set[str]) -> Finding:
    found = [cause.name for cause in CAUSES if cause.name in reported and rule.name in cause.explains]
    causes = [name for name in found if rule.name not in CAUSE_NAMES or severity[name] >= CERTAIN]
    return Finding(
        rule.name,
        severity[rule.name],
        evidence.sentence,
        {name: _round_figure(value) for name, value in evidence.figure.items()},
        tuple(remedy for remedy in evidence.remedies() if remedy is not None),
        tuple(sorted(causes, key=lambda name: -severity[name])),
        evidence.clients,
    )


def rank_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Explosions first that nothing explains, then by severity, but nothing above the causes that explain it."""
    own = {finding.name: finding.severity for finding in findings}

    def place(finding: Finding) -> tuple[bool, float, bool, float]:
        least = min((own[cause] for cause in finding.explained_by), default=1.0)
        first = finding.name in FIRST and not finding.explained_by
        return not first, -min(finding.severity, least), bool(finding.explained_by), -finding.severity

    return sorted(findings, key=place)


def _unread_rules(saved: SavedRun, seen: Mapping[str, Evidence]) -> list[Rule]:
    """Rules whose probes are missing; none for a run that diverged, nor those of what the model lacks."""
    if "diverged" in seen:
        return []
    lacking = [rule for rule in RULES if rule.probes and not any(map(saved.series, rule.probes))]
    has = {"running-statistics": saved.facts.get("buffers", True), "inexact-adapters": saved.facts.get("adapters")}
    return [rule for rule in lacking if has.get(rule.name, True)]


def _is_out_of_sight(rule: Rule, saved: SavedRun) -> bool:
    """Whether a rule's probes need data that is at other sites."""
    return is_remote(saved) and READ_UPDATES.isdisjoint(rule.probes)


def _was_used(rule: Rule, saved: SavedRun, unseen: bool = False) -> bool:
    """Whether one of a rule's probes was used, though it found nothing; or, if that counts too, could not be."""
    return (unseen and _is_out_of_sight(rule, saved)) or any(
        name in row.get(kind, {}) for name in rule.probes for row in saved.probes for kind in ("seconds", MISSED)
    )


def _why_nothing_found(rule: Rule, saved: SavedRun) -> str:
    """Why the probes of a rule, which were used, found nothing: their last reason."""
    reasons = [row[MISSED][name] for row in saved.probes for name in rule.probes if name in row.get(MISSED, {})]
    alone = all(len(row.get("clients", ())) < 2 for row in saved.probes)
    return reasons[-1] if reasons else "it takes two clients" if alone else "there was nothing to measure"


def _notes(saved: SavedRun, seen: Mapping[str, Evidence], reported: set[str]) -> Iterator[str]:
    """Where clients diverge most, who is rare, what it is too early to say, what could not be measured."""
    named = {client for name in reported for client in seen[name].clients}
    rare = rare_clients(saved, named)
    if rare is not None:
        yield rare
    if "diverging-strata" in seen.keys() - reported:
        yield seen["diverging-strata"].sentence
    if "running-statistics" not in seen and saved.series("statistics"):
        metric = saved.records[-1].primary if saved.records else "accuracy"
        why = f"they were measured before a client had taken {WARM} steps"
        if not any({"running", "batch"} <= found.keys() for found in saved.series("statistics").values()):
            why = "the run's metric was undefined"
        elif metric not in IDEAL:
            why = f"how good '{metric}' can be is not known"
        yield f"Running statistics were not judged: {why}."
    reasons: dict[str, list[str]] = {}
    for rule in _unread_rules(saved, seen):
        if _was_used(rule, saved):
            reasons.setdefault(_why_nothing_found(rule, saved), []).append(rule.name.replace("-", " "))
    for why, names in reasons.items():
        yield f"Could not be measured: {', '.join(names)} ({why})."
    unseen = [rule for rule in _unread_rules(saved, seen) if rule.name not in seen and _is_out_of_sight(rule, saved)]
    hidden = [rule.name.replace("-", " ") for rule in unseen]
    if hidden:
        data = "inputs and labels of single clients, " if saved.facts.get("cards") is None else ""
        yield f"Cannot be seen from the server, whose clients' data is at other sites: {data}{', '.join(hidden)}."


def _round_figure(value: float) -> float:
    """To four digits; JSON has no infinity."""
    return float(f"{min(max(value, -LARGEST), LARGEST):.4g}")
