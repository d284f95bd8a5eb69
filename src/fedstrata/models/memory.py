"""Memory of real computation: bytes of tensors that are alive at once, counted storage by storage.

A storage counts once, however many tensors look into it, from the operation that makes it until the last of them is
gone. So it does not matter who holds it: torch's tape, a closure of our own passes, or a list of gradients. Nothing is
timed, and no bit changes. What a kernel uses for itself while it runs is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what operations inside a `with` block have made; single numbers are left out.

    Attributes:
        live: bytes of what is alive now.
        peak: the most there has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FlopCount`: torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for tensor in _tensors((out,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._held or not tensor.dim():
                continue
            if given is None:
                given = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()) if kwargs else args)}
            if key not in given:
                self._take(storage, key, storage.nbytes())
        return out

    def _take(self, storage: torch.UntypedStorage, key: int, size: int) -> None:
        """Count a storage until it dies."""

        def drop(_: Any) -> None:
            self.live -= size
            del self._held[key]

        self._held[key] = weakref.ref(storage, drop)
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and in tuples and lists of them, which are all that operations take and return."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t is not None)}.values())


def saved_bytes(model: nn.Module, run: Callable[[], Any], names: Sequence[str]) -> dict[str, int]:
    """Name of a weight layer → bytes that it and what runs until the next one keep for the backward pass.

    By torch's tape. Each storage counts where it is saved first; the model's own tensors do not.

    Args:
        model: the module.
        run: runs it, up to the loss.
        names: of the weight layers, in the order in which they run.
    """
    seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    found = dict.fromkeys(names, 0)
    held: list[torch.UntypedStorage] = []  # so that no other storage takes its place

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(storage)
            found[current[0]] += storage.nbytes()
        return tensor

    with _following(model, names) as current, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return found


@contextmanager
def _following(model: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    """The name of the weight layer that has begun to run last, in a list of one."""
    current = [names[0]]
    modules = dict(model.named_modules())

    def enter(name: str) -> Any:
        return lambda module, args: current.__setitem__(0, name)

    handles = [modules[name].register_forward_pre_hook(enter(name)) for name in names]
    try:
        yield current
    finally:
        for handle in handles:
            handle.remove()
