"""Strata: the ordered layer groups of any PyTorch model.

A *stratum* is one weight layer with the norm layers that run after it: the unit that the whole library plans,
trains, sends, aggregates and measures in. Every parameter and every buffer of a model lies in exactly one
stratum.

**What opens a stratum.** A *weight layer*: a convolution, linear map, embedding, recurrent layer or
`nn.MultiheadAttention` (taken whole, with all that it holds), one of these with an adapter of `peft`'s around it
(LoRA's factors are of their layer's stratum, `Stratum.low_rank`), and any other module that owns a parameter with
two or more axes while the modules inside it own none. Everything else *joins* one:

- norm layers, and other modules whose own parameters are all vectors or scalars (RMS norms, layer scales,
  PReLU) or that own nothing but buffers, join the weight layer that ran before them; those that run before
  any weight layer join the first one;
- what a container owns directly (a class token, a position embedding, a bare `nn.Parameter`, a
  `ParameterList`) joins the first weight layer inside that container, or, where there is none, goes where the
  first norm layer inside goes;
- a tied parameter belongs to the first stratum that uses it, under the name that `named_parameters()` gives
  it; a layer left with no parameter of its own opens nothing.

**Order** is the order of the first execution in evaluation. Then come layers that run in training only, and last
those that never run, as strata of their own, in the order of registration. "Run" means that the module is
called: a layer whose weight is only read by another module's forward is placed as if it never ran.

**Idle** strata are those that no gradient of the outputs reaches, neither in evaluation nor in training: layers
that never run, whose results are not used, or that are detached (`.detach()`, `torch.no_grad()`), though the
outputs may well depend on these. They hold parameters like all others, which travel and are averaged; schedules
leave them out. Their running statistics may still change.

**The classifier** is the weight layer that is called last in evaluation, among those that a gradient of the outputs
reaches, if all gradients come through that call, and if it is the same layer for all inputs that were tried. An
auxiliary head is not one: it never runs, runs in training only, or its results are not in the outputs.
Where outputs are put together from several layers or calls, or a layer's weight is only read, no classifier is
found, and whoever needs one asks for a module by name.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fedstrata.core.lazy import nn, torch
from fedstrata.core.markup import heading, page_part, table
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.models.adapted import find_low_rank
from fedstrata.models.passes import Pass, preserve_model, run_pass
from fedstrata.models.stages import is_plain_sequential, stage_of
from fedstrata.models.units import Unit, find_units, is_norm, is_whole, take_over

if TYPE_CHECKING:
    from torch import Tensor, fx


SHOWN = 5
"""Idle layers that a note names."""


class Strata(tuple[Stratum, ...]):
    """A model's strata in execution order: a tuple that notebooks show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return page_part(heading("Strata", f"{len(self)}, in the order of execution"), strata_table(self))


def strata_table(strata: Sequence[Stratum]) -> str:
    """Strata as an HTML table: what each holds, and what is special about it."""
    columns = ("no.", "stratum", "stage", "special", "parameter tensors", "buffers", "of these in norm layers")
    rows = [
        (
            place,
            s.name or "(the model)",
            s.stage,
            "idle: no gradient reaches it" if s.idle else "classifier" if s.classifies else "",
            len(s.params),
            len(s.buffers),
            len(s.norms),
        )
        for place, s in enumerate(strata)
    ]
    return table(columns, rows, words=4)


def strata(model: nn.Module, sample: Tensor | None = None) -> Strata:
    """The model's layer groups in execution order; see the module's docstring for what belongs where.

    The order is found without changing the model (flags, buffers and random state are as before):

    1. with `sample`, a batch that the model accepts, by running the model in evaluation and in training mode;
    2. without, by symbolic tracing, stage by stage in an `nn.Sequential`;
    3. where tracing fails (say, control flow that depends on data), in the order of registration.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    if not names:
        raise UsageError(f"a model needs at least one parameter; this {type(model).__name__} has none")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise UsageError("the model has lazy layers; run it once on a batch, then ask for its strata")
    names |= {id(b): name for name, b in model.named_buffers()}

    shown = _trace_passes(model, frozenset(names)) if sample is None else _run_passes(model, sample)
    units = {id(unit.module): unit for unit in find_units(model)}
    parts = [[units.pop(key) for key in dict.fromkeys(map(id, called)) if key in units] for called in shown.called]
    parts = [*parts, list(units.values())]
    ordered = take_over(model, [unit for part in parts for unit in part])
    found = _group(ordered, {len(parts[0]), len(parts[0]) + len(parts[1])}, names)
    used = {names[key] for key in shown.reached}
    last = _classifier(model, parts[0], shown.evaluated)
    adapters = find_low_rank(model)
    return Strata(
        replace(s, idle=used.isdisjoint(s.params), classifies=s.name == last, low_rank=adapters.get(s.name))
        for s in found
    )


def classifier(strata: Sequence[Stratum]) -> Stratum | None:
    """The classifier among a model's strata; None if no single last layer was found."""
    return next((stratum for stratum in strata if stratum.classifies), None)


def used_by_any(whole: Sequence[Stratum], *models: Sequence[Stratum]) -> Strata:
    """The strata of a whole model, of which those that one of its sub-models uses are not idle."""
    used = {name for strata in models for stratum in strata if not stratum.idle for name in stratum.params}
    return Strata(replace(s, idle=s.idle and used.isdisjoint(s.params)) for s in whole)


def idle_note(strata: Sequence[Stratum]) -> tuple[str, ...]:
    """What a reader of results must know of idle strata, if there are any."""
    idle = [stratum.name for stratum in strata if stratum.idle]
    if not idle:
        return ()
    names = ", ".join(idle[:SHOWN]) + (f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else "")
    why = "because they never run, their results are not used or they are detached"
    return (f"idle layers, which no gradient of the outputs reaches, {why}: {names}; their parameters are not trained",)


