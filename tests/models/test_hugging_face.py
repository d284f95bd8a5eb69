"""Models of Hugging Face's from files on this machine: what is read, what is refused, and their strata."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_transformers import minilm, write_bert, write_gpt2  # isort: skip  # skips without transformers

import fedstrata as fs
from fedstrata.core.parts import Parts
from fedstrata.errors import UsageError
from fedstrata.models.adapted import base_digest, base_names
from fedstrata.models.export import write_model
from fedstrata.models.registry import tokenizer_of
from fedstrata.models.strata import strata
from fedstrata.models.zoo.hugging_face import new_parameters

SHAPE = {"input_ids": (12,), "attention_mask": (12,)}


def build(folder: Path, outputs: int = 3, seed: int = 0, **arguments: Any) -> torch.nn.Module:
    told = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return fs.build_model(f"hf({str(folder)!r}{told})", SHAPE, outputs, seed=seed)


def inputs(rows: int = 4, length: int = 12) -> Parts:
    ids = torch.randint(4, 60, (rows, length), generator=torch.Generator().manual_seed(1))
    return Parts({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_the_weights_are_the_files_and_the_head_is_the_seeds(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_bert(tmp_path)
    first, second, other = build(folder), build(folder), build(folder, seed=1)
    stored = load_file(folder / "model.safetensors")
    params = dict(first.named_parameters())
    assert new_parameters(first) == {"classifier.weight", "classifier.bias"}
    for name, tensor in stored.items():
        assert torch.equal(params[f"bert.{name}"], tensor), name
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(dict(other.named_parameters())["classifier.weight"], params["classifier.weight"])
    assert params["classifier.weight"].shape == (3, 16)


def test_strata_in_execution_order(tmp_path: Path) -> None:
    found = strata(build(write_bert(tmp_path)), inputs())
    names = [s.name.removeprefix("bert.") for s in found]
    block = ["attention.self.query", "attention.self.key", "attention.self.value"]
    block += ["attention.output.dense", "intermediate.dense", "output.dense"]
    embeddings = [f"embeddings.{kind}_embeddings" for kind in ("word", "token_type", "position")]
    blocks = [f"encoder.layer.{at}.{part}" for at in (0, 1) for part in block]
    assert names == [*embeddings, *blocks, "pooler.dense", "classifier"]
    assert [s.name for s in found if s.classifies] == ["classifier"]
    assert not any(s.idle for s in found)


def test_a_tied_embedding_is_counted_once_in_its_place(tmp_path: Path) -> None:
    model = build(write_gpt2(tmp_path), outputs=64, head="causal")
    found = strata(model, inputs())
    names = [name for s in found for name in s.params]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert [s.name for s in found if "transformer.wte.weight" in s.params] == ["transformer.wte"]
    assert found[0].name == "transformer.wte"
    assert not any("lm_head" in name for name in names)
    assert model(**inputs().tensors).logits.shape == (4, 12, 64)
    assert new_parameters(model) == set()


def test_a_head_per_token(tmp_path: Path) -> None:
    model = build(write_bert(tmp_path), head="tokens")
    assert model(**inputs().tensors).logits.shape == (4, 12, 3)


def test_a_head_on_the_mean_over_the_tokens(tmp_path: Path) -> None:
    """By hand: logits = W·(mean of the hidden states of the text's own tokens) + b."""
    model = build(write_bert(tmp_path), head="mean").eval()
    x = inputs(2).tensors
    x["attention_mask"] = torch.tensor([[1] * 12, [1] * 5 + [0] * 7])
    params = dict(model.named_parameters())
    hidden = model.bert(**x).last_hidden_state.double()
    weight, bias = params["classifier.weight"].double(), params["classifier.bias"].double()
    expected = torch.stack([weight @ hidden[0].mean(0) + bias, weight @ hidden[1, :5].mean(0) + bias])
    torch.testing.assert_close(model(**x).double(), expected, atol=1e-6, rtol=0)
    longer = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in x.items()}
    torch.testing.assert_close(model(**longer), model(**x), atol=1e-6, rtol=0)
    assert new_parameters(model) == {"classifier.weight", "classifier.bias"}
    found = strata(model, inputs())
    assert [s.name for s in found if s.classifies] == ["classifier"]
    assert not any("pooler" in s.name or s.idle for s in found)


