"""Memory of a step: counted by hand, predicted before training, and lowered by what is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.client.cpu_layouts import cpu_layouts
from fedstrata.client.memory_forecast import MemoryForecast
from fedstrata.client.train import train_client
from fedstrata.core.optim import OPTIMIZERS, build_optimizer
from fedstrata.core.task import Task
from fedstrata.core.tensors import clone
from fedstrata.core.types import Assignment, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.models.copying import copy_model
from fedstrata.models.memory import MemoryCount, saved_bytes
from fedstrata.models.strata import strata
from fedstrata.tasks.registry import build_task
from fedstrata.techniques import method

FLOAT = 4


def forecast(model: nn.Module, x: Tensor, y: Tensor, work: Work, task: Task | None = None) -> MemoryForecast:
    named: dict[str, Any] = {} if task is None else {"task": task}
    context = ClientContext(
        build=lambda arch: copy_model(model),
        method=method("fedavg"),
        sample=x[:2],
        channels_last=True,
        strata={"": strata(model, x[:2])},
        **named,
    )
    return MemoryForecast(context, work, x[:1], y[:1])


def measured(told: MemoryForecast, model: nn.Module, trains: Sequence[str], x: Tensor, y: Tensor) -> float:
    """What a visit of one step on all examples says that it took."""
    context = replace(told.context, replicas={}, costs={}, cache={})
    work = replace(told.work, batch_size=len(x))
    params, names = clone(dict(model.named_parameters())), tuple(trains)
    asked = Assignment(0, 0, "", params, {}, names, names, work, 3, context.method.digest)
    return train_client(context, asked, TensorExamples(x, y), {})[0].metrics["memory"]


def pictures(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, 3, 16, 16), torch.zeros(rows, dtype=torch.long)


def test_an_mlp_by_hand() -> None:
    """Two layers, 6 → 5 → 3, 7 rows, Adam, by torch's tape: nothing of this model runs on matrices alone elsewhere.

    At rest: W1 (5·6), b1 (5), W2 (3·5), b2 (3), twice that for Adam's moments, and the batch (7·6 floats, 7 labels of
    8 bytes). It is at its fullest while Adam moves: the gradients, √v and the direction, each as large as the weights.
    The passes take less: saved are the ReLU's output (7·5) and the log-softmax (7·3).
    """
    weights = 5 * 6 + 5 + 3 * 5 + 3
    rest = FLOAT * (3 * weights + 7 * 6) + 8 * 7
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x, y = torch.rand(7, 6), torch.zeros(7, dtype=torch.long)
    told = forecast(model, x, y, Work(lr=0.1, steps=1, optimizer="adam"))
    names = [n for n, _ in model.named_parameters()]
    assert told.step("", names, 7).memory == rest + FLOAT * 3 * weights
    assert measured(told, model, names, x, y) == rest + FLOAT * 3 * weights
    # Of a frozen layer no moments are kept, and no gradient is made; 25 numbers of the second layer move.
    head = 3 * 5 + 3
    rest = FLOAT * (weights + 2 * head + 7 * 6) + 8 * 7
    # Backwards: the hidden layer, saved (7·5), log-softmax and its gradient (2 · 7·3), the loss's own, and W2's.
    found = measured(told, model, names[2:], x, y)
    assert rest + FLOAT * (7 * 5 + 2 * 7 * 3) <= found <= rest + FLOAT * (2 * 7 * 5 + 3 * 7 * 3 + 3 * head)


def test_a_cnn_with_batch_norm_by_hand() -> None:
    """Convolution 3 → 4 (3×3, padded), BatchNorm, ReLU, mean over pixels, linear 4 → 5; 8 pictures of 16×16; SGD.

    What the passes keep, in numbers, with P = 8·4·16·16 of a feature map: the convolution its input (8·3·16·16), the
    norm layer the convolution's output (P) and the batch's mean and deviation (2·4), the ReLU its output, which
    overwrites the norm layer's (P), the linear layer its input (8·4), the loss log p (8·5) and its own divisor.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    x, y = pictures()
    pixels = 8 * 4 * 16 * 16
    told = forecast(model, x, y, Work(lr=0.1, steps=1))
    conv, head = told.describe("", 8)
    assert conv.activations == FLOAT * (8 * 3 * 16 * 16 + 2 * pixels + 2 * 4)
    assert FLOAT * (8 * 4 + 8 * 5) <= head.activations <= FLOAT * (8 * 4 + 8 * 5) + 8 * 8 + FLOAT
    assert (conv.weights, conv.gradient) == (FLOAT * (4 * 3 * 9 + 2 * 4 + 2 * 4) + 8, FLOAT * (4 * 3 * 9 + 2 * 4))
    assert (head.weights, head.gradient, head.optimiser) == (FLOAT * 25, FLOAT * 25, 0)
    # At most, in a step: both feature maps that are kept, and the gradients of the mean, expanded, and of the ReLU.
    rest = conv.weights + head.weights + FLOAT * 8 * 3 * 16 * 16 + 8 * 8
    names = [n for n, _ in model.named_parameters()]
    found = measured(told, model, names, x, y)
    assert found == conv.from_here
    assert rest + FLOAT * 4 * pixels <= found <= rest + FLOAT * (4 * pixels + 400)
    # Of the frozen prefix nothing is kept: only what its forward pass holds for a moment, two maps, is there.
    assert head.from_here == measured(told, model, names[3:], x, y)
    assert rest + FLOAT * 2 * pixels <= head.from_here <= rest + FLOAT * (2 * pixels + 400)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_without_numbers_make_the_same_shapes(training: bool, layout: torch.memory_format) -> None:
    aten, found = torch.ops.aten, []
    for device in ("cpu", "meta"):
        x, w = torch.ones(4, 6, 5, 7, device=device).contiguous(memory_format=layout), torch.ones(6, device=device)
        with cpu_layouts():
            out = aten.native_batch_norm.default(x, w, w, w.clone(), w.clone(), training, 0.1, 1e-5)
            back = x, w, w, w, *out[1:], training, 1e-5, [True, True, False]
            grads = aten.native_batch_norm_backward.default(torch.ones_like(x), *back)
        found.append([t if t is None else (t.shape, t.stride(), t.dtype) for t in (*out, *grads)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["cnn2", "resnet8(width=4)", "unet(width=4)", "gpt(width=16, depth=1)", "tokengru"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_predicted_before_training(name: str, optimizer: str) -> None:
    """Within 10 %, and here within 1 %, for full, prefix-frozen and single-stratum plans."""
    x, y = pictures()
    task, classes = None, 5
    if name == "resnet8(width=4)":  # one channel, whose layout is ambiguous
        x = x[:, :1]
    if name.startswith("unet"):
        classes = 2  # the most is then held at group norms, which copy what they are given anywhere but on the CPU
        task, y = build_task("segmentation"), torch.zeros(8, 16, 16, dtype=torch.long)
    if name.startswith(("gpt", "tokengru")):
        task, x, y = build_task("next_token"), *(torch.zeros(8, 12, dtype=torch.long) for _ in range(2))
    model = fs.build_model(name, tuple(x.shape[1:]), classes, seed=0)
    told = forecast(model, x, y, Work(lr=0.1, steps=1, optimizer=optimizer), task)
    groups = [s for s in told.context.strata[""] if not s.idle]
    for plan in (groups, groups[len(groups) // 2 :], groups[1:2]):
        names = [n for s in plan for n in s.params]
        assert told.step("", names, 8).memory == pytest.approx(measured(told, model, names, x, y), rel=0.01)


@pytest.mark.parametrize("company", ["fedprox(mu=0.01)", "scaffold"])
def test_predicted_beside_techniques_that_look(company: str) -> None:
    """Where a technique looks at what passes, nothing is overwritten in place, and no tape is spared: 13 % here."""
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.rand(8, 3, 16, 16, generator=rng), torch.zeros(8, dtype=torch.long)) for _ in range(2)]
    how: dict[str, Any] = {"rounds": 4, "batch_size": 8, "engine": "serial", "lr": 0.01}
    chosen = f"fedpart(full_rounds=1, rounds_per_stratum=1) + {company}"
    fed = fs.Federation(fs.build_model("cnn4", (3, 16, 16), 5, seed=0), clients, method=chosen, **how)
    told = MemoryForecast(fed._context, fed._work(0), *(t[:1] for t in clients[0]))
    groups = [s for s in fed.strata if not s.idle]
    for record in fed.fit().records:
        names = [n for s in groups if s.name in record.active for n in s.params]
        assert told.step("", names, 8).memory == pytest.approx(record.training_memory, rel=0.01)


def test_what_a_cached_prefix_keeps_is_counted_for_each_client() -> None:
    """It keeps a row per example, so the client with the most has the most, whoever comes first."""
    rng = torch.Generator().manual_seed(0)
    chosen = "fedpart(full_rounds=0, rounds_per_stratum=1, order='reverse', cache_prefix=True)"
    model, found = fs.build_model("cnn2", (3, 16, 16), 5, seed=0), []
    for sizes in ((64, 8), (8, 64)):
        clients = [(torch.rand(n, 3, 16, 16, generator=rng), torch.zeros(n, dtype=torch.long)) for n in sizes]
        fed = fs.Federation(model, clients, method=chosen, rounds=2, batch_size=8, engine="serial")
        found.append([r.training_memory for r in fed.fit().records])
    assert found[0] == found[1]


def test_a_frozen_prefix_holds_nothing() -> None:
    """FedPart's deepest third: at the end of the forward pass no activation of a frozen stratum is alive."""
    x, y = pictures()
    model = fs.build_model("resnet14(width=4)", (3, 16, 16), 5, seed=0)
    groups = strata(model, x[:2])
    third = {n for s in groups[-len(groups) // 3 :] for n in s.params}
    told = forecast(model, x, y, Work(lr=0.1, steps=1))
    whole = told.describe("", 8)
    for n, p in model.named_parameters():
        p.requires_grad_(n in third)
    kept = saved_bytes(model, lambda: nn.functional.cross_entropy(model(x), y), [s.name for s in groups])
    frozen = [kept[s.name] for s in groups if third.isdisjoint(s.params)]
    assert not any(frozen[:-1])
    assert frozen[-1] <= whole[len(frozen) - 1].activations / 2  # no more than what goes into the first that trains
    peaks = [stratum.from_here for stratum in whole]
    assert peaks == sorted(peaks, reverse=True)
    assert whole[len(frozen)].from_here < 0.6 * peaks[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimiser_keeps(name: str) -> None:
    params, optimizer = [torch.zeros(10)], build_optimizer(name)
    with MemoryCount() as counter:
        step = optimizer.start(params, 0.1, None)
    assert counter.live == FLOAT * 10 * optimizer.kept
    del step
    assert counter.live == 0


def test_views_count_once_and_the_dead_do_not() -> None:
    given = torch.zeros(8)
    with MemoryCount() as counter:
        a = given.view(2, 4) + 1
        b = a.t()[0]
        c = torch.cat([a, a])
        assert counter.live == FLOAT * (8 + 16)
        del a, c
        assert counter.live == FLOAT * 8
        del b
        given.add_(1)
    assert (counter.live, counter.peak) == (0, FLOAT * 24)


def test_the_record_has_it_on_all_engines() -> None:
    """The largest of the round's clients; the same in other processes, and with many trained at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    clients = [(torch.rand(n, 12), torch.randint(0, 3, (n,))) for n in (9, 20, 5)]
    how: dict[str, Any] = {"rounds": 2, "batch_size": 8, "method": "fedpart(full_rounds=1, rounds_per_stratum=1)"}
    runs = {engine: fs.Federation(model, clients, engine=engine, **how) for engine in ("serial", "wire", "vmap")}
    found = {engine: [r.training_memory for r in fed.fit().records] for engine, fed in runs.items()}
    assert found["serial"] == found["wire"] == found["vmap"]
    told = forecast(model, *clients[1], Work(lr=0.1))
    names = [n for n, _ in model.named_parameters()]
    assert found["serial"] == [told.step("", names, 8).memory, told.step("", names[:2], 8).memory]
    assert runs["serial"].history().costs.training_memory == max(found["serial"])


def test_code_that_looks_at_numbers_gets_zeros() -> None:
    """Where a step cannot be tried without numbers, it is tried with some; where it cannot be tried, that is said."""

    class Looks(nn.Module):
        def __init__(self, most: float) -> None:
            super().__init__()
            self.layer, self.most = nn.Linear(6, 3), most

        def forward(self, x: Tensor) -> Tensor:
            if float(x.abs().max()) > self.most:
                raise ValueError("too large")
            found: Tensor = self.layer(x)
            return found

    x, y = torch.rand(4, 6), torch.zeros(4, dtype=torch.long)
    told = forecast(Looks(9.0), x, y, Work(lr=0.1, steps=1))
    names = ["layer.weight", "layer.bias"]
    assert told.step("", names, 4).memory == measured(told, Looks(9.0), names, x, y)
    blind = replace(told, context=replace(told.context, build=lambda arch: Looks(-1.0)), _known={}, _contexts={})
    with pytest.raises(fs.UsageError, match="a step of this model cannot be tried on zeros: too large"):
        blind.step("", names, 4)
