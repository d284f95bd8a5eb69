"""The zoo: every model by its name, such as `resnet8(width=16)`.

Every model is an `nn.Sequential` with named children, its *stages*, so that it can be tapped after any stage
and run from there (`fedstrata.tap`, `fedstrata.run_from`). The last stage, `head`, is the linear classifier alone (of
every pixel or position, where each has a class): the features that leave the stage before it are the penultimate ones.
To add a model, write a builder and give it a row in `MODELS`; what a user may set are its keyword-only parameters, and
its help is the first line of its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

from fedstrata.core import spec
from fedstrata.core.lazy import nn, torch
from fedstrata.core.parts import ExampleShape, read_shape, shape_words
from fedstrata.errors import UsageError
from fedstrata.models.zoo.convnets import cnn2, cnn4, cnn8, vgg9
from fedstrata.models.zoo.hugging_face import hf
from fedstrata.models.zoo.own_code import python
from fedstrata.models.zoo.parts import check_positive, sequential
from fedstrata.models.zoo.resnets import RESNETS
from fedstrata.models.zoo.tables import ACTIVATIONS, Activation, tablemlp
from fedstrata.models.zoo.tokens import chargru, gpt, tokengru
from fedstrata.models.zoo.unets import unet
from fedstrata.models.zoo.vits import swin, vit


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: tuple[int, ...] = (64,),
    activation: Activation = "relu",
) -> nn.Sequential:
    """A multi-layer perceptron on the flattened input, one dense layer for each number in `hidden`.

    Stages: `flatten`, `fc1`, `fc2`, …, `head`. Any input shape.
    """
    check_positive("mlp", input_shape=input_shape, classes=classes, hidden=hidden)
    sizes = (math.prod(input_shape), *hidden)
    dense: list[tuple[str, nn.Module]] = [
        (
            f"fc{index}",
            sequential(("linear", nn.Linear(inputs, outputs)), ("act", getattr(nn, ACTIVATIONS[activation])())),
        )
        for index, (inputs, outputs) in enumerate(pairwise(sizes), start=1)
    ]
    return sequential(("flatten", nn.Flatten()), *dense, ("head", nn.Linear(sizes[-1], classes)))


def logreg(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Multinomial logistic regression on the flattened input.

    Stages: `flatten`, `head`. Any input shape.
    """
    check_positive("logreg", input_shape=input_shape, classes=classes)
    return sequential(("flatten", nn.Flatten()), ("head", nn.Linear(math.prod(input_shape), classes)))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logreg": logreg,
    "mlp": mlp,
    "cnn2": cnn2,
    "cnn4": cnn4,
    "cnn8": cnn8,
    "vgg9": vgg9,
    **RESNETS,
    "vit": vit,
    "swin": swin,
    "chargru": chargru,
    "tablemlp": tablemlp,
    "unet": unet,
    "tokengru": tokengru,
    "gpt": gpt,
    "hf": hf,
    "python": python,
}


ANY_INPUTS = frozenset({"hf", "python"})
"""Models that take whatever there is; all others take one tensor."""

TOKENIZERS: dict[str, Callable[..., str]] = {"hf": lambda *, name, **others: str(name)}
"""Models that have a tokenizer of their own: a function of their arguments that says where it is."""


def tokenizer_of(name: str) -> str:
    """Where a model's own tokenizer is, by the model's name with arguments; empty if it has none."""
    _, kwargs = spec.bind("model", MODELS, name)
    find = TOKENIZERS.get(spec.parse_call(name).name)
    return "" if find is None else find(**kwargs)


def build_model(name: str, input_shape: Any, classes: int, seed: int | None = None) -> nn.Module:
    """The model of that name, with new weights.

    Args:
        name: a name from `MODELS`, with arguments if wanted: `resnet8(width=16)`.
        input_shape: the shape of one example, without the batch: (channels, height, width) or (length,). Where inputs
            have several parts, one for each, in a tuple or by name in a dict.
        classes: how many logits the model gives.
        seed: where given, it alone decides the weights, and torch's random state is left as it was.
    """
    builder, kwargs = spec.bind("model", MODELS, name)
    shape = read_shape(input_shape)
    if spec.parse_call(name).name not in ANY_INPUTS:
        _check_one_tensor(name, shape, input_shape)
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # weights are made on the CPU: leave the other devices' states
        model: nn.Module = builder(shape, classes, **kwargs)
    return model


def _check_one_tensor(name: str, shape: ExampleShape | None, given: Any) -> None:
    """Refuse what is no shape of one tensor."""
    if shape and not all(isinstance(size, int) for size in shape):
        raise UsageError(f"model '{name}' takes one tensor, and an input has {len(shape)} parts: {shape_words(shape)}")
    if not shape:
        raise UsageError(f"model '{name}': the shape of an example must be whole numbers, not {given!r}")
