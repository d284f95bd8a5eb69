"""Names with arguments, as people write them: `resnet8(width=16)`, `dirichlet(alpha=0.1)`.

Methods, models, datasets, partitions, optimisers and schedules are all named this way, on the command line, in TOML
and in Python. A string is read with `ast`, literals only: nothing is ever evaluated. A *table* is a plain dict from
names to callables; the arguments a user may give are the callable's keyword-only parameters, checked against their
annotations, and its help is the first line of its docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedstrata.errors import UsageError, did_you_mean

Registry = Mapping[str, Callable[..., Any]]
Entry = TypeVar("Entry")
Buffers = Literal["average", "local", "drop"]
"""What may happen to running statistics; here, because the schema and the core both say it."""


@dataclass(frozen=True)
class Call:
    """A name and its arguments, read but not yet looked up."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def read_literal(node: ast.expr, text: str) -> Any:
    """A literal's value; a list as a tuple."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        hint = "; write text in quotes" if isinstance(node, ast.Name | ast.Attribute) else ""
        raise UsageError(f"in '{text}': {_quote(node)} is not a literal value{hint}") from None
    return tuple(value) if isinstance(value, list) else value


def _quote(node: ast.expr) -> str:
    try:
        return f"'{ast.unparse(node)}'"
    except RecursionError:
        return "an argument"


def parse_expression(text: str, shown: str | None = None) -> ast.expr:
    """The syntax tree of one expression, or a clear refusal, which calls the text `shown`."""
    if len(text) > 10_000:
        raise UsageError("a name with arguments is at most 10,000 characters long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "invalid escape sequence": what matters is checked by `bind`
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        how = "write it like name or name(argument=value)"
        if re.search(r"\blambda\s*=", text):  # a word of Python's own, and a symbol of many papers
            how = "the argument is called lambda_"
        raise UsageError(f"'{shown or text}' cannot be read; {how}") from None


ReadValue = Callable[[ast.expr, str], Any]
"""(an argument, the whole text) → its value, or a refusal."""


def read_call(node: ast.expr, text: str, value: ReadValue = read_literal) -> Call:
    """`name` or `name(arguments…)` as a Call; the arguments are literals unless `value` reads others."""
    if isinstance(node, ast.Name):
        return Call(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kwargs = []
        for keyword in node.keywords:
            if keyword.arg is None:
                raise UsageError(f"in '{text}': '**' is not allowed")
            kwargs.append((keyword.arg, value(keyword.value, text)))
        return Call(node.func.id, tuple(value(a, text) for a in node.args), tuple(kwargs))
    raise UsageError(f"'{text}' cannot be read; write it like name or name(argument=value)")


def parse_call(text: str, value: ReadValue = read_literal) -> Call:
    """Read one name with arguments. Dashes in the name are part of it: `fashion-mnist`, `cifar-10`."""
    head, paren, rest = text.strip().partition("(")
    name = head.strip()
    if not name or not all(part.isalnum() for part in name.replace("-", "_").split("_") if part):
        raise UsageError(f"'{text}' cannot be read; write it like name or name(argument=value)")
    call = read_call(parse_expression("f" + paren + rest, shown=text), text, value)
    return Call(name, call.args, call.kwargs)


def parse_sum(text: str, value: ReadValue = read_literal) -> list[Call]:
    """Read names with arguments joined by `+`, left to right: `feddyn(alpha=0.1) + fedlc`."""
    calls: list[Call] = []
    waiting = [parse_expression(text)]
    while waiting:  # without recursion, since a user's text may be long
        term = waiting.pop()
        if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Add):
            waiting += [term.right, term.left]
        else:
            calls.append(read_call(term, text, value))
    return calls


def split_sum(text: str) -> list[str]:
    """The texts of terms joined by `+`, left to right: `hf('a+b') + lora(r=2)` has two."""
    if "+" not in text:
        return [text.strip()]
    line, terms = text.strip(), list[str]()
    waiting = [parse_expression(line)]
    while waiting:
        term = waiting.pop()
        if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Add):
            waiting += [term.right, term.left]
        else:
            terms.append(ast.get_source_segment(line, term) or line)
    return terms


@cache
def parameters(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """What a user may give: keyword-only parameters (or dataclass fields) → (type, default)."""
    own = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    scope = _names_around(target)
    # Of these alone, for other parameters and results may be torch's, which is not loaded for a look at names.
    wanted = SimpleNamespace(__annotations__={p.name: p.annotation for p in own if p.annotation is not p.empty})
    hints = typing.get_type_hints(wanted, scope, include_extras=True)
    return {p.name: (hints.get(p.name, Any), p.default) for p in own}


def _names_around(target: Callable[..., Any]) -> dict[str, Any]:
    """What annotations may name: of a class, also in the modules of those that it inherits fields from."""
    kinds = reversed(target.__mro__) if inspect.isclass(target) else (inspect.unwrap(target),)
    modules = (sys.modules.get(kind.__module__) for kind in kinds)
    return {name: value for module in modules for name, value in getattr(module, "__dict__", {}).items()}


@cache
def takes_others(target: Callable[..., Any]) -> bool:
    """True if a user may give arguments of any other name, which are passed on (`**arguments`)."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())


