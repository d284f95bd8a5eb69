"""A diagnosis and how it is printed: ranked findings, each with its remedies."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedstrata.core.text import plural
from fedstrata.diagnosis.thresholds import HIGH, THRESHOLDS

WIDTH = 100
EARLY = "too-early"
"""The finding that keeps others from being judged."""
TRY_COMMAND = "fedstrata diagnose RUN --try"
"""What measures the findings of a run whose files tell where its data is from."""
SHOWN = 3
"""How many remedies of a finding a terminal shows with their reasons; none for a finding that others explain."""


@dataclass(frozen=True)
class Remedy:
    """What to try.

    Args:
        method: the run's own method with something added, ready to be used; None where the method stays.
        settings: other settings of the run, by name, such as `{"buffers": "drop"}`. If both are empty, `why` says
            what to change in a model that has no name.
        why: what it does, and what we have measured of it.
        paper: the paper that proposes it; empty for what takes no paper.
    """

    method: str | None
    settings: Mapping[str, Any]
    why: str
    paper: str

    @property
    def options(self) -> str:
        """The remedy as command-line options, `--method "feddyn + fedlc" --lr 0.03`; empty if there are none for it."""
        given = {**({} if self.method is None else {"method": self.method}), **self.settings}
        return " ".join(f"--{name.replace('_', '-')} {quote_value(value)}" for name, value in given.items())

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "method": self.method,
            "settings": dict(self.settings),
            "options": self.options,
            "why": self.why,
            "paper": self.paper,
        }


@dataclass(frozen=True)
class Harm:
    """What a finding costs, measured by trials.

    Args:
        cost: in the run's primary metric, in its own unit; a share of 0.1 is 10 points.
        low: lower end of its 90 % interval.
        high: its upper end.
        against: what was measured beside the run, such as `--without 3`.
        rounds: of the trials.
    """

    cost: float
    low: float
    high: float
    against: str
    rounds: int


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        name: short, such as `"label-skew"`.
        severity: from 0 to 1, by the table in `thresholds`.
        sentence: what was found, in plain words, with its figures.
        figure: name → number; the first is the one that the severity comes from.
        remedies: the most promising first.
        explained_by: names of the findings, ranked above, that cause this one.
        clients: numbers of the clients that it is about; none where it is about the run.
        harm: what it costs, where that was measured; None where the severity is an estimate by the table.
    """

    name: str
    severity: float
    sentence: str
    figure: Mapping[str, float]
    remedies: tuple[Remedy, ...] = ()
    explained_by: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    harm: Harm | None = None

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "name": self.name,
            "severity": self.severity,
            "sentence": self.sentence,
            "figure": dict(self.figure),
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "explained_by": list(self.explained_by),
            "clients": list(self.clients),
            "harm": None if self.harm is None else asdict(self.harm),
        }


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a federation, root causes first; `str` formats it for a terminal.

    Args:
        run: the run's name.
        method: its method.
        findings: causes above the symptoms that they explain, the severe above the slight.
        looked: finding → the figure that was looked at, whether or not anything was found.
        notes: what is worth knowing whether or not anything is wrong.
        unmeasured: finding → the probes that would show it, for findings of which no probe was used.
        learned: how far a run is on the way from guessing to the best there is, if that is not far; else None.
        trial: what measures what findings cost; empty where nothing can.
    """

    run: str
    method: str
    findings: tuple[Finding, ...]
    looked: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unmeasured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    learned: float | None = None
    trial: str = TRY_COMMAND

    @property
    def healthy(self) -> bool:
        """Whether nothing serious was found, there was something to look at, and the run has learnt something."""
        sound = all(finding.severity < HIGH and finding.name != EARLY for finding in self.findings)
        unexplained = self.learned is not None and not self.findings
        return bool(self.looked) and sound and not unexplained

    @property
    def verdict(self) -> str:
        """The diagnosis in one sentence."""
        if not self.looked:
            return "There is nothing to judge this run by."
        if not self.findings:
            what = "one figure that was" if len(self.looked) == 1 else f"{len(self.looked)} figures that were"
            if self.learned is not None:
                done = f"{100 * self.learned:.0f} % of the way from guessing to the best there is"
                return f"Nothing was found by the {what} looked at, but the run is only {done}."
            return f"Nothing is wrong by the {what} looked at."
        first, about = self.findings[0], f" ({_clients_text(self.findings[0])})" if self.findings[0].clients else ""
        if any(finding.severity >= HIGH for finding in self.findings):
            return f"First of all: {first.name.replace('-', ' ')}{about}."
        early = next((finding for finding in self.findings if finding.name == EARLY), None)
        if early is not None:
            return f"Too early to judge: it needs {early.figure.get('rounds_needed', 0):g} rounds."
        return f"Nothing serious: {plural(len(self.findings), 'slight finding')}{about}."

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "run": self.run,
            "method": self.method,
            "verdict": self.verdict,
            "healthy": self.healthy,
            "findings": [finding.as_dict() for finding in self.findings],
            "looked": dict(self.looked),
            "notes": list(self.notes),
            "unmeasured": {name: list(probes) for name, probes in self.unmeasured.items()},
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _wrap(f"{self.run} ({self.method}): {self.verdict}")
        for number, finding in enumerate(self.findings, start=1):
            yield ""
            yield from _wrap(f"{number}. {_title(finding)}")
            yield from _wrap(finding.sentence, 3)
            shown = 0 if finding.explained_by else SHOWN
            for remedy in finding.remedies[:shown]:
                yield from _wrap(f"- {_remedy_text(remedy)}", 3, 5)
            rest = [remedy.options for remedy in finding.remedies[shown:] if remedy.options]
            if rest:
                yield from _wrap(f"- {'or' if shown else 'against it alone:'} {'; '.join(rest)}", 3, 5)
        if self.looked:
            yield ""
            yield from _wrap(f"Looked at: {_figures_text(self.looked)}.")
        for note in self.all_notes:
            yield from _wrap(note)

    def _repr_html_(self) -> str:
        from fedstrata.diagnosis.html import diagnosis_html

        return diagnosis_html(self)

    def markdown(self) -> str:
        """The diagnosis as Markdown, with all remedies."""
        lines = [f"**{self.verdict}**", ""]
        for number, finding in enumerate(self.findings, start=1):
            lines += [f"{number}. **{_title(finding)}** {finding.sentence}"]
            lines += [f"   - {_remedy_text(remedy, '`')}" for remedy in finding.remedies]
        lines += ["", f"Looked at: {_figures_text(self.looked)}."] if self.looked else []
        for note in self.all_notes:
            lines += ["", note]
        return "\n".join(lines) + "\n"

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, and what the diagnosis itself says of its figures."""
        return (*self.notes, *self._hints())

    def _hints(self) -> Iterator[str]:
        if any(finding.harm is None for finding in self.findings):
            which = "Severities" if all(finding.harm is None for finding in self.findings) else "Other severities"
            measured = f"; {self.trial} measures what findings cost" if self.trial else ""
            yield f"{which} are estimates by these figures{measured}."
        if self.unmeasured:
            yield f"Not measured: {', '.join(self.unmeasured)}. A run with --probe all measures them."


