"""Examples: what a client holds, in tensors or in a map-style Dataset."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

from fedstrata.core.types import Examples
from fedstrata.data.examples import Dataset, LazyExamples, MapExamples, TensorExamples, as_examples
from fedstrata.errors import UsageError


def images() -> tuple[Tensor, Tensor]:
    """Five uint8 images of 2 channels and 1×2 pixels with all their values different, and their labels."""
    return torch.arange(20, dtype=torch.uint8).view(5, 2, 1, 2) * 12, torch.tensor([0, 1, 2, 0, 1])


class Pairs(TorchDataset[tuple[Any, Any]]):
    """A map-style dataset from two sequences."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]


def test_floats_pass_as_they_are():
    x, y = torch.randn(4, 3), torch.tensor([3, 2, 1, 0])
    examples = TensorExamples(x, y)
    bx, by = examples.batch(torch.tensor([2, 0]))
    assert torch.equal(bx, x[[2, 0]])
    assert by.tolist() == [1, 3]
    assert len(examples) == 4
    assert examples.labels().tolist() == [3, 2, 1, 0]


def test_tokens_stay_integers():
    x = torch.tensor([[1, 2], [3, 4]])
    bx, _ = TensorExamples(x, torch.tensor([0, 1])).batch(torch.tensor([1]))
    assert bx.dtype == torch.int64
    assert bx.tolist() == [[3, 4]]


def test_bytes_are_scaled_to_one():
    """Without mean and std: value / 255."""
    x, y = images()
    bx, _ = TensorExamples(x, y).batch(torch.tensor([4, 0]))
    expected = x.numpy()[[4, 0]].astype(np.float64) / 255
    assert bx.dtype == torch.float32
    np.testing.assert_allclose(bx.numpy(), expected, rtol=1e-6)


def test_bytes_are_normalised_by_channel():
    """(value/255 − mean_c) / std_c with mean (0.5, 0.25) and std (0.5, 2), in numpy float64."""
    x, y = images()
    examples = TensorExamples(x, y, mean=(0.5, 0.25), std=(0.5, 2.0))
    bx, _ = examples.batch(torch.arange(5))
    mean, std = (np.array(v).reshape(1, 2, 1, 1) for v in ((0.5, 0.25), (0.5, 2.0)))
    np.testing.assert_allclose(bx.numpy(), (x.numpy() / 255.0 - mean) / std, rtol=1e-5, atol=1e-6)


def test_reading_changes_nothing():
    x, y = images()
    before = x.clone()
    examples = TensorExamples(x, y, mean=(0.5, 0.25), std=(0.5, 2.0))
    first, _ = examples.batch(torch.arange(5))
    first.zero_()
    second, _ = examples.batch(torch.arange(5), augment=lambda t: t.add_(1.0))
    assert torch.equal(x, before)
    assert second.abs().sum() > 0


def test_augmentation_sees_pictures_between_zero_and_one():
    """A picture is augmented before it is normalised: 1 − p of p = 0 is 1, then (1 − 0.5)/0.5 = 1."""
    seen: list[Tensor] = []

    def invert(batch: Tensor) -> Tensor:
        seen.append(batch.clone())
        return 1 - batch

    x = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    bx, _ = TensorExamples(x, torch.tensor([0]), mean=(0.5,), std=(0.5,)).batch(torch.tensor([0]), invert)
    assert seen[0].flatten().tolist() == [0.0, 1.0]
    torch.testing.assert_close(bx.flatten(), torch.tensor([1.0, -1.0]))
    floats, _ = TensorExamples(torch.tensor([[0.25]]), torch.tensor([0])).batch(torch.tensor([0]), invert)
    assert floats.tolist() == [[0.75]]


def test_a_part_of_a_part_shares_the_tensors():
    """Rows (4, 2, 0) of the whole, and rows (2, 0) of that part: rows 0 and 4."""
    x, y = images()
    whole = TensorExamples(x, y, mean=(0.5, 0.25), std=(0.5, 2.0))
    part = whole.select(torch.tensor([4, 2, 0]))
    inner = part.select(torch.tensor([2, 0]))
    assert (len(whole), len(part), len(inner)) == (5, 3, 2)
    assert part.labels().tolist() == [1, 2, 0]
    assert inner.labels().tolist() == [0, 1]
    assert part.x is x
    assert torch.equal(inner.batch(torch.tensor([1]))[0], whole.batch(torch.tensor([4]))[0])


def test_an_empty_part():
    x, y = images()
    empty = TensorExamples(x, y).select(torch.tensor([], dtype=torch.int64))
    assert len(empty) == 0
    assert empty.labels().tolist() == []


def test_examples_and_labels_must_be_as_many():
    with pytest.raises(UsageError, match="3 examples but 2 labels"):
        TensorExamples(torch.zeros(3, 1), torch.tensor([0, 1]))


