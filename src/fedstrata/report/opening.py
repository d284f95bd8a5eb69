"""What a page opens with, as HTML, and what it ends with: how that was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.core.text import plural
from fedstrata.report import tables
from fedstrata.report.formatting import NONE, comma_list, escape
from fedstrata.report.run_groups import RunGroup
from fedstrata.report.verdict import standing, tiles

RANKED = ("rounds", "seeds", "state", "computed", "time", "simulated time")
"""Columns of other tables that the opening has already, of several methods."""
IN_TILES = ("buffers", "best", "in round", "up", "down", "steps", "memory")
"""Those that the tiles of one method have besides."""
TOLD = ("fedstrata", "python", "torch", "processor")
"""Versions that are told at once; all of them are in a table."""


def opening_html(groups: Sequence[RunGroup]) -> str:
    """Tiles of one method, or a table of several, the best first; and what their reader must know."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in tables.notes(groups))
    one = len(groups) == 1
    shown = f'<dl class="tiles">{"".join(map(_tile, tiles(groups[0])))}</dl>' if one else standing(groups).html()
    return shown + (f'<div class="notes"><h3>Notes</h3><ul>{notes}</ul></div>' if notes else "")


def _tile(tile: tuple[str, str, str]) -> str:
    name, value, word = map(escape, tile)
    return f"<div><dt>{name}</dt><dd>{value}</dd>" + (f"<dd>{word}</dd>" if word else "") + "</div>"


def setting_text(groups: Sequence[RunGroup]) -> str:
    """Model, data, clients, rounds and seeds in one line: what all the runs have in common, or vary."""
    seeds = list(dict.fromkeys(map(tables.seeds_text, groups)))
    clients, share = _clients(groups), values_text(groups, "participation")
    rounds = list(dict.fromkeys(group.rounds for group in groups))
    parts = [
        _model(groups),
        values_text(groups, "partition"),
        "" if clients == NONE else f"{clients} clients" + ("" if share == NONE else f", participation {share}"),
        plural(rounds[0], "round") if len(rounds) == 1 else f"{min(rounds)} to {max(rounds)} rounds",
        seeds[0] if len(seeds) == 1 else "",
    ]
    return " · ".join(part for part in parts if part.replace(NONE, "").strip())


def setup_html(groups: Sequence[RunGroup]) -> str:
    """What was run, in a few rows, and all settings and versions."""
    facts = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in _facts(groups).items())
    versions = tables.versions(groups)
    return (
        f'<dl class="facts">{facts}</dl><details class="more"><summary>All settings and versions</summary>'
        f"{tables.configuration(groups).html()}{versions.html() if versions else ''}</details>"
    )


def _facts(groups: Sequence[RunGroup]) -> dict[str, str]:
    """What was run, in a few rows: name → text."""
    shown = {
        "method": comma_list([group.name for group in groups])
        if len(groups) <= 6
        else f"{len(groups)}, see the results",
        "buffers": comma_list(list(dict.fromkeys(tables.buffers(run) for group in groups for run in group.runs))),
        "data": f"{values_text(groups, 'dataset')}, {values_text(groups, 'partition')}",
        "model": _model(groups),
        "clients": f"{_clients(groups)}, participation {values_text(groups, 'participation')}",
        "training": f"{values_text(groups, 'rounds')} rounds, {_local_work(groups)} of "
        f"{values_text(groups, 'optimizer')} at lr {values_text(groups, 'lr')}, "
        f"batch {values_text(groups, 'batch_size')}",
        "seeds": comma_list(list(dict.fromkeys(seed for group in groups for seed in group.seeds))),
        "versions": ", ".join(f"{n} {v}" for n, v in groups[0].shown_run.versions.items() if n in TOLD) or NONE,
    }
    return {name: value for name, value in shown.items() if value.replace(NONE, "").strip(", ")}


def _clients(groups: Sequence[RunGroup]) -> str:
    """How many clients were asked for; a run without run.toml has the number in its facts."""
    runs = [group.shown_run for group in groups]
    counts = [run.config.get("clients") or run.facts.get("clients") or NONE for run in runs]
    return comma_list(list(dict.fromkeys(map(str, counts))))


def _local_work(groups: Sequence[RunGroup]) -> str:
    steps = values_text(groups, "steps")
    epochs = values_text(groups, "epochs")
    return f"{steps} steps" if steps != NONE else f"{epochs} local epoch{'s' * (epochs != '1')}"


def _model(groups: Sequence[RunGroup]) -> str:
    name = values_text(groups, "archs")
    name = values_text(groups, "model") if name == NONE else name
    model = groups[0].shown_run.facts.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("parameters"), int):
        return name
    size = f"{model['parameters']:,} parameters in {plural(len(model.get('strata', [])), 'stratum')}"
    return ", ".join([*[name] * (name != NONE), size.replace("stratums", "strata")])


def values_text(groups: Sequence[RunGroup], field: str) -> str:
    """The values of a setting, each once; a dash where none is set."""
    return comma_list(list(dict.fromkeys(str(group.shown_run.config.get(field, NONE)) for group in groups)))
