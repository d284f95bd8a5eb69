"""All rules over one run: what is found, what is left out, and in which order it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedstrata.diagnosis.causes import CAUSES
from fedstrata.diagnosis.findings import Diagnosis, Finding
from fedstrata.diagnosis.reading import WARM, Evidence, Rule
from fedstrata.diagnosis.symptoms import SYMPTOMS
from fedstrata.diagnosis.thresholds import REPORTED, THRESHOLDS
from fedstrata.saved import Saved

RULES: tuple[Rule, ...] = (*CAUSES, *SYMPTOMS)


def diagnose(saved: Saved) -> Diagnosis:
    """Say what is wrong with a run, layer by layer, and what to try.

    Causes (label skew, running statistics, a network too deep for its input) rank above the symptoms that they explain;
    otherwise the more severe finding comes first. Nothing is run: all figures are those that the run has left.

    Args:
        saved: the run, finished or going on; with `--probe all` there is most to read.
    """
    read = {rule.name: rule.read(saved) for rule in RULES}
    seen = {name: evidence for name, evidence in read.items() if evidence is not None}
    severity = {name: THRESHOLDS[name].severity(evidence.value) for name, evidence in seen.items()}
    reported = {name for name in seen if severity[name] >= REPORTED}
    reported -= {rule.name for rule in CAUSES if not _backed(rule, seen, reported)}
    findings = [_finding(rule, seen[rule.name], severity, reported) for rule in RULES if rule.name in reported]
    return Diagnosis(
        saved.name,
        saved.method,
        tuple(ranked(findings)),
        {name: _rounded(evidence.value) for name, evidence in seen.items()},
        tuple(_notes(saved, seen, reported)),
        {rule.name: rule.probes for rule in RULES if rule.name not in seen and _applies(rule, saved)},
    )


def _backed(rule: Rule, seen: Mapping[str, Evidence], reported: set[str]) -> bool:
    """Whether some symptom bears a cause out; where none of them was looked for, it stands by itself."""
    return not rule.backed_by & seen.keys() or bool(rule.backed_by & reported)


def _finding(rule: Rule, evidence: Evidence, severity: Mapping[str, float], reported: set[str]) -> Finding:
    causes = [cause.name for cause in CAUSES if cause.name in reported and rule.name in cause.explains]
    return Finding(
        rule.name,
        severity[rule.name],
        evidence.sentence,
        {name: _rounded(value) for name, value in evidence.figure.items()},
        tuple(remedy for remedy in evidence.remedies() if remedy is not None),
        tuple(sorted(causes, key=lambda name: -severity[name])),
    )


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """By severity, but a symptom never above the causes that explain it."""
    own = {finding.name: finding.severity for finding in findings}

    def place(finding: Finding) -> tuple[float, bool, float]:
        least = min((own[cause] for cause in finding.explained_by), default=1.0)
        return -min(finding.severity, least), bool(finding.explained_by), -finding.severity

    return sorted(findings, key=place)


def _applies(rule: Rule, saved: Saved) -> bool:
    """Whether a probe could have told: running statistics need some, forgetting needs clients that lack classes."""
    if not rule.probes or any(saved.series(probe) for probe in rule.probes):
        return False
    return rule.name != "running-statistics" or bool(saved.facts.get("buffers", True))


def _notes(saved: Saved, seen: Mapping[str, Evidence], reported: set[str]) -> Iterator[str]:
    """Where clients part most, whether or not it is much; and what it is too early to tell."""
    if "diverging-strata" in seen.keys() - reported:
        yield seen["diverging-strata"].sentence
    if "running-statistics" not in seen and saved.series("statistics"):
        yield f"Running statistics were not judged: they were measured before a client had taken {WARM} steps."


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
