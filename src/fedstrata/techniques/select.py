"""Select: which strata train and travel is chosen by a score. FedPart is its cyclic case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.technique import ClientView, Figures, Hooks, RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add_, clone, scale
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError, not_negative, one_of, whole_number
from fedstrata.techniques.selection import (
    REFUSED,
    SCORE,
    key_of,
    names_by_stratum,
    read_scores,
    recall_report,
    remember_reports,
    score_tensors,
    scores_in,
    squared_norm,
    train_only,
    validate_scores,
    weighted_means,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

Score = Literal["cyclic", "random", "divergence", "gradnorm", "snr", "change"]
Per = Literal["round", "client"]
UNSCORED = ("cyclic", "random")
GRADIENTS = {"gradnorm": 1, "snr": 4}
"""Scores of gradients, and on how many batches they are taken unless somebody says so."""
_BYTES = "bytes/"


def rank(scores: Sequence[float], temperature: float, rng: Generator) -> list[int]:
    """Places in the order in which they are chosen; `temperature` 0 is by falling score, the first of equal ones first.

    Else they are drawn one after the other without replacement, each with a probability proportional to exp(s/(T·s̄))
    among those that are left, s̄ the mean of the scores: by falling s/(T·s̄) plus noise of Gumbel's distribution.
    """
    relative = torch.tensor(scores, dtype=torch.float64)
    if temperature:
        noise = -torch.log(-torch.log(torch.rand(len(scores), generator=rng, dtype=torch.float64)))
        relative = relative / ((float(relative.mean()) or 1.0) * temperature) + noise
    order: list[int] = torch.argsort(relative, descending=True, stable=True).tolist()
    return order


def take(ranked: Sequence[int], sizes: Sequence[int], count: int, share: float | None) -> list[int]:
    """The first so many of the ranked; by `share`, the first and then each that still fits into the share of bytes."""
    if share is None:
        return sorted(ranked[:count])
    left, chosen = share * sum(sizes), list[int]()
    for place in ranked:
        if not chosen or sizes[place] <= left:
            chosen.append(place)
            left -= sizes[place]
    return sorted(chosen)


def turns_of(sizes: Sequence[int], count: int, share: float | None) -> list[list[int]]:
    """All places in order, in groups of so many; by `share`, each as long as its bytes keep to the share."""
    if share is None:
        return [list(range(at, min(at + count, len(sizes)))) for at in range(0, len(sizes), count)]
    groups, left = list[list[int]](), 0.0
    for place, size in enumerate(sizes):
        if not groups or size > left:
            groups.append([])
            left = share * sum(sizes)
        groups[-1].append(place)
        left -= size
    return groups


def spread(total: Tensors, names: Sequence[str]) -> float:
    """√(Σ_k p_k‖δ_k − δ̄‖²/d) of d parameters, from running sums: Σ_k p_k‖δ_k − δ̄‖² = Σ_k p_k‖δ_k‖² − ‖δ̄‖²."""
    moments = [total[f"square/{n}"] / total[f"weight/{n}"] for n in names]
    means = [(total[f"sum/{n}"] / total[f"weight/{n}"]).double().square().sum() for n in names]
    entries = sum(total[f"sum/{n}"].numel() for n in names)
    return math.sqrt(max(float(sum(moments) - sum(means)), 0.0) / entries)


def measure_signal(gradients: Iterator[Tensors], groups: Mapping[str, Sequence[str]], noise: bool) -> Tensors:
    """Of each group of parameters ‖ḡ‖, ḡ the mean of B gradients; with `noise` ‖ḡ‖²/(Σ_b‖g_b − ḡ‖²/(B − 1)) instead.

    Noise below rounding counts as that; of one gradient alone there is none to tell of (−1).
    """
    sums, squares, count = Tensors(), Tensors(), 0
    for found in gradients:
        sums = add_(sums, found) if sums else clone(found)
        each = {key: squared_norm(found[n] for n in names) for key, names in groups.items()}
        squares = {key: squares[key] + square for key, square in each.items()} if squares else each
        count += 1
    mean = scale(sums, 1 / count)
    signal = {key: squared_norm(mean[n] for n in names) for key, names in groups.items()}
    if not noise:
        return {key: power.sqrt() for key, power in signal.items()}
    if count == 1:
        return {key: -torch.ones_like(power) for key, power in signal.items()}
    found = {}
    for key, power in signal.items():
        least = power * torch.finfo(power.dtype).eps
        variance = torch.maximum((squares[key] - count * power) / (count - 1), least)
        found[key] = torch.where(power > 0, power / variance, torch.zeros_like(power))
    return found


@dataclass(frozen=True, kw_only=True)
class Select(Technique):
    """Some strata per round, chosen by a score: only these train and travel, as one does under `fedpart`.

    A cycle is `full_rounds` rounds of the whole network, then as many as it would take for every stratum to have its
    turns one after the other; in each of them a choice is made. So where scores decide, every stratum trains at least
    once per cycle, and no score is older than that. δ_k is what client k sends, p_k its share in the mean, w the model,
    g_kb client k's gradient at w on one of B batches, ḡ_k their mean.

    Args:
        score: `cyclic`, from the input to the output (one stratum: FedPart, bit for bit); `random`, all alike; or the
            highest of: `change` ‖Δ‖/‖w‖, Δ the model's change; `divergence` √(Σ_k p_k‖δ_k − δ̄‖²/d) over d parameters;
            `gradnorm` Σ_k p_k‖ḡ_k‖; `snr`, likewise, of ‖ḡ_k‖²/(Σ_b‖g_kb − ḡ_k‖²/(B − 1)).
        strata: how many are chosen; 1 unless there is a share.
        share: of the bytes of all strata: the first stratum is chosen whatever its size, and then each that still fits.
        per: choose for the `round`, or for each `client` by what it sent at its own last visits: then `change` is
            ‖δ_k‖/‖w‖ and `divergence` √(‖δ_k‖²/d). One that never sent any goes by the mean of the last round's.
            Names that nobody sends stay as they are. `cyclic` begins at another stratum for each client.
        temperature: T, 1 for scores unless it is said; 0 takes the highest scores, else strata are drawn without
            replacement with probabilities ∝ exp(s/(T·s̄)), s̄ the mean score, by the run's seed and the round. So those
            with low, or old, scores have their turns, too.
        full_rounds: rounds of the whole network at the beginning of every cycle; scores need one at least.
        rounds_per_stratum: rounds per turn. `cyclic` and `random` hold their choice for a turn; scores choose anew in
            every round.
        batches: B, for `gradnorm` (1) and `snr` (4): extra passes forward and backward per visit, counted in its FLOPs.

    A stratum that does not train keeps its last score. One of which no score ever came, such as what clients keep to
    themselves, trains in every round. `change` is what techniques to the left have made of the mean.
    """

    name: ClassVar[str] = "select"
    refuses: ClassVar[Mapping[str, str]] = REFUSED
    vectorises: ClassVar[bool] = True
    score: Score = "divergence"
    strata: int | None = None
    share: float | None = None
    per: Per = "round"
    temperature: float | None = None
    full_rounds: int = 5
    rounds_per_stratum: int = 2
    batches: int | None = None

    def __post_init__(self) -> None:
        one_of("select", get_args(Score), score=self.score)
        one_of("select", get_args(Per), per=self.per)
        whole_number("select", 1, rounds_per_stratum=self.rounds_per_stratum)
        if self.strata is not None and self.share is not None:
            raise UsageError("select's strata and share both say how much is chosen: leave one out")
        if self.strata is not None:
            whole_number("select", 1, strata=self.strata)
        if self.share is not None and not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise UsageError(f"select's share must be above 0 and at most 1, not {self.share!r}")
        if self.temperature is not None:
            not_negative("select", temperature=self.temperature)
        self._check_score()

    def _check_score(self) -> None:
        """Refuse settings that have no meaning for the score."""
        if self.score in UNSCORED:
            whole_number("select", 0, full_rounds=self.full_rounds)
            if self.temperature is not None:
                raise UsageError(f"select's temperature is for scores, and score='{self.score}' has none")
        elif self.full_rounds == 0:
            raise UsageError(f"select's full_rounds=0 leaves score='{self.score}' nothing to begin with: say 1 or more")
        else:
            whole_number("select", 1, full_rounds=self.full_rounds)
        if self.batches is None:
            return
        if self.score not in GRADIENTS:
            raise UsageError(f"select's batches are for {' and '.join(GRADIENTS)}, not for score='{self.score}'")
        whole_number("select", 2 if self.score == "snr" else 1, batches=self.batches)

    @property
    def _heat(self) -> float:
        """T."""
        return 1.0 if self.temperature is None else self.temperature

    @property
    def _reports(self) -> bool:
        """True if clients send numbers."""
        return self.score in GRADIENTS or (self.score not in UNSCORED and self.per == "client")

    @property
    def idle_doors(self) -> frozenset[str]:
        """What the score has no use for."""
        idle = {"apply", "publish"} if self.score in UNSCORED else set[str]()
        if self.score not in GRADIENTS:
            idle.add("prepare")
        if not self._reports:
            idle.update(("local", "validate"))
        if self.per == "client" or self.score not in ("divergence", *GRADIENTS):
            idle.add("accumulate")
        return frozenset(idle)

    @property
    def per_client(self) -> bool:
        """True if each client is asked for strata of its own."""
        return self.per == "client"

    def check(self, setting: Setting) -> None:
        """Refuse more strata than there are."""
        count = sum(not setting.movable.isdisjoint(s.params) for s in setting.strata)
        if setting.arch == "" and self.strata is not None and self.strata > count:
            raise UsageError(f"select's strata={self.strata} are more than the {count} that the model has to train")

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """How many bytes of each stratum train; no scores."""
        chosen = [s for s in setting.strata if not setting.movable.isdisjoint(s.params)]
        free = setting.movable
        held = {key_of(s): [params[n] for n in s.params if n in free] for s in chosen}
        sizes = {key: sum(p.numel() * p.element_size() for p in tensors) for key, tensors in held.items()}
        return {_BYTES + key: torch.tensor(size) for key, size in sizes.items()}

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Only the chosen strata train and travel."""
        turns = self._turns(strata, state)
        cycle, at = divmod(assignment.round, self.full_rounds + self.rounds_per_stratum * len(turns))
        if at < self.full_rounds:
            return assignment
        turn = (at - self.full_rounds) // self.rounds_per_stratum
        when = (cycle, turn) if self.score in UNSCORED else (assignment.round,)
        if self.per == "client":
            strata = tuple(s for s in strata if key_of(s) in assignment.params)
            turns, when = self._turns(strata, state), (*when, int(assignment.client))
            turn += int(assignment.client)
        if self.score == "cyclic":
            return train_only(assignment, [strata[place] for place in turns[turn % len(turns)]] if turns else ())
        rng = generator(assignment.run_seed, "select", *when)
        return train_only(assignment, self._choose(strata, self._scores(assignment, strata, state), state, rng))

    def _turns(self, strata: Sequence[Stratum], state: Tensors) -> list[list[int]]:
        return turns_of(_sizes(strata, state), self.strata or 1, self.share)

    def _scores(self, assignment: Assignment, strata: Sequence[Stratum], state: Tensors) -> dict[str, float]:
        """Stratum's key → its score, as far as there is one."""
        if self.score == "random":
            return {key_of(s): 1.0 for s in strata}
        own = recall_report(state, assignment.client) if self.per == "client" else {}
        return {**scores_in(state), **own}

    def _choose(
        self, strata: Sequence[Stratum], scores: Mapping[str, float], state: Tensors, rng: Generator
    ) -> list[Stratum]:
        """The strata that train, in order."""
        keys = [key_of(s) for s in strata]
        known = [place for place, key in enumerate(keys) if key in scores]
        ranked = rank([scores[keys[place]] for place in known], self._heat, rng)
        chosen = take([known[at] for at in ranked], _sizes(strata, state), self.strata or 1, self.share)
        return [s for place, s in enumerate(strata) if place in chosen or keys[place] not in scores]

    def prepare(self, view: ClientView) -> Tensors:
        """What a few gradients at the received model say of each stratum."""
        groups = names_by_stratum(view.strata, [n for n in view.assignment.params if n not in view.base])
        count = self.batches or GRADIENTS[self.score]
        return view.measure_gradients(count, lambda found: measure_signal(found, groups, self.score == "snr"))

    def local(self, view: ClientView) -> Hooks:
        """Send what was measured, or what became of what travels."""
        a = view.assignment
        if not a.uploads:
            return Hooks()
        if self.score in GRADIENTS:
            measured = view.prepared
            return Hooks(finish=lambda delta, tally: (measured, None))
        groups = names_by_stratum(view.strata, a.uploads)
        return Hooks(finish=lambda delta, tally: (self._measure_change(delta, groups, a.params), None))

    def _measure_change(self, delta: Tensors, groups: Mapping[str, Sequence[str]], params: Tensors) -> Tensors:
        """A client's own `change` or `divergence`."""
        moved = {key: squared_norm(delta[n] for n in names) for key, names in groups.items()}
        if self.score == "divergence":
            return {key: (moved[key] / sum(params[n].numel() for n in names)).sqrt() for key, names in groups.items()}
        return {key: _relative(moved[key], params, names) for key, names in groups.items()}

    def validate(self, slot: Tensors, assignment: Assignment) -> str | None:
        """Refuse what is no number per stratum."""
        return validate_scores(slot, assignment)

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        """Weighted sums: of the numbers that came, or of changes and their squared norms, with the weights' own."""
        if self.score in GRADIENTS:
            told = {n: t.double() for n, t in slot.items() if float(t) >= 0}
            added = {f"sum/{n}": weight * t for n, t in told.items()}
        else:
            wide = {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in delta.items()}
            added = {f"sum/{n}": weight * t for n, t in wide.items()}
            added |= {f"square/{n}": weight * t.double().square().sum() for n, t in wide.items()}
            told = wide
        added |= {f"weight/{n}": torch.tensor(weight, dtype=torch.float64) for n in told}
        return {**added, **add_(total, added)}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """New scores of what came."""
        keys = [key_of(s) for s in round.strata if self._is_scored(s, state, round)]
        if self.per == "client":
            reports = [read_scores(update.slots.get(self.name, {})) for update in round.updates]
            found = weighted_means(reports, round.weights)
            came = {update.client: report for update, report in zip(round.updates, reports, strict=True) if report}
            state = {**state, **remember_reports(state, came, keys)}
        else:
            found = self._score_round(delta, round)
        return delta, {**state, **score_tensors({key: found[key] for key in keys if key in found})}

    def _is_scored(self, stratum: Stratum, state: Tensors, round: RoundView) -> bool:
        """True if a stratum travels: not one that clients keep or nobody trains, though it has gradients, too."""
        key = key_of(stratum)
        known = SCORE + key in state or not round.arrived.keys().isdisjoint(stratum.params)
        return known and _BYTES + key in state

    def _score_round(self, delta: Tensors, round: RoundView) -> dict[str, float]:
        """Stratum's key → its score, of those of which something came."""
        totals = round.totals.get(self.name, {})
        if self.score in GRADIENTS:
            sums = (n.removeprefix("sum/") for n in totals if n.startswith("sum/"))
            return {key: float(totals[f"sum/{key}"] / totals[f"weight/{key}"]) for key in sums}
        groups = names_by_stratum(round.strata, round.arrived.keys() & delta.keys())
        if self.score == "divergence":
            return {key: spread(totals, names) for key, names in groups.items()}
        moved = {key: squared_norm(delta[n] for n in names) for key, names in groups.items()}
        return {key: float(_relative(moved[key], round.params, names)) for key, names in groups.items()}

    def publish(self, state: Tensors) -> Figures:
        """Every stratum's last score."""
        return {"score": scores_in(state)}


def _sizes(strata: Sequence[Stratum], state: Tensors) -> list[int]:
    """How many bytes strata have."""
    return [int(state[_BYTES + key_of(s)]) for s in strata]


def _relative(moved: Tensor, params: Tensors, names: Sequence[str]) -> Tensor:
    """√moved/‖w‖, moved the squared norm of a change of w; √moved where w is zero."""
    size = squared_norm(params[n] for n in names)
    return (moved / torch.where(size > 0, size, torch.ones_like(size))).sqrt()
