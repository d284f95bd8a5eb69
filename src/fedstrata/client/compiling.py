"""torch.compile, for those who asked for it: compiled once for each shape, with one sentence where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedstrata.errors import UsageError, one_line
from fedstrata.models.layouts import guard_convolutions, is_foreign


def compiler_options() -> dict[str, Any]:
    """What the compiler is told.

    The layout of convolutions is chosen by `fedstrata.models.layouts`; the compiler would put every channel last. The
    width of vectors is what it would choose itself, but said, it is part of the key under which it keeps its results:
    a step that was compiled for AVX-512 and found again where AVX2 is used would leave out half of the numbers.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    width = pick_vec_isa().bit_width()
    return {"layout_optimization": False, **({"cpp.simdlen": width} if width else {})}


class CompiledForward:
    """A module whose forward and backward pass are compiled at the first call with every shape of inputs.

    With every shape: torch would run the ninth uncompiled, and a result would depend on the order in which they came.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._compiled: Any = _run_first(lambda: torch.compile(model, dynamic=False, options=compiler_options()))
        self._known: set[tuple[Any, ...]] = set()
        self._model, self._modules, self._foreign = model, list(model.modules()), is_foreign(model)

    def __call__(self, x: Tensor) -> Tensor:
        """The model's outputs, compiled."""
        # What torch compiles anew for: the inputs' form, which parameters train, and which layers are in training mode.
        trains = tuple(p.requires_grad for p in self._model.parameters())
        form = (x.shape, x.dtype, trains, tuple(m.training for m in self._modules))
        if form in self._known:
            with guard_convolutions(self._foreign):
                return self._compiled(x)  # type: ignore[no-any-return]
        with _lift_recompile_limit(), guard_convolutions(self._foreign):
            result: Tensor = _run_first(lambda: self._compiled(x))
        self._known.add(form)
        return result


def _lift_recompile_limit() -> Any:
    import torch._dynamo as dynamo

    return dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


def compile_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of nested tensors, compiled for arguments of this form.

    It is traced by running it, so whatever Python it contains is run once and for all; its random numbers, and every
    number that is not a tensor, become constants.
    """
    tensors, form = pytree.tree_flatten(arguments)
    present = [t is not None for t in tensors]
    forms: list[Any] = []

    def flat(*given: Tensor) -> list[Tensor]:
        left = iter(given)
        whole = [next(left) if there else None for there in present]
        results, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(whole, form)))
        forms[:] = [shape]
        return results

    def given(values: tuple[Any, ...]) -> list[Tensor]:
        return [t for t in pytree.tree_leaves(values) if t is not None]

    graph = _run_first(lambda: make_fx(flat)(*given(arguments)))
    compiled: Any = _run_first(lambda: torch.compile(graph, dynamic=False, options=compiler_options()))
    _run_first(lambda: compiled(*given(arguments)))
    return lambda *values: pytree.tree_unflatten(compiled(*given(values)), forms[0])


def _run_first(call: Callable[[], Any]) -> Any:
    """The first call, in which everything that can go wrong with a compiler does; its own warnings are not ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except UsageError:
        raise
    except Exception as error:  # torch's compiler has a dozen kinds, and the machine may have no C++ compiler
        why = one_line(str(error).strip().partition("\n")[0], 200)
        raise UsageError(f"the training step cannot be compiled here: {why}; leave compile out") from error