def _title(finding: Finding) -> str:
    name = finding.name.replace("-", " ").capitalize()
    title = f"{name} (severity {finding.severity:.2f}"
    causes = ", ".join(cause.replace("-", " ") for cause in finding.explained_by)
    return f"{title}, explained by {causes})." if causes else f"{title})."


def _clients_text(finding: Finding) -> str:
    return f"client{'s' if len(finding.clients) > 1 else ''} {', '.join(map(str, finding.clients))}"


def _remedy_text(remedy: Remedy, quote: str = "") -> str:
    text = f"{quote}{remedy.options}{quote}: {remedy.why}" if remedy.options else remedy.why
    return f"{text} [{remedy.paper}]" if remedy.paper else text


def _figures_text(looked: Mapping[str, float]) -> str:
    limits = {name: THRESHOLDS[name].none for name in looked if name in THRESHOLDS}
    figures = (
        f"{value:.3g} (limit {limits[name]:g})" if name in limits else f"{value:.3g}" for name, value in looked.items()
    )
    return ", ".join(f"{name.replace('-', ' ')} {figure}" for name, figure in zip(looked, figures, strict=True))


def quote_value(value: Any) -> str:
    """A setting's value as a shell takes it."""
    return f'"{value}"' if isinstance(value, str) and not value.isalnum() else str(value)


def _wrap(text: str, first: int = 0, then: int | None = None) -> list[str]:
    indent = " " * (first if then is None else then)
    return textwrap.wrap(text, WIDTH, initial_indent=" " * first, subsequent_indent=indent, break_on_hyphens=False) or [
        ""
    ]
