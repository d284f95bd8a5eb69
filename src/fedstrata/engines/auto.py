"""Which engine is the fastest for a model, a method and a number of workers, by a table of what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedstrata.client.context import ClientContext
from fedstrata.client.dense import find_chain
from fedstrata.core.text import plural
from fedstrata.data.examples import sizes
from fedstrata.engines.grouping import group_size
from fedstrata.engines.known_speeds import load_table
from fedstrata.engines.registry import Choice, EngineRequest
from fedstrata.engines.speed_table import Cell, Family, SpeedTable
from fedstrata.errors import UsageError
from fedstrata.models.flops import count_flops

FASTER = 0.9
"""The largest share of the time one by one at which many are trained at once: a smaller gain may be noise."""
WORTH: dict[Family, float] = {"dense": 0.2, "dense, torch.func": 2.0, "convolutional": 2.0}
"""Seconds of processor time that a run must gain to be worth other last bits than those of `serial`; torch.func takes
1.5 to load."""
FEWEST = 3
"""Clients per round from which on there is something to gain by training them at once."""
TOO_SHORT = "too short a run to gain much"
LOOKED_AT = 1_000
"""Clients whose examples are counted, at most: a million take a while."""
BESIDE_CONVOLUTIONS = (nn.Linear, nn.GroupNorm, nn.LayerNorm)
"""Other layers with parameters that a convolutional model may have."""


def choose_fastest(request: EngineRequest) -> Choice:
    """The engine that `auto` means: clients are trained as the run began, or in the way that the table says is faster.

    The number of workers does not decide about that: results must not depend on it.
    """
    one_by_one = "serial" if request.workers == 1 else "processes"
    if request.way is not None:
        engine, notes = ("vmap", ()) if request.way == "many at once" else (one_by_one, _grown_note(request))
        return Choice(engine, f"{request.way}, as the run began", notes)
    table, note = load_table()
    at_once, why = judge_ways(request, table)
    return Choice("vmap" if at_once else one_by_one, why, (note,) if note else ())


def _grown_note(request: EngineRequest) -> tuple[str, ...]:
    """What a reader must know of a run that began with few rounds and has so many by now that the table says else."""
    if TOO_SHORT not in request.began or not judge_ways(request, load_table()[0])[0]:
        return ()
    return (
        f"engine: a new run of {request.rounds} rounds would train clients many at once, with other last bits; this "
        "one goes on one by one, as it began",
    )


def judge_ways(request: EngineRequest, table: SpeedTable) -> tuple[bool, str]:
    """(whether to train many clients at once, why): by the cells that the run's models and clients are most like."""
    if request.context.device.type != "cpu":
        return False, "nothing was measured but the CPU"
    if request.per_round < FEWEST:
        return False, f"only {plural(request.per_round, 'client')} per round"
    if request.context.method.epochs_per_visit is not None:
        return False, "the parts of a visit take turns, which are trained one client after the other"
    visit, cells = find_usual_visit(request), list[Cell]()
    for arch in request.context.archs:
        model = request.context.build(arch)
        family = find_family(request, model, visit.even)
        if family is None:
            return False, "no model with such layers was measured"
        assert request.context.sample is not None
        flops = max(count_flops(model, request.context.sample), 1)
        cell = table.find_nearest(family, (flops, visit.batch, visit.steps, group_size(request.per_round)))
        if cell is None:
            return False, f"no {family} model as large was measured"
        cells.append(cell)
    worst = max(cells, key=lambda cell: cell.share)
    why = f"{worst.at_once:.0f} µs of processor time per step at once, {worst.one_by_one:.0f} one by one"
    why += f" ({table.tell_source(worst)})"
    if worst.share > FASTER:
        return False, why
    steps = request.rounds * request.per_round * visit.steps
    gain = steps * min(cell.one_by_one - cell.at_once for cell in cells) / 1e6
    if gain < max(WORTH[cell.family] for cell in cells):
        return False, f"{TOO_SHORT}, {why}"
    return _check(request.context, why)


def _check(context: ClientContext, why: str) -> tuple[bool, str]:
    """The same verdict, many at once, unless the models or the method do not allow it."""
    from fedstrata.engines.vmap import check_models  # not for models that it would not take anyway

    try:
        check_models(context)
    except UsageError as error:
        return False, str(error)
    return True, why


@dataclass(frozen=True)
class UsualVisit:
    """The visit of a client in the middle: examples per step, steps; and whether all clients take as many steps."""

    batch: int
    steps: int
    even: bool


def find_usual_visit(request: EngineRequest) -> UsualVisit:
    """What clients are asked for, by how many examples they have."""
    size, count, work = sizes(request.clients), len(request.clients), request.work
    held = sorted(max(size(client), 1) for client in range(0, count, -(-count // LOOKED_AT)))
    steps = [work.steps or work.epochs * -(-examples // work.batch_size) for examples in held]
    middle = len(held) // 2
    return UsualVisit(min(work.batch_size, held[middle]), steps[middle], steps[0] == steps[-1])


def find_family(request: EngineRequest, model: nn.Module, even: bool) -> Family | None:
    """What a model would be trained by, many at once; None if nothing like it is ever measured."""
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    if convolutions:
        others = all(isinstance(layer, (nn.Conv2d, *BESIDE_CONVOLUTIONS)) for layer in layers)
        return "convolutional" if others and all(map(_is_like_measured, convolutions)) else None
    if not all(isinstance(layer, nn.Linear) for layer in layers):
        return None
    local = list(request.context.method.at("local"))
    stacks = all(technique.stacks for technique in local) and (even or not local)
    plain = request.work.precision == "fp32" and not request.context.method.incomplete
    return "dense" if stacks and plain and find_chain(model, request.context.sample) else "dense, torch.func"


def _is_like_measured(layer: nn.Conv2d) -> bool:
    """True unless a convolution is of a kind that takes other kernels: in groups, or 1 × 1 with a stride."""
    return layer.groups == 1 and (max(layer.kernel_size) > 1 or max(layer.stride) == 1)
