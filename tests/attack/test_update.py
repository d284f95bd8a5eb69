"""The attack on updates: what it is made of against numbers worked out otherwise, what it rebuilds, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedstrata.attack import ImageUpdate, TextUpdate, attack_update
from fedstrata.attack.images import NOTHING
from fedstrata.attack.matching import gradient_directions, in_order, unit_rows
from fedstrata.attack.search import descend, grey_images, psnr
from fedstrata.attack.sending import FULL
from fedstrata.attack.token_recovery import (
    Shortlist,
    embedded_tokens,
    inputs_of_linear,
    pursue,
    rounding_of,
    row_space,
    shares_found,
    tells,
)
from fedstrata.attack.token_sources import find_sources
from fedstrata.attack.update import open_attacked
from tests.attack.test_attack import train
from tests.small_runs import fedstrata, one_sentence

Capture = pytest.CaptureFixture[str]


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- images ----------------------------------------------------------------------------------------------------------


def test_a_linear_layers_gradients_are_its_input() -> None:
    """∂ℓ/∂W = δxᵀ and ∂ℓ/∂b = δ, so x = (∂ℓ/∂W)_i / δ_i in every row: NumPy's quotient is what went in, and is found.

    A search that knows the weight's gradient alone must come to the same image.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 4))
    torch.manual_seed(0)
    nn.init.normal_(model[1].weight)
    x, y = torch.rand(1, 1, 5, 5, generator=random()), torch.tensor([2])
    F.cross_entropy(model(x), y).backward()
    weight, bias = model[1].weight.grad, model[1].bias.grad
    quotient = weight.numpy().astype(np.float64)[2] / bias.numpy().astype(np.float64)[2]
    np.testing.assert_allclose(quotient, x.flatten().numpy(), rtol=1e-5)
    np.testing.assert_allclose(inputs_of_linear(weight, bias).numpy(), quotient, rtol=1e-5)
    look = gradient_directions(model, F.cross_entropy, ["1.weight", "1.bias"], y[None], lambda pixels: pixels)
    target = unit_rows([{"1.weight": -0.3 * weight, "1.bias": -0.3 * bias}])
    *_, rebuilt = descend(look, target, grey_images((1, 1, 5, 5), random()), steps=120, lr=0.1, tv=0.0)
    assert psnr(rebuilt, torch.as_tensor(quotient).view(1, 1, 5, 5)) > 30


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_what_is_searched_for_is_the_gradient_of_training(norm: str) -> None:
    """Per visit, with the statistics of its own batch: what autograd gives in training mode, divided by its length."""
    layer = nn.BatchNorm2d(3) if norm == "batch" else nn.GroupNorm(1, 3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(27, 4))
    images, targets = torch.rand(2, 3, 1, 5, 5, generator=random()), torch.tensor([[0, 1, 2], [3, 3, 0]])
    look = gradient_directions(model, F.cross_entropy, ["0.weight", "5.bias"], targets, lambda p: 2 * p)
    found = look(images.flatten(1, 2))
    model.train()[3].eval()
    for row, x, y in zip(found, images, targets, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(2 * x), y), [model[0].weight, model[5].bias])
        whole = torch.cat([g.flatten() for g in gradients])
        torch.testing.assert_close(row, whole / whole.norm(), rtol=1e-4, atol=1e-6)


def test_a_batch_is_put_in_order() -> None:
    originals = torch.rand(4, 1, 3, 3, generator=random())
    torch.testing.assert_close(in_order(originals[[2, 0, 3, 1]] + 0.01, originals), originals + 0.01)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("update") / "run", model="cnn2(width=16, hidden=32)", rounds=1)


@pytest.fixture(scope="module")
def found(run: Path) -> ImageUpdate:
    made = attack_update(run, examples=2, strata=["head"], steps=120, start=True)
    assert isinstance(made, ImageUpdate)
    return made


