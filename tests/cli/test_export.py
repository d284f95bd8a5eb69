"""`fedstrata model export`: adapters that peft loads, and a merged model that gives the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_transformers import LORA, write_bert, write_gpt2, write_texts  # isort: skip  # skips without peft

import peft
import transformers

import fedstrata as fs
from fedstrata.models.adapters import adapt
from fedstrata.models.export import merge_adapters, write_adapter
from fedstrata.models.zoo.hugging_face import new_parameters
from fedstrata.run import deal, final_model, open_run
from tests.models.test_adapters import ZOO, shake, zoo_model
from tests.small_runs import config, fedstrata, one_sentence

SETTINGS: dict[str, Any] = {
    "adapter": LORA,
    "clients": 2,
    "partition": "iid",
    "rounds": 2,
    "participation": 1.0,
    "batch_size": 5,
    "lr": 0.5,
    "method": "fedavg",
    "engine": "serial",
}


def trained(tmp_path: Path, model: str, dataset: str, **changes: Any) -> tuple[Path, Any, Any]:
    """(the run's directory, its final model, inputs)."""
    settings = config(**{**SETTINGS, "model": model, "dataset": dataset, **changes})
    open_run(settings, tmp_path / "run").fit()
    data, _ = deal(settings)
    return tmp_path / "run", final_model(tmp_path / "run", settings, data).eval(), data.test.x


@pytest.mark.parametrize("adapter", [LORA, "dora(r=2, targets='query,dense')", "ia3(targets='key,value')"])
def test_a_transformer(tmp_path: Path, adapter: str) -> None:
    bert, texts = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.tsv", rows=45)
    run, model, x = trained(tmp_path, f"hf('{bert}')", f"text(path='{texts}')", adapter=adapter)
    assert fedstrata("model", "export", run, "--merged") == 0
    assert sorted(path.name for path in (run / "export").iterdir()) == ["adapter", "merged"]
    with torch.no_grad():
        expected = model(**x.tensors).logits
        kind = transformers.AutoModelForSequenceClassification
        merged = kind.from_pretrained(run / "export" / "merged", local_files_only=True).eval()
        torch.testing.assert_close(merged(**x.tensors).logits, expected, atol=1e-5, rtol=1e-5)
        fresh = fs.build_model(f"hf('{bert}')", x.shape[1:], 3, seed=77)
        loaded = peft.PeftModel.from_pretrained(fresh, run / "export" / "adapter").eval()
        torch.testing.assert_close(loaded(**x.tensors).logits, expected, atol=1e-6, rtol=1e-6)
    modes = {path.stat().st_mode & 0o777 for path in (run / "export").rglob("*") if path.is_file()}
    assert modes == {(run / "metrics.jsonl").stat().st_mode & 0o777}  # others may read it as they may the run
    stored = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.classifier.weight" in stored
    assert not any("base_layer" in name or "embeddings" in name for name in stored)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "export" / "merged")
    assert tokenizer("w1")["input_ids"] == [2, 5, 3]
    again = fs.build_model(f"hf('{run / 'export' / 'merged'}')", x.shape[1:], 3)
    torch.testing.assert_close(again.eval()(**x.tensors).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_causal_model_whose_embedding_is_its_head(tmp_path: Path) -> None:
    gpt2, texts = write_gpt2(tmp_path / "gpt2"), write_texts(tmp_path / "texts.tsv", rows=45)
    dataset = f"text(path='{texts}', task='next_token')"
    run, model, x = trained(tmp_path, f"hf('{gpt2}', head='causal')", dataset, adapter="lora(r=2, targets='c_attn')")
    assert fedstrata("model", "export", run, "--merged", "--out", tmp_path / "out") == 0
    with torch.no_grad():
        expected = model(**x.tensors).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", local_files_only=True)
        torch.testing.assert_close(merged.eval()(**x.tensors).logits, expected, atol=1e-5, rtol=1e-5)
        fresh = transformers.AutoModelForCausalLM.from_pretrained(gpt2, local_files_only=True)
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out" / "adapter").eval()
        torch.testing.assert_close(loaded(**x.tensors).logits, expected, atol=1e-6, rtol=1e-6)


def test_a_head_on_the_mean_over_the_tokens(tmp_path: Path) -> None:
    """Its library has no such model: the encoder is loaded as ever, and we read the head beside it."""
    bert, texts = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.tsv", rows=45)
    run, model, x = trained(tmp_path, f"hf('{bert}', head='mean')", f"text(path='{texts}')")
    assert fedstrata("model", "export", run, "--merged") == 0
    merged = run / "export" / "merged"
    again = fs.build_model(f"hf('{merged}', head='mean')", x.shape[1:], 3, seed=5).eval()
    fresh = fs.build_model(f"hf('{bert}', head='mean')", x.shape[1:], 3, seed=5)
    encoder = transformers.AutoModel.from_pretrained(merged, local_files_only=True).eval()
    with torch.no_grad():
        expected = model(**x.tensors)
        torch.testing.assert_close(again(**x.tensors), expected, atol=1e-5, rtol=1e-5)
        loaded = peft.PeftModel.from_pretrained(fresh, run / "export" / "adapter").eval()
        torch.testing.assert_close(loaded(**x.tensors), expected, atol=1e-5, rtol=1e-5)
        ours, theirs = again.bert(**x.tensors).last_hidden_state, encoder(**x.tensors).last_hidden_state
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert new_parameters(again) == set()
    assert new_parameters(fresh) == {"classifier.weight", "classifier.bias"}
    assert new_parameters(fs.build_model(f"hf('{merged}', head='mean')", x.shape[1:], 2)) == new_parameters(fresh)


@pytest.mark.parametrize("whose", ["archs", "dataset"])
def test_the_tokenizer_that_texts_were_read_with(tmp_path: Path, whose: str) -> None:
    """That of clients' own models, or one that the dataset names: the model's folder need not have any."""
    bert, texts = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.tsv", rows=45)
    if whose == "archs":
        archs = f"hf('{bert}', blocks=1) + lora(r=1, targets='query'); hf('{bert}') + lora(r=2, targets='query')"
        trained(tmp_path, "", f"text(path='{texts}')", archs=archs, adapter=None, method="hetlora")
    else:
        tokenizer = write_bert(tmp_path / "tokenizer")
        for path in bert.glob("tokenizer*"):
            path.unlink()
        trained(tmp_path, f"hf('{bert}')", f"text(path='{texts}', tokenizer='{tokenizer}')")
    assert fedstrata("model", "export", tmp_path / "run", "--merged") == 0
    merged = tmp_path / "run" / "export" / "merged"
    assert transformers.AutoTokenizer.from_pretrained(merged)("w1")["input_ids"] == [2, 5, 3]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("adapter", ["lora(r=2)", "dora(r=2)", "ia3"])
def test_models_of_ours(tmp_path: Path, name: str, adapter: str) -> None:
    """Merged as unmerged, and as peft reads the adapter directory."""
    base, x = zoo_model(name)
    model = adapt(zoo_model(name)[0], adapter, x, seed=1).eval()
    shake(model, [n for n, p in model.named_parameters() if p.requires_grad and "ia3" not in n])
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.mul_(1.5 if "ia3" in n else 1.0)
    merged = merge_adapters(model)
    assert dict(merged.named_parameters()).keys() == dict(base.named_parameters()).keys()
    torch.testing.assert_close(merged(x), model(x), atol=1e-4, rtol=1e-4)
    write_adapter(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_model_without_adapters(tmp_path: Path) -> None:
    dataset = "synthetic(examples=40, test_examples=20)"
    run, model, _ = trained(tmp_path, "mlp(hidden=(4,))", dataset, adapter=None)
    assert fedstrata("model", "export", run) == 0
    stored = load_file(run / "export" / "model" / "model.safetensors")
    assert all(torch.equal(stored[n], t) for n, t in model.state_dict().items())


def test_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("model", "export", tmp_path / "none") == 2
    assert "has no run.toml" in one_sentence(capsys)
    dataset = "synthetic(examples=40, test_examples=20)"
    run, _, _ = trained(tmp_path, "mlp(hidden=(4,))", dataset, adapter="lora(r=2)")
    (tmp_path / "out").mkdir()
    assert fedstrata("model", "export", run, "--out", tmp_path / "out") == 2
    assert "is there already" in one_sentence(capsys)
    (run / "model.safetensors").unlink()
    assert fedstrata("model", "export", run) == 2
    assert "the run is not finished" in one_sentence(capsys)
    assert not (run / "export").exists()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2
