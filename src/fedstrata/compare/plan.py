"""Which runs a comparison has: a grid of configurations, each with a directory of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedstrata.config.identity import EXECUTION_FIELDS
from fedstrata.config.overrides import assign
from fedstrata.config.schema import RunConfig, validate_values
from fedstrata.config.toml import flatten
from fedstrata.core.spec import parse_call
from fedstrata.errors import UsageError, one_line
from fedstrata.techniques import method

SYNONYMS = {"methods": "method", "seeds": "seed"}


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Args:
        label: what the table calls its method.
        varied: its values of the fields that are varied besides method and seed.
        own: the fields that only its method sets, with their values.
        config: the whole configuration.
        directory: where its files are.
        cuts: where it ends early: round → the score that it must have after it.
    """

    label: str
    varied: Mapping[str, Any]
    own: Mapping[str, Any]
    config: RunConfig
    directory: Path
    cuts: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.title} seed {self.config.seed}"

    @property
    def title(self) -> str:
        """What its row of the table is called."""
        return ", ".join([self.label, *(f"{name}={value}" for name, value in self.varied.items())])

    @property
    def setting(self) -> str:
        """What differs from other runs of its method and seed; as text, because 1 client is not 1.0, which is all."""
        return repr(self.varied)

    @property
    def is_incomplete(self) -> bool:
        """True if clients keep parts of the model to themselves."""
        return method(self.config.method).incomplete

    @property
    def buffers(self) -> str:
        """What happens to running statistics."""
        return method(self.config.method).with_buffers(self.config.buffers).buffers

    @property
    def rounds(self) -> int:
        """How many rounds it has, including those at the end in which nobody trains."""
        return self.config.rounds + method(self.config.method).epilogue

    @property
    def is_reference(self) -> bool:
        """True if gaps are measured from this method."""
        return method(self.config.method).centralised


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, in the order of its table: settings, then methods, then seeds.

    Args:
        runs: all of them.
        out: the directory that theirs are in.
        workers: True if the user has set the number of workers.
    """

    runs: tuple[Run, ...]
    out: Path
    workers: bool

    @property
    def axes(self) -> list[str]:
        """Fields that are varied, besides method and seed."""
        return list(self.runs[0].varied)

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order given."""
        return list(dict.fromkeys(run.config.seed for run in self.runs))

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all runs have in common."""
        first, *others = (run.config.model_dump() for run in self.runs)
        skipped = {"method", "seed", *self.axes}
        return {n: v for n, v in first.items() if n not in skipped and all(repr(o[n]) == repr(v) for o in others)}


@dataclass(frozen=True)
class Grid:
    """What is to be compared, as it was written.

    Args:
        fields: a run's, as far as they have one value each.
        methods: what the table calls each, and the fields that it sets, `method` among them.
        axes: fields that are varied, with their values.
        seeds: in the order given.
    """

    fields: Mapping[str, Any]
    methods: Sequence[tuple[str, Mapping[str, Any]]]
    axes: Mapping[str, Sequence[Any]]
    seeds: Sequence[Any]

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The combinations of what is varied."""
        return [dict(zip(self.axes, chosen, strict=True)) for chosen in product(*self.axes.values())]

    @property
    def sets_workers(self) -> bool:
        """True if the user has set the number of workers."""
        return "workers" in self.fields or any("workers" in own for _, own in self.methods)

    def runs(self, chosen: Mapping[str, Any], label: str, own: Mapping[str, Any], out: Path) -> list[Run]:
        """A method's runs under one setting, one per seed."""
        found = []
        for seed in self.seeds:
            config = validate_values(RunConfig, {**self.fields, **chosen, **own, "seed": seed})
            varied = {name: getattr(config, name) for name, several in self.axes.items() if len(several) > 1}
            rest = {name: getattr(config, name) for name in own if name != "method"}
            found.append(Run(label, varied, rest, config, out / directory_name(config)))
        return found


def read_grid(values: Mapping[str, Any]) -> Grid:
    """What to compare: values are a run's fields, any of which may hold a list.

    Raises:
        UsageError: if it contradicts itself.
    """
    values = _rename_synonyms(values)
    methods = _methods(values.pop("method", RunConfig.model_fields["method"].default))
    axes = {name: _axis(name, value) for name, value in values.items() if isinstance(value, list | tuple)}
    seeds = axes.pop("seed", None) or [values.get("seed", RunConfig.model_fields["seed"].default)]
    for name in EXECUTION_FIELDS & axes.keys():
        raise UsageError(f"{name} changes no result, so there is nothing to compare: give it one value")
    for label, own in methods:
        for name in own.keys() & {*axes, "seed"}:
            raise UsageError(f"{name} is set by the method '{label}' and for all of them: leave one out")
    return Grid({name: value for name, value in values.items() if name not in axes}, methods, axes, seeds)


def plan(values: Mapping[str, Any], out: str | Path) -> Plan:
    """The grid of runs: values are a run's fields, any of which may hold a list.

    Raises:
        UsageError: if any of the runs cannot be described, before anything is written.
    """
    grid = read_grid(values)
    runs = [
        run
        for chosen in grid.settings
        for label, own in grid.methods
        for run in grid.runs(chosen, label, own, Path(out))
    ]
    check_distinct(runs)
    return Plan(tuple(runs), Path(out), grid.sets_workers)


