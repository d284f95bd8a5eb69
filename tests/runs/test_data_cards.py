"""Cards of clients' inputs in facts.json, against numbers worked out by hand and in NumPy; what a model puts out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.parts import Parts
from fedstrata.data.examples import TensorExamples
from fedstrata.runs.data_cards import SAMPLED, data_card, data_cards
from fedstrata.runs.run_facts import puts_out_probabilities
from fedstrata.tasks.registry import build_task


def test_a_card_by_hand() -> None:
    """Two columns of a table: 0, 0, 3, 3 and 1, 1, 1, 5; two rows are the same, and none is one number throughout."""
    card = data_card(torch.tensor([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0], [3.0, 5.0]]))
    assert card["mean"] == [1.5, 2.0]
    assert card["std"] == [1.5, pytest.approx(math.sqrt(3), rel=1e-3)]
    assert (card["min"], card["max"], card["missing"], card["constant"]) == (0, 5, 0, 0)
    assert card["duplicates"] == 0.25


def test_missing_numbers_are_counted_and_left_out() -> None:
    card = data_card(torch.tensor([[1.0, math.nan], [3.0, math.inf], [5.0, math.nan], [7.0, math.nan]]))
    assert card["mean"] == [4, None]
    assert card["std"][1] is None
    assert (card["missing"], card["min"], card["max"]) == (0.5, 1, 7)
    json.dumps(card, allow_nan=False)
    json.dumps(data_card(torch.full((3, 2), math.nan)), allow_nan=False)


def test_images_by_channel_and_constant_ones() -> None:
    rng = np.random.default_rng(0)
    images = rng.normal([[[[2.0]], [[5.0]], [[-1.0]]]], 1.5, size=(40, 3, 6, 6))
    images[:10] = 3.0
    card = data_card(torch.from_numpy(images))
    assert card["mean"] == pytest.approx(images.mean((0, 2, 3)), rel=1e-3)
    assert card["std"] == pytest.approx(images.std((0, 2, 3)), rel=1e-3)
    assert card["constant"] == 0.25
    assert card["duplicates"] == pytest.approx(9 / 40)


def test_cards_of_clients() -> None:
    """Of the examples as the model sees them: bytes are scaled; of no more than some, of no more than the first."""
    bytes_ = torch.arange(200, dtype=torch.uint8).reshape(200, 1, 1, 1)
    whole = TensorExamples(bytes_, torch.zeros(200, dtype=torch.int64))
    clients = whole.split([torch.arange(0), torch.arange(100), torch.arange(100, 200), torch.arange(3)])
    cards = data_cards(clients, 3)
    assert cards is not None
    assert len(cards) == 3
    assert cards[0] is None
    assert cards[1] is not None
    assert cards[1]["max"] == pytest.approx(99 / 255, rel=1e-3)
    assert cards[1]["mean"] == [pytest.approx(49.5 / 255, rel=0.02)]
    assert SAMPLED < 100


def test_what_is_no_tensor_of_numbers_has_no_cards() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    tokens = TensorExamples(torch.ones(4, 5, dtype=torch.int64), labels)
    parts = TensorExamples(Parts({"a": torch.ones(4, 2)}, True), labels)  # type: ignore[arg-type]
    assert data_cards([tokens], 9) is None
    assert data_cards([parts], 9) is None
    assert data_cards([], 9) is None


def test_facts_have_cards_and_the_test_sets_labels(tmp_path: Path) -> None:
    clients = [(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])), (torch.randn(3, 2) * 9, torch.tensor([0, 0, 1]))]
    test = torch.randn(4, 2), torch.tensor([0, 2, 2, 2])
    fs.Federation(nn.Linear(2, 3), clients, test, rounds=1, batch_size=2, engine="serial", out=tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["test_counts"] == [1, 0, 3]
    assert facts["guess"] == 0.75
    assert [len(card["mean"]) for card in facts["cards"]] == [2, 2]
    assert facts["probabilities"] is False


class Answers(nn.Module):
    """A linear layer, and what comes after it."""

    def __init__(self, width: int, after: nn.Module) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(3, width), after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.layer(x))
        return out if out.shape[1] > 1 else out.squeeze(1)


@pytest.mark.parametrize(
    ("task", "width", "after", "expected"),
    [
        ("classification", 4, nn.Softmax(1), True),
        ("classification", 4, nn.Identity(), False),
        ("classification", 4, nn.Sigmoid(), False),  # they do not add up to 1
        ("classification", 4, nn.LogSoftmax(1), False),
        ("binary", 1, nn.Sigmoid(), True),
        ("binary", 1, nn.Identity(), False),
        ("regression", 1, nn.Sigmoid(), False),  # where it may be meant
    ],
)
def test_models_that_put_out_probabilities(task: str, width: int, after: nn.Module, expected: bool) -> None:
    torch.manual_seed(0)
    model, sample = Answers(width, after), torch.randn(5, 3)
    with torch.no_grad():
        assert puts_out_probabilities(model, sample, model(sample), build_task(task)) is expected


def test_small_outputs_between_0_and_1_are_no_probabilities() -> None:
    """A bias may put them there: inputs a thousand times as large take them out again."""
    model, sample = Answers(1, nn.Identity()), torch.randn(5, 3)
    with torch.no_grad():
        model.layer.weight.mul_(0.01)
        model.layer.bias.fill_(0.5)
        outputs = model(sample)
        assert ((outputs > 0) & (outputs < 1)).all()
        assert not puts_out_probabilities(model, sample, outputs, build_task("binary"))


@pytest.mark.parametrize("after", [nn.Identity(), nn.Sigmoid()])
def test_normalised_features_hide_large_inputs_but_not_a_large_classifier(after: nn.Module) -> None:
    """Layer norm makes ±1000·x what ±x was, so that a bias keeps the outputs between 0 and 1 for all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 1), after)
    sample = torch.randn(5, 3)
    with torch.no_grad():
        model[2].weight.mul_(0.01)
        model[2].bias.fill_(0.5)
        task, outputs = build_task("binary"), model(sample)
        assert puts_out_probabilities(model, sample, outputs, task)  # as long as nobody says which is the classifier
        is_sigmoid = isinstance(after, nn.Sigmoid)
        assert puts_out_probabilities(model, sample, outputs, task, fs.strata(model, sample)) is is_sigmoid


