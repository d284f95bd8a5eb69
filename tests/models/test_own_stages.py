"""Stages of an ordinary module: found by running it, or named; taps, the rest of the model, FedImpro and probes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.models.stages import find_stages, mark_stages, params_above, positions, stages_and_blocks


class Ordinary(nn.Module):
    """Two stages with code of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)  # registered first, run last
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).relu()
        return self.head(x.mean((2, 3)))


class Around(Ordinary):
    """Something goes around the features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.features(x) + x).relu().mean((2, 3)))


X = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def test_stages_are_found_in_the_order_in_which_they_run() -> None:
    model = Ordinary()
    assert find_stages(model, X) == ("features", "head")
    assert find_stages(Around(), X) == ("stem", "head")
    marked = mark_stages(model, X)
    assert fs.stages(marked) == ("features", "head")
    assert positions(marked) == ("features.0", "features.1", "features.2", "features", "head")
    assert "_fedstrata_stages" not in model.state_dict()


@pytest.mark.parametrize("stage", ["features.0", "features", "head"])
def test_a_tap_and_the_rest_are_the_model(stage: str) -> None:
    """Against the modules called by hand."""
    model = mark_stages(Ordinary(), X)
    features = model.features
    by_hand = {"features.0": features[0](X), "features": features(X), "head": model(X)}
    there = fs.tap(model, X, stage)
    assert torch.equal(there, by_hand[stage])
    assert torch.equal(fs.run_from(model, there, stage), model(X))
    doubled = fs.run_from(model, 2 * by_hand["features"], "features")
    assert torch.equal(doubled, model.head((2 * features(X)).relu().mean((2, 3))))


def test_parameters_above() -> None:
    model = mark_stages(Ordinary(), X)
    assert set(params_above(model, "features")) == {"head.weight", "head.bias"}
    assert set(params_above(model, "features.0")) == {
        f"{n}.{k}" for n in ("features.2", "head") for k in ("weight", "bias")
    }
    assert params_above(model, "head") == ()


def clients() -> list[tuple[Tensor, Tensor]]:
    made = []
    for client in range(3):
        x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(client))
        made.append((x, (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long()))
    return made


def train(model: nn.Module, **settings: Any) -> fs.Federation:
    run = fs.Federation(model, clients(), clients()[0], rounds=2, lr=0.05, engine="serial", **settings)
    run.fit()
    return run


def test_fedimpro_is_that_of_the_same_model_in_a_sequential() -> None:
    """The ordinary module and the same layers in an nn.Sequential: the same bits under the same names."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().mean((2, 3))

    ordinary = Ordinary()
    staged = nn.Sequential()
    staged.add_module("features", ordinary.features)
    staged.add_module("mean", Mean())
    staged.add_module("head", ordinary.head)
    found = [train(model, method="fedimpro(split='features')") for model in (ordinary, staged)]
    params = [run.state.params for run in found]
    assert params[0].keys() == params[1].keys()
    assert all(torch.equal(params[0][n], params[1][n]) for n in params[0])


def test_probes_see_the_stages() -> None:
    row = train(Ordinary(), probe="all").probes[-1]
    assert row["cka"]["mean"].keys() == {"features", "head"}
    assert "drift" in row


def test_blocks_of_a_model_on_another_device() -> None:
    """What the model is run on comes from where it was marked, and goes to where the model is."""
    model = mark_stages(Ordinary(), X)
    assert stages_and_blocks(model) == ("features", "head")
    assert stages_and_blocks(model.to("meta")) == ("features", "head")


def test_names_of_ones_own() -> None:
    named = fs.with_stages(Ordinary(), ("features",), X)
    assert fs.stages(named) == ("features",)
    assert train(named, method="fedimpro(split='features')").records
    with pytest.raises(fs.UsageError, match=r"has no child 'feature' \(did you mean 'features'\?\)"):
        fs.with_stages(Ordinary(), ("feature",), X)
    with pytest.raises(fs.UsageError, match=r"'features' is no stage: .*the model goes around it"):
        fs.with_stages(Around(), ("features",), X)
    with pytest.raises(fs.UsageError, match=r"has no stage 'feature' \(did you mean 'features'\?\)"):
        fs.tap(named, X, "feature")


class Linked(nn.Module):
    """The raw input goes around the features, with no parameter in between."""

    def __init__(self, link: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.features, self.head = nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 4)
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(self.stem(x))
        if self.link == "sum":
            h = h + x
        if self.link == "sign":
            h = torch.where(x > 0, h, -h)  # which no gradient shows
        if self.link == "training" and self.training:
            h = h + x
        if self.link == "seldom" and bool((x == 0).all()):
            h = -h
        return self.head(h)


