"""`--set name=value`: one setting, or one argument of what a setting names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.config.registries import load_table
from fedstrata.config.schema import RunConfig
from fedstrata.config.toml import SPECS, parse_toml, plain_value
from fedstrata.core.spec import Registry, bind, parse_call, text_of
from fedstrata.errors import UsageError, did_you_mean


def assign(values: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `a=c`, or `a.b=c` where b is an argument of the thing named in a: `model.width=16`.

    In a method the technique comes in between: `method.fedprox.mu=0.1`.
    """
    out = dict(values)
    for text in assignments:
        key, equals, raw = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise UsageError(f"--set {text}: write it like name=value or name.argument=value")
        value = _read_value(raw.strip())
        if len(path) == 1:
            out[path[0]] = value
            continue
        if path[0] == "model" and out.get("archs") is not None and "model" not in out:
            raise UsageError(f"--set {text}: the server's model is the deepest of archs; set it there")
        changed = _set_part(out, path, value)
        if changed is None:
            known = [f"{name}.…" for name in (*SPECS, "method")]
            raise UsageError(f"--set {text}: '{key}' has no such part{did_you_mean(key, known)}")
        out[path[0]] = changed
    return out


def _set_part(values: Mapping[str, Any], path: Sequence[str], value: Any) -> str | None:
    """A field as text, with an argument of what it names set; None if it has no such part."""
    field, *parts = path
    default = RunConfig.model_fields[field].default if field in RunConfig.model_fields else None
    current = str(values.get(field, default))
    if field == "method" and len(parts) == 2:
        return _set_method_argument(current, parts[0], parts[1], value)
    if field in SPECS and len(parts) == 1:
        return _set_argument(current, field, load_table(f"{field}s"), parts[0], value)
    return None


def _read_value(raw: str) -> Any:
    """What TOML makes of the text, or the text itself."""
    try:
        read = parse_toml(f"value = {raw}")
    except ValueError:
        return raw
    return plain_value(read["value"]) if len(read) == 1 else raw


def _set_argument(current: str, kind: str, known: Registry, name: str, value: Any) -> str:
    """A name with arguments as text, with one argument set."""
    call = parse_call(current)
    _, kwargs = bind(kind, known, call)
    return text_of(call.name, {**kwargs, name: value})


def _set_method_argument(current: str, technique: str, name: str, value: Any) -> str:
    """A method as text, with one argument of one of its techniques set."""
    from fedstrata.techniques import method

    read = method(current)
    parts = {read.base.name: str(read.base)} | {part.name: str(part) for part in read.techniques}
    if technique not in parts:
        raise UsageError(f"the method '{current}' has no technique '{technique}'{did_you_mean(technique, parts)}")
    parts[technique] = _set_argument(parts[technique], "method", load_table("methods"), name, value)
    return str(method(" + ".join(parts.values())))
