"""What one pass through a model shows: which modules are called, and which parameters a gradient would reach.

A pass changes nothing: modes, attributes, buffers, flags and random generators are as before afterwards. `strata` reads
the order of layers from passes; `fedstrata.models.taps` is for what is computed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import Lazy, nn, torch
from fedstrata.core.parts import Parts, call_on
from fedstrata.core.rng import preserve_rng
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils import _pytree as pytree
else:
    pytree = Lazy("torch.utils._pytree")

_REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass.

    Attributes:
        called: the modules in the order of their calls, repeats included.
        reached: the parameters that a gradient of the outputs would reach, frozen or not, by identity; None where the
            model cannot be run with gradients.
    """

    called: tuple[nn.Module, ...]
    reached: frozenset[int] | None


@contextmanager
def preserve_model(model: nn.Module, training: bool = False) -> Iterator[None]:
    """One of the modes inside, without gradients; afterwards everything is what it was."""
    modules = list(model.modules())
    attributes = [(m, dict(vars(m)), [dict(vars(m)[kind]) for kind in _REGISTERED]) for m in modules]
    contents = [(b, b.clone()) for m in modules for b in m._buffers.values() if b is not None]
    found = {p.device for m in modules for p in m._parameters.values() if p is not None}
    devices = sorted(device.index for device in found if device.type == "cuda")
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path calls no submodules
        elsewhere = torch.random.fork_rng(devices=devices) if devices else nullcontext()
        with preserve_rng(), elsewhere, torch.no_grad():
            model.train(training)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, values, registered in attributes:
            vars(module).clear()
            vars(module).update(values)
            for kind, members in zip(_REGISTERED, registered, strict=True):
                vars(module)[kind].clear()
                vars(module)[kind].update(members)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)


def calls(model: nn.Module, sample: Tensor, training: bool = False) -> list[nn.Module]:
    """The modules in the order of their calls, repeats included, on a batch in one of the modes."""
    return _run(model, sample, training, lambda outputs: None, None)[0]


def run_pass(
    model: nn.Module, sample: Tensor, training: bool = False, without: tuple[nn.Module, int] | None = None
) -> Pass:
    """A pass in one of the modes; no gradient goes back through what one call, `without`, puts out.

    `without`: a module, and which of its calls, counted from 1.
    """
    params = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    before = [p.requires_grad for p in params]
    try:
        for p in params:
            p.requires_grad_()
        called, reached = _run(model, sample, training, _reached_leaves, without)
        return Pass(tuple(called), reached)
    except UsageError:  # such as a module that writes into its own parameters
        return Pass(tuple(calls(model, sample, training)), None)
    finally:
        for p, was in zip(params, before, strict=True):
            p.requires_grad_(was)


def _run(
    model: nn.Module,
    sample: Tensor,
    training: bool,
    read: Callable[[Any], frozenset[int] | None],
    without: tuple[nn.Module, int] | None,
) -> tuple[list[nn.Module], frozenset[int] | None]:
    """(the modules that are called, what `read` makes of the outputs)."""
    seen: list[nn.Module] = []
    if training and len(sample) == 1:
        sample = torch.cat([sample, sample])  # norm layers cannot train on one row
    with preserve_model(model, training):
        handles = [module.register_forward_pre_hook(lambda m, args: seen.append(m)) for module in model.modules()]
        if without is not None:
            module, call = without
            handles.append(
                module.register_forward_hook(lambda m, args, out: _detach(out) if seen.count(m) == call else out)
            )
        try:
            with torch.set_grad_enabled(read is _reached_leaves):
                return seen, read(call_on(model, sample))
        except Exception as error:  # whatever a user's own model raises
            shape = sample.shape if isinstance(sample, Parts) else tuple(sample.shape)
            raise UsageError(f"the model cannot run on a sample of shape {shape}: {error}") from error
        finally:
            for handle in handles:
                handle.remove()


def _detach(outputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def _reached_leaves(outputs: Any) -> frozenset[int]:
    """The leaves of the tape that outputs end, found by walking along it: nothing is computed."""
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    found = {id(t) for t in tensors if t.is_leaf and t.requires_grad}
    todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        ahead = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= ahead
        todo += ahead
    return frozenset(found)
