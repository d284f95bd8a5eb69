"""Accuracy and loss, under every policy of running statistics."""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.core.technique import Buffers
from fedstrata.core.tensors import Tensors, clone
from fedstrata.data.examples import TensorExamples
from fedstrata.evaluation.evaluate import EvalRequest
from fedstrata.evaluation.evaluate import evaluate as evaluate_request
from fedstrata.models.norms import running_statistics
from fedstrata.techniques.fedavg import chain


def evaluate(
    replica: ModelReplica,
    params: Tensors,
    buffers: Tensors,
    examples: TensorExamples,
    policy: Buffers,
    batch_size: int = 512,
) -> tuple[float, float]:
    """(accuracy, mean loss) of a model with these parameters and running statistics."""
    found = evaluate_request(replica, EvalRequest(params, buffers, policy), examples, batch_size)
    assert found.metrics["accuracy"] is not None
    return found.metrics["accuracy"], found.loss


def bench_of(model: nn.Module) -> ModelReplica:
    return ClientContext(build=lambda arch: copy.deepcopy(model), method=chain()).replica("")


def examples(count: int = 11, seed: int = 0) -> TensorExamples:
    generator = torch.Generator().manual_seed(seed)
    return TensorExamples(torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))


def linear(seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def normed(seed: int = 1, momentum: float | None = 0.1) -> nn.Sequential:
    """Linear, batch norm with statistics and affine parameters that are not the initial ones, linear."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Dropout(0.5), nn.Linear(5, 3))
    with torch.no_grad():
        model[1].running_mean.copy_(torch.randn(5))
        model[1].running_var.copy_(torch.rand(5) + 0.5)
        model[1].weight.copy_(torch.rand(5) + 0.5)
        model[1].bias.copy_(torch.randn(5))
    return model


def tensors(model: nn.Module) -> tuple[Tensors, Tensors]:
    return clone(dict(model.named_parameters())), clone(running_statistics(model))


def by_hand(logits: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(accuracy, mean of −log softmax at the label), in float64."""
    shifted = logits - logits.max(1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
    return float((logits.argmax(1) == y).mean()), float(loss.mean())


def normed_by_hand(model: nn.Sequential, x: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """The normed model's logits with given statistics: W₂·(γ·(W₁x + b₁ − mean)/√(var + ε) + β) + b₂."""
    p = {n: t.detach().double().numpy() for n, t in model.named_parameters()}
    h = x @ p["0.weight"].T + p["0.bias"]
    h = p["1.weight"] * (h - mean) / np.sqrt(var + 1e-5) + p["1.bias"]
    return h @ p["3.weight"].T + p["3.bias"]


@pytest.mark.parametrize("batch_size", [1, 3, 11, 512])
def test_accuracy_and_loss(batch_size: int):
    """Against numpy in float64, whatever the batches (11 = 3 + 3 + 3 + 2)."""
    model, data = linear(), examples()
    found = evaluate(bench_of(model), *tensors(model), data, "average", batch_size)
    logits = data.x.double().numpy() @ model.weight.detach().double().numpy().T + model.bias.detach().double().numpy()
    assert found == pytest.approx(by_hand(logits, data.y.numpy()), rel=1e-6)
    assert 0 < found[0] < 1


def test_the_given_parameters_count_not_the_benchs():
    model, other, data = linear(1), linear(2), examples()
    replica = bench_of(model)
    assert evaluate(replica, *tensors(other), data, "average") == evaluate(
        bench_of(other), *tensors(other), data, "average"
    )
    assert evaluate(replica, *tensors(other), data, "average") != evaluate(replica, *tensors(model), data, "average")


@pytest.mark.parametrize("policy", ["average", "local"])
@pytest.mark.parametrize("batch_size", [4, 512])
def test_running_statistics_are_used_and_dropout_is_off(policy: Buffers, batch_size: int):
    """Against numpy with the given running mean and variance; the bench is in training mode before."""
    model, data = normed(), examples()
    replica = bench_of(normed(seed=2))
    replica.model.train()
    params, buffers = tensors(model)
    given = clone(buffers)
    found = evaluate(replica, params, buffers, data, policy, batch_size)
    mean, var = (buffers[f"1.running_{kind}"].double().numpy() for kind in ("mean", "var"))
    expected = by_hand(normed_by_hand(model, data.x.double().numpy(), mean, var), data.y.numpy())
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(given[n], buffers[n]) for n in given)
    assert all(torch.equal(given[n], replica.buffers[n]) for n in given)


def shuffled(count: int) -> Tensor:
    """The fixed order under drop, by the documented rule for seeds."""
    seed = int.from_bytes(hashlib.sha256(b"evaluate").digest()[:8], "big") >> 1
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def test_a_test_set_sorted_by_class_is_judged_like_any_other_under_drop():
    """Class k lies around (k, …, k): a batch of one class would be normalised to nothing that tells classes apart."""
    torch.manual_seed(0)
    y = torch.arange(4).repeat_interleave(64)
    x = y[:, None] + 0.1 * torch.randn(256, 3)
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4))
    with torch.no_grad():  # the logits of class k are largest near its normalised place
        places = (torch.arange(4) - 1.5) / 1.25**0.5
        model[1].weight.copy_(places[:, None].expand(4, 3))
        model[1].bias.copy_(-1.5 * places**2)
    mixed = torch.randperm(256)
    results = []
    for order in (torch.arange(256), mixed):
        data = TensorExamples(x[order], y[order])
        results.append(evaluate(bench_of(model), *tensors(model), data, "drop", batch_size=64)[0])
    assert min(results) > 0.95


