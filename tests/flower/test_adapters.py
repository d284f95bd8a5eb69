"""Adapters at other sites: only they are in messages, and both sides must have the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.flower.worlds import Loopback, sites  # isort: skip  # skips without flwr
from tests.tiny_transformers import LORA, write_bert, write_texts  # isort: skip  # skips without peft

import fedstrata as fs
from fedstrata.data.examples import Dataset
from fedstrata.flower import client_app
from fedstrata.models.adapted import base_names
from tests.engines.worlds import check_same
from tests.flower.worlds import silos

SETTINGS: dict[str, Any] = {"rounds": 3, "participation": 2, "batch_size": 5, "lr": 0.2, "checkpoint_seconds": 0.0}


class World:
    """A folder with a tiny transformer, texts of three clients, and the model that both sides make."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.bert = write_bert(folder / f"bert{seed}", seed=seed)
        self.data: Dataset = fs.load_dataset(
            f"text(path='{write_texts(folder / 'texts.tsv', rows=45)}')", tokenizer=str(self.bert)
        )
        self.parts = fs.partition(self.data.labels, "iid", 3, seed=0)

    def model(self) -> nn.Module:
        """With adapters, whatever random state there is: the base is from the files."""
        model = fs.build_model(f"hf('{self.bert}')", self.data.input_shape, self.data.classes, seed=0)
        return fs.adapt(model, LORA, self.data.train.padded.batch(torch.arange(2))[0], seed=1)

    def client(self, number: int) -> Any:
        return self.data.train.select(self.parts[number])

    def grid(self, other: World | None = None, **given: Any) -> Loopback:
        """Three sites, which may have the files of another world."""
        return Loopback(client_app((other or self).model, self.client, **given), sites(3))

    def serial(self, **settings: Any) -> fs.Federation:
        clients = [self.client(number) for number in range(3)]
        fed = fs.Federation(self.model(), clients, self.data.test, engine="serial", **{**SETTINGS, **settings})
        fed.fit()
        return fed

    def silos(self, grid: Loopback, **settings: Any) -> Any:
        return silos(grid, model=self.model, test=self.data.test, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


def sent(grid: Loopback) -> list[int]:
    """The length of every assignment that went out, in bytes."""
    messages = [m for m in grid.sent if m.metadata.message_type == "train"]
    return [sum(len(a.data) for record in m.content.array_records.values() for a in record.values()) for m in messages]


@pytest.mark.parametrize("method", ["fedavg", "scaffold + fedpart(warmup=1, rounds_per_stratum=1)"])
@pytest.mark.parametrize("kept", [False, True])
def test_the_same_bits_as_serial_and_no_base_in_any_message(
    world: World, method: str, kept: bool, tmp_path: Path
) -> None:
    grid = world.grid(keep=tmp_path if kept else None)
    found = world.silos(grid, method=method)
    check_same(found, world.serial(method=method))
    assert not any(record.refused for record in found.records)
    model = world.model()
    base = sum(p.nbytes for n, p in model.named_parameters() if n in base_names(model))
    lengths = sent(grid)
    assert len(lengths) == 6
    assert 0 < max(lengths) < base / 2
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert bool(stored) == kept
    assert all(path.stat().st_size < base / 2 for path in stored)


@pytest.mark.parametrize("method", ["fedexlora", "flora"])
@pytest.mark.parametrize("forgets", [False, True])
def test_weights_of_the_base_that_a_method_has_changed(world: World, method: str, forgets: bool) -> None:
    """They travel, to a site that has lost them once more; the rest of the base never does."""
    grid = world.grid()

    def forget(message: Any, answer: Any) -> Any:
        state = grid.contexts[100].state
        for name in [name for name in state.config_records if "-held-" in name]:
            del state.config_records[name]
        return answer()

    if forgets:
        grid.faults[100] = forget
    found = world.silos(grid, method=method, participation=3)
    reference = world.serial(method=method, participation=3)
    assert all(torch.equal(found.state.params[n], p) for n, p in reference.state.params.items())
    assert not any(record.refused for record in found.records)
    model = world.model()
    base = {n: p.nbytes for n, p in model.named_parameters() if n in base_names(model)}
    moved = {n for n, p in model.named_parameters() if n in base and not torch.equal(found.state.params[n], p)}
    assert moved == {n for n in base if n.endswith(("query.base_layer.weight", "value.base_layer.weight"))}
    own = sum(p.nbytes for n, p in model.named_parameters() if n not in base)
    assert max(sent(grid)) < own + sum(base[n] for n in moved) + 6000 < sum(base.values())


def test_a_site_with_another_base_is_refused(world: World, tmp_path: Path) -> None:
    grid = world.grid(World(tmp_path, seed=1), keep=tmp_path / "site")
    found = world.silos(grid, rounds=1)
    told = {refused["why"] for record in found.records for refused in record.refused}
    assert len(told) == 1
    assert "the frozen base beneath the adapters is another one here" in told.pop()
    assert found.records[0].bytes_up == 0
    assert not list((tmp_path / "site").rglob("*-held-*"))


def test_a_site_without_the_adapter_is_refused(world: World) -> None:
    def plain() -> nn.Module:
        return fs.build_model(f"hf('{world.bert}')", world.data.input_shape, world.data.classes, seed=0)

    grid = Loopback(client_app(plain, world.client), sites(3))
    found = world.silos(grid, rounds=1)
    assert "another one here (none) than at the server" in found.records[0].refused[0]["why"]


def test_a_site_that_has_lost_what_it_held_is_sent_adapters_again(world: World) -> None:
    """All of them, and still no base; the run has the bits that it would have had."""
    method = "fedpart(warmup=1, rounds_per_stratum=1)"
    grid = world.grid()
    forgotten: list[int] = []

    def forget(message: Any, answer: Any) -> Any:
        state = grid.contexts[100].state
        names = [name for name in state.config_records if "-held-" in name]
        for name in names:
            del state.config_records[name]
        forgotten.append(len(names))
        return answer()

    grid.faults[100] = forget
    found = world.silos(grid, method=method, participation=3)
    assert any(forgotten)
    reference = world.serial(method=method, participation=3)
    assert all(torch.equal(found.state.params[n], p) for n, p in reference.state.params.items())
    assert not any(record.refused for record in found.records)
    model = world.model()
    assert max(sent(grid)) < sum(p.nbytes for n, p in model.named_parameters() if n in base_names(model)) / 2
