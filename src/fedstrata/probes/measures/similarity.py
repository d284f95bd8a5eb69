"""How alike models are: linear CKA of their features, stage by stage (InCo Aggregation, §2, §5.4, Appendix E).

Linear CKA is from Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019; its estimate
from minibatches is from Nguyen, Raghu and Kornblith, "Do Wide and Deep Networks Learn the Same Things?", ICLR 2021.
Symbols: features X and Y of the same n examples, K = XXᵀ, L = YYᵀ, CKA = HSIC(K, L)/√(HSIC(K, K)·HSIC(L, L)).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import isnan, nan
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.core.rng import derive, generator, preserve_rng, seed_global
from fedstrata.data.examples import TensorExamples, as_unlabelled
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.models.inputs import outputs_of
from fedstrata.models.stages import stages_and_blocks
from fedstrata.models.taps import watch_places
from fedstrata.probes.measures.reading import Data, device_of, scratch_copy

LEAST = 4
"""Examples that the unbiased HSIC needs: it divides by n − 3."""


def cka(left: Tensor, right: Tensor, unbiased: bool = True) -> float:
    """Linear CKA of two models' features of the same examples: 1 for the same features, turned or scaled as a whole.

    Plain: HSIC₀ = tr(KHLH)/(n − 1)², H = I − 11ᵀ/n: from 0 to 1, and far above 0 for unrelated features where there
    are fewer examples than features. Unbiased: HSIC₁ (Song et al., 2012), see `minibatch_cka`: from −1 to 1, and
    about 0 for unrelated features. Features that are the same for all examples have no CKA: NaN.

    Args:
        left: one model's features, rows first; further axes count as features.
        right: the other's, of the same rows; they may be more or fewer.
        unbiased: by HSIC₁ instead of HSIC₀.
    """
    return float(_normalise(_products(left, right, unbiased))[0, 1])


def minibatch_cka(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The unbiased CKA from batches of examples: Σ HSIC₁(K, L)/√(Σ HSIC₁(K, K)·Σ HSIC₁(L, L)), sums over batches.

    HSIC₁(K, L) = [tr(K̃L̃) + 1ᵀK̃1·1ᵀL̃1/((n − 1)(n − 2)) − 2/(n − 2)·1ᵀK̃L̃1]/(n(n − 3)), where K̃ and L̃ are K and L with
    a diagonal of zeros. The result depends on the batch size only by chance. A batch has 4 examples or more.
    """
    products = [_products(left, right, unbiased=True) for left, right in pairs]
    if not products:
        raise UsageError("there are no batches of features to compare")
    return float(_normalise(torch.stack(products).sum(0))[0, 1])


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """Stage → CKA of every two models, as a symmetric matrix; the stages are in order."""

    matrices: dict[str, Tensor]

    @property
    def means(self) -> dict[str, float]:
        """Stage → the mean over all pairs of models, without those that have no CKA: the curve over depth."""
        return {stage: _over_pairs(matrix) for stage, matrix in self.matrices.items()}


def layer_similarity(
    models: Sequence[nn.Module],
    inputs: Tensor | Data,
    stages: Iterable[str] | None = None,
    batch_size: int = 128,
) -> LayerSimilarity:
    """The unbiased CKA between the models' features at the same stages, on the same inputs (InCo, Figs. 1, 10, 12).

    Args:
        models: two or more, of any depth and width.
        inputs: what all of them are shown, best of the test set: an array of inputs, a pair (inputs, labels), Examples
            or a map-style Dataset; labels are not looked at.
        stages: names of modules; those that only some of the models have are left out. None for all stages, and the
            blocks of a transformer that has them in a list.
        batch_size: examples of a minibatch, drawn in a fixed random order; the last ones join if they are too few.
    """
    if len(models) < 2:
        raise UsageError(f"similarity is between 2 or more models; there are {len(models)}")
    common = _common(models, stages)
    data = as_unlabelled(inputs, "what models are shown")
    totals = {stage: torch.zeros(len(models), len(models), dtype=torch.float64) for stage in common}
    with preserve_rng():
        seed_global(derive("probes"), torch.device("cpu"), everything=not isinstance(data, TensorExamples))
        for rows in _batches(len(data), batch_size):
            x = data.batch(rows)[0]
            seen = [_gram_matrices(model, x, common) for model in models]
            for stage, total in totals.items():
                total += _hsic([mine[stage] for mine in seen], unbiased=True)
    return LayerSimilarity({stage: _normalise(total) for stage, total in totals.items()})


