"""Models of token sequences: recurrent ones and a causal transformer."""

from __future__ import annotations

import math

from fedstrata.core.lazy import nn
from fedstrata.errors import UsageError
from fedstrata.models.zoo.parts import check_positive, check_tokens, sequential


def chargru(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    vocab: int | None = None,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Sequential:
    """A recurrent network (GRU) that predicts the next character from a sequence of character numbers.

    Inputs are whole numbers below `vocab` (by default, as many as there are classes), of shape (batch,
    length). Stages: `embed`, `gru1`, `gru2`, … (one GRU layer each, so that each is a stratum), `pool` (the
    last step), `head`.
    """
    check_tokens("chargru", input_shape, classes)
    vocab = classes if vocab is None else vocab
    check_positive("chargru", vocab=vocab, embedding=embedding, hidden=hidden, layers=layers)
    from fedstrata.models.zoo.layers import TakeStep

    return sequential(
        ("embed", nn.Embedding(vocab, embedding)),
        *_recurrent(embedding, hidden, layers),
        ("pool", TakeStep(-1)),
        ("head", nn.Linear(hidden, classes)),
    )


def tokengru(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    vocab: int | None = None,
    embedding: int = 32,
    hidden: int = 128,
    layers: int = 1,
) -> nn.Sequential:
    """A recurrent network (GRU) that predicts the next token at every position of a sequence.

    Inputs are whole numbers below `vocab` (by default, as many as there are classes), of shape (batch, length); outputs
    are logits (batch, length, classes), each of what came up to there. Stages: `embed`, `gru1`, `gru2`, …, `head`.
    """
    check_tokens("tokengru", input_shape, classes)
    vocab = classes if vocab is None else vocab
    check_positive("tokengru", vocab=vocab, embedding=embedding, hidden=hidden, layers=layers)
    return sequential(
        ("embed", nn.Embedding(vocab, embedding)),
        *_recurrent(embedding, hidden, layers),
        ("head", nn.Linear(hidden, classes)),
    )


def _recurrent(embedding: int, hidden: int, layers: int) -> list[tuple[str, nn.Module]]:
    """GRU layers, one a stage."""
    from fedstrata.models.zoo.layers import First

    return [
        (f"gru{index + 1}", First(nn.GRU(hidden if index else embedding, hidden, batch_first=True)))
        for index in range(layers)
    ]


def gpt(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    vocab: int | None = None,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """A small causal transformer, as GPT-2, that predicts the next token at every position of a sequence.

    Inputs are whole numbers below `vocab` (by default, as many as there are classes), of shape (batch, length) or
    shorter; outputs are logits (batch, length, classes), each of what came up to there. Norm layers come before
    attention and perceptron, the embedding is not tied to the head, and there is no dropout. Stages: `embed` (tokens
    and learned positions), `block1`, `block2`, …, `norm`, `head`.
    """
    length = check_tokens("gpt", input_shape, classes)
    vocab = classes if vocab is None else vocab
    check_positive("gpt", vocab=vocab, width=width, depth=depth, heads=heads)
    if width % heads:
        raise UsageError(f"model 'gpt': {heads} heads do not divide {width} features")
    if not (math.isfinite(mlp_ratio) and int(width * mlp_ratio) >= 1):
        raise UsageError(f"model 'gpt': mlp_ratio {mlp_ratio} leaves no hidden layer")
    from fedstrata.models.zoo.layers import CausalBlock, TokenEmbedding

    net = sequential(
        ("embed", TokenEmbedding(vocab, length, width)),
        *((f"block{index + 1}", CausalBlock(width, heads, int(width * mlp_ratio))) for index in range(depth)),
        ("norm", nn.LayerNorm(width)),
        ("head", nn.Linear(width, classes)),
    )
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:  # as GPT-2: what is added to the residual stream is smaller the more there is of it
            added = name.endswith(("attention.out.weight", "mlp.out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if added else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return net
