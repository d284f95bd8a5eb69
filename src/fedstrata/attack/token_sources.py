"""Which layers of a model see single tokens, and what goes into them for every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.attack.token_recovery import pairs
from fedstrata.core.parts import Parts
from fedstrata.core.types import Into
from fedstrata.data.texts import MASK
from fedstrata.errors import UsageError
from fedstrata.models.taps import value_at

TOKENS = "input_ids"
_AT_ONCE = 1 << 15
"""Positions that go through the model at the same time."""


@dataclass(frozen=True)
class Source:
    """A layer into which single tokens go.

    Args:
        place: the module's name.
        weight: its parameter's name.
        embeds: True for the embedding itself, False for a linear layer.
        inputs: a number that linear layers share that have the same inputs.
    """

    place: str
    weight: str
    embeds: bool
    inputs: int


def tokens_of(inputs: Tensor | Parts) -> Tensor:
    """The tokens of a batch [texts, places]."""
    return inputs.tensors[TOKENS] if isinstance(inputs, Parts) else inputs


def real_tokens(inputs: Tensor | Parts) -> set[int]:
    """The tokens of a batch without its padding."""
    tokens = tokens_of(inputs)
    mask = inputs.tensors.get(MASK) if isinstance(inputs, Parts) else None
    return set((tokens if mask is None else tokens[mask != 0]).flatten().tolist())


def with_tokens(like: Tensor | Parts, tokens: Tensor) -> Tensor | Parts:
    """A batch of these tokens, without padding, in the form of another's."""
    if not isinstance(like, Parts):
        return tokens
    blank = {name: torch.zeros_like(tokens) for name in like.tensors}
    return Parts({**blank, **({MASK: torch.ones_like(tokens)} if MASK in blank else {}), TOKENS: tokens}, like.named)


def find_sources(model: nn.Module, like: Tensor | Parts, vocabulary: int) -> list[Source]:
    """The layers whose input at a place depends on the token at that place alone, found by trying.

    The first token of a text is changed: what goes into such a layer at the other places stays as it is.
    """
    places = tokens_of(like).shape[1]
    tokens = torch.arange(places).remainder(vocabulary)[None]
    other = tokens.clone()
    other[0, 0] = (tokens[0, 0] + 1) % vocabulary
    seen, again = (_record_inputs(model, with_tokens(like, each)) for each in (tokens, other))
    names = {id(p): name for name, p in model.named_parameters()}
    found: list[Source] = []
    kinds: list[Tensor] = []
    for place, (module, x) in seen.items():
        weight = names.get(id(module.weight))
        if weight is None:
            continue
        if isinstance(module, nn.Embedding):
            if torch.equal(x, tokens) and torch.equal(again[place][1], other):
                found.append(Source(place, weight, True, -1))
        elif x.dim() == 3 and _sees_single_tokens(x, again[place][1]):
            same = next(
                (at for at, one in enumerate(kinds) if one.shape == x.shape and torch.equal(one, x)), len(kinds)
            )
            kinds += [x] if same == len(kinds) else []
            found.append(Source(place, weight, False, same))
    return found


def _sees_single_tokens(x: Tensor, again: Tensor) -> bool:
    return torch.equal(x[:, 1:], again[:, 1:]) and not torch.equal(x[:, 0], again[:, 0])


def _record_inputs(model: nn.Module, inputs: Any) -> dict[str, tuple[Any, Tensor]]:
    """Module → (itself, what goes into it), of embeddings and linear layers, in evaluation mode."""
    seen: dict[str, tuple[Any, Tensor]] = {}

    def record(place: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen[place] = module, args[0].detach().clone()

    kinds = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.Linear)]
    handles = [module.register_forward_pre_hook(partial(record, place)) for place, module in kinds]
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def vocabulary_of(model: nn.Module) -> int:
    """How many tokens the embedding has."""
    sizes = [module.num_embeddings for n, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if not sizes:
        raise UsageError("the model has no embedding, so no token can be told from what it is sent")
    return max(sizes)


def every_input(
    model: nn.Module, place: str, like: Tensor | Parts, vocabulary: int, places: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, tokens): what goes into a layer for every token at every place of a text."""
    model.eval()
    for tokens in torch.split(torch.arange(vocabulary), max(1, _AT_ONCE // places)):
        batch = with_tokens(like, tokens[:, None].repeat(1, places))
        with torch.no_grad():
            yield from pairs(tokens, value_at(model, Into(place), partial(model, batch)))