def test_classes_by_hand_and_those_of_few_examples_are_not_told() -> None:
    """Six of class 0, five of class 2, and two of class 1, which are in no mean: their sum would follow from it."""
    labels = torch.tensor([0] * 6 + [2] * 5 + [1] * 2)
    inputs = torch.cat([torch.zeros(6, 2), torch.full((5, 2), 11.0), torch.full((2, 2), 99.0)])
    card = data_card(inputs, labels)
    assert card["groups"].keys() == {"0", "2"}
    assert card["groups"]["2"] == {"count": 5, "mean": [11.0, 11.0], "std": [0.0, 0.0]}
    assert (card["count"], card["mean"], card["max"]) == (11, [5.0, 5.0], 11.0)
    many = data_card(torch.cat([inputs, torch.full((3, 2), 99.0)]), torch.cat([labels, torch.tensor([3, 3, 4])]))
    assert many["groups"].keys() == {"0", "2"}
    assert (many["count"], many["max"]) == (16, 99.0)  # of five that are left over, nobody can tell which is which


def test_targets_that_are_numbers_are_told_by_fifths_of_everybodys() -> None:
    targets = torch.arange(60.0)
    clients = [TensorExamples(targets[rows].unsqueeze(1), targets[rows]) for rows in (slice(0, 24), slice(24, 60))]
    cards = data_cards(clients, 2)
    assert cards is not None
    assert [{name: group["count"] for name, group in (card or {})["groups"].items()} for card in cards] == [
        {"0": 12, "1": 12},
        {"2": 12, "3": 12, "4": 12},
    ]


def test_targets_of_many_numbers_have_no_groups() -> None:
    cards = data_cards([TensorExamples(torch.randn(9, 2), torch.randn(9, 3))], 1)
    assert cards is not None
    assert "groups" not in (cards[0] or {})
