"""Adapters: what they add and freeze, their place in the strata, and what can be computed with their factors."""

from __future__ import annotations

import builtins
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_transformers import LORA, minilm, write_bert, write_gpt2  # isort: skip  # skips without peft

import fedstrata as fs
from fedstrata.core.low_rank import adapters_of, factor_names, merge, product, rank
from fedstrata.core.parts import Parts
from fedstrata.errors import UsageError
from fedstrata.models.adapted import base_digest, base_names, name_in_base
from fedstrata.models.adapters import ADAPTERS, adapt
from fedstrata.models.parts import names_of_parts
from fedstrata.models.strata import strata
from tests.models.test_hugging_face import build, inputs

ZOO = {
    "mlp": (3, 8, 8),
    "cnn2": (3, 16, 16),
    "resnet8(width=2)": (3, 16, 16),
    "unet(width=2)": (3, 16, 16),
    "vit(patch=4, dim=16, depth=2, heads=2)": (3, 16, 16),
    "gpt(width=16, heads=2)": (12,),
}


def zoo_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model with random running statistics and weights, and a batch for it."""
    shape = ZOO[name]
    model = fs.build_model(name, shape, 10, seed=0)
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(0, 10, (3, *shape), generator=draw) if len(shape) == 1 else torch.randn(3, *shape, generator=draw)
    return model, x


def shake(model: nn.Module, names: Any) -> None:
    """Give some parameters other numbers, such as those that begin at zero."""
    params, draw = dict(model.named_parameters()), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in names:
            params[name].copy_(0.1 * torch.randn(params[name].shape, generator=draw))


def merged_into(base: nn.Module, adapted: nn.Module, found: Any) -> nn.Module:
    """The model without adapters, with the sums W + scale·B·A in it."""
    made = copy.deepcopy(base).eval()
    own, params = dict(made.named_parameters()), {n: p.detach() for n, p in adapted.named_parameters()}
    with torch.no_grad():
        for name, value in merge(params, adapters_of(found)).items():
            own[name_in_base(name)].copy_(value)
    return made


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("adapter", ["lora(r=2, alpha=3)", "lora(r=4, alpha=8, rslora=True)", "dora(r=2)", "ia3"])
def test_on_every_kind_of_layer_of_ours(name: str, adapter: str) -> None:
    """At first nothing changes; then what the adapter adds is what the factors say."""
    model, x = zoo_model(name)
    base = copy.deepcopy(model).eval()
    adapted = adapt(model, adapter, x, seed=1).eval()
    found = strata(adapted, x)
    torch.testing.assert_close(adapted(x), base(x), atol=1e-5, rtol=1e-5)
    assert [s.name for s in found] == [s.name for s in strata(base, x)]
    assert sorted(n for s in found for n in s.params) == sorted(dict(adapted.named_parameters()))
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained.isdisjoint(base_names(adapted))
    if adapter == "ia3":
        assert adapters_of(found) == ()
        return
    shake(adapted, factor_names(found, "B"))
    assert float((adapted(x) - base(x)).detach().abs().max()) > 1e-3
    if adapter.startswith("lora"):
        torch.testing.assert_close(adapted(x), merged_into(base, adapted, found)(x), atol=1e-5, rtol=1e-4)
        assert {one.scale for one in adapters_of(found)} == {1.5 if "alpha=3" in adapter else 4.0}
    else:
        assert all(one.magnitude in trained for one in adapters_of(found))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_of_any_number_of_axes(kind: Any) -> None:
    axes = int(kind.__name__[4])
    x = torch.randn(2, 4, *[6] * axes, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(kind(4, 6, 3, stride=2, padding=1), nn.Flatten(), nn.LazyLinear(2))
    model(x)
    base = copy.deepcopy(model).eval()
    adapted = adapt(model, "lora(r=2)", x, seed=1).eval()
    found = strata(adapted, x)
    shake(adapted, factor_names(found, "B"))
    torch.testing.assert_close(adapted(x), merged_into(base, adapted, found)(x), atol=1e-5, rtol=1e-4)


def test_a_product_by_hand() -> None:
    """B = (1, 2)ᵀ, A = (3, 4): B·A = ((3, 4), (6, 8)), times 0.5; of a transposed weight, its transpose."""
    one = fs.LowRank(a="a", b="b", weight="w", scale=0.5)
    params = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0], [2.0]]), "w": torch.ones(2, 2)}
    assert rank(params, one) == 1
    assert product(params, one).tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert merge(params, [one])["w"].tolist() == [[2.5, 3.0], [4.0, 5.0]]
    turned = fs.LowRank(a="a", b="b", weight="w", scale=0.5, transposed=True)
    assert product(params, turned).tolist() == [[1.5, 3.0], [2.0, 4.0]]


def test_the_strata_of_a_transformer(tmp_path: Path) -> None:
    """Factors are part of their layer's stratum, and can be named apart."""
    model = build(write_bert(tmp_path))
    before = [s.name for s in strata(model, inputs())]
    adapted = adapt(model, LORA, inputs(), seed=1)
    found = strata(adapted, inputs())
    assert [s.name for s in found] == before
    query = next(s for s in found if s.name == "bert.encoder.layer.0.attention.self.query")
    ends = [name.removeprefix(f"{query.name}.") for name in query.params]
    assert ends == ["base_layer.weight", "base_layer.bias", "lora_A.default.weight", "lora_B.default.weight"]
    assert query.low_rank is not None
    assert (query.low_rank.a, query.low_rank.b) == query.params[2:]
    assert (query.low_rank.weight, query.low_rank.scale) == (query.params[0], 4.0)
    assert len(adapters_of(found)) == 4
    assert names_of_parts(["lora_A"], found) == set(factor_names(found, "A"))
    assert names_of_parts(["lora_B"], found) == set(factor_names(found, "B"))
    free = {n for n, p in adapted.named_parameters() if p.requires_grad}
    head = {"classifier.weight", "classifier.bias"}
    assert free == {*factor_names(found, "A"), *factor_names(found, "B"), *head}
    assert base_names(adapted) == {n for n, _ in adapted.named_parameters()} - free


