"""The stages of a sequential model: features after a stage, the model from there on, and weights that are alike.

A *stage* is a child of an `nn.Sequential`, such as `layer1`. Strata (`fedstrata.models.strata`) are finer, and models
without stages have them too. `fedstrata.models.taps` looks at any module of any model while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedstrata.core.lazy import nn, torch
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


def stages(model: nn.Module) -> tuple[str, ...]:
    """The stages of an `nn.Sequential`: the names of its children, in order."""
    return tuple(_children(model))


def positions(model: nn.Module) -> tuple[str, ...]:
    """Where a staged model can be cut in two: after each of these modules, in order.

    The stages, and what is inside of those that are an `nn.Sequential` themselves, such as `layer1.0`.
    """
    found: list[str] = []
    for name, child in _children(model).items():
        inside = positions(child) if is_plain_sequential(child) else ()
        found += [*(f"{name}.{position}" for position in inside), name]
    return tuple(found)


def tap(model: nn.Module, x: Tensor, stage: str) -> Tensor:
    """The features that leave a stage, for a batch of inputs: batch first, then the stage's own shape.

    A stage inside a stage has a dotted name, as in `positions`.
    """
    for module in split(model, stage)[0]:
        x = module(x)
    return x


def run_from(model: nn.Module, features: Tensor, stage: str) -> Tensor:
    """The rest of the model after a stage: `run_from(m, tap(m, x, stage), stage)` equals `m(x)`."""
    for module in split(model, stage)[1]:
        features = module(features)
    return features


def split(model: nn.Module, stage: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that run up to and including a stage, and those after it."""
    if stage not in (known := positions(model)):
        raise UsageError(f"the model has no stage '{stage}'{did_you_mean(stage, known)}")
    below: list[nn.Module] = []
    above: list[nn.Module] = []
    while stage:
        here, _, stage = stage.partition(".")
        children = _children(model)
        at = list(children).index(here)
        model, before, after = children[here], list(children.values())[:at], list(children.values())[at + 1 :]
        below, above = [*below, *before], [*after, *above]
    return [*below, model], above


def params_above(model: nn.Module, stage: str) -> tuple[str, ...]:
    """The names of the parameters that are used after a stage."""
    own = {id(p) for module in split(model, stage)[1] for p in module.parameters()}
    return tuple(name for name, p in model.named_parameters() if id(p) in own)


def partners(params: Mapping[str, Tensor], strata: Sequence[Stratum]) -> dict[str, str]:
    """For each weight, the earliest weight before it with the same shape in the same stage, if any.

    Weights are the parameters with two or more axes. The stage is that of the parameter's own name; a stage that is
    repeated counts as one (`repeated_stages`). This is the "layer 0" of cross-layer gradients (InCo Aggregation, §3.2).
    """
    stages = repeated_stages(params, strata)
    weights = (n for stratum in strata for n in stratum.params if params[n].dim() >= 2)
    return first_of_kind(weights, lambda name: (stages[stage_of(name)], params[name].shape))


def repeated_stages(params: Mapping[str, Tensor], strata: Sequence[Stratum]) -> dict[str, str]:
    """Stage → the first one of those in a row, itself among them, that hold tensors of the same names and shapes.

    A transformer's blocks and a perceptron's equal layers are one stage repeated.
    """
    held: dict[str, list[tuple[str, torch.Size]]] = {}
    for name in (name for stratum in strata for name in stratum.params):
        held.setdefault(stage_of(name), []).append((name.partition(".")[2], params[name].shape))
    first: dict[str, str] = {}
    before = ""
    for stage, tensors in held.items():
        first[stage] = first[before] if before and held[before] == tensors else stage
        before = stage
    return first


def first_of_kind(names: Iterable[str], kind: Callable[[str], Hashable]) -> dict[str, str]:
    """Name → the first one of its kind, without those that are it."""
    first: dict[Hashable, str] = {}
    found = {name: first.setdefault(kind(name), name) for name in names}
    return {name: other for name, other in found.items() if other != name}


def stage_of(name: str) -> str:
    """The stage that a module or parameter name lies in: its first part."""
    return name.partition(".")[0]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether forward is the composition of the children, in order."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """A staged model's children by name, or a refusal."""
    if not is_plain_sequential(model):
        raise UsageError(
            f"a {type(model).__name__} has no stages; put the model's parts, in order, into a plain torch.nn.Sequential"
        )
    return {name: child for name, child in model._modules.items() if child is not None}