def test_a_map_style_dataset_is_read_row_by_row():
    x, y = torch.randn(4, 3), [2, 0, 1, 1]
    examples = MapExamples(Pairs(x, y))
    bx, by = examples.batch(torch.tensor([3, 0]))
    assert torch.equal(bx, x[[3, 0]])
    assert by.tolist() == [1, 2]
    assert by.dtype == torch.int64
    assert examples.labels().tolist() == y
    assert len(examples) == 4
    doubled, _ = examples.batch(torch.tensor([3]), augment=lambda t: 2 * t)
    assert torch.equal(doubled, 2 * x[[3]])


def test_a_map_style_dataset_of_bytes_and_of_arrays():
    """uint8 rows become value/255; numpy rows and numpy labels are taken too."""
    rows = np.array([[0, 255], [51, 102]], dtype=np.uint8)
    bx, by = MapExamples(Pairs(rows, np.array([1, 0]))).batch(torch.tensor([0, 1]))
    torch.testing.assert_close(bx, torch.tensor([[0.0, 1.0], [0.2, 0.4]]))
    assert by.tolist() == [1, 0]


def test_what_a_user_may_hand_over():
    x, y = torch.randn(4, 3), torch.tensor([2, 0, 1, 1])
    already = TensorExamples(x, y)
    assert as_examples(already) is already
    for given in ((x, y), [x, y], (x.numpy(), y.numpy()), (x, y.to(torch.uint8)), (x, y.tolist())):
        found = as_examples(given)
        assert isinstance(found, TensorExamples)
        assert found.y.dtype == torch.int64
        assert torch.equal(found.batch(torch.arange(4))[0], x)
        assert found.labels().tolist() == y.tolist()
    for given in (
        TensorDataset(x, y),
        Subset(TensorDataset(x, y), [0, 1, 2, 3]),
        [(x[i], int(y[i])) for i in range(4)],
    ):
        found = as_examples(given)
        assert isinstance(found, Examples)
        assert torch.equal(found.batch(torch.arange(4))[0], x)
        assert found.labels().tolist() == y.tolist()


def test_a_list_of_two_rows_is_a_dataset_too():
    x = torch.randn(2, 3)
    found = as_examples([(x[0], 1), (x[1], 0)])
    assert torch.equal(found.batch(torch.arange(2))[0], x)
    assert found.labels().tolist() == [1, 0]


@pytest.mark.parametrize("given", [3, None, iter([1]), {1, 2}, object()])
def test_what_a_user_may_not_hand_over(given: Any):
    with pytest.raises(UsageError, match="pair of tensors or a map-style Dataset"):
        as_examples(given)


def test_labels_are_whole_numbers():
    with pytest.raises(UsageError, match="label"):
        as_examples((torch.zeros(2, 1), torch.tensor([0.0, 1.5])))


def test_the_shape_of_one_input():
    x, y = images()
    examples = TensorExamples(x, y)
    assert Dataset("toy", examples, examples, 3).input_shape == (2, 1, 2)


def test_augmentation_of_floats_keeps_their_range():
    """Normalised data is not cut to [0, 1]; uint8 images are, after a change that leaves it."""
    x, y = torch.tensor([[-2.0, 3.0]]), torch.tensor([0])
    assert TensorExamples(x, y).batch(torch.arange(1), lambda batch: batch)[0].tolist() == [[-2.0, 3.0]]
    images = TensorExamples(torch.tensor([[0, 255]], dtype=torch.uint8), y)
    assert images.batch(torch.arange(1), lambda batch: batch * 3 - 1)[0].tolist() == [[0.0, 1.0]]


def test_a_function_is_called_when_its_examples_are_read_and_only_it_travels() -> None:
    """And what it does to the global random generators changes nobody else's numbers."""
    calls.clear()
    examples = as_examples(make_client)
    assert isinstance(examples, LazyExamples)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert len(examples) == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert examples.batch(torch.tensor([1]))[1].tolist() == [1]
    assert examples.labels().tolist() == [0, 1, 2]
    assert len(calls) == 1
    there = copy.copy(examples)  # by way of its state, as to another process
    assert len(there) == 3
    assert len(calls) == 1
    assert there.labels().tolist() == [0, 1, 2]
    assert len(calls) == 2
    examples.forget()
    assert len(examples) == 3
    assert len(calls) == 2
    with pytest.raises(UsageError, match="a client's data is"):
        as_examples(object)


calls: list[int] = []


def make_client() -> tuple[torch.Tensor, torch.Tensor]:
    """A client's data, with a seed of its own as many scripts have it."""
    calls.append(1)
    torch.manual_seed(0)
    return torch.randn(3, 2), torch.arange(3)
