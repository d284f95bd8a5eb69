"""FedPart: train and send one stratum at a time.

Wang et al., "Why Go Full? Elevating Federated Learning Through Partial Network Updates", NeurIPS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.technique import Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError, one_of
from fedstrata.models.strata import check_patterns
from fedstrata.techniques.selection import train_only

Order = Literal["sequential", "reverse", "random"]
Group = tuple[Stratum, ...]


PAPERS = (
    Paper(
        "Haolin Wang and Xuefeng Liu and Jianwei Niu and Wenkai Guo and Shaojie Tang",
        "Why Go Full? Elevating Federated Learning Through Partial Network Updates",
        "NeurIPS",
        2024,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedPart(Technique):
    """One stratum at a time: a cycle is `full_rounds` rounds of the whole network, then each stratum in its turn.

    Only the active stratum trains and travels, with its running statistics; all others are frozen. Below it nothing is
    recorded for the backward pass, which stops at it. Idle strata, such as a layer that never runs, have no turn. The
    paper's values are the defaults: a cycle of ResNet-8, which has 10 strata, takes 25 rounds and sends 28.0 % of what
    full updates would.

    Args:
        full_rounds: rounds of the whole network at the beginning of every cycle.
        rounds_per_stratum: rounds that a stratum is active for.
        order: from the input to the output, the other way, or drawn anew for every cycle.
        warmup: rounds of the whole network before the first cycle.
        group: how many strata, one after the other, are active at once.
        cycles: how many cycles; the whole network trains after them. By default they go on to the end.
        strata: name patterns, such as `("stem*", "layer1*")`, each for a group of strata that are active at once, in
            this order; strata that no pattern names train in full rounds only.
        freeze_norm: let frozen norm layers use their running statistics, as in evaluation, and leave them as they are.
            By default they use the batch at hand and move their statistics, as in the authors' code.
        cache_prefix: compute what lies below the active stratum once per visit instead of once per step. The result is
            the same up to rounding. It needs data that is not augmented (a dataset of your own must give the same
            example every time), and `freeze_norm` where the model normalises over the batch. Engine `vmap` has use
            for it in dense models whose clients' data are tensors; otherwise it, and compiled steps, do without.

    Deviation: the authors' code leaves all layers recording gradients, so that it does not save their computation.
    """

    name: ClassVar[str] = "fedpart"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    full_rounds: int = 5
    rounds_per_stratum: int = 2
    order: Order = "sequential"
    warmup: int = 0
    group: int = 1
    cycles: int | None = None
    strata: tuple[str, ...] = ()
    freeze_norm: bool = False
    cache_prefix: bool = False

    def __post_init__(self) -> None:
        least = {"full_rounds": 0, "rounds_per_stratum": 1, "warmup": 0, "group": 1, "cycles": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            optional = name == "cycles" and value is None
            if not optional and not (isinstance(value, int) and value >= limit):
                raise UsageError(f"fedpart's {name} must be a whole number, {limit} or more, not {value!r}")
        one_of("fedpart", get_args(Order), order=self.order)
        if isinstance(self.strata, str):
            raise UsageError(f"fedpart's strata are a tuple of patterns: write ({self.strata!r},)")
        if self.group > 1 and self.strata:
            raise UsageError("fedpart's group and strata both say what trains at once: leave one out")

    def groups(self, strata: tuple[Stratum, ...]) -> tuple[Group, ...]:
        """What is active at once, from the input to the output or as the patterns are given."""
        if not self.strata:
            return tuple(strata[i : i + self.group] for i in range(0, len(strata), self.group))
        found = (tuple(s for s in strata if fnmatchcase(s.name, pattern)) for pattern in self.strata)
        return tuple(group for group in found if group)

    def active(self, round: int, run_seed: int, strata: tuple[Stratum, ...]) -> Group | None:
        """The strata that train in a round, None for all."""
        groups = self.groups(strata)
        if not groups:
            return None
        length = self.full_rounds + self.rounds_per_stratum * len(groups)
        cycle, at = divmod(round - self.warmup, length)
        if cycle < 0 or (self.cycles is not None and cycle >= self.cycles) or at < self.full_rounds:
            return None
        turn = (at - self.full_rounds) // self.rounds_per_stratum
        if self.order == "reverse":
            turn = len(groups) - 1 - turn
        elif self.order == "random":
            turn = int(torch.randperm(len(groups), generator=generator(run_seed, "fedpart", cycle))[turn])
        return groups[turn]

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name no stratum, and a `cache_prefix` that would change the result."""
        if setting.arch == "":  # the schedule is the server model's; sub-models may lack strata
            moving = {n for n, p in setting.model.named_parameters() if p.requires_grad}
            names = [s.name for s in setting.strata if not s.idle and not moving.isdisjoint(s.params)]
            check_patterns("fedpart's strata: none that trains is called", self.strata, names)
        if self.freeze_norm and setting.buffers == "drop":
            raise UsageError("fedpart's freeze_norm needs running statistics, and buffers='drop' does without them")
        if not self.cache_prefix:
            return
        if setting.augment:
            raise UsageError("fedpart's cache_prefix cannot be used with augmentation: inputs differ from step to step")
        whole = {n for s in setting.strata for n in s.buffers}
        if whole and not self.freeze_norm:
            raise UsageError("fedpart's cache_prefix needs freeze_norm=True: the model's norm layers follow the batch")
        from fedstrata.models.frozen_prefix import cut_at

        for group in self.groups(tuple(s for s in setting.strata if not s.idle)):
            still = whole - {n for s in group for n in s.buffers}
            cut_at(setting.model, {n for s in group for n in s.params}, still, setting.sample)

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Only the strata whose turn it is train and travel."""
        group = self.active(assignment.round, assignment.run_seed, strata)
        if group is None:
            return assignment
        narrowed = train_only(assignment, group)
        moves = narrowed.upload_buffers if self.freeze_norm else None
        return replace(narrowed, update_buffers=moves, cache_prefix=self.cache_prefix)
