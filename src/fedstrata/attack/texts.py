"""Tokens from updates: which ones went into the layers that see single tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstrata.attack.asking import Progress, step_counter, write_result
from fedstrata.attack.sending import Sender
from fedstrata.attack.token_recovery import Shortlist, embedded_tokens, rounding_of, row_space, shares_found, tells
from fedstrata.attack.token_sources import Source, every_input, find_sources, real_tokens, tokens_of, vocabulary_of
from fedstrata.attack.victim import RunClient
from fedstrata.core.tensors import Tensors
from fedstrata.data.texts import TextOptions, TextReader
from fedstrata.run import find_tokenizer


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Tokens that were found in what travels of one update after the other.

    Args:
        name: of what travels.
        reads: True if it has a layer that sees single tokens.
        found: the tokens, visit by visit.
        recalls: the share of the visit's tokens that were found.
        precisions: the share of what was found that was there; 0 where nothing was.
    """

    name: str
    reads: bool
    found: tuple[tuple[int, ...], ...]
    recalls: tuple[float, ...]
    precisions: tuple[float, ...]

    @property
    def recall(self) -> float:
        """Mean over the visits."""
        return statistics.fmean(self.recalls)

    @property
    def precision(self) -> float:
        """Mean over the visits in which anything was found."""
        told = [p for p, tokens in zip(self.precisions, self.found, strict=True) if tokens]
        return statistics.fmean(told) if told else 0.0


@dataclass(frozen=True, eq=False)
class TextUpdate:
    """Tokens that were found in updates. A token counts once per visit; those at the ends of every text do not count.

    Args:
        run: the run's directory.
        client: the victim's number.
        originals: the tokens of each visit.
        rows: the full update, then stratum by stratum.
        settings: of the visits.
        names: token → how it is written; empty where nobody knows.
    """

    run: Path
    client: int
    originals: tuple[tuple[int, ...], ...]
    rows: tuple[TokenRow, ...]
    settings: Mapping[str, Any]
    names: Mapping[int, str]

    def written(self, tokens: Sequence[int]) -> str:
        """Tokens for people, in alphabetical order: a bag has none of its own."""
        return " ".join(sorted(self.names.get(token, str(token)) for token in tokens))

    def as_dict(self) -> dict[str, Any]:
        """All figures and all tokens."""
        about = {"run": str(self.run), "client": self.client, "settings": dict(self.settings)}
        originals = [self.written(tokens) for tokens in self.originals]
        return {**about, "originals": originals, "rows": [self._row(row) for row in self.rows]}

    def _row(self, row: TokenRow) -> dict[str, Any]:
        figures = zip(row.found, row.recalls, row.precisions, strict=True)
        visits = [{"found": self.written(found), "recall": r, "precision": p} for found, r, p in figures]
        means = {"recall": row.recall, "precision": row.precision}
        return {"name": row.name, "reads_tokens": row.reads, **means, "visits": visits}

    def save(self, directory: str | Path) -> None:
        """Write update.json."""
        write_result(Path(directory), ("update.json", self.as_dict()), None)


def find_tokens(
    run: Path,
    found: RunClient,
    sender: Sender,
    visits: Sequence[Tensor],
    parts: Mapping[str, tuple[str, ...]],
    settings: Mapping[str, Any],
    progress: Progress | None = None,
) -> TextUpdate:
    """Look for the visits' tokens in the full update and in each stratum's part."""
    reader = _open_reader(found)
    ends = frozenset() if reader is None else reader.special_tokens
    batches = [found.data.batch(index)[0] for index in visits]
    originals = [real_tokens(x) - ends for x in batches]
    vocabulary = vocabulary_of(sender.model)
    sources = find_sources(sender.model, found.data.padded.batch(visits[0][:1])[0], vocabulary)
    mine = {name: [source for source in sources if source.weight in names] for name, names in parts.items()}
    tick = step_counter(progress, len(visits))
    told = []
    for index, x in zip(visits, batches, strict=True):
        changes = {name: sender.change(names, index) for name, names in parts.items() if mine[name]}
        told.append(_search(sender, mine, changes, x, vocabulary))
        tick()
    rows = []
    for name in parts:
        each = [visit.get(name, set()) - ends for visit in told]
        shares = [shares_found(*pair) for pair in zip(each, originals, strict=True)]
        recalls, precisions = zip(*shares, strict=True)
        rows.append(TokenRow(name, bool(mine[name]), tuple(map(_in_order, each)), recalls, precisions))
    seen = sorted(set().union(*originals, *(set(tokens) for row in rows for tokens in row.found)))
    names_of = {} if reader is None else dict(zip(seen, reader.words(seen), strict=True))
    return TextUpdate(run, found.number, tuple(map(_in_order, originals)), tuple(rows), settings, names_of)


def _in_order(tokens: set[int]) -> tuple[int, ...]:
    return tuple(sorted(tokens))


def _open_reader(found: RunClient) -> TextReader | None:
    """The tokenizer of the run's model, which everybody has; None if it has none."""
    tokenizer = find_tokenizer(found.config)
    return TextReader(TextOptions(found.config.dataset, tokenizer)) if tokenizer else None


def _search(
    sender: Sender, sources: Mapping[str, Sequence[Source]], changes: Mapping[str, Tensors], x: Any, vocabulary: int
) -> dict[str, set[int]]:
    """What travels → the tokens of one visit: of the embedding's own gradient where it travels, else of linear layers'.

    Every token is looked at once for all layers that have the same inputs.
    """
    found: dict[str, set[int]] = {}
    spans: dict[Source, list[tuple[str, Shortlist]]] = {}
    firsts: dict[int, Source] = {}
    for name, change in changes.items():
        embeddings = [source.weight for source in sources[name] if source.embeds]
        found[name] = set().union(*(embedded_tokens(change[w], rounding_of(sender.params[w])) for w in embeddings))
        for kind in () if embeddings else sorted({source.inputs for source in sources[name]}):
            alike = [source for source in sources[name] if source.inputs == kind]
            basis = row_space([change[s.weight] for s in alike], [rounding_of(sender.params[s.weight]) for s in alike])
            if tells(basis):
                spans.setdefault(firsts.setdefault(kind, alike[0]), []).append((name, Shortlist(basis)))
    texts, places = tokens_of(x).shape
    for source, searched in spans.items():
        for inputs, tokens in every_input(sender.model, source.place, x, vocabulary, places):
            for _, best in searched:
                best.offer(inputs, tokens)
        for name, best in searched:
            found[name] |= set(best.tokens_in(texts * places))
    return found
