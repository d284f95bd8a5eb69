"""What local training does to a model: gradient norms, forgetting, drift, statistics; against loops and by hand."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.probes import measures
from fedstrata.probes.measures.neurons import activation_change, bound_neurons

CLASSES = 3


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def convolution(seed: int = 0) -> nn.Sequential:
    """Convolution, batch norm, a rectifier that works in place, another convolution, pooling, head."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.Conv2d(5, 4, 3),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(36, CLASSES),
    )
    model(torch.randn(20, 1, 5, 5) * 2 + 1)
    return model.double()


def rows(count: int = 40, seed: int = 0, shape: Sequence[int] = (4,)) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=rng)
    x = torch.randn(count, *shape, generator=rng, dtype=torch.float64)
    return x + y.reshape(-1, *[1] * len(shape)), y


def train_copy(model: nn.Module, x: Tensor, y: Tensor, steps: int = 20, lr: float = 0.1) -> nn.Module:
    """A copy after some steps of plain SGD on all rows."""
    own = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(own.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
    return own


def everything(model: nn.Module) -> dict[str, Any]:
    """Whatever measuring could change: values, modes, gradients, hooks, and the states of all generators."""
    return {
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "grads": [p.grad for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = all(torch.equal(left["state"][n], t) for n, t in right["state"].items())
    others = all(left[key] == right[key] for key in ("modes", "grads", "hooks", "python", "numpy"))
    return tensors and others and torch.equal(left["torch"], right["torch"])


# Gradient norms ---------------------------------------------------------------------------------------------


def test_one_weight_by_hand():
    """Two outputs without bias, both examples x = 1 of class 0, weights (w, −w): p = σ(2w), the gradient is
    (p − 1, 1 − p), its norm √2·(1 − p), and a step adds η·(1 − p) to w. From w = 0: p = ½, then σ(2·½η)."""

    def model(w: float) -> nn.Sequential:
        net = nn.Sequential(nn.Linear(1, 2, bias=False)).double()
        net[0].weight.data = torch.tensor([[w], [-w]], dtype=torch.float64)
        return net

    def norms(w: float, eta: float) -> list[float]:
        found = []
        for _ in range(3):
            left = 1 - 1 / (1 + math.exp(-2 * w))
            found.append(math.sqrt(2) * left)
            w += eta * left
        return found

    data = TensorExamples(torch.ones(2, 1).double(), torch.zeros(2).long())
    found = measures.gradient_trace(model(1.0), model(0.0), data, strata(model(0.0)), steps=3, batch_size=2, lr=0.5)
    assert found.averaged == {"0": pytest.approx(norms(0.0, 0.5), rel=1e-12)}
    assert found.alone == {"0": pytest.approx(norms(1.0, 0.5), rel=1e-12)}
    assert found.averaged["0"][0] == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert found.jumps == {"0": pytest.approx(0.5 / (1 - 1 / (1 + math.exp(-2))), rel=1e-12)}


@pytest.mark.parametrize("make", [plain, convolution])
def test_steps_against_an_optimizer_of_torch(make: Callable[[int], nn.Sequential]):
    """With all rows in every batch the order does not matter, and dropout's draws are the same for both models."""
    local, averaged = make(0), make(1)
    for model in (local, averaged):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    x, y = rows(12, shape=(4,) if make is plain else (1, 5, 5))
    layers = strata(local, x)
    found = measures.gradient_trace(local, averaged, TensorExamples(x, y), layers, steps=4, batch_size=99, lr=0.2)
    for model, norms in ((local, found.alone), (averaged, found.averaged)):
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.2)
        for step in range(4):
            optimizer.zero_grad()
            F.cross_entropy(own(x), y).backward()
            grads = {n: p.grad.numpy().copy() for n, p in own.named_parameters() if p.grad is not None}
            for layer in layers:
                expected = math.sqrt(sum(float((grads[n] ** 2).sum()) for n in layer.params))
                assert norms[layer.name][step] == pytest.approx(expected, rel=1e-9)
            optimizer.step()


def test_both_models_see_the_same_batches_and_draws():
    """With dropout, and batches of some of the rows; other seeds give others."""
    model, data = convolution(), TensorExamples(*rows(20, shape=(1, 5, 5)))
    found = [
        measures.gradient_trace(model, copy.deepcopy(model), data, strata(model), steps=7, batch_size=6, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert all(trace.alone == trace.averaged for trace in found)
    assert found[0] == found[1] != found[2]
    assert set(map(len, found[0].alone.values())) == {7}
    assert found[0].jumps == dict.fromkeys(found[0].alone, 1.0)


def test_batches_are_all_of_one_size_and_an_epoch_repeats_nothing():
    class Noting(TensorExamples):
        def batch(self, index: Tensor, augment: Any = None) -> tuple[Tensor, Tensor]:
            seen.append(index.tolist())
            return super().batch(index, augment)

    seen: list[list[int]] = []
    measures.gradient_trace(plain(), plain(1), Noting(*rows(10)), strata(plain()), steps=5, batch_size=4)
    assert seen[:5] == seen[5:]
    assert [len(index) for index in seen] == [4] * 10
    assert all(len({*seen[k], *seen[k + 1]}) == 8 for k in (0, 2))


def test_a_user_dataset_with_random_transforms():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            return torch.randn(4) + np.random.rand() + random.random() + row, row % CLASSES

    model = plain().float()
    found = measures.gradient_trace(model, model, fs.MapExamples(Noisy()), strata(model), steps=3, batch_size=4)
    assert found.alone == found.averaged


def test_averaging_two_trained_models_raises_the_gradient():
    """Two clients that fit their own class: the average of their models fits neither, and its gradient is larger."""
    start, (x, y) = plain(), rows(60)
    parts = [TensorExamples(x[y == c], y[y == c]) for c in range(2)]
    local = [train_copy(start, data.x, data.y, 100, 0.5) for data in parts]
    averaged = copy.deepcopy(start)
    averaged.load_state_dict({n: (t + local[1].state_dict()[n]) / 2 for n, t in local[0].state_dict().items()})
    found = measures.gradient_trace(local[0], averaged, parts[0], strata(start), steps=3, batch_size=8)
    assert all(jump > 2 for jump in found.jumps.values())


# Forgetting -------------------------------------------------------------------------------------------------


def knowing(*answers: int) -> nn.Sequential:
    """A model that answers input k with the k-th class; inputs are one-hot."""
    net = nn.Sequential(nn.Linear(len(answers), 4, bias=False))
    net[0].weight.data = F.one_hot(torch.tensor(answers), 4).float().T.contiguous()
    return net


def test_forgetting_by_hand():
    """Inputs 0 to 5 are of the classes 0, 0, 1, 1, 2, 2; of class 3 there is none.

    Before: class 0 right (1), class 1 half (½), class 2 right (1). Client 0 holds class 0 and answers 0, 0, 1, 0, 0, 0:
    1, ½, 0. Client 1 holds 1 and 2 and answers 0, 1, 1, 1, 2, 1: ½, 1, ½. After: ¾, ¾, ¼. Held: (1 + ¾)/2.
    Missing: client 0 has (½ + 0)/2, client 1 ½; their mean is ⅜. Fall: client 0 (0 + 1)/2, client 1 ½; ½.
    """
    before = knowing(0, 0, 1, 0, 2, 2)
    local = [knowing(0, 0, 1, 0, 0, 0), knowing(0, 1, 1, 1, 2, 1)]
    found = measures.forgetting(before, local, [{0}, [1, 2, 3]], torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert found.before == (1.0, 0.5, 1.0, None)
    assert found.after == (0.75, 0.75, 0.25, None)
    assert found == measures.Calibration(found.before, found.after, held=7 / 8, missing=3 / 8, forgetting=1 / 2)


def test_clients_that_hold_everything_forget_nothing_that_could_be_measured():
    found = measures.forgetting(knowing(0, 1), [knowing(0, 0)], [range(4)], torch.eye(2), torch.tensor([0, 1]))
    assert found == measures.Calibration((1.0, 1.0, None, None), (1.0, 0.0, None, None), 0.5, None, None)
    two = measures.forgetting(knowing(0, 1), [knowing(0, 0)] * 2, [range(4), {0}], torch.eye(2), torch.tensor([0, 1]))
    assert (two.held, two.missing, two.forgetting) == (0.75, 0.0, 1.0)


def test_classes_weigh_the_same_however_many_examples_they_have():
    """Class 0 has three examples, class 1 one: half of the classes, not three quarters."""
    found = measures.forgetting(
        knowing(0, 1), [knowing(0, 0)], [()], torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 0, 1])
    )
    assert found.missing == 0.5
    assert found.held is None


def test_forgetting_against_a_loop():
    before, (x, y) = convolution(), rows(90, shape=(1, 5, 5))
    held: list[Collection[int]] = [{0}, {1, 2}, {2}]
    local = []
    for mine in held:
        own = [k for k in range(45) if int(y[k]) in mine]
        local.append(train_copy(before, x[own], y[own]))

    def accuracy(model: nn.Module, c: int) -> float:
        model = copy.deepcopy(model).eval()
        right = [int(model(x[k : k + 1]).argmax()) == c for k in range(len(x)) if y[k] == c]
        return sum(right) / len(right)

    was = [accuracy(before, c) for c in range(CLASSES)]
    now = [[accuracy(model, c) for c in range(CLASSES)] for model in local]
    on_held, on_missing, falls = [], [], []
    for mine, row in zip(held, now, strict=True):
        lacks = [c for c in range(CLASSES) if c not in mine]
        on_held.append(sum(row[c] for c in mine) / len(mine))
        on_missing.append(sum(row[c] for c in lacks) / len(lacks))
        falls.append(sum(was[c] - row[c] for c in lacks) / len(lacks))
    found = measures.forgetting(before, local, held, x, y)
    assert found.before == pytest.approx(was)
    assert found.after == pytest.approx([sum(column) / 3 for column in zip(*now, strict=True)])
    assert (found.held, found.missing, found.forgetting) == pytest.approx(
        (sum(on_held) / 3, sum(on_missing) / 3, sum(falls) / 3)
    )
    assert found.held is not None
    assert found.missing is not None
    assert found.held > 0.9 > 0.2 > found.missing


def test_clients_of_different_depth_are_compared_with_what_they_began_with():
    """Client 0 began with a model that knew class 1 and lost it; client 1's never knew it, and lost nothing."""
    starts, after = [knowing(0, 1), knowing(0, 0)], [knowing(0, 0), nn.Sequential(knowing(0, 0), nn.Identity())]
    found = measures.forgetting(starts, after, [{0}, {0}], torch.eye(2), torch.tensor([0, 1]))
    assert found.before[:2] == (1.0, 0.5)
    assert found.forgetting == 0.5


# Neurons ----------------------------------------------------------------------------------------------------


def neurons(weight: Sequence[Sequence[float]]) -> nn.Sequential:
    """A hidden layer of three neurons on one-hot inputs, and a head."""
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2)).double()
    net[0].weight.data = torch.tensor(weight, dtype=torch.float64)
    return net


def test_drift_by_hand():
    """Activations before, on class 0 | 1: neuron 0: 4 | 1, bound to 0; neuron 1: −1 | 2, bound to 1; neuron 2: −3 | −1,
    bound to none. After: 5 | 0, −2 | 1.5, 9 | 9. Client 0 holds class 0: held (5 − 4)/4, missing (1.5 − 2)/2.
    Client 1 holds class 1 and stays as it was, but for neuron 0, which falls to 2 on class 0: held 0, missing −½."""
    before = neurons([[4, 1], [-1, 2], [-3, -1]])
    local = [neurons([[5, 0], [-2, 1.5], [9, 9]]), neurons([[2, 1], [-1, 2], [-3, -1]])]
    x, y = torch.eye(2).double(), torch.tensor([0, 1])
    one = measures.neuron_drift(before, local[:1], [{0}], x, y)
    assert one == measures.Drift(held={"0": pytest.approx(0.25)}, missing={"0": pytest.approx(-0.25)})
    both = measures.neuron_drift(before, local, [{0}, {1}], x, y)
    assert both == measures.Drift(held={"0": pytest.approx(0.125)}, missing={"0": pytest.approx(-0.375)})


def test_bound_is_more_active_on_a_class_than_on_any_of_the_other_kind():
    """Activations on classes 0, 1, 2. The client holds class 0. Neuron 0 (1 | 3 | 2) is bound to 1 and, though that is
    not its maximum, to 2; neuron 1 (4 | 5 | 1) to 1; neuron 2 (2 | 2 | −1) to none, for a tie is not more.
    Missing: ((2 − 3) + (3 − 2) + (1 − 5))/(3 + 2 + 5). Held: none on neurons 0 and 1; neuron 2 is a tie there, too."""
    was = torch.tensor([[1.0, 4, 2], [3, 5, 2], [2, 1, -1]])
    now = torch.tensor([[9.0, 9, 9], [2, 1, 9], [3, 9, 9]])
    missing = torch.tensor([False, True, True])
    assert bound_neurons(was, missing).tolist() == [[False] * 3, [True, True, False], [True, False, False]]
    assert activation_change(was, now, missing) == pytest.approx(-0.4)
    assert activation_change(was, now, ~missing) is None
    everything = torch.tensor([True] * 3)  # nothing of the other kind: whatever is active counts
    assert bound_neurons(was, everything).equal(was > 0)


def test_large_neurons_weigh_more_and_classes_are_in_the_mean_over_their_examples():
    """Class 0 has the inputs e₀ and 3e₀, so that activations on it are twice the weight: 8 and 2 before, 4 and 4 after:
    (−4 + 2)/(8 + 2). Class 7 has none: its neurons' weights for e₁ are 0."""
    before, after = neurons([[4, 0], [1, 0], [0, 0]]), neurons([[2, 0], [2, 0], [5, 0]])
    x = torch.tensor([[1.0, 0], [0, 1], [3, 0]], dtype=torch.float64)
    found = measures.neuron_drift(before, [after], [{0}], x, torch.tensor([0, 7, 0]))
    assert found == measures.Drift(held={"0": pytest.approx(-0.2)}, missing={})


def drift_by_loop(
    before: nn.Module, local: Sequence[nn.Module], held: Sequence[Collection[int]], x: Tensor, y: Tensor, stop: int
) -> tuple[float, float]:
    """Of what leaves the first `stop` modules, example by example and neuron by neuron."""

    def means(model: nn.Module) -> list[list[float]]:
        parts = list(copy.deepcopy(model).eval().children())[:stop]
        sums: list[list[list[float]]] = [[] for _ in range(CLASSES)]
        for k in range(len(x)):
            there = x[k : k + 1]
            for part in parts:
                there = part(there)
            one = there[0].detach().numpy().copy()
            sums[int(y[k])].append([float(channel.mean()) for channel in one])
        return [np.mean(rows, axis=0).tolist() for rows in sums]

    was, figures = means(before), ([], [])  # type: tuple[list[list[float]], tuple[list[float], list[float]]]
    for model, mine in zip(local, held, strict=True):
        now = means(model)
        for which, into in enumerate(figures):
            top = bottom = 0.0
            asked = [c for c in range(CLASSES) if (c in mine) is (which == 0)]
            for j in range(len(was[0])):
                for c in asked:
                    if was[c][j] > 0 and all(was[c][j] > was[d][j] for d in range(CLASSES) if d not in asked):
                        top += now[c][j] - was[c][j]
                        bottom += was[c][j]
            if bottom:
                into.append(top / bottom)
    return sum(figures[0]) / len(figures[0]), sum(figures[1]) / len(figures[1])


def test_drift_of_feature_maps_against_a_loop():
    """Channels in the mean over their positions. Batch norm's outputs are seen before they are rectified in place.

    Client 0 has no neuron of its own class at stage 3, which keeps its place in the order nevertheless.
    """
    before, (x, y) = convolution(), rows(60, shape=(1, 5, 5))
    held: list[Collection[int]] = [{0}, {1, 2}]
    local = [train_copy(before, x[keep], y[keep]) for keep in (y == 0, y != 0)]
    found = measures.neuron_drift(before, local, held, x, y)
    assert list(found.held) == ["0", "1", "2", "3", "4", "5"]
    for stage in found.held:
        expected = drift_by_loop(before, local, held, x, y, int(stage) + 1)
        assert (found.held[stage], found.missing[stage]) == pytest.approx(expected, rel=1e-9)
    assert found.held["1"] != pytest.approx(found.held["2"])


def test_a_model_that_did_not_train_did_not_drift():
    before, (x, y) = convolution(), rows(30, shape=(1, 5, 5))
    found = measures.neuron_drift(before, [copy.deepcopy(before)], [{0}], x, y)
    assert set(found.held.values()) == set(found.missing.values()) == {0.0}


def test_only_stages_that_training_changes_and_that_are_not_the_head():
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    perceptron = build_model("mlp(hidden=(5, 4))", (1, 4, 4), 3)
    assert list(measures.neuron_drift(perceptron, [perceptron], [{0, 1, 2}], x, y).held) == ["fc1", "fc2"]
    regression = build_model("logreg", (1, 4, 4), 3)
    assert measures.neuron_drift(regression, [regression], [{0}], x, y) == measures.Drift({}, {})
    net = build_model("resnet8(width=4)", (3, 16, 16), 3)
    found = measures.neuron_drift(net, [net], [{0, 1, 2}], torch.randn(6, 3, 16, 16), y)
    assert "head" not in found.held
    assert found.missing == {}
    assert list(measures.neuron_drift(net, [net], [{0}], torch.randn(6, 3, 16, 16), y, ["stem"]).held) == ["stem"]


def test_drift_of_clients_of_different_depth():
    """Each with the stages that it has, against what it began with."""

    def model(*names: str) -> nn.Sequential:
        net = nn.Sequential()
        for name in (*names, "head"):
            net.add_module(name, nn.Linear(2, 2, bias=False))
            net[-1].weight.data = torch.eye(2)
        return net

    def times(net: nn.Sequential, name: str, factor: float) -> nn.Sequential:
        own = copy.deepcopy(net)
        own.get_submodule(name).weight.data *= factor  # type: ignore[operator]
        return own

    deep, shallow = model("a", "b"), model("a")
    found = measures.neuron_drift(
        [shallow, deep],
        [times(shallow, "a", 0.5), times(deep, "b", 3)],
        [{0, 1}, {0, 1}],
        torch.eye(2),
        torch.tensor([0, 1]),
    )
    assert found == measures.Drift(held={"a": pytest.approx(-0.25), "b": pytest.approx(2.0)}, missing={})


# Running statistics -----------------------------------------------------------------------------------------

LAYERS = (
    Stratum(
        "a",
        "a",
        ("a.weight",),
        ("a.running_mean", "a.running_var", "a.num_batches_tracked", "n.running_mean", "n.running_var"),
    ),
    Stratum("b", "b", ("b.weight",), ("b.running_mean", "b.running_var")),
    Stratum("c", "c", ("c.weight",), ()),
)


def statistics(layer: str, mean: Sequence[float], var: Sequence[float]) -> Tensors:
    return {f"{layer}.running_mean": torch.tensor(mean), f"{layer}.running_var": torch.tensor(var)}


def test_spread_by_hand():
    """Means (0, 5) and (4, 5), variances (3, 1) and (5, 9): in the middle (2, 5) and (4, 5). Shifts ∓2/2 and 0: both
    clients are √(½) away. ε = 10⁻⁵ is not seen in five digits."""
    clients = [statistics("a", [0.0, 5.0], [3.0, 1.0]), statistics("a", [4.0, 5.0], [5.0, 9.0])]
    assert measures.statistics_spread(clients, LAYERS) == pytest.approx({"a": math.sqrt(0.5)}, rel=1e-5)


def test_a_mean_over_clients_and_over_all_norm_layers_of_a_stratum():
    """Layer a: means 0, 0, 3, variance 1: shifts −1, −1, 2. Layer n: two channels, means 0. Square means: √(1/3),
    √(1/3), √(4/3)."""
    clients = [
        {
            **statistics("a", [mean], [1.0]),
            **statistics("n", [0.0, 0.0], [1.0, 1.0]),
            "a.num_batches_tracked": torch.tensor(3),
        }
        for mean in (0.0, 0.0, 3.0)
    ]
    expected = (2 * math.sqrt(1 / 3) + math.sqrt(4 / 3)) / 3
    assert measures.statistics_spread(clients, LAYERS) == pytest.approx({"a": expected}, rel=1e-5)


def test_what_nobody_or_one_client_has_is_left_out():
    """b is client 1's alone; a is compared between 0 and 2; a dead channel, always 0, counts for nothing."""
    clients = [
        statistics("a", [1.0, 0.0], [1.0, 0.0]),
        statistics("b", [1.0], [1.0]),
        statistics("a", [1.0, 0.0], [1.0, 0.0]),
    ]
    assert measures.statistics_spread(clients, LAYERS) == {"a": 0.0}
    assert measures.statistics_spread([{}, {}], LAYERS) == measures.statistics_spread([], LAYERS) == {}


def test_spread_of_a_models_own_statistics_against_a_loop():
    start, (x, y) = convolution(), rows(60, shape=(1, 5, 5))
    local = [train_copy(start, x[y == c], y[y == c]) for c in range(CLASSES)]
    found = measures.statistics_spread([dict(model.named_buffers()) for model in local], strata(start))
    means = [model[1].running_mean.numpy() for model in local]  # type: ignore[union-attr, index]
    variances = [model[1].running_var.numpy() for model in local]  # type: ignore[union-attr, index]
    expected = 0.0
    for mean in means:
        total = 0.0
        for c in range(5):
            middle = sum(m[c] for m in means) / 3
            total += (mean[c] - middle) ** 2 / (sum(v[c] for v in variances) / 3 + 1e-5)
        expected += math.sqrt(total / 5) / 3
    assert found == pytest.approx({"0": expected}, rel=1e-10)
    assert expected > 0.1


# All --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_measuring_changes_no_model_and_no_generator(mode: bool):
    models = [convolution(seed).train(mode) for seed in range(3)]
    x, y = rows(12, shape=(1, 5, 5))
    kept = x.clone(), y.clone()
    before = [everything(model) for model in models]
    measures.gradient_trace(
        models[0], models[1], TensorExamples(x, y), strata(models[0]), steps=3, batch_size=4, lr=1.0
    )
    measures.forgetting(models[0], models[1:], [{0}, {1}], x, y)
    measures.neuron_drift(models[0], models[1:], [{0}, {1}], x, y)
    measures.statistics_spread([dict(model.named_buffers()) for model in models], strata(models[0]))
    assert all(same(was, everything(model)) for was, model in zip(before, models, strict=True))
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


def test_models_without_running_statistics():
    """Norm layers then use the batch at hand: here all rows, in a fixed order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, CLASSES)).double()
    x, y = rows(30)
    hidden = model[1](model[0](x)).detach()
    means = torch.stack([hidden[y == c].mean(0) for c in range(CLASSES)])
    found = measures.neuron_drift(model, [nn.Sequential(model[0], model[1], model[2])], [{0}], x, y)
    assert found.held["1"] == found.missing["1"] == pytest.approx(0)
    assert (means.max(0).values > 0).all()
    accuracy = float((model(x).argmax(1) == y)[y == 0].double().mean())
    assert measures.forgetting(model, [model], [{0}], x, y).before[0] == pytest.approx(accuracy)


X, Y = rows(6)
NET = plain()
DATA = TensorExamples(X, Y)
WIDE = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
NORMED = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.low(x))
        return out


def trace(**given: Any) -> Any:
    usual = {"local": NET, "averaged": NET, "data": DATA, "strata": strata(NET)}
    return measures.gradient_trace(**{**usual, **given})


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "steps": (lambda: trace(steps=0), "steps must be above 0"),
    "batch size": (lambda: trace(batch_size=0), "batch_size must be above 0"),
    "lr": (lambda: trace(lr=-1), "lr must be above 0"),
    "no data": (lambda: trace(data=TensorExamples(X[:0], Y[:0])), "client 0 has none"),
    "one example": (lambda: trace(local=NORMED, strata=strata(NORMED), batch_size=1), "batch of one example"),
    "strata": (lambda: trace(strata=LAYERS), "the model has no 'a.weight'"),
    "trace label": (lambda: trace(data=TensorExamples(X, Y + 5)), "but the model has 3 outputs"),
    "nobody": (lambda: measures.forgetting(NET, [], [], X, Y), "there are 0, 0 and 0"),
    "classes": (lambda: measures.forgetting(NET, [NET, NET], [{0}], X, Y), "there are 2, 1 and 2"),
    "starts": (lambda: measures.neuron_drift([NET], [NET, NET], [{0}, {1}], X, Y), "there are 2, 2 and 1"),
    "rows": (lambda: measures.forgetting(NET, [NET], [{0}], X, Y[:2]), "2 labels for 6 rows"),
    "label": (lambda: measures.forgetting(NET, [NET], [{0}], X, Y + 5), "but the model has 3 outputs"),
    "outputs": (
        lambda: measures.forgetting(NET, [nn.Sequential(NET, nn.Linear(3, 4).double())], [{0}], X, Y),
        "models of 3 and of 4 classes",
    ),
    "one class": (lambda: measures.neuron_drift(NET, [NET], [{0}], X, Y * 0 + 2), "all of class 2"),
    "no rows": (lambda: measures.neuron_drift(NET, [NET], [{0}], X[:0], Y[:0]), "0 labels for 0 rows"),
    "width": (lambda: measures.neuron_drift(NET, [WIDE], [{0}], X, Y), "another number of neurons"),
    "no stages": (lambda: measures.neuron_drift(Loose(), [Loose()], [{0}], X, Y), "has no stages"),
    "place": (lambda: measures.neuron_drift(NET, [NET], [{0}], X, Y, ["9"]), "no module '9'"),
    "buffers": (lambda: measures.statistics_spread([{"a.runing_mean": X}], LAYERS), "did you mean 'a.running_mean'"),
    "uneven": (
        lambda: measures.statistics_spread(
            [statistics("b", [1.0], [1.0]), statistics("b", [1.0] * 2, [1.0] * 2)], LAYERS
        ),
        "'b.running_mean' are of different shapes",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_gets_a_sentence(case: str):
    call, sentence = REFUSALS[case]
    with pytest.raises(UsageError, match=sentence) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_any_module_of_any_model_may_be_a_place():
    torch.manual_seed(0)
    before, after = Loose().double(), Loose().double()
    found = measures.neuron_drift(before, [after], [{0, 1, 2}], X, Y, ["low"])
    assert list(found.held) == ["low"]


def test_of_a_module_that_runs_twice_the_first_time_counts():
    """Twice as large after training, and then four times at its second run."""

    class Twice(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.low = nn.Linear(2, 2, bias=False)
            self.low.weight.data = factor * torch.eye(2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.low(self.low(x))
            return out

    found = measures.neuron_drift(Twice(1), [Twice(2)], [{0, 1}], torch.eye(2), torch.tensor([0, 1]), ["low"])
    assert found.held == {"low": pytest.approx(1.0)}