def test_linear_layers_that_are_stored_transposed(tmp_path: Path) -> None:
    model = build(write_gpt2(tmp_path), outputs=64, head="causal").eval()
    base = copy.deepcopy(model)
    adapted = adapt(model, "lora(r=2, targets='c_attn,c_proj')", inputs(), seed=1).eval()
    found = strata(adapted, inputs())
    assert all(one.transposed for one in adapters_of(found))
    assert len(adapters_of(found)) == 6
    shake(adapted, factor_names(found, "B"))
    x = inputs().tensors
    merged = merged_into(base, adapted, found)(**x).logits
    torch.testing.assert_close(adapted(**x).logits, merged, atol=1e-5, rtol=1e-4)
    assert "transformer.wte.weight" in base_names(adapted)
    everywhere = strata(adapt(copy.deepcopy(base), "lora(r=2)", inputs()), inputs())
    assert len(adapters_of(everywhere)) == 8
    assert everywhere[0].low_rank is None  # the embedding that is the head, too


def test_the_seed_alone_decides(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    made = [dict(adapt(build(folder), LORA, inputs(), seed=seed).named_parameters()) for seed in (1, 1, 2)]
    a = "bert.encoder.layer.0.attention.self.query.lora_A.default.weight"
    assert torch.equal(made[0][a], made[1][a])
    assert not torch.equal(made[0][a], made[2][a])


def test_the_digest_is_of_the_base_alone(tmp_path: Path) -> None:
    """Neither the adapter nor the new head is in it; every frozen weight is."""
    folder = write_bert(tmp_path / "one")
    first = adapt(build(folder), LORA, inputs(), seed=1)
    wider = adapt(build(folder, seed=5), "lora(r=4, targets='key')", inputs(), seed=2)
    assert len(base_digest(first)) == 16
    assert base_digest(first) == base_digest(wider)
    assert base_digest(first) != base_digest(adapt(build(write_bert(tmp_path / "two", seed=1)), LORA, inputs()))
    with torch.no_grad():
        first.bert.encoder.layer[1].output.dense.bias[3] += 1e-6
    assert base_digest(first) != base_digest(wider)


def test_a_model_that_its_user_has_adapted(tmp_path: Path) -> None:
    """peft's own wrapper has the same strata, factors and base, under its names."""
    import peft

    folder = write_bert(tmp_path)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    theirs = peft.get_peft_model(build(folder), config)
    found = strata(theirs, inputs())
    assert len(adapters_of(found)) == 4
    ours = adapt(build(folder), LORA, inputs(), seed=1)
    names = {name_in_base(n) for n in base_names(theirs)}
    assert {name_in_base(n) for n in base_names(ours)} <= names  # its wrapper keeps a frozen copy of the head
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert any("classifier" in n for n in trained)
    other = peft.get_peft_model(build(folder, seed=1), config)  # at another site, where its first head was drawn anew
    assert base_digest(theirs) == base_digest(other) != ""
    with torch.no_grad():
        other.get_base_model().bert.pooler.dense.bias[0] += 1
    assert base_digest(theirs) != base_digest(other)


def test_a_module_of_ones_own_that_calls_something_its_original() -> None:
    """Only what peft has put in a head's place is no part of the base."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].original_module = nn.Linear(4, 4)
    assert base_digest(model) == ""
    model = adapt(model, "lora(r=2, targets='1', trains='')", torch.randn(3, 4))
    before = base_digest(model)
    with torch.no_grad():
        model.get_parameter("0.original_module.bias").add_(1)
    assert base_digest(model) != before


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
def test_layers_that_are_not_one_matrix() -> None:
    """Channels by groups, and attention's several weights: none of our adapters, and no product of peft's."""
    import peft

    layers = [nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(), nn.Linear(32, 3)]
    x = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    found = strata(adapt(nn.Sequential(*copy.deepcopy(layers)), "lora(r=2)", x), x)
    assert [s.name for s in found if s.low_rank] == ["0"]
    with pytest.raises(UsageError, match="no linear or convolutional layer that could have one is called '1'"):
        adapt(nn.Sequential(*copy.deepcopy(layers)), "lora(r=2, targets='1')", x)
    theirs = peft.get_peft_model(nn.Sequential(*layers), peft.LoraConfig(r=8, target_modules=["0", "1"]))
    assert len(adapters_of(strata(theirs, x))) == 1
    attention = peft.get_peft_model(Attentive(), peft.LoraConfig(r=2, target_modules=["attention"]))
    assert adapters_of(strata(attention, torch.randn(2, 3, 4))) == ()


class Attentive(nn.Module):
    """Attention whose layers read their weights by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_what_trains_beside_the_adapters(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)

    def free(adapter: str) -> set[str]:
        model = adapt(build(folder), adapter, inputs(), seed=1)
        return {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}

    assert free("lora(targets='query')") == {"classifier"}
    assert free("lora(targets='query', trains='pooler.dense,head')") == {"classifier", "bert.pooler.dense"}
    assert free("lora(targets='query', trains='')") == set()
    assert free("lora(targets='layer.0.*.query', trains='layer.1.*.LayerNorm')") == {
        "bert.encoder.layer.1.attention.output.LayerNorm",
        "bert.encoder.layer.1.output.LayerNorm",
    }


def test_targets_are_names_or_patterns(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)

    def targets(written: str) -> list[str]:
        model = adapt(build(folder), f"lora(targets={written})", inputs(), seed=1)
        return [s.name.removeprefix("bert.encoder.layer.") for s in strata(model, inputs()) if s.low_rank]

    assert targets("'query'") == ["0.attention.self.query", "1.attention.self.query"]
    assert targets("('layer.1.*.key', 'pooler.dense')") == ["1.attention.self.key", "bert.pooler.dense"]
    assert targets("'attention.*.dense'") == ["0.attention.output.dense", "1.attention.output.dense"]
    assert len(targets("''")) == 13


@pytest.mark.parametrize(
    ("adapter", "refusal"),
    [
        ("lora(targets='qurey')", r"no linear or convolutional layer that could have one is called 'qurey'.*'query'"),
        ("lora(targets='word_embeddings')", "no linear or convolutional layer that could have one"),
        ("lora(r=0)", "the rank must be at least 1, not 0"),
        ("lora(alpha=-1.0)", "alpha must be above 0"),
        ("lora(dropout=1.0)", "dropout must be from 0 up to"),
        ("lora(trains='hed')", "no module is called 'hed'"),
        ("lora(targets='nothing-like-it')", r"'nothing-like-it' \(known: dense, key, query, value\)"),
        ("ia3(targets='key', feedforward='dense')", r"none of its targets is called 'dense' \(known: key\)"),
        ("lora(rank=8)", "has no argument 'rank'"),
        ("lara", "there is no adapter 'lara'.*lora"),
    ],
)
def test_one_sentence(tmp_path: Path, adapter: str, refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal) as told:
        adapt(build(write_bert(tmp_path)), adapter, inputs())
    assert "\n" not in str(told.value)


def test_nothing_to_adapt() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.GRU(4, 4))
    with pytest.raises(UsageError, match="the model has no linear or convolutional layer for it"):
        adapt(model, "lora(trains='')")
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    with pytest.raises(UsageError, match="the model has no linear or convolutional layer for it"):
        adapt(attention, "lora(trains='')")  # it reads its layers' weights by itself: an adapter would do nothing


