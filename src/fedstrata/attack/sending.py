"""What a client sends after a visit on a few of its examples, as in a round: all of it, or one stratum's part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.core.low_rank import factor_names
from fedstrata.core.rng import derive, preserve_rng
from fedstrata.core.task import Task
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.models.adapted import base_names
from fedstrata.models.copying import copy_model
from fedstrata.models.norms import normalises_batches, running_statistics
from fedstrata.models.strata import strata
from fedstrata.techniques.fedavg import chain

FULL = "full update"


@dataclass(frozen=True, eq=False)
class Sender:
    """A client whose visits are looked at.

    Args:
        model: what it is sent, which takes batches of the client's inputs as they are.
        task: what is learnt.
        data: its examples.
        work: how it trains on the few examples of a visit.
        seed: of its random numbers, such as dropout's.
    """

    model: nn.Module
    task: Task
    data: TensorExamples
    work: Work
    seed: int

    @cached_property
    def params(self) -> Tensors:
        """All parameters of the model."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The parameters that train, and travel: all but the frozen base beneath adapters."""
        base = base_names(self.model)
        return tuple(name for name in self.params if name not in base)

    @cached_property
    def strata(self) -> tuple[Stratum, ...]:
        """The model's strata."""
        return strata(self.model, self._sample)

    @cached_property
    def _sample(self) -> Tensor:
        return self.data.padded.batch(torch.arange(min(2, len(self.data))))[0]

    @cached_property
    def _context(self) -> ClientContext:
        return ClientContext(
            lambda arch: copy_model(self.model), chain(), self.task, sample=self._sample, strata={"": self.strata}
        )

    def parts(self, wanted: Iterable[str] | None) -> dict[str, tuple[str, ...]]:
        """Name → what travels: the full update, of adapters every A and every B, then each stratum, all or the wanted.

        Raises:
            UsageError: for a stratum that the model has not.
        """
        free = set(self.trainable)
        each = {s.name or "model": tuple(n for n in s.params if n in free) for s in self.strata}
        each = {name: names for name, names in each.items() if names}
        for name in wanted or ():
            if name not in each:
                raise UsageError(f"the model has no stratum '{name}' that trains{did_you_mean(name, each)}")
        factors = {"every A": factor_names(self.strata, "A"), "every B": factor_names(self.strata, "B")}
        whole = {FULL: self.trainable, **{name: names for name, names in factors.items() if names}}
        return whole | {name: names for name, names in each.items() if wanted is None or name in wanted}

    def check_batch(self, examples: int) -> None:
        """Refuse visits that the model cannot train on."""
        if examples == 1 and normalises_batches(self.model):
            raise UsageError(
                "batch norm cannot train on one example: attack batches of two or more, or a model with norm='group'"
            )

    def change(self, names: Sequence[str], index: Tensor) -> Tensors:
        """The change of these parameters, and no others, after a visit that trains them on the examples at `index`."""
        sent = Assignment(
            round=0,
            client=0,
            arch="",
            params=self.params,
            buffers=running_statistics(self.model),
            trains=tuple(names),
            uploads=tuple(names),
            work=self.work,
            seed=derive(self.seed, "attack", "visit", *index.tolist()),
            method=self._context.method.digest,
        )
        with preserve_rng():
            return train_client(self._context, sent, self.data.select(index), {})[0].delta