def test_an_exported_head_on_the_mean_is_not_taken_for_another(tmp_path: Path) -> None:
    """The library's head has a classifier of the same name and size, on what its pooler puts out."""
    model = build(write_bert(tmp_path / "bert"), head="mean").eval()
    write_model(model, tmp_path / "export")
    with torch.no_grad():
        again = build(tmp_path / "export", head="mean").eval()
        torch.testing.assert_close(again(**inputs(2).tensors), model(**inputs(2).tensors), atol=0, rtol=0)
    with pytest.raises(UsageError, match="is one on the mean over the tokens: say head='mean'"):
        build(tmp_path / "export")


def test_weights_of_another_size_are_refused_under_any_head(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    for head in ("classification", "mean"):
        with pytest.raises(UsageError, match=r"do not fit its config.json"):
            build(folder, head=head)


def test_dropout_is_set_everywhere(tmp_path: Path) -> None:
    model = build(write_bert(tmp_path), dropout=0).train()
    x = inputs().tensors
    assert torch.equal(model(**x).logits, model(**x).logits)
    own = build(tmp_path).train()
    assert not torch.equal(own(**x).logits, own(**x).logits)


def test_both_kinds_of_attention_agree(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    x = inputs().tensors
    fused, plain = (build(folder, attention=kind).eval()(**x).logits for kind in ("sdpa", "eager"))
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=0)


def test_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is tried, neither for a folder nor for a name that is not in the cache."""
    folder = write_bert(tmp_path / "bert")
    tried: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **how: tried.append(address) or [])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    build(folder)
    with pytest.raises(UsageError, match="neither a folder nor in the cache of Hugging Face, and nothing is fetched"):
        build(Path("some/model-that-nobody-has"))
    assert tried == []


def test_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the Hub stands for what its user has downloaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    folder = write_bert(repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    assert new_parameters(build(Path("someone/tiny"))) == {"classifier.weight", "classifier.bias"}
    assert tokenizer_of("hf('someone/tiny')") == "someone/tiny"


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    model = build(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"there is no \*.safetensors in .*weights in other formats are not read"):
        build(folder)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UsageError, match="model 'hf'"):
        build(folder)


@pytest.mark.parametrize(
    ("spoil", "arguments", "refusal"),
    [
        (lambda f: (f / "config.json").unlink(), {}, "there is no config.json in"),
        (lambda f: (f / "config.json").write_text("{"), {}, "cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no tensors"), {}, "cannot be read"),
        (lambda f: None, {"head": "classifcation"}, "does not fit"),
        (lambda f: None, {"dropout": 1.0}, "dropout must be from 0 up to"),
        (lambda f: None, {"size": 3}, "has no argument 'size'"),
    ],
)
def test_one_sentence(tmp_path: Path, spoil: Any, arguments: dict[str, Any], refusal: str) -> None:
    folder = write_bert(tmp_path)
    spoil(folder)
    with pytest.raises(UsageError, match=refusal) as told:
        build(folder, **arguments)
    assert "\n" not in str(told.value)


def test_adapters_beside_a_model_are_not_read(tmp_path: Path) -> None:
    """The library would load them, pickled ones too, and they would be part of a base that nobody knows of."""
    folder = write_bert(tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/model"}')
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(UsageError, match="holds adapters of peft's, which are not read: merge them into their model"):
        build(folder)


def test_a_head_of_other_classes_is_made_anew(tmp_path: Path) -> None:
    """What was tuned for two classes serves for three, with a new head; any other weight must fit."""
    two = build(write_bert(tmp_path / "base"), outputs=2)
    two.save_pretrained(tmp_path / "two")
    assert new_parameters(build(tmp_path / "two", outputs=2)) == set()
    assert new_parameters(build(tmp_path / "two", outputs=3)) == {"classifier.weight", "classifier.bias"}
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))
    with pytest.raises(UsageError, match=r"do not fit its config\.json"):
        build(tmp_path / "two")


def test_a_model_without_adapters_has_no_base(tmp_path: Path) -> None:
    model = build(write_bert(tmp_path))
    model.bert.requires_grad_(False)
    assert base_names(model) == set()
    assert base_digest(model) == ""


def test_the_real_minilm() -> None:
    model = build(minilm(), outputs=2)
    assert sum(p.numel() for p in model.parameters()) == 22_713_986
    assert len(strata(model, inputs())) == 41
