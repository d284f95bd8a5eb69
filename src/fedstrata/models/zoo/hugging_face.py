"""Pre-trained models of Hugging Face's `transformers` (the extra `hf`), from this machine's files.

The architecture and its parameters' names are the library's, so parties that train together need versions that agree.
What the files do not hold, such as the head for a new task, gets new weights, and `new_parameters` tells which those
are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fedstrata.core.hugging_face import ModelName, find_folder, is_token, load_library, read_tokenizer, reading
from fedstrata.core.lazy import nn
from fedstrata.core.parts import ExampleShape
from fedstrata.errors import UsageError
from fedstrata.models.zoo.parts import check_positive

Head = Literal["classification", "mean", "tokens", "causal"]
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "mean": "AutoModel",
    "tokens": "AutoModelForTokenClassification",
    "causal": "AutoModelForCausalLM",
}
_MEAN = "fedstrata_mean_head"
"""In an exported config.json: the classifier beside the encoder is one on the mean over the tokens."""
_NEW = "_fedstrata_new"
"""Attribute of a model: the names of the parameters that its files did not hold."""


def hf(
    input_shape: ExampleShape,
    classes: int,
    /,
    *,
    name: ModelName,
    head: Head = "classification",
    dropout: float | None = None,
    attention: Literal["sdpa", "eager"] = "sdpa",
    blocks: int | None = None,
) -> nn.Module:
    """A pre-trained model of Hugging Face's, from a folder or the cache; never fetched (needs the extra `hf`).

    Inputs are what its tokenizer makes of a text, by name. Safetensors only, and no code that comes with it is run.

    Args:
        input_shape: of one example.
        classes: how many outputs it needs; `causal` has its vocabulary's.
        name: of a folder with `config.json` and weights in safetensors, or of a model of the Hub in your cache.
        head: what it puts out: a class per text (`classification`, by the head that its library has for it; `mean`,
            from the mean over the tokens, for models of sentence embeddings), a class per token (`tokens`), or the next
            token (`causal`).
        dropout: all of its dropout rates; without it, its own.
        attention: torch's fused attention, or matrix by matrix.
        blocks: how many of its blocks it has, the first ones, before the head; without it, all.
    """
    what = "model 'hf'"
    check_positive("hf", classes=classes)
    if dropout is not None and not 0 <= dropout < 1:
        raise UsageError(f"{what}: dropout must be from 0 up to, but not including, 1, not {dropout}")
    folder = _find_model(what, name)
    model = _read(what, folder, head, classes, dropout, attention, blocks)
    if head == "mean":
        return _classify_mean(model, classes, folder)
    if head == "classification" and getattr(model.config, _MEAN, False):
        raise UsageError(f"{what}: the classifier in {folder} is one on the mean over the tokens: say head='mean'")
    size = getattr(model.config, "vocab_size", classes)
    if head == "causal" and size < classes:
        raise UsageError(f"{what}: its vocabulary has {size:,} tokens, and the data {classes:,}")
    return model  # type: ignore[no-any-return]


def _find_model(what: str, name: str) -> Path:
    """The folder of a whole model. The library would load adapters beside it, which nobody here knows of."""
    folder = find_folder(what, name)
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"{what}: {folder} holds adapters of peft's, which are not read: merge them into their model, or name the "
            "model beneath them"
        )
    return find_folder(what, str(folder), "config.json", "*.safetensors")


def _read(
    what: str, folder: Path, head: Head, classes: int, dropout: float | None, attention: str, blocks: int | None
) -> Any:
    """The model in a folder, with such a head, after so many of its blocks."""
    library = load_library(what)
    with reading(what, folder):
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _set_dropout(config, dropout)
        _set_depth(what, config, blocks)
        _set_padding(what, config, folder)
        if head != "causal":
            config.num_labels = classes
        config.use_cache = False  # a training step has no use for it, and it would come out beside the logits
        kind = getattr(library, _CLASSES[head])
        if type(config) not in kind._model_mapping:
            raise UsageError(f"{what}: a {config.model_type} has no head '{head}'")
        model, found = kind.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention,
            dtype="float32",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        vars(model)[_NEW] = _find_new(what, folder, model, found)
    return model


def _classify_mean(encoder: Any, classes: int, folder: Path) -> nn.Module:
    """An encoder with a classifier on the mean over the tokens, new unless such a one was exported into the folder.

    A pooler of a single token has no use.
    """
    from fedstrata.models.zoo.layers import MeanText

    config = encoder.config
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    head = nn.Linear(config.hidden_size, classes)
    nn.init.normal_(head.weight, std=getattr(config, "initializer_range", 0.02))
    nn.init.zeros_(head.bias)
    known = getattr(config, _MEAN, False) and _read_head(folder, head)
    setattr(config, _MEAN, True)
    model = MeanText(encoder.base_model_prefix, encoder, head, getattr(config, "hidden_dropout_prob", 0.0))
    inside = (f"{encoder.base_model_prefix}.{name}" for name in new_parameters(encoder) if "pooler" not in name)
    vars(model)[_NEW] = (*inside, *(() if known else ("classifier.weight", "classifier.bias")))
    return model


def _read_head(folder: Path, head: nn.Linear) -> bool:
    """Fill a classifier from a folder's files; False if theirs is of other sizes, or not there."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = (n for n in file.keys() if n in ("classifier.weight", "classifier.bias"))  # noqa: SIM118
            found |= {n.rpartition(".")[2]: file.get_tensor(n) for n in names}
    if {n: t.shape for n, t in found.items()} != {n: p.shape for n, p in head.named_parameters()}:
        return False
    head.load_state_dict(found)
    return True


def new_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that the files of a pre-trained model did not hold."""
    return frozenset(vars(model).get(_NEW, ()))


def _find_new(what: str, folder: Path, model: Any, found: dict[str, Any]) -> tuple[str, ...]:
    """The names of what the files did not hold: a head of other sizes is made anew, but nothing else."""
    unlike = {name if isinstance(name, str) else name[0] for name in found["mismatched_keys"]}
    is_encoder = not any(name.startswith(f"{model.base_model_prefix}.") for name, _ in model.named_parameters())
    wrong = [name for name in sorted(unlike) if is_encoder or name.startswith(f"{model.base_model_prefix}.")]
    if wrong:
        raise UsageError(f"{what}: the weights in {folder} do not fit its config.json: '{wrong[0]}' is of another size")
    names = dict(model.named_parameters())
    return tuple(sorted(name for name in unlike | set(found["missing_keys"]) if name in names))


def _set_depth(what: str, config: Any, blocks: int | None) -> None:
    """Leave blocks out at the end."""
    if blocks is None:
        return
    most = getattr(config, "num_hidden_layers", None)
    if most is None:
        raise UsageError(f"{what}: a {config.model_type} does not say how many blocks it has, so none can be left out")
    if not 1 <= blocks <= most:
        raise UsageError(f"{what}: blocks must be from 1 to the {most} that it has, not {blocks}")
    config.num_hidden_layers = blocks


def _set_padding(what: str, config: Any, folder: Path) -> None:
    """Name the token that texts are filled up with, where the configuration does not."""
    if not is_token(getattr(config, "pad_token_id", None), config) and any(folder.glob("tokenizer*")):
        _, config.pad_token_id = read_tokenizer(what, str(folder))


def _set_dropout(config: Any, rate: float | None) -> None:
    """Give all dropout rates of a configuration one value."""
    for name, value in ({} if rate is None else config.to_dict()).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and ("dropout" in name or "pdrop" in name):
            setattr(config, name, rate)
