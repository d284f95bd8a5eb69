"""The stages of a model: features after a stage, the model from there on, and weights that are alike.

A *stage* is a child of an `nn.Sequential`, such as `layer1`. An ordinary module has stages, too: children that run
once, one after the other, so that all that comes later goes through them, and nothing of the input around them.
`with_stages` names them; a federation finds those of a model that names none (`find_stages`). Strata
(`fedstrata.models.strata`) are finer, and models without stages have them too. `fedstrata.models.taps` looks at any
module of any model while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import nn, torch
from fedstrata.core.low_rank import adapters_of
from fedstrata.core.parts import as_batch, call_on
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


_MARK = "_fedstrata_stages"
"""Attribute of an ordinary module: (the names of its stages, or None if nobody has looked for them yet; inputs)."""
_ROWS = 4
"""Inputs by which stages are looked for; of a model whose stages are known, one is kept."""


def with_stages(model: nn.Module, names: Sequence[str], sample: Any) -> nn.Module:
    """Say which children of an ordinary module are its stages, in order; the model itself is marked and returned.

    Args:
        model: any module; its code stays as it is.
        names: of children that each run once, one after the other, such as `("features", "head")`.
        sample: a batch of inputs, of which one is kept to run the model on: a tensor, or a tuple or a dict of them.

    Raises:
        UsageError: for a name that is no child, or one that the model can go around, and for another order.
    """
    if isinstance(names, str):
        raise UsageError(f"names are several, such as ('{names}',), not one text")
    rows = as_batch(sample)
    known = [name for name, _ in model.named_children()]
    for name in names:
        if name not in known:
            raise UsageError(f"the model has no child '{name}'{did_you_mean(name, known)}")
    verdicts = _judge_children(model, rows)
    for name in names:
        if verdicts[name] is not None:
            raise UsageError(f"'{name}' is no stage: {verdicts[name]}")
    in_order = [name for name in verdicts if name in names]
    if list(names) != in_order:
        raise UsageError(f"stages are named once each, in the order in which they run: {', '.join(in_order)}")
    return _mark(model, tuple(names), rows[:1])


def mark_stages(model: nn.Module, sample: Any) -> nn.Module:
    """The model, with an input by which its stages are found when somebody asks, unless it has stages already."""
    return model if is_plain_sequential(model) or _MARK in vars(model) else _mark(model, None, sample[:_ROWS])


def _mark(model: nn.Module, names: tuple[str, ...] | None, rows: Any) -> nn.Module:
    if not is_plain_sequential(model):
        vars(model)[_MARK] = names, rows.clone()
    return model


def _marked_stages(model: nn.Module) -> tuple[str, ...]:
    """The stages of an ordinary module, looked for once; none where it has none, or no input to find them by."""
    names, rows = vars(model).get(_MARK, ((), None))
    if names is None:
        names = find_stages(model, rows)
        vars(model)[_MARK] = names, rows[:1].clone()
    found: tuple[str, ...] = names
    return found


def find_stages(model: nn.Module, sample: Any) -> tuple[str, ...]:
    """The children that run once, in order, and that everything after them goes through."""
    return tuple(name for name, why in _judge_children(model, sample).items() if why is None)


def _judge_children(model: nn.Module, sample: Any) -> dict[str, str | None]:
    """Child → why it is no stage, or None if it is one; in the order in which they run, and last those that do not."""
    from fedstrata.models.detours import find_detour
    from fedstrata.models.passes import run_pass

    rows = sample[:_ROWS]
    names = {id(child): name for name, child in model.named_children()}
    order = [module for module in run_pass(model, rows).called if id(module) in names]
    before: set[int] = set()
    verdicts: dict[str, str | None] = {}
    for module in order:
        before |= {id(p) for p in module.parameters()}
        if order.count(module) > 1:
            verdicts[names[id(module)]] = "it runs more than once"
            continue
        beside = run_pass(model, rows, without=(module, 1)).reached
        around = beside is None or not before.isdisjoint(beside)
        verdicts[names[id(module)]] = "the model goes around it" if around else find_detour(model, module, rows)
    return verdicts | {name: "it does not run" for name in names.values() if name not in verdicts}


def stages(model: nn.Module) -> tuple[str, ...]:
    """The stages in order: the children of an `nn.Sequential`, or those that an ordinary module is marked with."""
    return tuple(_children(model))


def stages_and_blocks(model: nn.Module) -> tuple[str, ...]:
    """The stages of a model and, of an ordinary module, its blocks that run once, in order.

    Blocks are the members of an `nn.ModuleList` of modules of one kind, as transformers have them inside of a stage, or
    of a child that is none.
    """
    if is_plain_sequential(model) or _MARK not in vars(model):
        return stages(model)
    names = (*_marked_stages(model), *_find_blocks(model))
    return _names_in_order(model, names, vars(model)[_MARK][1]) or stages(model)


def _find_blocks(model: nn.Module) -> list[str]:
    """The members of lists of modules of one kind that are in no member of another."""
    found: list[str] = []
    for name, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        inside = any(name.startswith(f"{block}.") for block in found)
        if (
            isinstance(module, nn.ModuleList)
            and len(kinds) == 1
            and not inside
            and any(True for _ in module.parameters())
        ):
            found += [f"{name}.{own}" if name else own for own, _ in module.named_children()]
    return found


def _names_in_order(model: nn.Module, names: Iterable[str], rows: Any) -> tuple[str, ...]:
    """Those of the modules that run once and put out a row for each input, in the order in which they end."""
    from fedstrata.models.inputs import outputs_of
    from fedstrata.models.passes import preserve_model

    ran: list[str] = []
    device = next((p.device for p in model.parameters()), None)

    def note(name: str, out: Any) -> None:
        features = outputs_of(out)
        if isinstance(features, torch.Tensor) and len(features) == len(rows):
            ran.append(name)

    chosen = {name: model.get_submodule(name) for name in names}
    handles = [m.register_forward_hook(lambda _, args, out, name=name: note(name, out)) for name, m in chosen.items()]
    try:
        with preserve_model(model):
            call_on(model, rows if device is None else rows.to(device))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(name for name in ran if ran.count(name) == 1)


def positions(model: nn.Module) -> tuple[str, ...]:
    """Where a staged model can be cut in two: after each of these modules, in order.

    The stages, and what is inside of those that are an `nn.Sequential` themselves, such as `layer1.0`.
    """
    found: list[str] = []
    for name, child in _children(model).items():
        inside = positions(child) if is_plain_sequential(child) else ()
        found += [*(f"{name}.{position}" for position in inside), name]
    return tuple(found)


def tap(model: nn.Module, x: Any, stage: str) -> Tensor:
    """The features that leave a stage, for a batch of inputs: batch first, then the stage's own shape.

    A stage inside a stage has a dotted name, as in `positions`.
    """
    if _MARK in vars(model):
        from fedstrata.models.taps import value_at

        _check_stage(model, stage)
        inputs = as_batch(x) if isinstance(x, Mapping | tuple) else x
        return value_at(model, stage, lambda: call_on(model, inputs))
    features: Tensor = x
    for module in split(model, stage)[0]:
        features = module(features)
    return features


def run_from(model: nn.Module, features: Tensor, stage: str) -> Tensor:
    """The rest of the model after a stage: `run_from(m, tap(m, x, stage), stage)` equals `m(x)`.

    Of an ordinary module the part below the stage runs, too, on an input that does not matter.
    """
    if _MARK in vars(model):
        return _run_marked(model, features, stage)
    for module in split(model, stage)[1]:
        features = module(features)
    return features


def _run_marked(model: nn.Module, features: Tensor, stage: str) -> Tensor:
    """The rest of an ordinary module: what a stage puts out is replaced while the model runs."""
    from fedstrata.models.taps import hook_place

    _check_stage(model, stage)
    one = vars(model)[_MARK][1].to(features.device)
    handle = hook_place(model, stage, lambda there: features)
    try:
        outputs: Tensor = call_on(model, torch.cat([one] * len(features)))
        return outputs
    finally:
        handle.remove()


def _check_stage(model: nn.Module, stage: str) -> None:
    if stage not in (known := positions(model)):
        raise UsageError(f"the model has no stage '{stage}'{did_you_mean(stage, known)}")


def split(model: nn.Module, stage: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules of a sequential model that run up to and including a stage, and those after it."""
    _check_stage(model, stage)
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
    if _MARK in vars(model):
        from fedstrata.models.passes import run_pass

        _check_stage(model, stage)
        used = run_pass(model, vars(model)[_MARK][1], without=(model.get_submodule(stage), 1)).reached or frozenset()
        return tuple(name for name, p in model.named_parameters() if id(p) in used)
    own = {id(p) for module in split(model, stage)[1] for p in module.parameters()}
    return tuple(name for name, p in model.named_parameters() if id(p) in own)


