"""Looking into a model while it runs: what is at a module's input or output, to see it or to replace it.

For any model, by hooks; `fedstrata.models.stages` runs a sequential model piece by piece instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedstrata.core.types import Into
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.models.stages import is_plain_sequential


def hook_place(model: nn.Module, place: str, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Let a function replace a module's output or, for an `Into`, its input, until the handle is removed."""
    module = _module(model, place)
    if isinstance(place, Into):
        return module.register_forward_pre_hook(lambda m, args: (function(args[0]), *args[1:]))
    return module.register_forward_hook(lambda m, args, output: function(output))


class _Seen(BaseException):
    """Ends a run of the model where all that is wanted has been computed."""

    def __init__(self, there: Tensor) -> None:
        self.there = there


def value_at(model: nn.Module, place: str, run: Callable[[], Any]) -> Tensor:
    """What is at a place of the model while it runs, which it does no further than there."""

    def see(there: Tensor) -> Tensor:
        raise _Seen(there)

    handle = hook_place(model, place, see)
    try:
        run()
    except _Seen as seen:
        return seen.there
    finally:
        handle.remove()
    raise UsageError(f"the model's module '{place}' does not run")


def stages_to(model: nn.Module, place: str) -> list[nn.Module]:
    """The stages of a plain `nn.Sequential` whose composition ends at a place; none where it is no end of a stage."""
    hooked = model._forward_hooks or model._forward_pre_hooks
    if not is_plain_sequential(model) or hooked or str(place) not in model._modules:
        return []
    names = list(model._modules)
    end = names.index(str(place)) + (not isinstance(place, Into))
    return [stage for stage in list(model._modules.values())[:end] if stage is not None]


@contextmanager
def watch_places(model: nn.Module, watch: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Call every function with what is at its place, whenever the model runs that place."""
    handles = [hook_place(model, place, partial(_show, look)) for place, look in watch.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _show(look: Callable[[Tensor], None], there: Tensor) -> Tensor:
    """Call a function that only looks; what is there stays."""
    look(there)
    return there


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise UsageError(f"the model has no module '{name}'{did_you_mean(name, known)}") from None