def _rename_synonyms(values: Mapping[str, Any]) -> dict[str, Any]:
    """`methods` and `seeds` under the schema's names."""
    for plural, name in SYNONYMS.items():
        if plural in values and name in values:
            raise UsageError(f"give '{name}' or '{plural}', not both")
    return flatten({SYNONYMS.get(name, name): value for name, value in values.items()})


def _axis(name: str, values: Sequence[Any]) -> list[Any]:
    """The values of a field that is varied."""
    if not values:
        raise UsageError(f"{name} is an empty list: give it at least one value")
    found = [flatten({name: value})[name] for value in values]
    for place, value in enumerate(found):
        if repr(value) in map(repr, found[:place]):
            raise UsageError(f"{name} has the value {value!r} twice")
    return found


def _methods(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The methods: what the table calls each, and the fields that it sets, `method` among them."""
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise UsageError("method is an empty list: give it at least one value")
    found = []
    for entry in entries:
        if isinstance(entry, Mapping):
            own = flatten({name: v for name, v in entry.items() if name != "label"})
            if "method" not in own:
                raise UsageError(f'a table in the list of methods needs a method = "…", unlike {dict(entry)!r}')
            text = ", ".join([str(own["method"]), *(f"{n}={v}" for n, v in own.items() if n != "method")])
            label = entry.get("label", text)
            if not isinstance(label, str) or not label.strip():
                raise UsageError(f"label = {label!r} does not fit: give the method a name for the table")
        else:
            own, label = {"method": entry}, str(entry)
        found.append((one_line(label, 200), own))
    return found


def check_distinct(runs: Sequence[Run]) -> None:
    """Refuse methods that are the same, and names that are."""
    first = [run for run in runs if run.setting == runs[0].setting and run.config.seed == runs[0].config.seed]
    for place, run in enumerate(first):
        for other in first[:place]:
            if run.directory == other.directory:
                same = "is given twice" if run.label == other.label else f"is the same as '{other.label}'"
                raise UsageError(f"the method '{run.label}' {same}")
            if run.label == other.label:
                raise UsageError(f"two methods are called '{run.label}': give each its own label")


def identity(config: RunConfig) -> dict[str, Any]:
    """What a result depends on; the accuracy to reach does not count unless the run ends there."""
    chosen = method(config.method).with_buffers(config.buffers)
    left_out = EXECUTION_FIELDS if config.stop_at_target else EXECUTION_FIELDS | {"target"}
    values = {name: value for name, value in config.model_dump().items() if name not in left_out}
    return values | {"method": str(chosen), "buffers": chosen.buffers}


def directory_name(config: RunConfig) -> str:
    """A readable name that two configurations share only if they have the same result."""
    values = identity(config)
    # Defaults are left out, so that a later version's new fields change no name. 1 and 1.0 clients are not the same.
    named = {n: v for n, v in values.items() if repr(v) != repr(RunConfig.model_fields[n].default)}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{parse_call(config.dataset).name}-{values['method']}".lower())
    return f"{slug[:60].strip('-')}-seed{config.seed}-{digest}"


def merge_options(
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    methods: str | None = None,
    seeds: Sequence[str] = (),
    vary: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Merge a file's values with the command's options, which win, and with --set, which wins over both."""
    options = dict(given)
    if methods is not None:
        _add_axis(options, "method", _pieces(methods), "--methods")
    if seeds:
        _add_axis(options, "seed", _parse_seeds(seeds), "--seeds")
    base = _rename_synonyms(values)
    for text in vary:
        _add_axis(options, *_parse_vary(text, {**base, **given}), f"--vary {text}")
    merged = base | options
    for text in sets:
        merged = assign(_single(merged, text.partition("=")[0].strip(), f"--set {text}"), [text])
    return merged


def _add_axis(options: dict[str, Any], name: str, several: list[Any], option: str) -> None:
    """Give a field several values, unless it has been given otherwise."""
    if name in options:
        raise UsageError(f"{option} gives {name}, but it is already set: leave one out")
    if not several:
        raise UsageError(f"{option} needs at least one value")
    options[name] = several


def _parse_seeds(seeds: Sequence[str]) -> list[int]:
    try:
        return [int(word) for text in seeds for word in text.split(",") if word.strip()]
    except ValueError:
        raise UsageError(f"--seeds {' '.join(seeds)}: give whole numbers, such as --seeds 0 1 2") from None


def _parse_vary(text: str, known: dict[str, Any]) -> tuple[str, list[Any]]:
    """The field that `--vary` names, and its values; one may vary an argument of what is known."""
    key, equals, raw = text.partition("=")
    name = SYNONYMS.get(key.strip(), key.strip())
    if not equals or not name:
        raise UsageError(f"--vary {text}: write it like 'lr=0.1; 0.01'")
    top = name.partition(".")[0]
    single = _single(known, name, f"--vary {text}")
    return top, [assign(single, [f"{name}={piece}"])[top] for piece in _pieces(raw)]


def _pieces(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(";") if piece.strip()]


def _single(values: dict[str, Any], name: str, option: str) -> dict[str, Any]:
    """The values, unless an argument is to be set in a field that has several: it would have to be set in each."""
    top, dot, _ = name.partition(".")
    if dot and isinstance(values.get(top), list | tuple | Mapping):
        raise UsageError(f"{option}: there are several values of '{top}'; write the argument into each")
    return values