@pytest.mark.parametrize("momentum", [0.1, None])
def test_drop_uses_the_statistics_of_each_batch(momentum: float | None):
    """Batches of 4, 4 and 3, in a fixed random order, each normalised by its own (biased) mean and variance.

    The running statistics that are handed over play no part and stay, as do the bench's and its momentum.
    """
    model, data = normed(momentum=momentum), examples()
    replica = bench_of(model)
    params, buffers = tensors(model)
    junk = {n: torch.full_like(b, 7) for n, b in buffers.items()}
    found = evaluate(replica, params, junk, data, "drop", batch_size=4)
    order = shuffled(len(data))
    x, w, b = (t.detach().double().numpy() for t in (data.x[order], model[0].weight, model[0].bias))
    logits = []
    for part in (x[:4], x[4:8], x[8:]):
        h = part @ w.T + b
        logits.append(normed_by_hand(model, part, h.mean(0), h.var(0)))
    assert found == pytest.approx(by_hand(np.concatenate(logits), data.y[order].numpy()), rel=1e-5)
    assert all(junk[n].eq(7).all() for n in junk)
    assert torch.equal(replica.buffers["1.running_mean"], buffers["1.running_mean"])
    assert torch.equal(replica.buffers["1.running_var"], buffers["1.running_var"])
    assert replica.model[1].momentum == momentum


def test_an_evaluation_under_drop_leaves_the_next_one_alone():
    model, data = normed(), examples()
    replica = bench_of(model)
    before = evaluate(replica, *tensors(model), data, "average")
    dropped = evaluate(replica, *tensors(model), data, "drop")
    assert dropped != before
    assert evaluate(replica, *tensors(model), data, "average") == before
    assert evaluate(replica, *tensors(model), data, "drop") == dropped


@pytest.mark.parametrize("count", [1, 5, 9])
def test_a_last_single_example_under_drop(count: int):
    """4 + 1 or 4 + 4 + 1 examples: a single one has no statistics of its own, but it must be evaluated all the same."""
    model = normed()
    accuracy, loss = evaluate(bench_of(model), *tensors(model), examples(count), "drop", batch_size=4)
    assert 0 <= accuracy <= 1
    assert np.isfinite(loss)


def test_a_last_single_example_joins_the_batch_before_it_under_drop():
    """9 examples in fours: batches of 4 and 5, each with its own statistics."""
    model, data = normed(), examples(9)
    found = evaluate(bench_of(model), *tensors(model), data, "drop", batch_size=4)
    order = shuffled(len(data))
    x, w, b = (t.detach().double().numpy() for t in (data.x[order], model[0].weight, model[0].bias))
    logits = []
    for part in (x[:4], x[4:]):
        h = part @ w.T + b
        logits.append(normed_by_hand(model, part, h.mean(0), h.var(0)))
    assert found == pytest.approx(by_hand(np.concatenate(logits), data.y[order].numpy()), rel=1e-5)


def test_nothing_requires_grad_and_no_random_number_is_drawn():
    model, data = normed(), examples()
    replica = bench_of(model)
    before = torch.get_rng_state()
    evaluate(replica, *tensors(model), data, "drop", batch_size=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in replica.params.values())
    assert not any(b.is_inference() for b in replica.buffers.values())