def partners(params: Mapping[str, Tensor], strata: Sequence[Stratum]) -> dict[str, str]:
    """For each weight, the earliest weight before it with the same shape in the same stage, if any.

    Weights are the parameters with two or more axes. The stage is that of the parameter's own name; a stage that is
    repeated counts as one (`repeated_stages`). This is the "layer 0" of cross-layer gradients (InCo Aggregation, §3.2).
    A factor of a low-rank adapter has the same factor of the same layer in an earlier block.
    """
    stages = repeated_stages(params, strata)
    weights = (n for stratum in strata for n in stratum.params if params[n].dim() >= 2)
    factors = {n for one in adapters_of(strata) for n in (one.a, one.b)}

    def kind(name: str) -> Hashable:
        place = _place_in_block(name) if name in factors else ()
        return stages[stage_of(name)], params[name].shape, place

    return first_of_kind(weights, kind)


def _place_in_block(name: str) -> tuple[str, ...]:
    """A parameter's name without its stage and the numbers of blocks."""
    return tuple("" if part.isdecimal() else part for part in name.split(".")[1:])


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
        names = _marked_stages(model)
        if names:
            return {name: model.get_submodule(name) for name in names}
        raise UsageError(
            f"a {type(model).__name__} has no stages; name its children that run one after the other, "
            "fs.with_stages(model, names, sample), or put them into a plain torch.nn.Sequential"
        )
    return {name: child for name, child in model._modules.items() if child is not None}


def cut_place(split: str | int, model: nn.Module, strata: Sequence[Stratum], what: str) -> str:
    """The stage after which a model is cut: by name, or by the number of strata below; a refusal begins with `what`.

    Raises:
        UsageError: if the model cannot be cut there.
    """
    try:
        places = positions(model)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    if isinstance(split, str):
        if split not in places:
            raise UsageError(f"{what}: the model has no stage '{split}'{did_you_mean(split, places)}")
        return split
    numbered = _places_by_number(model, strata, places)
    if split not in numbered:
        raise UsageError(
            f"{what}: the model cannot be cut after stratum {split}, "
            f"but after {', '.join(map(str, numbered)) or 'none'} of its {sum(not s.idle for s in strata)}"
        )
    return numbered[split]


def _places_by_number(model: nn.Module, strata: Sequence[Stratum], places: Sequence[str]) -> dict[int, str]:
    """Number of strata below → the last place that has exactly these, the first of all, below it."""
    found: dict[int, str] = {}
    order = [name for stratum in strata if not stratum.idle for name in stratum.params[:1]]
    for place in places:
        upper = set(params_above(model, place))
        count = sum(name not in upper for name in order)
        if 0 < count < len(order) and upper.issuperset(order[count:]):
            found[count] = place
    return found