def _over_pairs(matrix: Tensor) -> float:
    found = [float(matrix[i, j]) for i, j in combinations(range(len(matrix)), 2)]
    return fmean(kept) if (kept := [value for value in found if not isnan(value)]) else nan


def _common(models: Sequence[nn.Module], stages: Iterable[str] | None) -> list[str]:
    """The stages that all models have, in order; a name that no model has is refused."""
    if isinstance(stages, str):
        raise UsageError(f"stages are a list of module names, not '{stages}'")
    asked = list(dict.fromkeys(stages_and_blocks(models[0]) if stages is None else stages))
    known = [{str(name) for name, _ in model.named_modules(remove_duplicate=False)} for model in models]
    everything = set().union(*known)
    for stage in asked:
        if str(stage) not in everything:
            raise UsageError(f"no model has a stage '{stage}'{did_you_mean(stage, everything - {''})}")
    common = [stage for stage in asked if all(str(stage) in names for names in known)]
    if not common:
        raise UsageError("the models have none of the stages in common")
    return common


def _batches(examples: int, batch_size: int) -> list[Tensor]:
    """Rows batch by batch. Examples sorted by class would otherwise meet their own class only."""
    if min(examples, batch_size) < LEAST:
        raise UsageError(f"CKA needs {LEAST} or more examples per batch, not {min(examples, batch_size)}")
    parts = list(torch.split(torch.randperm(examples, generator=generator("similarity")), batch_size))
    if len(parts[-1]) < LEAST:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _gram_matrices(model: nn.Module, x: Tensor, stages: Sequence[str]) -> dict[str, Tensor]:
    """Stage → the centred Gram matrix of the features that a batch has there."""
    found: dict[str, Tensor] = {}

    def look(stage: str, there: Any) -> None:  # computes at once: the next layer may work in place
        there = outputs_of(there)
        if len(there) != len(x):
            raise UsageError(f"stage '{stage}' puts out {len(there)} rows for {len(x)} examples")
        if stage not in found:  # of a module that runs more than once, the first time
            found[stage] = _centred_gram(there, unbiased=True)

    with scratch_copy(model) as scratch, torch.no_grad(), watch_places(scratch, {s: partial(look, s) for s in stages}):
        scratch(x.to(device_of(scratch)))
    if missing := [stage for stage in stages if stage not in found]:
        raise UsageError(f"the model's module '{missing[0]}' does not run")
    return found


def _products(left: Tensor, right: Tensor, unbiased: bool) -> Tensor:
    """HSIC of both sides with each other and with themselves, 2 × 2."""
    least = LEAST if unbiased else 2
    if len(left) != len(right):
        raise UsageError(f"CKA compares features of the same examples, not of {len(left)} rows and {len(right)}")
    if len(left) < least:
        raise UsageError(f"CKA needs {least} or more examples per batch, not {len(left)}")
    return _hsic([_centred_gram(side, unbiased) for side in (left, right)], unbiased)


def _centred_gram(features: Tensor, unbiased: bool) -> Tensor:
    """A Gram matrix such that HSIC is a sum of products of entries: HKH, or for HSIC₁ the same without a diagonal.

    Without it, rows add up to 0 once their sums/(n − 2) are taken off and the whole sum/((n − 1)(n − 2)) is given back.
    What is nothing but rounding becomes 0.
    """
    points = features.detach().cpu().reshape(len(features), -1)
    points = points if points.is_floating_point() else points.double()
    rounding = 16 * min(torch.finfo(points.dtype).eps, torch.finfo(torch.float32).eps)
    points = points.double()
    moved = points - points.mean(0)
    gram = moved @ moved.T
    if moved.norm() <= rounding * points.norm():
        return torch.zeros_like(gram)
    if not unbiased:
        return gram
    n = len(gram)
    gram.fill_diagonal_(0)
    sums = gram.sum(0) / (n - 2)
    left = (gram - sums - sums.unsqueeze(1) + sums.sum() / (n - 1)).fill_diagonal_(0)
    return torch.zeros_like(gram) if left.norm() <= 1e-12 * gram.norm() else left


def _hsic(centred: Sequence[Tensor], unbiased: bool) -> Tensor:
    """HSIC of every two."""
    n = len(centred[0])
    rows = torch.stack([gram.flatten() for gram in centred])
    return rows @ rows.T / (n * (n - 3) if unbiased else (n - 1) ** 2)


def _normalise(hsic: Tensor) -> Tensor:
    """CKA from HSIC; NaN where a side's HSIC with itself is 0."""
    own = hsic.diagonal().sqrt()
    return hsic / torch.outer(own, own)