def test_layers_that_have_numbers_for_names_are_listed_by_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UsageError, match=r"is called 'query' \(known: 0, 2\)"):
        adapt(model, "lora(targets='query', trains='')", torch.randn(3, 4))


def test_adapters_once_only(tmp_path: Path) -> None:
    model = adapt(build(write_bert(tmp_path)), LORA, inputs())
    with pytest.raises(UsageError, match="the model has adapters already"):
        adapt(model, LORA, inputs())


def test_every_adapter_is_tried_above() -> None:
    assert set(ADAPTERS) == {"lora", "dora", "ia3"}


def test_the_real_minilm() -> None:
    model = adapt(build(minilm(), outputs=2), "lora(r=8, alpha=16, targets='query,value')", inputs(), seed=1)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 6 * 2 * 2 * 8 * 384 + 2 * 384 + 2
    assert base_digest(model) == "8eedd5e1a55a8b96"
    assert isinstance(inputs(), Parts)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = build(write_bert(tmp_path)), builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] in ("peft", "transformers"):
            raise ModuleNotFoundError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"adapters need the package peft: pip install 'fedstrata\[peft\]'"):
        adapt(model, LORA, inputs())
    with pytest.raises(UsageError, match=r"model 'hf' needs the package transformers: pip install 'fedstrata\[hf\]'"):
        build(tmp_path)
