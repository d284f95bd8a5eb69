"""What a search tunes: each method under each setting, with the spaces of its settings and where it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedstrata.compare.plan import SYNONYMS, Grid, read_grid
from fedstrata.config.identity import EXECUTION_FIELDS, PROBE_FIELDS
from fedstrata.config.registries import load_table
from fedstrata.config.schema import RunConfig, validate_values
from fedstrata.core.spec import Call, parse_call, parse_sum
from fedstrata.core.text import plural
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.tuning.space import Space, Template, Uniform, read_template

DEFAULT_SEARCH = {"lr": "log(0.001, 1)"}
"""What is searched where nothing is said."""
SEEDS = (0, 1, 2)
"""What is reported where nothing is said."""
NEVER = {
    *("dataset", "partition", "clients", "task", "holdout", "validation", "public", "trusted", "newcomers", "without"),
    *("seed", "rounds", "eval_every", "eval_clients", "target", "stop_at_target", "fleet", "faults"),
    *EXECUTION_FIELDS,
    *PROBE_FIELDS,
}
"""Fields that no search may change: scores would be of something else, or cost something else."""
TABLE_OF = {"method": "methods", "model": "models", "optimizer": "optimizers", "schedule": "schedules"}
"""Field → the table in which the defaults of its arguments are."""


@dataclass(frozen=True)
class Budget:
    """What a search may cost, the same for every method under every setting.

    Args:
        trials: how many settings are tried.
        seed: of the search, and of all its runs; none of those that are reported.
        validation: share of the training examples that trials are judged by.
        factor: η of successive halving: about one of η trials goes on at each rung; 0 to run all to their ends.
        batch: how many trials are chosen together, before any of them is known; they can run side by side.
    """

    trials: int = 20
    seed: int = 1000
    validation: float = 0.2
    factor: int = 3
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("trials", "seed", "factor", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"a search's {name} must be a whole number, not {value!r}")
        if not isinstance(self.validation, int | float):
            raise UsageError(f"a search's validation must be a number, not {self.validation!r}")
        for name in ("trials", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"a search needs {name} of 1 or more, not {getattr(self, name)}")
        if self.seed < 0:
            raise UsageError(f"the seed of a search must be 0 or more, not {self.seed}")
        if self.factor < 2 and self.factor != 0:
            raise UsageError(f"successive halving needs a factor of 2 or more, or 0 for none, not {self.factor}")
        if not 0 < self.validation < 1:
            raise UsageError(f"validation must be above 0 and below 1, not {self.validation}")


@dataclass(frozen=True)
class Candidate:
    """A method under one setting, to be tuned.

    Args:
        label: what tables call the method.
        varied: the setting: values of the fields that are varied.
        fields: of its runs, but for what is searched.
        own: those of them that only its method sets.
        templates: the fields in which something is searched.
        initial: the values with which the search begins.
    """

    label: str
    varied: Mapping[str, Any]
    fields: Mapping[str, Any]
    own: Mapping[str, Any]
    templates: tuple[Template, ...]
    initial: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([self.label, *(f"{name}={value}" for name, value in self.varied.items())])

    @property
    def spaces(self) -> dict[str, Space]:
        """Everything that is searched, by name."""
        return {name: space for template in self.templates for name, space in template.spaces.items()}

    def chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that its method sets, with these values in the spaces' places."""
        filled = {template.field: template.fill(values) for template in self.templates}
        return {**self.own, **filled}

    def trial(self, values: Mapping[str, Any], budget: Budget) -> RunConfig:
        """The configuration of a trial: on validation data, under the search's seed.

        Raises:
            UsageError: if a run cannot have these values.
        """
        own = {"seed": budget.seed, "validation": budget.validation, "target": None, "stop_at_target": False}
        return validate_values(RunConfig, {**self.fields, **self.chosen(values), **own})


@dataclass(frozen=True)
class SearchPlan:
    """What is tuned, and what is reported afterwards.

    Args:
        grid: what is compared with the settings that are found.
        candidates: in the order of the table.
        budget: of each.
    """

    grid: Grid
    candidates: tuple[Candidate, ...]
    budget: Budget