def summary(target: Callable[..., Any]) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def signature(target: Callable[..., Any]) -> str:
    """The arguments with their defaults, as shown by `fedstrata list`."""
    shown = [
        name if default is inspect.Parameter.empty else f"{name}={_default(kind, default)}"
        for name, (kind, default) in parameters(target).items()
    ]
    return ", ".join(shown + ["…"] * takes_others(target))


def _default(kind: Any, default: Any) -> str:
    """A default, and for a choice among names all of them."""
    parts = [kind, *typing.get_args(kind)]
    choices = [repr(c) for part in parts if typing.get_origin(part) is typing.Literal for c in typing.get_args(part)]
    return "|".join(sorted(choices, key=lambda c: c != repr(default))) or repr(default)


def lookup(kind: str, table: Mapping[str, Entry], name: str) -> Entry:
    """The table's entry, or a refusal with the nearest name."""
    if name not in table:
        raise UsageError(f"there is no {kind} '{name}'{did_you_mean(name, table)}")
    return table[name]


def bind(kind: str, table: Registry, call: Call | str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Look a call up in a table and check its arguments: (callable, keyword arguments).

    Arguments of which the callable says nothing but `**arguments` are passed on as they are.
    """
    call = parse_call(call) if isinstance(call, str) else call
    target = lookup(kind, table, call.name)
    known = parameters(target)
    others = takes_others(target)
    if len(call.args) > len(known):
        raise UsageError(f"{kind} '{call.name}' takes at most {len(known)} arguments, not {len(call.args)}")
    given = dict(zip(known, call.args, strict=False))
    for name, value in call.kwargs:
        if name in given:
            raise UsageError(f"{kind} '{call.name}': argument '{name}' is given twice")
        if name not in known and not others:
            hint = did_you_mean(name, known) if known else "; it takes none"
            raise UsageError(f"{kind} '{call.name}' has no argument '{name}'{hint}")
        given[name] = value
    for name, (_, default) in known.items():
        if default is inspect.Parameter.empty and name not in given:
            raise UsageError(f"{kind} '{call.name}' needs the argument '{name}'")
    return target, {
        name: check(f"{kind} '{call.name}', argument '{name}'", known[name][0], value) if name in known else value
        for name, value in given.items()
    }


def settle(kind: str, table: Registry, text: str) -> str:
    """The text, with arguments that mean something else elsewhere, such as relative paths, as what they are here.

    A text that names nothing stays as it is: whoever looks it up says what is wrong.
    """
    try:
        call = parse_call(text)
        target, bound = bind(kind, table, call)
    except UsageError:
        return text
    given = dict(zip(parameters(target), call.args, strict=False)) | dict(call.kwargs)
    return text if bound == given else text_of(call.name, bound)


def check(what: str, annotation: Any, value: Any) -> Any:
    """The value as its annotated type (an int may stand for a float), or a refusal that names what is wrong."""
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first, *others = dict.fromkeys(e["msg"][:1].lower() + e["msg"][1:] for e in error.errors())
        wanted = " or ".join([first, *(other.removeprefix("input should be ") for other in others)])
        raise UsageError(f"{what}: {value!r} does not fit ({wanted})") from None


def text_of(name: str, kwargs: Mapping[str, Any]) -> str:
    """The call as a string that `parse_call` reads back."""
    inner = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
    return f"{name}({inner})" if inner else name


def non_default_fields(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}