def check_patterns(refusal: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse name patterns of which one names nothing: `refusal`, the pattern, and the nearest name."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"{refusal} '{pattern}'{did_you_mean(pattern, names)}")


@dataclass(frozen=True, eq=False)
class _PassFacts:
    """What passes have shown.

    Args:
        called: the modules called in evaluation, and those in training.
        reached: the parameters, by identity, that a gradient of the outputs reaches in one of these modes.
        evaluated: the passes in evaluation, one by one, each with its inputs if there were any.
    """

    called: tuple[Sequence[nn.Module], Sequence[nn.Module]]
    reached: frozenset[int]
    evaluated: Sequence[tuple[Pass, Tensor | None]]


def _run_passes(model: nn.Module, sample: Tensor) -> _PassFacts:
    """Run a model in both modes: on two rows and, as long as something is idle, on all, one by one: it may choose."""
    own = frozenset(map(id, model.parameters()))
    called: tuple[list[nn.Module], list[nn.Module]] = [], []
    reached: frozenset[int] = frozenset()
    evaluated: list[tuple[Pass, Tensor | None]] = []
    few = sample[:2]
    for rows in (few, *(torch.split(sample, 1) if len(sample) > 1 else ())):
        for mode, training in enumerate((False, True)):
            try:
                seen = run_pass(model, rows, training)
            except UsageError:
                if rows is few and not training:
                    raise
                continue  # it may be unable to train on so few
            called[mode].extend(seen.called)
            reached |= own & _used_params(seen)
            if not training:
                evaluated.append((seen, rows))
        if reached == own:
            break
    return _PassFacts(called, reached, evaluated)


def _used_params(seen: Pass) -> frozenset[int]:
    """The parameters, by identity, that a pass reached; those of all modules that it called where it cannot tell."""
    if seen.reached is not None:
        return seen.reached
    return frozenset(id(p) for module in seen.called for p in module.parameters(recurse=is_whole(module)))


def _trace_passes(model: nn.Module, everything: frozenset[int]) -> _PassFacts:
    """What can be told without running a model, in which everything then counts as used."""
    called = tuple(_traced_calls(model))
    return _PassFacts((called, ()), everything, [(Pass(called, everything), None)])


def _traced_calls(model: nn.Module) -> list[nn.Module]:
    """The modules in the order of their calls where tracing can tell, else in the order of registration."""
    if is_whole(model):
        return [model]
    if is_plain_sequential(model):
        return [called for child in model.children() for called in _traced_calls(child)]
    try:
        optional = {
            p.name: p.default
            for p in inspect.signature(model.forward).parameters.values()
            if p.default is not inspect.Parameter.empty
        }
        with preserve_model(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about specialising on defaults, which is what is wanted
            graph = _tracer().trace(model, concrete_args=optional)
    except Exception:  # tracing runs the user's code on stand-ins, so it may fail in any way
        return list(model.modules())
    return [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]


def _tracer() -> fx.Tracer:
    """One that looks into containers only."""
    from torch import fx

    class UnitTracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return is_whole(m)

    return UnitTracer()


def _group(units: Sequence[Unit], begins: Collection[int], names: dict[int, str]) -> tuple[Stratum, ...]:
    """Units in order as strata; where a part of them begins, its first one opens a stratum, whatever it is.

    `names`: all tensors' names, by identity.
    """
    groups: list[tuple[str, list[str], list[str]]] = []
    waiting: tuple[list[str], list[str]] = ([], [])  # what comes before the first weight layer
    norms: set[str] = set()
    anew = False
    free = dict(names)
    for index, unit in enumerate(units):
        params = [free.pop(id(p)) for p in unit.params if id(p) in free]
        buffers = [free.pop(id(b)) for b in unit.buffers if id(b) in free]
        if is_norm(unit.module):
            norms.update(params, buffers)
        anew = anew or index in begins
        if params and (unit.opens or anew):
            anew = False
            groups.append((unit.name, params + waiting[0], buffers + waiting[1]))
            waiting = ([], [])
        else:
            target = groups[-1][1:] if groups else waiting
            target[0].extend(params)
            target[1].extend(buffers)
    if waiting[0] or waiting[1]:  # not one weight layer: the norm layers are all there is
        groups.append((units[0].name, *waiting))
    return tuple(
        Stratum(name, stage_of(name), tuple(params), tuple(buffers), frozenset(norms & {*params, *buffers}))
        for name, params, buffers in groups
    )


def _classifier(model: nn.Module, units: Sequence[Unit], evaluated: Sequence[tuple[Pass, Tensor | None]]) -> str | None:
    """The name of the unit that is the last one in every pass: which of the others run may depend on the input."""
    opening = {id(unit.module): unit for unit in units if unit.opens}
    last = _last(model, opening, *evaluated[0])
    return last if all(_last(model, opening, *one) == last for one in evaluated[1:]) else None


def _last(model: nn.Module, opening: Mapping[int, Unit], seen: Pass, rows: Tensor | None) -> str | None:
    """The name of the unit that a pass called last, if all outputs come through that call: one place to look at."""
    used = _used_params(seen)
    weights = (m for m in reversed(seen.called) if id(m) in opening)
    last = next((m for m in weights if any(id(p) in used for p in m.parameters())), None)
    if last is None:
        return None
    call = last, seen.called.count(last)
    beside = frozenset() if rows is None else run_pass(model, rows, without=call).reached or frozenset()
    # Scalars and vectors, such as a temperature or a norm layer's, may well come after the classifier.
    return None if any(p.dim() > 1 and id(p) in beside for p in model.parameters()) else opening[id(last)].name
