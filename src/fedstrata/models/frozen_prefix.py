"""What a model computes below everything that trains: cut off, so that it can be computed once per visit.

The model is traced into a graph of its layers. Whatever depends on nothing but the inputs and frozen layers, row by row
and without random numbers, is the prefix; the tensors that cross from it into the rest are kept for all examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedstrata.errors import UsageError
from fedstrata.models.units import is_whole

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_")


@dataclass(frozen=True, eq=False)
class Cut:
    """A model in two parts.

    Args:
        below: inputs → the tensors that cross.
        above: the tensors that cross → outputs.
    """

    below: Callable[[Tensor], tuple[Tensor, ...]]
    above: Callable[..., Tensor]


class _Tracer(fx.Tracer):
    """Looks into containers, but not into those that it is told to leave whole."""

    def __init__(self, whole: Callable[[nn.Module, str], bool]) -> None:
        super().__init__()
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._whole(m, module_qualified_name)


def cut_at(
    model: nn.Module, trains: Collection[str], still: Collection[str], sample: Tensor, places: Collection[str] = ()
) -> Cut | None:
    """The model cut below everything that trains; None if nothing lies there.

    Args:
        model: the module.
        trains: names of the parameters that train.
        still: names of running statistics that stay as they are.
        sample: a batch of inputs.
        places: modules that somebody looks at or changes in every step.

    Raises:
        UsageError: if the model's code cannot be followed.
    """
    places = {str(place) for place in places}
    if "" in places:
        return None
    if len(sample) == 1:
        sample = torch.cat([sample, sample])  # norm layers cannot train on one row
    parts = {name for name, _ in model.named_children()} if isinstance(model, nn.Sequential) else set()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        twin = _training_copy(model, frozenset(still))
        for whole in (
            lambda module, name: is_whole(module) or name in places,
            lambda module, name: name in parts or is_whole(module),
        ):
            graph = _trace(twin, whole, sample)
            if graph is None:
                continue
            halves = _cut_graph(twin, graph, frozenset(trains), frozenset(still), sample, places)
            if halves is None:
                return None
            _check_cut(twin, halves, trains, sample)
            return Cut(*(fx.GraphModule(model, half) for half in halves))
    raise UsageError(
        f"what lies below a stratum of this {type(model).__name__} cannot be computed apart, for its code cannot be "
        "traced; put its parts into a plain torch.nn.Sequential"
    )


def _training_copy(model: nn.Module, still: frozenset[str]) -> nn.Module:
    """A copy of the model in the modes that it trains in."""
    twin = copy.deepcopy(model).train()
    for name, module in twin.named_modules():
        own = {f"{name}.{buffer}" if name else buffer for buffer, _ in module.named_buffers(recurse=False)}
        if isinstance(module, _NormBase) and own and own <= still:
            module.eval()
    return twin


def _trace(twin: nn.Module, whole: Callable[[nn.Module, str], bool], sample: Tensor) -> fx.Graph | None:
    """The model's graph, if it computes what the model computes, also from the random numbers that it draws."""
    try:
        graph = _Tracer(whole).trace(twin)
        same = all(_same_outputs(twin, fx.GraphModule(twin, graph), sample, seed) for seed in (1, 2))
    except Exception:  # tracing runs the model's code on stand-ins, so it may fail in any way
        return None
    return graph if same else None


def _same_outputs(model: nn.Module, other: Callable[[Tensor], Any], sample: Tensor, seed: int) -> bool:
    """True if both give the same for the same inputs and the same random numbers."""
    found = []
    for run in (model, other):
        torch.default_generator.manual_seed(seed)
        found.append(run(sample.clone()))
    expected, given = found
    return isinstance(given, Tensor) and given.shape == expected.shape and torch.allclose(given, expected, 1e-4, 1e-6)


class _Values(fx.Interpreter):
    """Runs a graph and keeps what every node gave."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n.name] = super().run_node(n)
        return self.seen[n.name]


def _cut_graph(
    twin: nn.Module,
    graph: fx.Graph,
    trains: frozenset[str],
    still: frozenset[str],
    sample: Tensor,
    places: Collection[str],
) -> tuple[fx.Graph, fx.Graph] | None:
    """The graph below and above the cut; None if there is nothing below."""
    values = _Values(fx.GraphModule(copy.deepcopy(twin).eval(), graph))
    values.run(sample)
    below: set[fx.Node] = set()
    for node in graph.nodes:
        rows = values.seen.get(node.name)
        by_row = isinstance(rows, Tensor) and rows.dim() > 0 and len(rows) == len(sample)
        if by_row and below.issuperset(node.all_input_nodes) and _is_fixed(twin, node, trains, still, places):
            below.add(node)
    crossing = [n for n in graph.nodes if n in below and not below.issuperset(n.users)]
    if all(n.op == "placeholder" for n in crossing):
        return None
    lower, upper = fx.Graph(), fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in below:
            new[node] = lower.node_copy(node, new.__getitem__)
    lower.output(tuple(new[n] for n in crossing))
    new = {n: upper.placeholder(n.name) for n in crossing}
    for node in graph.nodes:
        if node not in below:
            new[node] = upper.node_copy(node, new.__getitem__)
    return lower, upper


def _check_cut(twin: nn.Module, halves: tuple[fx.Graph, fx.Graph], trains: Collection[str], sample: Tensor) -> None:
    """Refuse a cut that code no list of layers knows makes wrong: random numbers, rows that mix, changes in place."""
    below, above = (fx.GraphModule(twin, half) for half in halves)
    first, again, alone = (below(x) for x in (sample.clone(), sample.clone(), sample[:1].clone()))
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    by_row = all(torch.allclose(a[:1], b, 1e-3, 1e-4) for a, b in zip(first, alone, strict=True))
    for name in trains:
        param = twin.get_parameter(name)
        param.add_(torch.randn_like(param), alpha=0.1)  # what is below must not depend on it
    whole = _same_outputs(twin, lambda x: above(*(t.clone() for t in first)), sample, 3)
    if not (same and by_row and whole):
        raise UsageError(
            f"what lies below a stratum of this {type(twin).__name__} cannot be computed once for all steps: it draws "
            "random numbers, or rows of a batch change each other, or it is changed in place later"
        )


def _is_fixed(
    model: nn.Module, node: fx.Node, trains: frozenset[str], still: frozenset[str], places: Collection[str]
) -> bool:
    """True if a node gives the same rows for the same rows in every step, and nobody looks."""
    if node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return not any(word in name for word in _RANDOM)
    if node.op != "call_module":
        return node.op == "placeholder"
    where = str(node.target)
    if any(f"{place}.".startswith(f"{where}.") for place in places):
        return False
    module = model.get_submodule(where)
    if any(f"{where}.{name}" in trains for name, _ in module.named_parameters()):
        return False
    return all(_is_deterministic(m, f"{where}.{name}" if name else where, still) for name, m in module.named_modules())


def _is_deterministic(module: nn.Module, name: str, still: frozenset[str]) -> bool:
    """True if a layer draws no random numbers and does not look at the whole batch."""
    if isinstance(module, _DropoutNd):
        return module.p == 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return not module.dropout
    if isinstance(module, _NormBase):
        return all(f"{name}.{buffer}" in still for buffer, _ in module.named_buffers()) and module.track_running_stats
    return True