def test_images_come_back_from_a_whole_update(found: ImageUpdate) -> None:
    rows = {row.name: row for row in found.rows}
    assert list(rows) == [NOTHING, FULL, "head"]
    assert rows[FULL].psnr > 20 > rows[NOTHING].psnr + 5
    assert rows["head"].psnr < rows[FULL].psnr - 5  # what went into the head has lost the pixels
    assert rows[FULL].psnrs == tuple(psnr(rows[FULL].images, found.originals).tolist())
    assert rows[FULL].error < 0.2


def test_an_update_is_that_of_a_real_visit(run: Path) -> None:
    """One step of SGD: −Δ/lr is autograd's gradient, of a stratum by itself as in the whole."""
    found, sender = open_attacked(run, None, None, batch=2, epochs=1, start=True, seed=0)
    x, y = found.data.batch(torch.tensor([0, 1]))
    names = sender.parts(["fc.linear"])["fc.linear"]
    gradients = torch.autograd.grad(
        F.cross_entropy(sender.model.train()(x), y), [sender.model.get_parameter(n) for n in names]
    )
    for parts in (names, sender.trainable):
        change = sender.change(parts, torch.tensor([0, 1]))
        assert tuple(change) == tuple(parts)
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(-change[name] / 0.1, gradient, rtol=1e-3, atol=1e-5)


