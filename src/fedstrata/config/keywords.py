"""A federation's settings as keywords: `Federation(model, clients, test, rounds=30, lr=0.1)`.

They build one `Settings` object, once; from there on settings travel whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from fedstrata.config.schema import Settings, validate_settings
from fedstrata.core.types import Buffers
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.core.method import Method


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` but for `engine`, which a federation takes itself; for type checkers and editors."""

    method: str | Method
    rounds: int
    participation: int | float
    epochs: int
    steps: int | None
    batch_size: int
    lr: float
    optimizer: str
    schedule: str
    clip: float | None
    augment: str
    buffers: Buffers | None
    seed: int
    workers: int | str
    threads: int
    ray_address: str
    ray_cpus: float
    ray_gpus: float
    channels_last: bool
    compile: bool
    device: str
    eval_every: int
    eval_clients: bool
    target: float | None
    stop_at_target: bool
    checkpoint_seconds: float
    probe: str | None
    probe_every: int
    probe_clients: int
    probe_examples: int


def resolve_settings(settings: Settings | None, keywords: Mapping[str, Any]) -> tuple[Method, Settings]:
    """(the method, the settings) of a run: what `settings` says, unless a keyword says otherwise.

    A method may be given as an object, with techniques that no name stands for; the settings then hold its text.

    Raises:
        UsageError: for a setting that does not exist or does not fit, or two that contradict each other.
    """
    from fedstrata.techniques import method

    said = {} if settings is None else {name: getattr(settings, name) for name in Settings.model_fields}
    said |= dict(keywords)
    chosen, buffers = method(said.get("method", "fedavg")), said.get("buffers")
    if buffers is not None and chosen.base.buffers not in (None, buffers):
        raise UsageError(f"the method says buffers={chosen.base.buffers!r}, but buffers={buffers!r}: leave one out")
    chosen = chosen.with_buffers(buffers)
    found = validate_settings(Settings, {**said, "method": str(chosen), "buffers": chosen.buffers})
    if found.stop_at_target and chosen.epilogue:
        raise UsageError(f"stop_at_target would end the run before '{chosen}' finishes: leave one out")
    return chosen, found
