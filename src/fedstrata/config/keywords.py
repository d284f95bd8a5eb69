"""A federation's settings as keywords: `Federation(model, clients, test, rounds=30, lr=0.1)`.

They build one `Settings` object, once; from there on settings travel whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedstrata.config.schema import Settings, validate_settings
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.core.method import Method


def resolve_settings(settings: Settings | None, keywords: Mapping[str, Any]) -> tuple[Method, Settings]:
    """(the method, the settings) of a run: what `settings` says, unless a keyword says otherwise.

    A method may be given as an object, with techniques that no name stands for; the settings then hold its text.

    Raises:
        UsageError: for a setting that does not exist or does not fit, or two that contradict each other.
    """
    from fedstrata.techniques import method

    if not isinstance(settings, Settings | None):
        raise UsageError(f"settings must be a Settings object, not a {type(settings).__name__}; or give keywords")
    said = {} if settings is None else {name: getattr(settings, name) for name in Settings.model_fields}
    if "method" in keywords:
        said["buffers"] = None  # those of another method
    said |= dict(keywords)
    chosen, buffers = method(said.get("method", "fedavg")), said.get("buffers")
    if buffers is not None and chosen.base.buffers not in (None, buffers):
        raise UsageError(f"the method says buffers={chosen.base.buffers!r}, but buffers={buffers!r}: leave one out")
    chosen = chosen.with_buffers(buffers)
    found = validate_settings(Settings, {**said, "method": str(chosen), "buffers": chosen.buffers})
    if found.stop_at_target and chosen.epilogue:
        raise UsageError(f"stop_at_target would end the run before '{chosen}' finishes: leave one out")
    return chosen, found