def test_the_command(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    given = ("--examples", 2, "--steps", 2, "--strata", "head", "--out", out)
    assert fedstrata("attack", "update", run, *given) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(text in printed.out for text in ("full update", "head", "PSNR", str(out)))
    assert sorted(path.name for path in out.iterdir()) == ["update.json", "update.png"]
    assert fedstrata("attack", "update", run, *given, "--batch", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("out") == str(out)
    assert told == json.loads((out / "update.json").read_text())
    assert [row["name"] for row in told["rows"]] == [NOTHING, FULL, "head"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--strata", "heat"], "the model has no stratum 'heat' that trains (did you mean 'head'?)"),
        (["--batch", "0"], "batch must be a whole number from 1 to 64, not 0"),
        (["--examples", "1", "--batch", "2"], "has 1 examples, fewer than a batch of 2"),
    ],
)
def test_refusals(run: Path, tmp_path: Path, capsys: Capture, given: list[str], sentence: str) -> None:
    assert fedstrata("attack", "update", run, *given, "--out", tmp_path / "out") == 2
    assert sentence in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


def test_batch_norm_needs_two(tmp_path: Path, capsys: Capture) -> None:
    out = train(tmp_path / "run", model="resnet8(width=2, stem='3x3', maxpool=False)", rounds=1)
    assert fedstrata("attack", "update", out) == 2
    assert "batch norm cannot train on one example" in one_sentence(capsys)


def test_what_is_neither_image_nor_text(tmp_path: Path, capsys: Capture) -> None:
    out = train(tmp_path / "run", dataset="synthetic(shape=(7,))", model="mlp", rounds=1)
    assert fedstrata("attack", "update", out) == 2
    assert "are neither of them" in one_sentence(capsys)


# --- tokens ----------------------------------------------------------------------------------------------------------


def spanned(rows: int, chosen: list[int], size: int = 96, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs of all tokens, the gradient of a layer with so many outputs into which some of them went)."""
    inputs = torch.randn(tokens, size, generator=random())
    return inputs, torch.randn(rows, len(chosen), generator=random(1)) @ inputs[chosen]


@pytest.mark.parametrize(("rows", "rank"), [(12, 5), (3, 3)])
def test_tokens_span_a_linear_layers_gradient(rows: int, rank: int) -> None:
    """Σ δ_t·x_tᵀ has the span of all x_t, or, with fewer rows than tokens, as a low-rank factor, a part of it."""
    chosen = [3, 50, 51, 120, 199]
    inputs, gradient = spanned(rows, chosen)
    basis = row_space([gradient, 2 * gradient], [1e-4, 1e-4])
    assert basis.shape == (96, rank)
    rows_of = np.linalg.svd(gradient.double().numpy(), full_matrices=False)[2][:rank]
    np.testing.assert_allclose((basis @ basis.T).numpy(), rows_of.T @ rows_of, atol=1e-6)
    short = Shortlist(basis, most=60)
    for part in torch.arange(200).split(33):
        short.offer(inputs[part], part)
    assert len(short.shares) == 60
    assert short.tokens_in(9) == chosen


def test_the_whole_space_tells_nothing() -> None:
    inputs, gradient = spanned(120, list(range(100)))
    basis = row_space([gradient], [1e-4])
    assert not tells(basis)
    assert pursue(inputs.double(), basis, 100) == []


def test_rows_of_an_embedding() -> None:
    table = nn.Embedding(9, 4)
    change = torch.zeros(9, 4)
    change[[1, 7]] = 0.01
    change[3] = 1e-9  # rounding
    assert embedded_tokens(change, rounding_of(table.weight.detach())) == [1, 7]
    assert shares_found({1, 7, 8}, {1, 2, 7, 5}) == (0.5, pytest.approx(2 / 3))
    assert shares_found((), {1}) == (0.0, 0.0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny pre-trained transformer, and texts."""
    from tests.tiny_transformers import write_bert, write_texts  # skips without transformers and peft

    folder = tmp_path_factory.mktemp("texts")
    bert = write_bert(folder / "bert", hidden_size=96)
    data = write_texts(folder / "texts.tsv")
    settings = {
        "dataset": f"text(path='{data}')",
        "model": f"hf('{bert}', dropout=0.0)",
        "partition": "iid",
        "lr": 0.5,
        "rounds": 1,
    }
    return {**settings, "batch_size": 8, "clients": 3}


def test_tokens_come_back(texts: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    """The embedding tells all, the first block's layers most; later ones see tokens mixed."""
    run = train(tmp_path / "run", **texts)
    found = attack_update(run, examples=2)
    assert isinstance(found, TextUpdate)
    rows = {row.name: row for row in found.rows}
    assert rows[FULL].recall == rows[FULL].precision == 1.0
    assert rows[FULL].found == found.originals
    assert all(token > 3 for tokens in found.originals for token in tokens)  # no [CLS], no [SEP]
    names = [name for name, row in rows.items() if row.reads and "layer.0" in name]
    assert [name.rpartition(".")[2] for name in names] == ["query", "key", "value"]
    assert rows[names[0]].recall > 0.5
    assert rows[names[0]].precision > 0.9
    assert not any(row.reads for name, row in rows.items() if "layer.1" in name or "intermediate" in name)
    assert fedstrata("attack", "update", run, "--examples", 1) == 0
    printed = capsys.readouterr().out
    assert "the first visit: w" in printed
    assert "not looked at" in printed


def test_adapters_factors_tell_unlike_much(texts: dict[str, Any], tmp_path: Path) -> None:
    """What goes into A is the tokens' inputs; what goes into B is A's few outputs. At first B is 0, so A is still."""
    run = train(tmp_path / "run", **texts, adapter="lora(r=4, alpha=32, targets='query,value')")
    found = {row.name: row for row in attack_update(run, examples=3, strata=[]).rows}
    assert list(found) == [FULL, "every A", "every B"]
    assert found["every A"].recall > 0.2
    assert found["every A"].precision > 0.9
    assert found["every B"].recall < found["every A"].recall
    begun = {row.name: row for row in attack_update(run, examples=3, strata=[], start=True).rows}
    assert begun["every A"].recall == 0


def test_layers_that_see_single_tokens() -> None:
    """The embedding and what follows it, place by place; not what comes after tokens were mixed."""
    mixing = nn.GRU(6, 6, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.mixing, self.last = mixing, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.table(x)
            return self.last(self.mixing(self.first(x) + self.second(x))[0])

    found = find_sources(Net(), torch.zeros(1, 5).long(), 11)
    assert [(s.place, s.embeds) for s in found] == [("table", True), ("first", False), ("second", False)]
    assert found[1].inputs == found[2].inputs
