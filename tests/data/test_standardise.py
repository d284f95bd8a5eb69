"""Clients on another scale, and clients left out: the settings `standardise` and `without`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.data.examples import TensorExamples
from fedstrata.data.standardise import measure_clients

LAYERS: dict[str, Any] = {"rounds": 2, "batch_size": 8, "lr": 0.1}


def world(gain: float = 1.0) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]], Any]:
    """Four clients of two columns, the last on another scale; the class is the sign of the first column."""
    torch.manual_seed(0)
    data = [torch.randn(16, 2) * torch.tensor([1.0, 3.0]) + 2 for _ in range(5)]
    pairs = [(x * (gain if client == 3 else 1), (x[:, 0] > 2).long()) for client, x in enumerate(data)]
    return torch.nn.Linear(2, 2), pairs[:4], pairs[4]


def scores(gain: float = 1.0, **settings: Any) -> list[float | None]:
    model, clients, test = world(gain)
    return [record.loss for record in fs.Federation(model, clients, test, **{**LAYERS, **settings}).fit().records]


def test_the_median_client_stands_for_those_that_belong_to_none() -> None:
    """Columns (1, 3), (3, 5), (5, 700): means 2, 4, 352.5 and deviations 1, 1, 347.5; the median is 4 and 1."""
    columns = [torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [5.0]]), torch.tensor([[5.0], [700.0]])]
    found = measure_clients({c: TensorExamples(x, torch.tensor([0, 1])) for c, x in enumerate(columns)})
    assert (found.median[0].item(), found.median[1].item()) == (4.0, 1.0)
    own = found.apply(TensorExamples(columns[2], torch.tensor([0, 1])), 2)
    assert own.batch(torch.tensor([0, 1]))[0].flatten().tolist() == [-1.0, 1.0]
    nobodys = found.apply(TensorExamples(columns[0], torch.tensor([0, 1])))
    assert nobodys.batch(torch.tensor([0, 1]))[0].flatten().tolist() == [-3.0, -1.0]


def test_a_column_that_does_not_vary_is_not_blown_up() -> None:
    constant = TensorExamples(torch.full((4, 1), 7.0), torch.zeros(4, dtype=torch.int64))
    assert measure_clients({0: constant}).apply(constant, 0).batch(torch.arange(4))[0].flatten().tolist() == [0.0] * 4


def test_another_scale_makes_no_difference_once_clients_standardise() -> None:
    assert scores(1000.0, standardise="client") == pytest.approx(scores(standardise="client"), rel=0.05)
    assert scores(1000.0) != pytest.approx(scores(), rel=0.1)


@pytest.mark.parametrize("settings", [{"standardise": "client"}, {"without": "1,3"}])
def test_engines_agree(settings: dict[str, Any]) -> None:
    alone = scores(50.0, engine="serial", **settings)
    assert scores(50.0, engine="wire", **settings) == alone
    assert scores(50.0, engine="processes", workers=2, **settings) == alone
    assert scores(50.0, engine="vmap", **settings) == pytest.approx(alone, rel=1e-4)


def test_those_left_out_never_take_part_and_are_pooled_by_nobody() -> None:
    model, clients, test = world()
    found = fs.Federation(model, clients, test, without="3,1", **LAYERS)
    assert {client for record in found.fit().records for client in record.clients} == {0, 2}
    assert found.settings.without == "1,3"
    pooled = scores(without="3", method="centralised")
    assert pooled == scores(1000.0, without="3", method="centralised")


def test_own_tests_are_as_they_are_without_the_fault() -> None:
    """Inputs of client 3 are multiplied, standardised and so the same again; its own test examples never were."""
    found = []
    for faults in (None, "inputs(gain=255, clients=(3,))"):
        model, clients, _ = world()
        fed = fs.Federation(
            model, clients, holdout=0.25, eval_clients=True, standardise="client", faults=faults, **LAYERS
        )
        found.append([record.loss for record in fed.fit().records])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_count_of_participants_is_at_most_those_that_are_left() -> None:
    model, clients, test = world()
    found = fs.Federation(model, clients, test, without="3", participation=4, **LAYERS).fit()
    assert all(record.clients == [0, 1, 2] or record.clients == (0, 1, 2) for record in found.records)
    with pytest.raises(fs.UsageError, match="participation = 5"):
        scores(without="3", participation=5)


@pytest.mark.parametrize("text", ["", "a", "-1", "1;2"])
def test_what_names_no_clients_is_refused(text: str) -> None:
    with pytest.raises(fs.UsageError, match="give numbers of clients"):
        scores(without=text)


def test_clients_that_are_not_there_are_refused() -> None:
    with pytest.raises(fs.UsageError, match="without names client 4, and the clients are 0 to 3"):
        scores(without="4")
    with pytest.raises(fs.UsageError, match="no client that has examples"):
        scores(without="0,1,2,3")


def test_inputs_without_a_scale_are_refused() -> None:
    tokens = (torch.zeros(8, 3, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    with pytest.raises(fs.UsageError, match="standardise needs inputs"):
        fs.Federation(model, [tokens, tokens], tokens, standardise="client", **LAYERS)
