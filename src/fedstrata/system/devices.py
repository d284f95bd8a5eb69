"""Where training runs: the devices that a name stands for, and the way of tensors to a device and home.

This is the one file that knows kinds of devices. Only CUDA copies by itself, between its own memory and pinned memory
of the host, while Python goes on; everywhere else a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fedstrata.core.stacks import Assignments, Memories
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots, replace_fields
from fedstrata.errors import UsageError

HOST = torch.device("cpu")
"""Where results come home to; the server's tensors, memories and examples are there."""
META = torch.device("meta")
"""Where tensors have a shape and no memory: what a step takes can be tried there."""


def devices_by_name(names: str) -> tuple[torch.device, ...]:
    """The devices of one name or of several, with commas between them: workers are dealt out to them in turn.

    A device may be named twice, and gets twice as many workers then.

    Raises:
        UsageError: if one of them cannot be used here, or if they are of different kinds.
    """
    listed = [name.strip() for name in names.split(",")]
    if not all(listed):
        raise UsageError(f"device = {names!r} has an empty entry: give a name, or several such as cuda:0,cuda:1")
    first, *others = listed
    found = [device_by_name(first), *(_parse(name) for name in others)]
    if len({device.type for device in found}) > 1:
        raise UsageError(f"the devices {names} are of different kinds: results would depend on who is trained where")
    for name, device in zip(others, found[1:], strict=True):
        if device != HOST and (device.index or 0) >= torch.accelerator.device_count():
            raise _unavailable(name)  # found without opening it, which takes some of its memory
    return tuple(found)


def device_by_name(name: str) -> torch.device:
    """The device of a name, if it can be used here."""
    device = _parse(name)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError):
        raise _unavailable(name) from None
    return device


def _parse(name: str) -> torch.device:
    """The device that a name means; every `cpu:N` is the CPU, of which torch knows one only."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _unavailable(name) from None
    if device.type == "meta":
        raise UsageError(f"the device '{name}' holds no numbers: nothing can be trained there")
    return HOST if device.type == "cpu" else device


def _unavailable(name: str) -> UsageError:
    return UsageError(f"the device '{name}' is unavailable on this machine")


def survive_fork(devices: Iterable[torch.device]) -> bool:
    """True if forked processes can use them: what a driver has opened in the main process is of no use in a copy."""
    return all(device == HOST for device in devices)


def accelerators() -> int:
    """How many devices other than the CPU this machine has, of the one kind that torch is made for."""
    return torch.accelerator.device_count()


def assigned(device: torch.device) -> torch.device:
    """A device of the same kind, as a process names it that is shown none but its own: always the first."""
    return torch.device(device.type)


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a device is the current one of its kind: pinning memory would open another one too, in every worker."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# The way there, and home ------------------------------------------------------------------------------------------


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, the very same where it is there already."""
    if device.type == "cuda" and tensor.device.type != "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def slots_on(device: torch.device, slots: Slots) -> Slots:
    """Tensors on a device, the very same ones where they are there already: a visit computes in one place."""
    if not slots or all(t.device.type == device.type for slot in slots.values() for t in slot.values()):
        return slots
    if device == HOST:
        return _bring_home(slots)
    return {name: {n: to_device(t, device) for n, t in slot.items()} for name, slot in slots.items()}


def _bring_home(slots: Slots) -> Slots:
    """Tensors on the CPU: all copies are on their way before the first is waited for."""
    busy = {t.device for slot in slots.values() for t in slot.values() if t.device.type == "cuda"}
    home = {
        name: {n: t.to(HOST, non_blocking=t.device in busy) for n, t in slot.items()} for name, slot in slots.items()
    }
    for device in busy:
        torch.cuda.current_stream(device).synchronize()
    return home


def assignment_on(device: torch.device, assignment: Assignment) -> Assignment:
    """An assignment with its tensors on a device."""
    if device == HOST:
        return assignment
    params, buffers = (slots_on(device, {"": tensors})[""] for tensors in (assignment.params, assignment.buffers))
    return replace_fields(assignment, params=params, buffers=buffers, slots=slots_on(device, assignment.slots))


def visits_on(device: torch.device, assignments: Assignments, memories: Memories) -> tuple[Assignments, Memories]:
    """Assignments and what their clients remember on a device; what visits have in common goes there once."""
    if device == HOST:
        return assignments, memories
    there: dict[int, Tensor] = {}

    def move(tensors: Tensors) -> Tensors:
        for tensor in tensors.values():
            if id(tensor) not in there:
                there[id(tensor)] = to_device(tensor, device)
        return {name: there[id(tensor)] for name, tensor in tensors.items()}

    def move_slots(slots: Slots) -> Slots:
        return {name: move(slot) for name, slot in slots.items()}

    templates = tuple(
        replace_fields(a, params=move(a.params), buffers=move(a.buffers), slots=move_slots(a.slots))
        for a in assignments.templates
    )
    stacks, *places = memories.regroup(move_slots)
    return replace_fields(assignments, templates=templates), Memories(tuple(stacks), *places)
