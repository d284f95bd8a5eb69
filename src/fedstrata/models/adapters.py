"""Adapters by name, `lora(r=8, alpha=16, targets='query,value')`: small trainable parts in a frozen model, by `peft`.

`adapt` puts them into any model with linear or convolutional layers and freezes all else but the head. To add an
adapter, write a function of keyword-only arguments and give it a row in `ADAPTERS`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fedstrata.core import spec
from fedstrata.core.extras import missing
from fedstrata.core.lazy import nn, torch
from fedstrata.errors import UsageError, did_you_mean, one_line
from fedstrata.models.adapted import adapted_layers
from fedstrata.models.strata import classifier, strata
from fedstrata.models.zoo.hugging_face import new_parameters

HEAD = "head"
"""What stands for the classifier, whatever it is called, and for layers that are new to a pre-trained model."""
Names = str | tuple[str, ...]
"""Names of layers or patterns of them: a text with commas between them, or several."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that is about to be put into a model.

    Args:
        name: of its kind, for messages.
        targets: layers that get one: names, their last parts, or patterns; all linear and convolutional ones where
            empty.
        trains: modules that train as they are, beside the adapters.
        config: a regular expression for the targets' names → peft's configuration.
    """

    name: str
    targets: tuple[str, ...]
    trains: tuple[str, ...]
    config: Callable[[str], Any]


def _load_peft() -> Any:
    """The package `peft`, imported only when an adapter needs it."""
    try:
        import peft
    except ImportError:
        raise missing("peft", "adapters need") from None
    return peft


def _split(names: Names) -> tuple[str, ...]:
    given = names.split(",") if isinstance(names, str) else names
    return tuple(name.strip() for name in given if name.strip())


def lora(
    *,
    r: int = 8,
    alpha: float | None = None,
    targets: Names = "",
    dropout: float = 0.0,
    rslora: bool = False,
    trains: Names = HEAD,
) -> Adapter:
    """LoRA (Hu et al., 2022): W + α/r·B·A with W frozen, A of r rows and B of r columns (needs the extra `peft`).

    Args:
        r: the rank.
        alpha: α; 2r where it is not given.
        targets: layers that get one: their names, the last parts of these, or patterns; all linear and convolutional
            ones where empty.
        dropout: of what goes into A.
        rslora: α/√r in the place of α/r (Kalajdzievski, 2023).
        trains: modules that train as they are; `head` is the classifier and whatever is new in a pre-trained model.
    """
    return _low_rank("lora", r, alpha, targets, dropout, trains, use_rslora=rslora)


def dora(
    *, r: int = 8, alpha: float | None = None, targets: Names = "", dropout: float = 0.0, trains: Names = HEAD
) -> Adapter:
    """DoRA (Liu et al., 2024): LoRA of the direction, and the length of each output's weights by itself (needs `peft`).

    Args:
        r: the rank.
        alpha: α; 2r where it is not given.
        targets: as of `lora`.
        dropout: of what goes into A.
        trains: as of `lora`.
    """
    return _low_rank("dora", r, alpha, targets, dropout, trains, use_dora=True)


def ia3(*, targets: Names = "", feedforward: Names = (), trains: Names = HEAD) -> Adapter:
    """IA³ (Liu et al., 2022): a factor for each output, or each input, of some layers (needs the extra `peft`).

    Args:
        targets: as of `lora`.
        feedforward: those of the targets of which the inputs are scaled, and not the outputs.
        trains: as of `lora`.
    """
    inputs = _split(feedforward)

    def config(pattern: str) -> Any:
        names = [name.replace("\\", "") for name in re.findall(r"[^|()]+", pattern)]
        for each in inputs:
            if not any(_is_named(name, [each]) for name in names):
                raise UsageError(f"adapter 'ia3': none of its targets is called '{each}'{_suggest(each, names)}")
        held = [re.escape(name) for name in names if _is_named(name, inputs)]
        chosen = "|".join(held)
        return _load_peft().IA3Config(target_modules=pattern, feedforward_modules=f"({chosen})" if held else [])

    return Adapter("ia3", _split(targets), _split(trains), config)


def _low_rank(
    name: str, r: int, alpha: float | None, targets: Names, dropout: float, trains: Names, **others: Any
) -> Adapter:
    """LoRA or one of its kin."""
    if r < 1:
        raise UsageError(f"adapter '{name}': the rank must be at least 1, not {r}")
    if alpha is not None and not 0 < alpha < float("inf"):
        raise UsageError(f"adapter '{name}': alpha must be above 0, not {alpha}")
    if not 0 <= dropout < 1:
        raise UsageError(f"adapter '{name}': dropout must be from 0 up to, but not including, 1, not {dropout}")

    def config(pattern: str) -> Any:
        scaled = 2 * r if alpha is None else alpha
        return _load_peft().LoraConfig(r=r, lora_alpha=scaled, target_modules=pattern, lora_dropout=dropout, **others)

    return Adapter(name, _split(targets), _split(trains), config)


ADAPTERS: dict[str, Callable[..., Adapter]] = {"lora": lora, "dora": dora, "ia3": ia3}
"""Every adapter by name."""


def adapt(model: nn.Module, adapter: str, sample: Any = None, seed: int | None = None) -> nn.Module:
    """Put adapters into a model, and freeze all else but the head; the model itself is changed and returned.

    Args:
        model: any module with linear or convolutional layers.
        adapter: a name from `ADAPTERS`, with arguments if wanted: `lora(r=8, targets='query,value')`.
        sample: a batch of inputs, by which the classifier is found where tracing cannot tell.
        seed: where given, it alone decides the adapters' weights, and torch's random state is left as it was.

    Raises:
        UsageError: one sentence for the first thing that does not fit.
    """
    build, arguments = spec.bind("adapter", ADAPTERS, adapter)
    made: Adapter = build(**arguments)
    if any(True for _ in adapted_layers(model)):
        raise UsageError(f"adapter '{made.name}': the model has adapters already")
    free = _free_modules(model, made, sample)
    _inject(model, made, _find_targets(model, made, free), seed)
    for module in free:
        module.requires_grad_(True)
    for name in new_parameters(model) if HEAD in made.trains else ():
        model.get_parameter(name).requires_grad_(True)
    return model


def _inject(model: nn.Module, made: Adapter, targets: Sequence[str], seed: int | None) -> None:
    """Let peft put an adapter around each target, and freeze all else."""
    peft, pattern = _load_peft(), "|".join(map(re.escape, targets))
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that are stored transposed, which it finds by itself
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(made.config(f"({pattern})"), model)
        except UsageError:
            raise
        except Exception as error:  # peft, of layers or ranks that do not go together
            raise UsageError(f"adapter '{made.name}': {one_line(str(error), 200)}") from error


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name, or its last parts, fit one of the patterns."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)


def _suggest(pattern: str, names: Sequence[str]) -> str:
    """The nearest name, or the last parts of all that are no numbers: deep models have hundreds of names."""
    ends = {end for name in names if not (end := name.rpartition(".")[2]).isdigit()}
    return did_you_mean(pattern, {*ends, *names}, ends or names)


def _free_modules(model: nn.Module, made: Adapter, sample: Any) -> list[nn.Module]:
    """The modules that train as they are."""
    found: list[nn.Module] = []
    names = [name for name, _ in model.named_modules() if name]
    for pattern in made.trains:
        if pattern == HEAD and not any(_is_named(name, [HEAD]) for name in names):
            found += _classifier(model, sample)
            continue
        chosen = [name for name in names if _is_named(name, [pattern])]
        if not chosen:
            raise UsageError(f"adapter '{made.name}': no module is called '{pattern}'{_suggest(pattern, names)}")
        found += map(model.get_submodule, chosen)
    return found


def _classifier(model: nn.Module, sample: Any) -> list[nn.Module]:
    """The classifier, if there is a single last layer; none of a model whose head its files held, as a causal one."""
    new = new_parameters(model)
    if new:
        return []  # these train, and nothing else of it
    last = classifier(strata(model, sample))
    return [] if last is None or _is_pretrained(model) else [model.get_submodule(last.name)]


def _is_pretrained(model: nn.Module) -> bool:
    """Whether all of a model's weights were read from files."""
    return hasattr(model, "config") and hasattr(model, "name_or_path") and not new_parameters(model)


