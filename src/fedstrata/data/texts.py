"""Texts as a model reads them: tokens and a mask, by the model's own tokenizer; and datasets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.hugging_face import read_tokenizer
from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.rng import generator
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 128
"""Tokens of a text at most, where nobody says another number and the tokenizer allows as many."""
MASK = "attention_mask"
IGNORED = -100
"""The target where there is no next token."""


@dataclass(frozen=True)
class TextOptions:
    """How texts become tokens.

    Args:
        dataset: whose texts they are, for messages.
        tokenizer: a folder, or a name on the Hub; empty where nobody has named one.
        length: tokens of a text at most; None for what is usual.
        next_token: True if a text's own tokens are its targets.
    """

    dataset: str
    tokenizer: str
    length: int | None = None
    next_token: bool = False


class TextReader:
    """Makes examples of texts.

    Args:
        options: how.

    Attributes:
        vocabulary: how many tokens there are.
        note: what a reader of results must know.
    """

    def __init__(self, options: TextOptions) -> None:
        name = options.dataset
        if not options.tokenizer:
            raise UsageError(
                f"{name} needs a tokenizer, and the model has none: take one that has, such as hf('PATH'), or say "
                f"whose, {name}(tokenizer='PATH')"
            )
        self._options, what = options, f"the tokenizer of {name}"
        self._tokenizer, self._blank = read_tokenizer(what, options.tokenizer)
        self._length = self._find_length()
        self.vocabulary, self.note = len(self._tokenizer), f"texts of up to {self._length} tokens"

    def _find_length(self) -> int:
        """Tokens of a text at most."""
        o, known = self._options, int(min(self._tokenizer.model_max_length, 1 << 30))
        least = self._tokenizer.num_special_tokens_to_add() + 1 + o.next_token
        if o.length is not None and not least <= o.length <= known:
            allowed = f"{least} or more" if known == 1 << 30 else f"from {least} to {known}"
            raise UsageError(f"{o.dataset}: the length of a text is {allowed} tokens, not {o.length}")
        return min(LENGTH, known) if o.length is None else o.length

    def tokenize(self, texts: Sequence[str]) -> tuple[Any, Tensor]:
        """(tokens and mask, how many tokens each text has), as long as the longest text, padding last."""
        whole = self._length + self._options.next_token
        rows = self._tokenizer(list(texts), truncation=True, max_length=whole)["input_ids"] if len(texts) else []
        counts = np.array([len(row) for row in rows], np.int64)
        ids = np.full((len(rows), int(counts.max(initial=1))), self._blank, np.int64)
        mask = np.arange(ids.shape[1]) < counts[:, None]
        ids[mask] = np.concatenate([np.asarray(row, np.int64) for row in rows]) if len(rows) else []
        parts = {"input_ids": torch.from_numpy(ids), MASK: torch.from_numpy(mask.astype(np.int64))}
        return Parts(parts, named=True), torch.from_numpy(counts)

    @property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that stand for no part of a text."""
        return frozenset(self._tokenizer.all_special_ids)

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as they are written."""
        written: list[str] = self._tokenizer.convert_ids_to_tokens(list(tokens))
        return written

    def read(self, texts: Sequence[str], labels: Any) -> TensorExamples:
        """Examples of texts with their labels, or with their own next tokens."""
        x, _ = self.tokenize(texts)
        if not self._options.next_token:
            return TensorExamples(x, torch.as_tensor(labels), mask=MASK)
        ids, mask = x.tensors["input_ids"], x.tensors[MASK]
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
        shown: Any = Parts({"input_ids": ids[:, :-1].contiguous(), MASK: mask[:, :-1].mul(mask[:, 1:])}, named=True)
        return TensorExamples(shown, targets, mask=MASK)


def draw_texts(name: str, part: str, count: int, wanted: int | None) -> list[int]:
    """The places of so many of a dataset's texts, the same every time; of all of them where None."""
    if wanted is None:
        return list(range(count))
    if not 1 <= wanted <= count:
        raise UsageError(f"{name} has {count:,} {part} examples: ask for 1 or more, not {wanted:,}")
    chosen: list[int] = torch.randperm(count, generator=generator(name, part))[:wanted].sort().values.tolist()
    return chosen
