"""A federation's settings as keywords: `Federation(model, clients, test, rounds=30, lr=0.1)`.

They build one `Settings` object, once; from there on settings travel whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedstrata.config.schema import Settings, validate_settings
from fedstrata.core.text import SHARES
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.core.method import Method
    from fedstrata.core.task import Task


def resolve_settings(settings: Settings | None, keywords: Mapping[str, Any]) -> tuple[Method, Task, Settings]:
    """(the method, the task, the settings) of a run: what `settings` says, unless a keyword says otherwise.

    A method and a task may be given as objects, which no name may stand for; the settings then hold their texts.

    Raises:
        UsageError: for a setting that does not exist or does not fit, or two that contradict each other.
    """
    from fedstrata.tasks.registry import build_task
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
    task = build_task(said.get("task") or "classification")
    texts = {"method": str(chosen), "buffers": chosen.buffers, "task": str(task)}
    found = validate_settings(Settings, {**said, **texts})
    check_target(task, found.target)
    if found.stop_at_target and chosen.epilogue:
        raise UsageError(f"stop_at_target would end the run before '{chosen}' finishes: leave one out")
    return chosen, task, found


def check_target(task: Task, target: float | None) -> None:
    """Refuse a target that nothing can reach."""
    if target is not None and task.primary in SHARES and not 0 < target <= 1:
        raise UsageError(f"target = {target} does not fit: {task.primary} is above 0 and at most 1")
