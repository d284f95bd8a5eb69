"""What is tried: the run itself, what could be reached, and the most promising remedies, each one change away."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedstrata.config.schema import parse_clients
from fedstrata.core.method import Method
from fedstrata.diagnosis import Diagnosis, Finding, Remedy
from fedstrata.diagnosis.evidence import absent_clients
from fedstrata.errors import UsageError
from fedstrata.faults import parse_faults, write_faults
from fedstrata.faults.fault import SHARE, acts
from fedstrata.faults.plan import UPDATE_DOORS
from fedstrata.runs.reader import SavedRun
from fedstrata.techniques import method

ROUNDS = 10
"""What a trial has at most, unless one asks for more."""
SEEDS = 3
COUNT = 3
"""How many remedies are tried."""

LATER = 0.6
"""What a finding's next remedy is worth, against the one before."""
EXPLAINED = 0.3
"""What remedies of a finding are worth that others explain, against those of a cause."""


class NothingToTry(UsageError):
    """A diagnosis that offers nothing which could be run."""


@dataclass(frozen=True)
class Budget:
    """What trials may cost.

    Args:
        count: how many remedies are tried.
        rounds: of every trial; None for the run's own, of which at most ten.
        seeds: how many, the run's own and those that follow it.
    """

    count: int = COUNT
    rounds: int | None = None
    seeds: int = SEEDS

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("rounds", self.rounds), ("seeds", self.seeds)):
            if value is not None and value < 1:
                raise UsageError(f"what is tried needs {name} of 1 or more, not {value}")

    def rounds_of(self, config: Mapping[str, Any]) -> int:
        """Rounds of a trial."""
        return self.rounds or min(int(config.get("rounds", ROUNDS)), ROUNDS)

    def seeds_of(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Seeds of all trials: the run's own first."""
        first = int(config.get("seed", 0))
        return tuple(range(first, first + self.seeds))


DEFAULT_BUDGET = Budget()


@dataclass(frozen=True)
class Trial:
    """One thing to run.

    Args:
        kind: the run itself, what could be reached, or advice.
        name: what tables call it.
        changes: settings that differ from the run's.
        finding: what a remedy is against.
        leaves_out: clients that the run has and the trial does not, where that is all that differs.
    """

    kind: Literal["control", "reference", "remedy"]
    name: str
    changes: Mapping[str, Any]
    finding: str = ""
    leaves_out: tuple[int, ...] = ()


def choose_trials(
    diagnosis: Diagnosis, saved: SavedRun, count: int, fields: Collection[str]
) -> tuple[list[Trial], list[str]]:
    """(what to run: control, references, remedies; what is offered and cannot be tried so, with the reason).

    Faults on purpose that were drawn by lot hit, under every seed, the clients that they hit in the run. A reference
    that is advice, too, is run as advice.

    Args:
        diagnosis: of the run.
        saved: the run.
        count: how many remedies.
        fields: settings that can be changed.
    """
    pinned = _pin_faults(saved)
    left_out, chosen = [], dict[str, Trial]()
    for finding, remedy in rank_remedies(diagnosis.findings):
        changes = _changes(remedy)
        if "rounds" in changes or not changes.keys() <= {*fields}:
            why = "it takes more rounds" if "rounds" in changes else "the model or the data would be others"
            left_out.append(f"{remedy.options} ({why})")
        elif remedy.options not in chosen and len(chosen) < count:
            left = _leaves_out(changes, saved)
            chosen[remedy.options] = Trial("remedy", remedy.options, {**pinned, **changes}, finding.name, left)
    advised = [trial.changes for trial in chosen.values()]
    references = [trial for trial in _references(diagnosis, saved, pinned) if trial.changes not in advised]
    return [Trial("control", "the run as it is", pinned), *references, *chosen.values()], list(dict.fromkeys(left_out))


def rank_remedies(findings: Sequence[Finding]) -> list[tuple[Finding, Remedy]]:
    """All remedies that can be run, the most promising first: those of severe causes before others.

    The first of each finding counts its whole severity, the second 0.6 of it, and so on, so that several causes share a
    few trials.
    """
    found = []
    for finding in findings:
        weight = finding.severity * (EXPLAINED if finding.explained_by else 1.0)
        runnable = [remedy for remedy in finding.remedies if remedy.options]
        found += [(weight * LATER**place, finding, remedy) for place, remedy in enumerate(runnable)]
    return [(finding, remedy) for _, finding, remedy in sorted(found, key=lambda entry: -entry[0])]


def _changes(remedy: Remedy) -> dict[str, Any]:
    """A remedy's settings; another method brings its own policy for running statistics, unless the remedy has one."""
    if remedy.method is None:
        return dict(remedy.settings)
    return {"buffers": None, "method": remedy.method, **remedy.settings}


def _leaves_out(changes: Mapping[str, Any], saved: SavedRun) -> tuple[int, ...]:
    """Whom a change leaves out, beside those that the run does without; nobody if it changes anything else."""
    if changes.keys() != {"without"}:
        return ()
    return tuple(sorted({*parse_clients(changes["without"])} - absent_clients(saved)))


def guilty_clients(diagnosis: Diagnosis) -> tuple[int, ...]:
    """All clients that a finding names which no other explains."""
    causes = [finding for finding in diagnosis.findings if not finding.explained_by]
    return tuple(sorted({client for finding in causes for client in finding.clients}))


def _references(diagnosis: Diagnosis, saved: SavedRun, pinned: Mapping[str, Any]) -> Iterator[Trial]:
    """Pooled data, and everybody but the clients that are named."""
    guilty = guilty_clients(diagnosis)
    others = {"without": ",".join(map(str, sorted({*guilty, *absent_clients(saved)})))} if guilty else {}
    whom = f"without client{'s' * (len(guilty) > 1)} {', '.join(map(str, guilty))}"
    if not _is_centralised(saved.method):
        data = _data_faults(pinned.get("faults"))
        name = f"centralised, {whom}" if guilty else "centralised"
        given = {**pinned, **others, "faults": data, "method": "centralised", "buffers": None}
        yield Trial("reference", name, {n: v for n, v in given.items() if n != "faults" or pinned.get("faults")})
    if guilty:
        yield Trial("reference", whom, {**pinned, **others}, leaves_out=guilty)


def _is_centralised(text: str) -> bool:
    try:
        known: Method = method(text)
    except UsageError:
        return False
    return known.centralised


def _pin_faults(saved: SavedRun) -> dict[str, Any]:
    """The run's faults, each with the clients that it hit: another seed would draw others."""
    told = saved.facts.get("faults")
    if not saved.config.get("faults") or not isinstance(told, list):
        return {}
    named = []
    for entry in told:
        (fault,) = parse_faults(str(entry["fault"]))
        if entry["clients"]:
            named.append(type(fault)(**{**vars(fault), "share": SHARE, "clients": tuple(entry["clients"])}))
    return {"faults": write_faults(tuple(named)) if named else None}


def _data_faults(text: str | None) -> str | None:
    """Those of the faults that are in the data: who pools everybody's gets them, too."""
    kept = tuple(fault for fault in parse_faults(text) if not acts(fault, *UPDATE_DOORS)) if text else ()
    return write_faults(kept) if kept else None
