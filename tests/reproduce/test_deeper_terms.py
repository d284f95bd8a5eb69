"""Eq. 11's two terms: by hand on a linear network, against finite steps of what they mean, and how they are judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedstrata.errors import UsageError
from fedstrata.models.registry import build_model
from fedstrata.reproduce.deeper_terms import LayerTerms, assess, gradient_terms, layer_ratios


def test_two_linear_layers_by_hand() -> None:
    """H1 = x, H2 = (ln 3·H1, 0), class 0, so that ∂L/∂H2 = softmax(H2) − (1, 0) and ∂L/∂H1 = ln 3·its first entry.

    The prototype 1 has softmax (3/4, 1/4): ∂L/∂H2 = (−1/4, 1/4), ∂L/∂A2 = that times 1, ∂L/∂A1 = −ln 3/4. The image 0
    has softmax (1/2, 1/2): ∂L/∂H2 = (−1/2, 1/2), and both gradients are 0, since they are times 0. So ε2 = (1/4, −1/4),
    with square 1/8, and ε1 = ln 3/4. T1: ∂L/∂H2 moves by (−1/4, 1/4), times ln 3 and the prototype's input 1: −ln 3/4.
    T2 is the rest, ln 3/2. 2·T1·T2 = −ln² 3/4.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.copy_(torch.tensor([[math.log(3)], [0.0]]))
    found = gradient_terms(model, torch.tensor([1.0]), torch.tensor([[0.0]]), 0)
    log = math.log(3) ** 2
    assert list(found) == ["0", "1"]
    assert found["1"] == LayerTerms(pytest.approx(1 / 8))
    assert found["0"] == LayerTerms(
        pytest.approx(log / 16), pytest.approx(log / 16), pytest.approx(log / 4), pytest.approx(-log / 4)
    )


def test_the_mean_is_over_the_images() -> None:
    """The prototype itself does not deviate: beside the image 0 it halves all figures."""
    model = build_model("mlp(hidden=(4, 3))", (2,), 3, seed=0)
    middle, other = torch.tensor([1.0, -1.0]), torch.tensor([[0.5, 2.0]])
    one = gradient_terms(model, middle, other, 1)
    both = gradient_terms(model, middle, torch.cat([other, middle.unsqueeze(0)]), 1)
    for layer, terms in one.items():
        assert both[layer].deviation == pytest.approx(terms.deviation / 2)
        assert both[layer].inputs == (None if terms.inputs is None else pytest.approx(terms.inputs / 2))


@pytest.mark.parametrize("name", ["cnn4(width=2)", "mlp(hidden=(5, 4))"])
def test_the_back_propagated_part_by_its_meaning(name: str) -> None:
    """T1 of the layer before the last: the same network from the prototype on, with the other image's ∂L/∂H put in at
    the head; by plain autograd of ⟨∂L/∂H, H(prototype)⟩. And the terms add up to the deviation in every layer."""
    model = build_model(name, (1, 8, 8), 3, seed=1).double()
    middle, other = (torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    found = gradient_terms(model, middle[0], other, 2)
    *_, before, _ = (n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    weight = model.get_submodule(before).weight
    signals = [F.softmax(model(x), 1) - F.one_hot(torch.tensor([2]), 3) for x in (middle, other)]
    moved = (signals[1] - signals[0]).detach()
    (back,) = torch.autograd.grad((moved * model(middle)).sum(), weight)
    assert found[before].back == pytest.approx(float(back.square().sum()))
    for terms in list(found.values())[:-1]:
        assert (terms.back or 0) + (terms.inputs or 0) + (terms.cross or 0) == pytest.approx(terms.deviation)


def test_measuring_changes_nothing() -> None:
    model = build_model("cnn4(width=2)", (1, 8, 8), 3, seed=1)
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    gradient_terms(model, torch.zeros(1, 8, 8), torch.ones(3, 1, 8, 8), 0)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_one_layer_has_nothing_behind_it() -> None:
    with pytest.raises(UsageError, match="2 or more linear layers"):
        gradient_terms(nn.Sequential(nn.Linear(1, 2)), torch.ones(1), torch.zeros(1, 1), 0)


def _terms(*layers: tuple[float, float, float, float]) -> dict[str, dict[str, Any]]:
    names = ("deviation", "back", "inputs", "cross")
    return {str(at): dict(zip(names, values, strict=True)) for at, values in enumerate(layers)}


LAST = (2.0, 0.0, 0.0, 0.0)


def test_ratios_by_hand() -> None:
    """Back over the next one's deviation: 4/2 and 1/2, in the geometric mean 1; deviations 8/2 and 2/2: 2. Shares of
    inputs 3/8 and 1/2, cross shares 1/8 and 0. A class that does not deviate is left out."""
    classes = [_terms((8, 4, 3, 1), LAST), _terms((2, 1, 1, 0), LAST), _terms((0, 0, 0, 0), LAST)]
    found = layer_ratios(classes)
    assert list(found) == ["0"]
    assert (found["0"].kept, found["0"].grown) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (found["0"].inputs, found["0"].cross) == (pytest.approx(7 / 16), pytest.approx(1 / 16))
    assert layer_ratios(classes[2:]) == {}


def _network(*layers: tuple[float, float, float, float]) -> dict[str, Any]:
    kinds = {kind: [_terms(*layers)] for kind in ("noise", "class")}
    return {"trained": kinds, "new": kinds}


def test_terms_are_judged() -> None:
    """good: 3/2 is kept, divergence grows from 2 to 4. bad: 1/10 is kept, and one of two layers is below the next."""
    figures = {"good": _network((4, 3, 1, 0), LAST), "bad": _network((4, 0.2, 3.8, 0), (1, 0.2, 0.8, 0), LAST)}
    found = assess(dict.fromkeys(range(5), figures))
    assert len(found.checks) == 2 * 2 * 2 * 2
    assert {check.holds for check in found.checks if check.name.startswith("good")} == {True}
    assert {check.holds for check in found.checks if check.name.startswith("bad")} == {False}
    assert found.checks[0].figures.startswith("0.58 ± 0.00")  # log2 of 3/2
    table = assess({0: figures}).tables[0]
    assert table.rows[0][:6] == ("good", "1", "1.5000", "2.0000", "0.2500", "0.0000")
    assert [row[:2] for row in table.rows] == [("good", "1"), ("bad", "1"), ("bad", "2")]
