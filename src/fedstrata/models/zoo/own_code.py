"""A model of the user's own, which a class or a function makes."""

from __future__ import annotations

from typing import Any

from fedstrata.core.lazy import nn
from fedstrata.core.own_code import SourceText, call_own, load_object, takes
from fedstrata.core.parts import ExampleShape
from fedstrata.errors import UsageError
from fedstrata.models.zoo.parts import check_positive


def python(input_shape: ExampleShape, classes: int, /, *, source: SourceText, **arguments: Any) -> nn.Module:
    """A model of your own: the class or function 'module:Name', called with all other arguments.

    It also gets `input_shape` (of one example) and `outputs` (how many numbers the task wants per example) if it takes
    arguments of these names; where inputs have several parts, `input_shape` is a tuple or a dict of their shapes. The
    module is found in the working directory, or is installed. Any `nn.Module` will do; methods that work on stages want
    an `nn.Sequential`, or one whose stages they can find.

    Args:
        input_shape: of one example.
        classes: how many outputs it needs.
        source: `module:Name`, or `DIR/module:Name`.
        arguments: of the class or function, literal values.
    """
    check_positive("python", classes=classes)
    make = load_object(source)
    told = {"input_shape": input_shape, "outputs": classes}
    model = call_own(source, make, {name: value for name, value in told.items() if takes(make, name)} | arguments)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source} makes no torch.nn.Module, but {type(model).__name__}")
    return model