def read_search(texts: Sequence[str]) -> dict[str, Any]:
    """The pieces of `--search "lr=log(1e-3,1); method=fedprox(mu=log(1e-4,1))"`; several methods make a list."""
    found: dict[str, Any] = {}
    for piece in (piece.strip() for text in texts for piece in text.split(";")):
        name, equals, value = piece.partition("=")
        name = SYNONYMS.get(name.strip(), name.strip())
        if piece and not (equals and name and value.strip()):
            raise UsageError(f"--search {piece}: write it like 'lr=log(1e-3, 1); method=fedprox(mu=log(1e-4, 1))'")
        if name == "method":
            found.setdefault(name, []).append(value.strip())
        elif piece and name in found:
            raise UsageError(f"--search names {name} twice")
        elif piece:
            found[name] = value.strip()
    return found


def plan_search(values: Mapping[str, Any], search: Mapping[str, Any] | str | None, budget: Budget) -> SearchPlan:
    """What to tune: values as for a comparison, and what to search in them.

    Args:
        values: a run's fields, any of which may hold a list, as in `compare`; methods may hold spaces.
        search: field, or argument such as `fedprox.mu` → its space, also as text; None or nothing for spaces in the
            values alone, or where there are none for the learning rate.
        budget: of every method.

    Raises:
        UsageError: if something cannot be searched, or cannot be described, before anything is written.
    """
    values, wanted = dict(values), _flatten(read_search([search]) if isinstance(search, str) else search or {})
    methods = wanted.pop("method", None)
    if methods is not None:
        if {"method", "methods"} & values.keys():
            raise UsageError(
                "the methods are set already: write what is searched into them, or as 'fedprox.mu=log(1e-4, 1)'"
            )
        values["method"] = methods
    if "seed" not in values and "seeds" not in values:
        values["seed"] = list(SEEDS)
    grid = read_grid(values)
    if any("validation" in fields for fields in (grid.fields, grid.axes, *(own for _, own in grid.methods))):
        raise UsageError("a search has one validation share, its budget's, and reports on the test set")
    if budget.seed in grid.seeds:
        raise UsageError(
            f"seed {budget.seed} is the one that is tuned on: report others, or give another --search-seed"
        )
    if not wanted and not _has_space(grid):
        wanted = dict(DEFAULT_SEARCH)
    _check_used(wanted, grid)
    candidates = [
        _candidate(grid, chosen, _short_label(label, grid), own, wanted)
        for chosen in grid.settings
        for label, own in grid.methods
    ]
    for candidate in candidates:
        candidate.trial(candidate.initial, budget)
        _check_numbers(candidate, budget)
    return SearchPlan(grid, tuple(candidates), budget)