def _find_targets(model: nn.Module, made: Adapter, free: Sequence[nn.Module]) -> list[str]:
    """The names of the layers that get an adapter."""
    left_out = {id(inner) for module in free for inner in module.modules()}
    new = {name.rpartition(".")[0] for name in new_parameters(model)} if HEAD in made.trains else set()
    inside = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]  # it reads weights by itself
    left_out |= {id(inner) for module in inside for inner in module.modules()}
    left_out |= _tied_modules(model)
    layers = [
        name
        for name, m in model.named_modules()
        if name and _takes_adapters(m) and id(m) not in left_out and name not in new
    ]
    if not layers:
        raise UsageError(f"adapter '{made.name}': the model has no linear or convolutional layer for it")
    if not made.targets:
        return layers
    for pattern in made.targets:
        if not any(_is_named(name, [pattern]) for name in layers):
            raise UsageError(
                f"adapter '{made.name}': no linear or convolutional layer that could have one is called "
                f"'{pattern}'{_suggest(pattern, layers)}"
            )
    return [name for name in layers if _is_named(name, made.targets)]


def _tied_modules(model: nn.Module) -> set[int]:
    """The modules, by identity, that own a parameter with others, such as an embedding that is the head too."""
    owners: dict[int, list[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(id(module))
    return {module for modules in owners.values() if len(modules) > 1 for module in modules}


def _takes_adapters(module: nn.Module) -> bool:
    """Whether a module is a linear or a convolutional layer; those of GPT-2 are linear ones of Hugging Face's own.

    Convolutions whose channels go by groups, such as depthwise ones, cannot be merged with an adapter.
    """
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return getattr(module, "groups", 1) == 1
    return type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"
