"""Progressive: blocks train one after the other from the input, each until it has converged, and are frozen then.

Wu, Li and Xu, "Breaking the Memory Wall for Heterogeneous Federated Learning via Progressive Training", KDD 2025
(ProFL).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Figures, RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError, whole_number
from fedstrata.models.strata import check_patterns
from fedstrata.techniques.selection import CHOICE, REFUSED, key_of, score_tensors, scores_in, train_only

Block = tuple[Stratum, ...]
_BLOCK, _AGE, _PATH, _NET, _MEMBER = "block", "age", "path", "net/", "member/"


PAPERS = (
    Paper(
        "Yebo Wu and Li Li and Chengzhong Xu",
        "Breaking the Memory Wall for Heterogeneous Federated Learning via Progressive Training",
        "KDD",
        2025,
    ),
)


def effective_movement(net: Tensors, path: float) -> float:
    """‖Σ_h U_h‖₁/Σ_h‖U_h‖₁ of the changes U_h of some rounds: 1 if all go one way, near 0 if they cancel out.

    Args:
        net: Σ_h U_h.
        path: Σ_h‖U_h‖₁.
    """
    return sum(float(t.double().abs().sum()) for t in net.values()) / path if path else 0.0


@dataclass(frozen=True, kw_only=True)
class Progressive(Technique):
    """Progressive growing: one block at a time trains, from the input to the output, and is frozen once it converged.

    The classifier trains along with every block, as what reads it. A block has converged when over a window of H rounds
    its effective movement ‖Σ_h U_h‖₁/Σ_h‖U_h‖₁ is below a threshold, U_h the change of its parameters in round h: they
    go to and fro, and no longer anywhere. After the last block the whole network trains.

    Args:
        strata: name patterns, such as `("stem*", "layer1*")`, each for a block, in this order; a stratum is of the
            first block whose pattern names it. By default a block is one stage of the model. Strata that no pattern
            names train with the whole network only.
        window: H, rounds over which movement is measured, again and again.
        threshold: of the effective movement.
        longest: rounds after which a block is frozen in any case; None for never.

    Deviations: the growing stage alone. The paper first shrinks the model from the output, which gives blocks their
    first values and a small output module each; here the rest of the network, with its first values, and the classifier
    stand for that module, and clients hold the whole model. The paper takes a block for converged when a line through
    its effective movements has become flat; here a threshold decides.
    """

    name: ClassVar[str] = "progressive"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[Mapping[str, str]] = {**REFUSED, "select": CHOICE, "fedldf": CHOICE}
    strata: tuple[str, ...] = ()
    window: int = 5
    threshold: float = 0.5
    longest: int | None = None

    def __post_init__(self) -> None:
        whole_number("progressive", 2, window=self.window)
        if not (isinstance(self.threshold, int | float) and 0 <= self.threshold <= 1):
            raise UsageError(f"progressive's threshold must be between 0 and 1, not {self.threshold!r}")
        if self.longest is not None:
            whole_number("progressive", 1, longest=self.longest)
        if isinstance(self.strata, str):
            raise UsageError(f"progressive's strata are a tuple of patterns: write ({self.strata!r},)")

    def blocks(self, strata: tuple[Stratum, ...]) -> tuple[Block, ...]:
        """What trains at once, beside the classifier."""
        if not self.strata:
            return tuple(tuple(block) for _, block in groupby(strata, key=lambda s: s.stage))
        first = {s: next((p for p in self.strata if fnmatchcase(s.name, p)), None) for s in strata}
        found = (tuple(s for s in strata if first[s] == pattern) for pattern in dict.fromkeys(self.strata))
        return tuple(block for block in found if block)

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name no stratum."""
        if setting.arch == "":
            names = [s.name for s in setting.strata if not setting.movable.isdisjoint(s.params)]
            check_patterns("progressive's strata: none that trains is called", self.strata, names)

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """The block of each stratum, and the first one's turn."""
        blocks = self.blocks(tuple(s for s in setting.strata if not setting.movable.isdisjoint(s.params)))
        members = {_MEMBER + key_of(s): torch.tensor(number) for number, block in enumerate(blocks) for s in block}
        return {
            **members,
            _BLOCK: torch.tensor(0),
            _AGE: torch.tensor(0),
            _PATH: torch.tensor(0.0, dtype=torch.float64),
        }

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """The block whose turn it is, and the classifier."""
        if all(number < int(state[_BLOCK]) for number in _members(state).values()):
            return assignment
        block = _block(strata, state)
        return train_only(assignment, [s for s in strata if s in block or s.classifies])

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """How the block has moved in this window; whether it is the next one's turn."""
        block = _block(round.strata, state)
        if not block:
            return delta, state
        body = [s for s in block if not s.classifies] or block
        moved = {n: delta[n] for s in body for n in s.params if n in round.arrived and n in delta}
        before = {n.removeprefix(_NET): t for n, t in state.items() if n.startswith(_NET)}
        net, age = {**moved, **add(before, moved)}, int(state[_AGE]) + 1
        path = float(state[_PATH]) + sum(float(t.double().abs().sum()) for t in moved.values())
        movement = effective_movement(net, path)
        kept = {n: t for n, t in state.items() if not n.startswith(_NET)}
        kept |= score_tensors({key_of(body[0]): movement})
        over = age % self.window == 0
        if (over and movement < self.threshold) or age == self.longest:
            age, kept[_BLOCK] = 0, state[_BLOCK] + 1
        if over or not age:
            net, path = {}, 0.0
        kept |= {_AGE: torch.tensor(age), _PATH: torch.tensor(path, dtype=torch.float64)}
        return delta, {**kept, **{_NET + n: t for n, t in net.items()}}

    def publish(self, state: Tensors) -> Figures:
        """Effective movement of each block, under its first stratum, as last measured."""
        return {"score": scores_in(state)}


def _block(strata: tuple[Stratum, ...], state: Tensors) -> Block:
    """The strata whose turn it is; empty once all have had theirs."""
    now, members = int(state[_BLOCK]), _members(state)
    return tuple(s for s in strata if members.get(key_of(s)) == now)


def _members(state: Tensors) -> dict[str, int]:
    """Stratum's key → its block."""
    return {n.removeprefix(_MEMBER): int(t) for n, t in state.items() if n.startswith(_MEMBER)}