def _flatten(search: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of TOML, such as `fedprox.mu = "log(1e-4, 1)"`, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in search.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": space for inner, space in value.items()}
        else:
            found[SYNONYMS.get(name, name)] = value
    return found


def _has_space(grid: Grid) -> bool:
    every = [grid.fields, *(own for _, own in grid.methods)]
    return any(read_template(name, value) for fields in every for name, value in fields.items())


def _check_used(wanted: Mapping[str, Any], grid: Grid) -> None:
    """Refuse what is in no method and no setting, what is varied already, and what scores would depend on."""
    used = {call.name for _, own in grid.methods for call in _calls("method", own["method"])}
    for name in wanted:
        head, dot, _ = name.partition(".")
        if head in grid.axes:
            raise UsageError(f"{head} is varied already: search it, or vary it")
        if head in NEVER:
            raise UsageError(f"{head} cannot be searched: scores would no longer be of the same thing")
        if head not in RunConfig.model_fields and head not in used:
            known = [*RunConfig.model_fields, *used]
            what = "method or setting" if dot else "setting"
            raise UsageError(f"there is no {what} '{head}' to search{did_you_mean(head, known)}")
        if head not in RunConfig.model_fields and not dot:
            raise UsageError(f"{head} is a method: name what is searched in it, as in {head}.mu")


def _check_numbers(candidate: Candidate, budget: Budget) -> None:
    """Refuse fractions where whole numbers are wanted, and the like, for such a search would find nothing."""
    for name, space in candidate.spaces.items():
        if isinstance(space, Uniform):
            try:
                candidate.trial({**candidate.initial, name: space.middle}, budget)
            except UsageError as why:
                raise UsageError(f"{name} cannot be searched in {space}: {why}") from None


def _short_label(label: str, grid: Grid) -> str:
    """A method without what is searched in it, unless two would be called the same."""
    short = [_without_spaces(own["method"]) if name == own["method"] else name for name, own in grid.methods]
    place = [name for name, _ in grid.methods].index(label)
    return short[place] if short.count(short[place]) == 1 else label


def _without_spaces(text: str) -> str:
    template = read_template("method", text)
    if template is None or not isinstance(template.value, tuple):
        return text
    kept = tuple(
        replace(c, kwargs=tuple(p for p in c.kwargs if not _searches(template, c, p[0]))) for c in template.value
    )
    return str(Template("method", kept).fill({}))


def _searches(template: Template, call: Call, argument: str) -> bool:
    return f"{call.name}.{argument}" in template.spaces


def _calls(name: str, text: Any) -> tuple[Call, ...]:
    """The calls of a field's text."""
    template = read_template(name, text)
    if template is not None and isinstance(template.value, tuple):
        return template.value
    return tuple(parse_sum(text)) if name == "method" else (parse_call(text),)


def _candidate(
    grid: Grid, chosen: Mapping[str, Any], label: str, own: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Candidate:
    """A method under a setting: what its texts say to search, and what is wanted of all."""
    every = {**grid.fields, **chosen, **own}
    templates = {name: found for name, value in every.items() if (found := read_template(name, value))}
    written: dict[str, Any] = {}
    for name, text in wanted.items():
        head, dot, argument = name.partition(".")
        space = _read_space(name, text)
        if not dot:
            templates[head] = Template(head, space)
            continue
        target = head if head in RunConfig.model_fields else "method"
        before = templates.get(target)
        now = every.get(target, RunConfig.model_fields[target].default)
        calls = before.value if before and isinstance(before.value, tuple) else _calls(target, now)
        placed = _place(calls, None if target == head else head, argument, space)
        if placed is not None:
            templates[target] = Template(target, placed)
            written[name] = _present(calls, None if target == head else head, argument)
    for name in templates.keys() & NEVER:
        raise UsageError(f"{name} cannot be searched: scores would no longer be of the same thing")
    varied = {name: value for name, value in chosen.items() if len(grid.axes[name]) > 1}
    kept = {name: value for name, value in own.items() if name not in templates}
    fields = {name: value for name, value in every.items() if name not in templates}
    # Methods' own arguments last: what all methods have in common is drawn first, and so with the same random numbers.
    order = sorted(templates.values(), key=lambda template: template.field == "method")
    made = Candidate(label, varied, fields, kept, tuple(order))
    said = {n: value for n, value in written.items() if n in made.spaces and made.spaces[n].contains(value)}
    return replace(made, initial=_initial(made, every) | said)


def _read_space(name: str, text: Any) -> Space:
    found = read_template(name.partition(".")[0], text)
    if found is None or isinstance(found.value, tuple):
        raise UsageError(
            f"{name} = {text!r} says nothing to search in: write log(a, b), uniform(a, b), int(a, b) or choice(a, b, …)"
        )
    return found.value


def _place(calls: Sequence[Call], name: str | None, argument: str, space: Space) -> tuple[Call, ...] | None:
    """The calls with a space for one argument of the call of that name, or of the only one; None if it is not there."""
    if name is not None and name not in [call.name for call in calls]:
        return None
    return tuple(
        replace(call, kwargs=(*((n, v) for n, v in call.kwargs if n != argument), (argument, space)))
        if name in (None, call.name)
        else call
        for call in calls
    )


def _present(calls: Sequence[Call], name: str | None, argument: str) -> Any:
    """What an argument is as it was written; None if nothing was."""
    return next((v for call in calls if name in (None, call.name) for n, v in call.kwargs if n == argument), None)


def _initial(candidate: Candidate, every: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they are, or the middle of the space where they are outside of it."""
    found: dict[str, Any] = {}
    for template in candidate.templates:
        name = template.field
        present = every.get(name, RunConfig.model_fields[name].default)
        table = load_table(TABLE_OF[name]) if name in TABLE_OF else None
        found |= template.defaults(present, table)
    return found


def describe(plan: SearchPlan, reported: Sequence[int], halves: bool) -> str:
    """How the settings were found, in a sentence for whoever reads the results; `halves` if trials may end early."""
    budget = plan.budget
    spaces = dict.fromkeys(f"{n} in {space}" for c in plan.candidates for n, space in c.spaces.items())
    early = f", of which successive halving by {budget.factor} ended some early" if halves else ""
    seeds = f"seed{'s' * (len(reported) > 1)} {', '.join(map(str, reported))}"
    return (
        f"tuned: {'; '.join(spaces)}; {plural(budget.trials, 'trial')} for every method{early}, chosen by TPE with "
        f"seed {budget.seed} and judged on {100 * budget.validation:g} % of the training examples, held out for that; "
        f"reported on {seeds}, trained on all of them and judged on the test set"
    )
