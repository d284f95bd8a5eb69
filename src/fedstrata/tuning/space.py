"""Search spaces, as people write them: `lr=log(1e-3, 1)`, `method=fedprox(mu=log(1e-4, 1))`.

A space stands where a value would stand. Texts are read with the grammar of all other names (`core/spec.py`): nothing
is ever evaluated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedstrata.core.spec import Call, bind, parse_call, parse_sum, read_call, read_literal, text_of
from fedstrata.errors import UsageError


class Space(Protocol):
    """What a value is searched in."""

    @property
    def middle(self) -> Any:
        """A value to begin with where the settings have none."""
        ...

    def contains(self, value: Any) -> bool:
        """Whether the search can find a value."""
        ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """A number between two others.

    Args:
        low, high: the least and the largest.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise UsageError(f"{self} needs low < high")

    def __str__(self) -> str:
        return f"uniform({self.low:g}, {self.high:g})"

    @property
    def middle(self) -> float:
        """Halfway between its ends."""
        return (self.low + self.high) / 2

    def contains(self, value: Any) -> bool:
        """Whether it is between the ends."""
        return _is_number(value) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Log(Uniform):
    """A number between two others, by its logarithm.

    Args:
        low, high: the least and the largest.
    """

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise UsageError(f"{self} needs 0 < low < high")

    def __str__(self) -> str:
        return f"log({self.low:g}, {self.high:g})"

    @property
    def middle(self) -> float:
        """The geometric mean of its ends."""
        return math.sqrt(self.low) * math.sqrt(self.high)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole number between two others, which are possible, too.

    Args:
        low, high: the least and the largest.
        log: by its logarithm.
    """

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        if self.low >= self.high or (self.log and self.low < 1):
            raise UsageError(f"{self} needs {'1 ≤ ' * self.log}low < high")

    def __str__(self) -> str:
        return f"int({self.low}, {self.high}{', log=True' * self.log})"

    @property
    def middle(self) -> int:
        """Halfway between its ends."""
        return round(math.sqrt(self.low * self.high)) if self.log else (self.low + self.high) // 2

    def contains(self, value: Any) -> bool:
        """Whether it is a whole number between the ends."""
        return _is_number(value) and isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True)
class Choice:
    """One of several values, in no order.

    Args:
        options: all of them.
    """

    options: tuple[Any, ...]

    def __post_init__(self) -> None:
        if len({*map(repr, self.options)}) < max(2, len(self.options)):
            raise UsageError(f"{self} needs two different values or more, each once")

    def __str__(self) -> str:
        return f"choice({', '.join(map(repr, self.options))})"

    @property
    def middle(self) -> Any:
        """The first."""
        return self.options[0]

    def contains(self, value: Any) -> bool:
        """Whether it is one of them; 1 is not 1.0."""
        return repr(value) in map(repr, self.options)


SPACES = {"log": Log, "uniform": Uniform, "int": Whole, "choice": Choice}
"""What a search can be written with."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_value(node: ast.expr, text: str) -> Any:
    """A literal, or a space in its place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SPACES:
        return _build(read_call(node, text), text)
    return read_literal(node, text)


def _build(call: Call, text: str) -> Space:
    if call.name == "choice":
        if call.kwargs:
            raise UsageError(f"in '{text}': write choice(a, b, …), without names")
        return Choice(call.args)
    target, given = bind("search space", {n: s for n, s in SPACES.items() if n != "choice"}, call)
    space: Space = target(**given)
    return space


@dataclass(frozen=True)
class Template:
    """The value of a field with spaces in it: a space, or names with arguments of which some are spaces.

    Args:
        field: of a run.
        value: the space, or the calls that the field's text is the sum of.
    """

    field: str
    value: Space | tuple[Call, ...]

    @property
    def spaces(self) -> dict[str, Space]:
        """Name → space: `lr`, `model.width`, and of methods `fedprox.mu`."""
        if not isinstance(self.value, tuple):
            return {self.field: self.value}
        return {f"{self._prefix(call)}.{name}": space for call, name, space in self._holes(self.value)}

    def _holes(self, calls: Sequence[Call]) -> Iterator[tuple[Call, str, Any]]:
        return ((call, name, value) for call in calls for name, value in call.kwargs if _is_space(value))

    def _prefix(self, call: Call) -> str:
        return call.name if self.field == "method" else self.field

    def fill(self, values: Mapping[str, Any]) -> Any:
        """The field's value, with these in the spaces' places."""
        if not isinstance(self.value, tuple):
            return values[self.field]
        texts = []
        for call in self.value:
            given = {n: values[f"{self._prefix(call)}.{n}"] if _is_space(v) else v for n, v in call.kwargs}
            positional = [repr(value) for value in call.args]
            text = text_of(call.name, given)
            inner = ", ".join([*positional, *([text[len(call.name) + 1 : -1]] if given else [])])
            texts.append(f"{call.name}({inner})" if inner else call.name)
        return " + ".join(texts)

    def defaults(self, present: Any, table: Mapping[str, Any] | None) -> dict[str, Any]:
        """What to begin with: the values that would be there if nothing were searched, else the middle of a space."""
        if not isinstance(self.value, tuple):
            return {self.field: present if self.value.contains(present) else self.value.middle}
        found = {}
        for call, name, space in self._holes(self.value):
            known = _default_of(table, call.name, name)
            found[f"{self._prefix(call)}.{name}"] = known if space.contains(known) else space.middle
        return found


def _default_of(table: Mapping[str, Any] | None, name: str, argument: str) -> Any:
    """The default of an argument of something in a table; None where it has none."""
    from fedstrata.core.spec import parameters

    target = (table or {}).get(name)
    return None if target is None else parameters(target).get(argument, (None, None))[1]


def _is_space(value: Any) -> bool:
    return isinstance(value, tuple(SPACES.values()))


def read_template(field: str, text: Any) -> Template | None:
    """What a field's text says to search; None if it is a value like any other.

    Raises:
        UsageError: if it cannot be read, or a space stands where it has no name.
    """
    if not isinstance(text, str) or not any(f"{name}(" in text for name in SPACES):
        return None
    if field == "method":
        calls = tuple(parse_sum(text, _read_value))
    else:
        call = parse_call(text, _read_value)
        if call.name in SPACES:
            return Template(field, _build(call, text))
        calls = (call,)
    for call in calls:
        if any(map(_is_space, call.args)):
            raise UsageError(f"in '{text}': name the argument that is searched, as in {call.name}(name=log(1e-3, 1))")
    found = Template(field, calls)
    return found if found.spaces else None
