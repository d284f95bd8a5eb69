"""Who takes part, and for how many steps; and everybody's data as one party's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.core.types import Work
from fedstrata.data.examples import JoinedExamples, join_examples
from fedstrata.server.sampling import ClientSampler

SIZES = (9, 0, 14, 1, 30)


def parties() -> list[fs.TensorExamples]:
    """Client c's examples are c·100, c·100 + 1, …, and their labels c."""
    return [
        fs.TensorExamples(100 * c + torch.arange(n).float()[:, None], torch.full((n,), c)) for c, n in enumerate(SIZES)
    ]


def sampler(participation: int | float = 2, centralised: bool = False, drop_single: bool = False) -> ClientSampler:
    return ClientSampler(parties(), lambda c: "deep" if c else "", participation, 7, 3, centralised, drop_single)


def test_only_clients_with_examples_are_asked_and_all_of_them_after_the_last_round() -> None:
    made = sampler()
    drawn = [list(made.sample(number)) for number in range(3)]
    assert all(len(set(clients)) == 2 and 1 not in clients for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 1
    assert list(made.sample(3)) == [0, 2, 3, 4]
    assert made.per_round == 2


def test_a_fraction_is_of_those_that_have_examples() -> None:
    assert sampler(0.5).per_round == 2
    assert sampler(0.01).per_round == 1
    with pytest.raises(fs.UsageError, match="participation = 5, but only 4 clients have examples"):
        sampler(5)


@pytest.mark.parametrize("drop_single", [False, True])
def test_one_party_takes_the_steps_of_those_that_would_have_been_asked(drop_single: bool) -> None:
    """Batches of 4: 9 examples take 3 steps (2 without the last, single one), 14 take 4, 1 takes 1 (0), 30 take 8."""
    steps = {0: 2 if drop_single else 3, 2: 4, 3: 0 if drop_single else 1, 4: 8}
    apart, together = sampler(), sampler(centralised=True, drop_single=drop_single)
    for number in range(3):
        work = together.work(number, Work(epochs=2, batch_size=4))
        assert work.steps == 2 * sum(steps[client] for client in apart.sample(number))
        assert list(together.sample(number)) == [0]
        assert apart.work(number, Work(epochs=2)) == Work(epochs=2)
    assert len(together.clients) == 1
    assert len(together.clients[0]) == sum(SIZES)
    assert together.arch_of(0) == ""


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor([1000.0 + row]), 9


def test_joined_examples_are_the_parts_one_after_the_other() -> None:
    parts: list[fs.Examples] = [*parties(), fs.MapExamples(Rows())]
    whole = join_examples(parts)
    assert isinstance(whole, JoinedExamples)
    x, y = whole.batch(torch.arange(len(whole)))
    expected = [100.0 * c + i for c, n in enumerate(SIZES) for i in range(n)] + [1000.0, 1001.0, 1002.0]
    assert x.flatten().tolist() == expected
    assert y.tolist() == whole.labels().tolist()
    index = torch.tensor([56, 0, 23, 22, 9, 0])
    x, y = whole.batch(index)
    assert x.flatten().tolist() == [expected[i] for i in index.tolist()]
    assert y.tolist() == [whole.labels()[i] for i in index.tolist()]


def test_a_split_is_joined_without_copying() -> None:
    data = fs.TensorExamples(torch.arange(10.0)[:, None], torch.arange(10))
    split = data.split([torch.tensor([3, 1]), torch.tensor([7])])
    whole = join_examples(split)
    assert isinstance(whole, fs.TensorExamples)
    assert whole.x is data.x
    assert whole.batch(torch.arange(3))[0].flatten().tolist() == [3.0, 1.0, 7.0]