TABLE = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("link", ["sum", "sign", "training", "seldom"])
@pytest.mark.parametrize("sample", [TABLE, TABLE[:1], torch.zeros(2, 6)], ids=["rows", "one row", "zeros"])
def test_what_the_raw_input_goes_around_is_no_stage(link: str, sample: Tensor) -> None:
    assert find_stages(Linked("none"), sample) == ("stem", "features", "head")
    assert find_stages(Linked(link), sample) == ("head",)
    with pytest.raises(fs.UsageError, match="'features' is no stage: the model goes around it, with something of its"):
        fs.with_stages(Linked(link), ("features",), sample)


def test_fedimpro_refuses_to_cut_where_the_input_goes_around() -> None:
    data = [(TABLE, torch.arange(5) % 4)] * 2
    with pytest.raises(fs.UsageError, match="fedimpro's split: the model has no stage 'features'"):
        fs.Federation(Linked(), data, method="fedimpro(split='features')", rounds=1)


class Tokens(nn.Module):
    """A mask is made of the tokens, or comes with them, and is used after the encoder."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.masked = masked

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        there = (tokens != 0 if mask is None else mask)[..., None]
        h = self.encoder(self.embed(tokens)).relu()
        h = (h * there).sum(1) / there.sum(1).clamp(min=1) if self.masked else h.mean(1)
        out: Tensor = self.head(h)
        return out


IDS = torch.randint(1, 9, (5, 6), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(5, 6, dtype=torch.bool)


def test_a_mask_goes_around_the_encoder() -> None:
    """Also where no token of the sample is masked."""
    assert find_stages(Tokens(), IDS) == find_stages(Tokens(), torch.zeros_like(IDS)) == ("head",)
    assert find_stages(Tokens(masked=False), IDS) == ("embed", "encoder", "head")


@pytest.mark.parametrize("sample", [(IDS, MASK), {"tokens": IDS, "mask": MASK}], ids=["tuple", "dict"])
def test_samples_of_several_parts(sample: Any) -> None:
    """As the model takes them."""
    model = fs.with_stages(Tokens(masked=False), ("embed", "encoder"), sample)
    for stage in ("embed", "encoder"):
        there = fs.tap(model, sample, stage)
        assert torch.equal(fs.run_from(model, there, stage), model(IDS, MASK))
    with pytest.raises(fs.UsageError, match="'encoder' is no stage: the model goes around it"):
        fs.with_stages(Tokens(), ("encoder",), sample)
    run = fs.Federation(model, [(sample, torch.arange(5) % 4)] * 2, method="fedimpro(split='encoder')", rounds=1)
    assert run.fit().records


class Lively(nn.Module):
    """Dropout, batch norm, spectral norm and writing in place: no two runs are alike, and nothing goes around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout())
        self.high = nn.Sequential(nn.Dropout(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.high(self.low(x).relu_())
        out: Tensor = self.head(self.recurrent(h[:, None])[0][:, 0])
        return out


def test_random_layers_and_running_statistics_are_no_detour() -> None:
    model = Lively()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert find_stages(model, TABLE) == ("low", "high", "head")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(fs.UsageError, match="'recurrent' is no stage: it does not put out one tensor with a row"):
        fs.with_stages(Lively(), ("recurrent",), TABLE)


@pytest.mark.parametrize(
    ("names", "sample", "message"),
    [
        (("head", "features"), X, "named once each, in the order in which they run: features, head$"),
        (("features", "features"), X, "named once each, in the order in which they run: features$"),
        ("features", X, r"names are several, such as \('features',\), not one text"),
        (
            ("features",),
            "x",
            "a batch of inputs is a tensor with a row for each, or a tuple or a dict of such tensors, not str",
        ),
        (("features",), 3.0, "a batch of inputs is .*, not a single number"),
        (("features",), X[:0], "the batch of inputs is empty"),
        (("features",), (X, X[:2]), "the parts of an input have one row per example each, not 0 5, 1 2"),
        (("features",), (X, X), r"the model cannot run on a sample of shape 0 \[4, 1, 6, 6\], 1 .*: "),
    ],
)
def test_names_and_samples_that_do_not_fit(names: Any, sample: Any, message: str) -> None:
    with pytest.raises(fs.UsageError, match=message):
        fs.with_stages(Ordinary(), names, sample)
