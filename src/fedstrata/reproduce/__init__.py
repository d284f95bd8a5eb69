"""Does a paper's result hold here? Its settings at four scales, its tables, and its claims as named checks."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from fedstrata.data.readers.archives import DATA_VARIABLE
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.reproduce import (
    deeper,
    deeper_settings,
    fedimpro,
    fedimpro_settings,
    fednlr,
    fednlr_settings,
    fedpart,
    inco,
    inco_settings,
    together,
    together_settings,
)
from fedstrata.reproduce.choices import choose_seeds, parse_seeds, record_sets, set_fields
from fedstrata.reproduce.claims import Check
from fedstrata.reproduce.parts import Findings, FindingsTable, OwnWork, Part, PartResources
from fedstrata.reproduce.planning import Outlook, Paces
from fedstrata.reproduce.plots import check_plots
from fedstrata.reproduce.report import Reproduction
from fedstrata.reproduce.running import Watching, Workshop, describe_machine, look_ahead, make_parts

__all__ = [
    "PAPERS",
    "SCALES",
    "Check",
    "Findings",
    "FindingsTable",
    "Outlook",
    "Reproduction",
    "outlook",
    "parse_seeds",
    "parts",
    "reproduce",
]

PAPERS: Mapping[str, Callable[[str], list[Part]]] = {
    "fedpart": fedpart.parts,
    "fednlr": fednlr.parts,
    "fedimpro": fedimpro.parts,
    "inco": inco.parts,
    "deeper": deeper.parts,
    "together": together.parts,
}
"""Paper → its parts at a scale; `together` is a study of ours."""

SCALES = ("smoke", "small", "evidence", "paper")
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "fedpart": fedpart.SCALES,
    "fednlr": fednlr_settings.SCALES,
    "fedimpro": fedimpro_settings.SCALES,
    "inco": inco_settings.SCALES,
    "deeper": deeper_settings.SCALES,
    "together": together_settings.SCALES,
}
"""Paper → scale → its settings; `together` has no scale `paper`."""


def parts(
    paper: str,
    scale: str,
    only: Sequence[str] = (),
    seeds: int | Sequence[int] | None = None,
    sets: Sequence[str] = (),
) -> list[Part]:
    """The parts of a paper's reproduction; of those named, if any are, else of `evidence` the headline ones.

    Raises:
        UsageError: for an unknown paper, scale, part or field.
    """
    if paper not in PAPERS:
        raise UsageError(f"there is no reproduction of '{paper}'{did_you_mean(paper, PAPERS)}")
    if scale not in SCALES:
        raise UsageError(f"there is no scale '{scale}'{did_you_mean(scale, SCALES)}")
    if scale not in _SETTINGS[paper]:
        those = ", ".join(name for name, settings in _SETTINGS.items() if scale in settings)
        raise UsageError(f"{paper} has no scale '{scale}': {those} have it")
    found = PAPERS[paper](scale)
    for name in only:
        if name not in (names := [part.name for part in found]):
            raise UsageError(f"{paper} has no part '{name}'{did_you_mean(name, names)}")
    chosen = [part for part in found if part.name in only or (not only and part.headline)]
    if seeds is not None:
        chosen = [part.with_seeds(choose_seeds(part.seeds, seeds)) for part in chosen]
    return [set_fields(part, sets) for part in chosen]


def reproduce(
    paper: str,
    scale: str = "smoke",
    *,
    data_dir: str | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    seeds: int | Sequence[int] | None = None,
    sets: Sequence[str] = (),
    run: bool = True,
    watch: Watching | None = None,
    say: Callable[[str], None] = lambda line: None,
    on_plan: Callable[[Outlook], None] | None = None,
) -> Reproduction:
    """Make a paper's runs at a scale, as far as they are missing, and check its claims by them.

    Args:
        paper: fedpart, fednlr, fedimpro, inco, deeper or together.
        scale: smoke (seconds, data without files), small (real data, two cores, half an hour), evidence (the headline
            claims where they can show, two cores, three hours) or paper (its settings, for a GPU).
        data_dir: where the data files are; default: FEDSTRATA_DATA.
        out: for the runs and the report; what is finished there is not done again. None keeps nothing.
        jobs: how many runs at the same time, each in a process of its own.
        only: names of parts; none for all, or at the scale evidence for the headline ones.
        seeds: how many, or which; None for the scale's.
        sets: settings of all runs instead of the scale's, such as `rounds=20`.
        run: False to make nothing and to report on what is there.
        watch: the runs and a clock → a context that is told of them.
        say: called with a line about the progress of work that is not a run.
        on_plan: called with what is to be made before it begins; at the scale evidence a pilot measures how long.

    Raises:
        UsageError: for what cannot be made, before anything is written.
        Stopped: after Ctrl-C; the same call with the same `out` goes on.
    """
    chosen = parts(paper, scale, only, seeds, sets)
    where = _check_request(scale, chosen, jobs, data_dir, out)
    if not run and (out is None or not Path(out).is_dir()):
        raise UsageError("without runs there is only a report on what is finished: say where that is with --out DIR")
    with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as place:
        shop = Workshop(Path(place), PartResources(where, jobs), watch, say)
        paces = Paces(shop.out, run and scale == PLANNED and on_plan is not None, say)
        if run and scale == PLANNED and on_plan is not None:
            on_plan(look_ahead(chosen, shop, paces, _others(paper, scale, chosen)))
        sections, failures = make_parts(chosen, shop, paces, run)
        command = _command_text(paper, scale, out, jobs, only, seeds, sets)
        outcome = Reproduction(
            paper, scale, command, tuple(sections), failures, describe_machine(jobs), record_sets(sets)
        )
        if out is not None:
            outcome.write(Path(out))
    return outcome


PLANNED = "evidence"
"""The scale that is planned, with a pilot, before it begins."""


def outlook(
    paper: str,
    scale: str,
    *,
    data_dir: str | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    only: Sequence[str] = (),
    seeds: int | Sequence[int] | None = None,
    sets: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Outlook:
    """What `reproduce` would make, and how long it may take, from finished runs or from a pilot of one round each.

    At the scale paper there is no pilot: its runs are for another machine.

    Raises:
        UsageError: for what cannot be made.
    """
    chosen = parts(paper, scale, only, seeds, sets)
    where = _check_request(scale, chosen, jobs, data_dir, out)
    with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as place:
        shop = Workshop(Path(place), PartResources(where, jobs), None, say)
        paces = Paces(shop.out, scale != "paper", say)
        return look_ahead(chosen, shop, paces, _others(paper, scale, chosen))


def _others(paper: str, scale: str, chosen: Sequence[Part]) -> list[str]:
    """The parts that are not made unless they are asked for."""
    names = {part.name for part in chosen}
    return [part.name for part in PAPERS[paper](scale) if not part.headline and part.name not in names]


def _check_request(
    scale: str, chosen: Sequence[Part], jobs: int, data_dir: str | None, out: str | Path | None
) -> str | None:
    """Refuse early what could not be read, written, drawn or computed here; returns where the data is."""
    if jobs < 1:
        raise UsageError(f"jobs must be 1 or more, not {jobs}")
    where = data_dir or os.environ.get(DATA_VARIABLE)
    if scale != "smoke" and not where:
        raise UsageError(
            f"the scale '{scale}' needs real data: say where it is with --data-dir DIR, or {DATA_VARIABLE} in the "
            "environment"
        )
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise UsageError(f"{out} is not a directory")
    if out is not None and any(part.draws for part in chosen):
        check_plots()
    for part in chosen:
        if isinstance(part, OwnWork):
            part.needs()
    return where


def _command_text(
    paper: str,
    scale: str,
    out: str | Path | None,
    jobs: int,
    only: Sequence[str],
    seeds: int | Sequence[int] | None,
    sets: Sequence[str],
) -> str:
    """The command that repeats it, with placeholders for directories."""
    words = ["fedstrata reproduce", paper, f"--scale {scale}"]
    words += ["--data-dir DIR"] if scale != "smoke" else []
    words += ["--out DIR"] if out is not None else []
    words += [f"--jobs {jobs}"] if jobs > 1 else []
    words += [f"--parts {','.join(only)}"] if only else []
    if seeds is not None:
        listed = str(seeds) if isinstance(seeds, int) else ",".join(map(str, seeds)) + "," * (len(seeds) == 1)
        words.append(f"--seeds {listed}")
    return " ".join([*words, *(f"--set {shlex.quote(text)}" for text in sets)])
