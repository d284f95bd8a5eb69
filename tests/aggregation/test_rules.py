"""Reducers: by hand, against NumPy and SciPy in double precision, and at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.aggregation import arithmetic, coordinate_wise
from fedstrata.aggregation.bulyan import Bulyan
from fedstrata.aggregation.coordinate_wise import TrimmedMean
from fedstrata.aggregation.krum import Krum, MultiKrum
from fedstrata.aggregation.mean import RunningMean, WeightedMean
from fedstrata.aggregation.rules import REDUCERS, build_reducer
from fedstrata.aggregation.strata import reduce_updates
from fedstrata.core.spec import signature, summary
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Reducer, Stratum
from fedstrata.errors import UsageError

Arrays = dict[str, np.ndarray]

ROBUST = ["median", "trimmed_mean(share=0.2)", "krum", "multi_krum", "geometric_median", "bulyan", "norm_clip"]
BY_COORDINATE = ROBUST[:2]
WHOLE = ROBUST[2:]
SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
PRECISE = "geometric_median(tolerance=1e-13, steps=100000)"


def build_rule(text: str) -> Reducer:
    reducer = build_reducer(text)
    assert reducer is not None
    return reducer


def reduce_values(text: str, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """A reducer on one tensor per client, in double precision, as a list."""
    deltas = [{"x": torch.tensor(v, dtype=torch.float64)} for v in values]
    delta, buffers = build_rule(text)(deltas, [{}] * len(values), weights or [1.0] * len(values))
    assert buffers == {}
    return delta["x"].tolist()


def clients(
    count: int, seed: int = 0, dtype: torch.dtype = torch.float64, held: Sequence[str] | None = None
) -> list[Tensors]:
    """Random tensors; `held` says which names each client has (all, if it is None)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for n, shape in SHAPES.items()
            if held is None or n in held[k]
        }
        for k in range(count)
    ]


def arrays(tensors: Sequence[Tensors]) -> list[Arrays]:
    return [{n: t.double().numpy() for n, t in client.items()} for client in tensors]


def weights_of(count: int) -> list[float]:
    return [float(3 + 7 * k % 11) for k in range(count)]


def close(found: Tensors, expected: Arrays, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].double().numpy(), value, rtol=rtol, atol=atol)


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        t.dtype == right[n].dtype and torch.equal(t, right[n]) for n, t in left.items()
    )


# What the reducers do, written once more with loops over clients and elements.


def reduce_stacks(found: Sequence[Arrays], reduce: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    names = dict.fromkeys(n for c in found for n in c)
    return {n: reduce(np.stack([c[n] for c in found if n in c])) for n in names}


def trim_and_average(share: float) -> Callable[[np.ndarray], np.ndarray]:
    def reduce(values: np.ndarray) -> np.ndarray:
        drop = int(share * len(values))
        return np.sort(values, axis=0)[drop : len(values) - drop].mean(axis=0)

    return reduce


def weighted_mean(found: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    out = {}
    for name in dict.fromkeys(n for c, w in zip(found, weights, strict=True) if w for n in c):
        at = [(w, c[name]) for c, w in zip(found, weights, strict=True) if w and name in c]
        out[name] = sum(w * x for w, x in at) / sum(w for w, _ in at)
    return out


def krum_ranks(found: Sequence[Arrays], suspects: int) -> list[int]:
    scores = []
    for i, one in enumerate(found):
        to_others = []
        for j, other in enumerate(found):
            shared = [n for n in one if n in other]
            if j != i and shared:
                total = sum(float(((one[n] - other[n]) ** 2).sum()) for n in shared)
                to_others.append(total / sum(one[n].size for n in shared))
            elif j != i:
                to_others.append(math.inf)
        scores.append(sum(sorted(to_others)[: max(1, len(found) - suspects - 2)]))
    return sorted(range(len(found)), key=scores.__getitem__)


def kept_weights(found: Sequence[Arrays], weights: Sequence[float], suspects: int, keep: int) -> list[float]:
    kept = krum_ranks(found, suspects)[:keep]
    return [w if k in kept else 0.0 for k, w in enumerate(weights)]


def spread(v: Arrays, found: Sequence[Arrays], weights: Sequence[float]) -> float:
    """Σ_k α_k (d_k/D) ‖v − w_k‖, where ‖·‖² is over the names of client k, times D/d_k."""
    total = sum(x.size for x in v.values())
    out = 0.0
    for client, weight in zip(found, weights, strict=True):
        held = sum(x.size for x in client.values())
        square = sum(float(((v[n] - x) ** 2).sum()) for n, x in client.items())
        out += weight / sum(weights) * held / total * math.sqrt(total / held * square)
    return out


def minimise_spread(found: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """The point of the smallest spread, by SciPy's BFGS from the weighted mean."""
    optimize = pytest.importorskip("scipy.optimize")
    start = weighted_mean(found, weights)
    ends = np.cumsum([x.size for x in start.values()])[:-1]

    def unpacked(flat: np.ndarray) -> Arrays:
        return {n: p.reshape(start[n].shape) for n, p in zip(start, np.split(flat, ends), strict=True)}

    def slope(flat: np.ndarray) -> np.ndarray:
        v = unpacked(flat)
        total = flat.size
        out = {n: np.zeros_like(x) for n, x in v.items()}
        for client, weight in zip(found, weights, strict=True):
            held = sum(x.size for x in client.values())
            far = math.sqrt(total / held * sum(float(((v[n] - x) ** 2).sum()) for n, x in client.items()))
            for n, x in client.items():
                out[n] += weight / sum(weights) * (v[n] - x) / far
        return np.concatenate([x.ravel() for x in out.values()])

    first = np.concatenate([x.ravel() for x in start.values()])
    answer = optimize.minimize(
        lambda flat: spread(unpacked(flat), found, weights), first, jac=slope, method="BFGS", options={"gtol": 1e-9}
    )
    assert np.abs(slope(answer.x)).max() < 1e-7
    return unpacked(answer.x)


# The mean


def test_the_mean_has_the_bits_of_a_plain_fold():
    """Σ n_k x_k from the first client to the last, and one division at the end, all in single precision."""
    found, weights = clients(7, dtype=torch.float32), weights_of(7)
    mean = RunningMean()
    for client, weight in zip(found, weights, strict=True):
        mean.add(client, weight)
    for name, shape in SHAPES.items():
        total = torch.zeros(shape)
        for client, weight in zip(found, weights, strict=True):
            total = torch.add(total, client[name], alpha=weight)
        assert torch.equal(mean.result()[name], total / sum(weights))


def test_the_mean_by_hand():
    """x: (1·2 + 3·5)/4 = 4.25; y: the second one's alone. Buffers: (1·10 + 3·13)/4 = 12.25 → 12."""
    deltas = [{"x": torch.tensor(2.0)}, {"x": torch.tensor(5.0), "y": torch.tensor([1.0, -1.0])}]
    delta, buffers = WeightedMean()(deltas, [{"n": torch.tensor(10)}, {"n": torch.tensor(13)}], [1.0, 3.0])
    assert {n: t.tolist() for n, t in delta.items()} == {"x": 4.25, "y": [1.0, -1.0]}
    assert buffers["n"].dtype == torch.int64
    assert buffers["n"].item() == 12


def test_the_mean_is_left_to_the_caller():
    assert build_reducer("mean") is None
    assert build_reducer("mean()") is None


# By hand


def test_the_median_by_hand():
    """Of (1, 5, 2) and (7, −1, 0): 2 and 0. Of (10, 1, 4, 2): between 2 and 4, so 3. Weights play no part."""
    assert reduce_values("median", [[1.0, 7.0], [5.0, -1.0], [2.0, 0.0]], [1.0, 1000.0, 1.0]) == [2.0, 0.0]
    assert reduce_values("median", [10.0, 1.0, 4.0, 2.0], [1000.0, 1.0, 1.0, 1.0]) == 3.0


def test_the_trimmed_mean_by_hand():
    """⌊0.2·5⌋ = 1 goes at each end: of (50, 1, −100, 6, 2) remain 1, 2, 6, whose mean is 3; of four, nothing goes:
    (50 + 1 − 100 + 6)/4 = −10.75. With a share of 0.4 only the median remains. Weights play no part."""
    values = [50.0, 1.0, -100.0, 6.0, 2.0]
    assert reduce_values("trimmed_mean(share=0.2)", values, [1.0, 9.0, 1.0, 1.0, 1.0]) == 3.0
    assert reduce_values("trimmed_mean(share=0.2)", values[:4]) == -10.75
    assert reduce_values("trimmed_mean(share=0.4)", values) == 2.0
    assert reduce_values("trimmed_mean(share=0)", values) == -8.2


def test_each_coordinate_is_trimmed_on_its_own():
    """The first coordinate loses −9 and 8, the second −7 and 6: other clients."""
    assert reduce_values("trimmed_mean(share=0.34)", [[-9.0, 6.0], [1.0, -7.0], [8.0, 2.0]]) == [1.0, 2.0]


def test_krum_by_hand():
    """0, 1, 3, 4.5 and 100 on a line, n = 5, f = ⌊0.2·5⌋ = 1: two neighbours each.

    s = 1 + 9 = 10; 1 + 4 = 5; 2.25 + 4 = 6.25; 2.25 + 12.25 = 14.5; 95.5² + 97² for the last: 1 has the lowest. With
    f = 2 there is one neighbour: s = 1, 1, 2.25, 2.25, 95.5², and the first of the two that tie wins. With f = 0 there
    are three: s = 1 + 9 + 20.25 = 30.25; 1 + 4 + 12.25 = 17.25; 2.25 + 4 + 9 = 15.25, and 3 wins.
    """
    values = [0.0, 1.0, 3.0, 4.5, 100.0]
    assert reduce_values("krum(share=0.2)", values) == 1.0
    assert reduce_values("krum(share=0.4)", values) == 0.0
    assert reduce_values("krum(share=0)", values) == 3.0


def test_multi_krum_by_hand():
    """The scores above: kept are 1 and 3, with weights 2 and 6: (2·1 + 6·3)/8 = 2.5. By default all but f = 1 are:
    (1·0 + 2·1 + 6·3 + 7·4.5)/16 = 51.5/16. A `keep` beyond n keeps all."""
    values, weights = [0.0, 1.0, 3.0, 4.5, 100.0], [1.0, 2.0, 6.0, 7.0, 4.0]
    assert reduce_values("multi_krum(share=0.2, keep=2)", values, weights) == 2.5
    assert reduce_values("multi_krum(share=0.2)", values, weights) == 51.5 / 16
    assert reduce_values("multi_krum(share=0.2, keep=9)", values, weights) == 451.5 / 20


def test_the_geometric_median_by_hand():
    """Of the corners of a convex quadrilateral it is where the diagonals cross: y = x and x + y = 3 at (1.5, 1.5); the
    mean would be (1.75, 1.75). On a line it is the weighted median: 2 of (0, 2, 50) with the weights (2, 3, 2), and 50
    with (2, 2, 5)."""
    found = reduce_values("geometric_median", [[0.0, 0.0], [3.0, 0.0], [4.0, 4.0], [0.0, 3.0]])
    assert found == pytest.approx([1.5, 1.5], abs=1e-5)
    assert reduce_values("geometric_median", [0.0, 2.0, 50.0], [2.0, 3.0, 2.0]) == pytest.approx(2.0, abs=1e-4)
    assert reduce_values("geometric_median", [0.0, 2.0, 50.0], [2.0, 2.0, 5.0]) == pytest.approx(50.0, abs=1e-4)


def test_one_step_of_weiszfeld_by_hand():
    """0 and 3 with the weights 2 and 1: v = 1, distances 1 and 2, β = (2/3)/1 and (1/3)/2, which are 4 : 1: v = 3/5.

    With ν = 1.5, β = (2/3)/1.5 and (1/3)/2, which are 8 : 3: v = 9/11.
    """
    assert reduce_values("geometric_median(steps=1)", [0.0, 3.0], [2.0, 1.0]) == pytest.approx(0.6, rel=1e-14)
    assert reduce_values("geometric_median(steps=1, smooth=1.5)", [0.0, 3.0], [2.0, 1.0]) == pytest.approx(
        9 / 11, rel=1e-14
    )


def test_a_tolerance_ends_the_steps():
    """The first step goes from 1 to 0.6, by 0.4; the distances' harmonic mean is 1/(2/3 + 1/6) = 1.2. So a tolerance of
    0.34 > 0.4/1.2 stops there, and one of 0.33 does not."""
    one = reduce_values("geometric_median(steps=1)", [0.0, 3.0], [2.0, 1.0])
    assert reduce_values("geometric_median(tolerance=0.34)", [0.0, 3.0], [2.0, 1.0]) == one
    assert reduce_values("geometric_median(tolerance=0.33)", [0.0, 3.0], [2.0, 1.0]) < 0.5


# Against NumPy and SciPy


@pytest.mark.parametrize("count", range(1, 13))
def test_the_network_sorts_all_zeros_and_ones(count: int):
    """A network that sorts every sequence of zeros and ones sorts everything (Knuth, volume 3, 5.3.4)."""
    columns = torch.arange(2**count)
    block = torch.stack([(columns >> k) % 2 for k in range(count)]).float()
    assert torch.equal(coordinate_wise.sort_columns(block), block.sort(0).values)


@pytest.mark.parametrize("count", [31, 32, 33, 100, 257])
def test_the_network_sorts_many_clients(count: int):
    block = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    before = block.clone()
    assert torch.equal(coordinate_wise.sort_columns(block), block.sort(0).values)
    assert torch.equal(block, before)


@pytest.mark.parametrize("held", [None, ["abc", "ab", "bc", "c", "abc", "ac", "abc", "b", "abc"]])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_against_numpy(count: int, held: Sequence[str] | None):
    found, values, weights = clients(count, 1, held=held), clients(count, 2, held=held), weights_of(count)
    plain, plain_values = arrays(found), arrays(values)

    delta, buffers = build_rule("median")(found, values, weights)
    close(delta, reduce_stacks(plain, lambda x: np.median(x, axis=0)))
    close(buffers, reduce_stacks(plain_values, lambda x: np.median(x, axis=0)))

    for share in (0.0, 0.26, 0.49):
        delta, buffers = TrimmedMean(share=share)(found, values, weights)
        close(delta, reduce_stacks(plain, trim_and_average(share)))
        close(buffers, reduce_stacks(plain_values, trim_and_average(share)))

        suspects = int(share * count)
        chosen = krum_ranks(plain, suspects)[0]
        delta, buffers = Krum(share=share)(found, values, weights)
        assert same(delta, found[chosen])
        assert same(buffers, values[chosen])

        for keep in (None, 2):
            chosen = kept_weights(plain, weights, suspects, keep or count - suspects)
            delta, buffers = MultiKrum(share=share, keep=keep)(found, values, weights)
            close(delta, weighted_mean(plain, chosen))
            close(buffers, weighted_mean(plain_values, chosen))


@pytest.mark.parametrize("held", [None, ["abc", "ab", "bc", "abc", "abc", "ac", "abc"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_geometric_median_against_scipy(seed: int, held: Sequence[str] | None):
    found, weights = clients(7, seed, held=held), weights_of(7)
    delta, _ = build_rule(PRECISE)(found, [{}] * 7, weights)
    plain = arrays(found)
    expected = minimise_spread(plain, weights)
    close(delta, expected, rtol=1e-6, atol=1e-6)
    least = spread(expected, plain, weights)
    assert spread(arrays([delta])[0], plain, weights) <= least * (1 + 1e-12)
    # The mean lies well apart, so the comparison can fail.
    assert spread(weighted_mean(plain, weights), plain, weights) > least * (1 + 1e-4)
    roughly, _ = build_rule("geometric_median")(found, [{}] * 7, weights)
    close(roughly, expected, rtol=1e-4, atol=1e-4)


def test_buffers_follow_the_weights_of_the_geometric_median():
    """The weights are found again from deltas and result by least squares; they are not the clients' own."""
    found, values, weights = clients(4, 1), clients(4, 2), [1.0, 2.0, 3.0, 4.0]
    delta, buffers = build_rule("geometric_median")(found, values, weights)

    def flat(tensors: Tensors) -> np.ndarray:
        return torch.cat([t.reshape(-1) for t in tensors.values()]).numpy()

    shares, *_ = np.linalg.lstsq(np.stack([flat(c) for c in found], axis=1), flat(delta), rcond=None)
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert not np.allclose(shares, np.array(weights) / 10, atol=1e-3)
    close(buffers, weighted_mean(arrays(values), shares.tolist()), rtol=1e-10)


def bulyan_by_loops(found: Sequence[Arrays], values: Sequence[Arrays], share: float) -> tuple[Arrays, Arrays]:
    """Krum's choice taken out θ = n − 2f times; of each number the mean of the θ − 2f nearest to the median."""
    suspects = min(int(share * len(found)), max(0, (len(found) - 3) // 4))
    left, chosen = list(range(len(found))), []
    for _ in range(len(found) - 2 * suspects):
        best = left[krum_ranks([found[k] for k in left], suspects)[0]] if len(left) > 1 else left[0]
        left.remove(best)
        chosen.append(best)

    def middle(stacked: np.ndarray) -> np.ndarray:
        flat = stacked.reshape(len(stacked), -1)
        out = np.empty(flat.shape[1])
        for j in range(flat.shape[1]):
            column = flat[:, j]
            near = np.argsort(np.abs(column - np.median(column)), kind="stable")
            out[j] = column[near[: max(1, len(column) - 2 * suspects)]].mean()
        return out.reshape(stacked.shape[1:])

    return tuple(reduce_stacks([many[k] for k in chosen], middle) for many in (found, values))  # type: ignore[return-value]


@pytest.mark.parametrize("held", [None, ["abc", "abc", "ab", "abc", "bc", "abc", "abc", "ac", "abc", "abc", "abc"]])
@pytest.mark.parametrize("count", [1, 2, 6, 7, 11])
def test_bulyan_against_numpy(count: int, held: Sequence[str] | None):
    found, values = clients(count, 5, held=held), clients(count, 6, held=held)
    for share in (0.0, 0.15, 0.2):
        delta, buffers = build_rule(f"bulyan(share={share})")(found, values, weights_of(count))
        expected, expected_values = bulyan_by_loops(arrays(found), arrays(values), share)
        close(delta, expected)
        close(buffers, expected_values)


def test_bulyan_by_hand():
    """n = 7, f = 1, θ = 5: of 0, 1, 2, 3, 4, 50 and 60 Krum chooses 2 (four neighbours: 1 + 1 + 4 + 4), and in the end
    all but 50 and 60. Their median is 2, and the three nearest are 1, 2 and 3. With six updates nobody is suspected:
    the mean."""
    values = [0.0, 60.0, 1.0, 2.0, 50.0, 3.0, 4.0]
    assert reduce_values("bulyan", values) == 2.0
    assert reduce_values("bulyan", [10.0, 1.0, 2.0, 3.0, 4.0, 100.0]) == 20.0


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_norm_clip_against_numpy(limit: float | None):
    held = ["abc", "ab", "abc", "c", "abc", "bc"]
    found, values, weights = clients(6, 1, held=held), clients(6, 2), weights_of(6)
    found[2] = {n: t * 1000 for n, t in found[2].items()}
    plain = arrays(found)
    norms = [np.sqrt(sum((x**2).sum() for x in c.values())) for c in plain]
    most = np.median(norms) if limit is None else limit
    clipped = [{n: x / max(1, norm / most) for n, x in c.items()} for c, norm in zip(plain, norms, strict=True)]
    delta, buffers = build_rule(f"norm_clip(limit={limit})")(found, values, weights)
    close(delta, weighted_mean(clipped, weights))
    close(buffers, reduce_stacks(arrays(values), lambda x: np.median(x, axis=0)))


def test_a_long_update_counts_for_no_more_than_others():
    """One of five sends numbers without end: the result is at most (1/5) of the median norm from the others' sum."""
    good = clients(4, 3)
    bad = {n: torch.full_like(t, 1e300) for n, t in good[0].items()}
    delta, _ = build_rule("norm_clip")([*good, bad], [{}] * 5, [1.0] * 5)
    others = weighted_mean(arrays(good), [1.0] * 4)
    norms = [np.sqrt(sum((x**2).sum() for x in c.values())) for c in arrays(good)]
    apart = np.sqrt(sum(((delta[n].numpy() - 0.8 * x) ** 2).sum() for n, x in others.items()))
    assert apart <= 2 / 5 * max(norms)


def test_fltrust_against_numpy():
    """ReLU(cos(Δ_k, Δ_0)) and ‖Δ_0‖/‖Δ_k‖ over the names of client k; one points the other way, one is zero."""
    held = ["abc", "abc", "ab", "c", "abc", "abc"]
    found, values = clients(6, 8, held=held), clients(6, 9)
    found[1] = {n: 3 * t + 0.1 for n, t in found[0].items()}
    found[2] = {n: -t for n, t in found[0].items() if n in "ab"}
    found[4] = {n: 0 * t for n, t in found[0].items()}
    plain, scores, scaled = arrays(found), [], []
    for client in plain[1:]:
        own = np.concatenate([plain[0][n].ravel() for n in client])
        theirs = np.concatenate([x.ravel() for x in client.values()])
        lengths = np.linalg.norm(own), np.linalg.norm(theirs)
        scores.append(max(0.0, float(own @ theirs) / (lengths[0] * lengths[1])) if lengths[1] else 0.0)
        scaled.append({n: x * (lengths[0] / lengths[1] if lengths[1] else 0) for n, x in client.items()})
    assert scores[0] > 0.9
    assert scores[1] == scores[3] == 0
    delta, buffers = build_rule("fltrust")(found, values, [0.0, *weights_of(5)])
    close(delta, weighted_mean(scaled, scores), rtol=1e-10)
    close(buffers, weighted_mean(arrays(values)[1:], scores), rtol=1e-10)
    nobody, own = build_rule("fltrust")([found[0], found[2], found[4]], values[:3], [0.0, 1.0, 1.0])
    assert nobody == {}
    assert same(own, values[0])


STRATA = (Stratum("one", "one", ("a",), ("a",)), Stratum("two", "two", ("b",), ()))
"""`c` is in no stratum."""


@pytest.mark.parametrize("text", ["krum", "multi_krum(share=0.3)", "geometric_median", "bulyan", "norm_clip"])
def test_stratum_by_stratum(text: str):
    """As if there were a model of each stratum's names alone, for the clients that hold some of them."""
    held = ["abc", "ab", "abc", "bc", "abc", "abc", "abc", "c", "abc"]
    found, values, weights = clients(9, 1, held=held), clients(9, 2), weights_of(9)
    found[0]["a"], found[2]["b"] = found[0]["a"] + 100, found[2]["b"] + 100
    rule = build_rule(text[:-1] + ", per='stratum')" if text.endswith(")") else f"{text}(per='stratum')")
    delta, buffers = reduce_updates(rule, found, values, weights, STRATA)
    for names, statistics in (("a", "a"), ("b", ""), ("c", "bc")):
        own = [{n: t for n, t in c.items() if n in names} for c in found]
        theirs = [{n: t for n, t in c.items() if n in statistics} for c in values]
        at = [k for k, c in enumerate(own) if c]
        chosen = [own[k] for k in at], [theirs[k] for k in at], [weights[k] for k in at]
        expected, expected_values = build_rule(text)(*chosen)
        assert same({n: delta[n] for n in names if n in delta}, expected)
        assert same({n: buffers[n] for n in statistics if n in buffers}, expected_values)
    whole, _ = reduce_updates(build_rule(text), found, values, weights, STRATA)
    assert same(whole, build_rule(text)(found, values, weights)[0])
    assert not same(whole, delta)
    assert reduce_updates(rule, [{}] * 3, [{}] * 3, [1.0] * 3, STRATA) == ({}, {})


def test_a_client_may_lie_in_one_layer_and_be_honest_in_the_others():
    """Client 0 lies in a, client 1 in b; per stratum each one's honest layer counts: (0 + 0.1 + 0.2 + 0.3)/4."""
    found = [{"a": torch.full((4,), 9.0), "b": torch.zeros(4)}, {"a": torch.zeros(4), "b": torch.full((4,), 9.0)}]
    found += [{"a": torch.full((4,), v), "b": torch.full((4,), v)} for v in (0.1, 0.2, 0.3)]
    rule = build_rule("multi_krum(share=0.2, per='stratum')")
    delta, _ = reduce_updates(rule, found, [{}] * 5, [1.0] * 5, STRATA)
    assert delta["a"][0].item() == pytest.approx(0.6 / 4)
    assert delta["b"][0].item() == pytest.approx(0.6 / 4)


def test_statistics_without_parameters_are_judged_by_whole_updates():
    """Client 2 points the other way and is trusted in nothing: the statistic is the mean of 1 and 3."""
    strata = [Stratum("a", "a", ("a",), ()), Stratum("norm", "norm", (), ("mean",))]
    found = [{"a": torch.tensor([v, 1.0])} for v in (1.0, 1.0, 1.0, -1.0)]
    found[3]["a"][1] = -1.0
    values = [{"mean": torch.tensor([v])} for v in (7.0, 1.0, 3.0, 99.0)]
    delta, buffers = reduce_updates(build_rule("fltrust(per='stratum')"), found, values, [1.0] * 4, strata)
    assert delta.keys() == {"a"}
    assert buffers["mean"].item() == pytest.approx(2.0)


# Different names


def test_a_coordinate_is_reduced_over_its_holders():
    """x: the median of 1, 2 and 9; y: of 4 and 8; z: one client's."""
    deltas = [
        {"x": torch.tensor(1.0), "y": torch.tensor(4.0)},
        {"x": torch.tensor(9.0)},
        {"x": torch.tensor(2.0), "y": torch.tensor(8.0), "z": torch.tensor([5.0])},
    ]
    delta, _ = build_rule("median")(deltas, [{}] * 3, [1.0] * 3)
    assert {n: t.tolist() for n, t in delta.items()} == {"x": 2.0, "y": 6.0, "z": [5.0]}


def test_distances_are_for_each_shared_element():
    """0 and 1 share x, one element: 2² = 4. 0 and 2 share x and y, three elements: (3² + 1 + 1)/3. 1 and 2 share x: 1.
    Client 3 shares nothing with anyone."""
    deltas = [
        {"x": torch.tensor([0.0]), "y": torch.tensor([0.0, 0.0])},
        {"x": torch.tensor([2.0])},
        {"x": torch.tensor([3.0]), "y": torch.tensor([1.0, -1.0])},
        {"z": torch.tensor([0.0])},
    ]
    far = math.inf
    expected = [[0.0, 4.0, 11 / 3, far], [4.0, 0.0, 1.0, far], [11 / 3, 1.0, 0.0, far], [far, far, far, 0.0]]
    assert arithmetic.squared_distances(deltas).tolist() == [pytest.approx(row, rel=1e-15) for row in expected]


def test_how_many_names_clients_share_does_not_matter():
    """Three clients hold 100 elements (all 0, all 0.1, all 0.2), three hold one (4, 4.5, 5.5); f = 2, two neighbours.

    For each element the lowest scores are 2·0.01 and 0.25 + 1: the wide clients win. By plain sums they would lose,
    100·2·0.01 = 2 against 1.25.
    """
    wide = [{"x": torch.full((1,), v), "y": torch.full((99,), v)} for v in (0.0, 0.1, 0.2)]
    small = [{"x": torch.full((1,), v)} for v in (4.0, 4.5, 5.5)]
    delta, _ = build_rule("krum(share=0.34)")([*small, *wide], [{}] * 6, [1.0] * 6)
    assert delta["x"].item() == pytest.approx(0.1)
    assert delta["y"].shape == (99,)


def test_a_name_that_no_chosen_client_holds_is_left_out():
    """The near clients hold x and the buffer s; the far one holds y and t besides, and is not chosen.

    multi_krum: x = (1 + 1.5 + 2·1.25)/4 = 1.25, s = (0 + 1 + 2·2)/4 = 1.25. krum, with two neighbours: the scores of
    1 and 1.5 are 0.0625 + 0.25, that of 1.25 is 0.0625 + 0.0625.
    """
    deltas = [
        {"x": torch.tensor(1.0)},
        {"x": torch.tensor(1.5)},
        {"x": torch.tensor(1.25)},
        {"x": torch.tensor(9.0), "y": torch.tensor(1.0)},
    ]
    values = [{"s": torch.tensor(float(k))} for k in range(3)] + [{"s": torch.tensor(7.0), "t": torch.tensor(1.0)}]
    delta, buffers = build_rule("multi_krum(share=0.25)")(deltas, values, [1.0, 1.0, 2.0, 1.0])
    assert {n: t.item() for n, t in delta.items()} == {"x": 1.25}
    assert {n: t.item() for n, t in buffers.items()} == {"s": 1.25}
    delta, buffers = build_rule("krum(share=0)")(deltas, values, [1.0, 1.0, 2.0, 1.0])
    assert {n: t.item() for n, t in delta.items()} == {"x": 1.25}
    assert {n: t.item() for n, t in buffers.items()} == {"s": 2.0}


def test_among_infinite_scores_the_one_with_more_neighbours_is_lower():
    """Two kinds of clients that share nothing, n = 5, f = 0, three neighbours: every sum is infinite. The three of the
    second kind lack one neighbour each, those of the first two. Of the three, the middle one is nearest."""
    deltas = [{"x": torch.tensor(v)} for v in (0.0, 0.0)] + [{"y": torch.tensor(v)} for v in (1.0, 5.0, 3.0)]
    delta, _ = build_rule("krum(share=0)")(deltas, [{}] * 5, [1.0] * 5)
    assert {n: t.item() for n, t in delta.items()} == {"y": 3.0}
    delta, _ = build_rule("multi_krum(share=0, keep=4)")(deltas, [{}] * 5, [1.0] * 5)
    assert {n: t.item() for n, t in delta.items()} == {"y": 3.0, "x": 0.0}


def test_a_client_without_a_delta_has_no_say_in_the_geometric_median():
    deltas = [{"x": torch.tensor(1.0)}, {}, {"x": torch.tensor(1.0)}]
    values = [{"s": torch.tensor(2.0)}, {"s": torch.tensor(50.0), "t": torch.tensor(1.0)}, {"s": torch.tensor(4.0)}]
    delta, buffers = build_rule("geometric_median")(deltas, values, [1.0, 5.0, 1.0])
    assert {n: t.item() for n, t in delta.items()} == {"x": 1.0}
    assert {n: t.item() for n, t in buffers.items()} == {"s": 3.0}


def test_names_keep_the_order_of_their_first_appearance():
    held = ["bc", "abc", "ca"]
    found = clients(3, held=held)
    for text in [*BY_COORDINATE, "multi_krum(share=0)", "geometric_median"]:
        assert list(build_rule(text)(found, [{}] * 3, [1.0] * 3)[0]) == ["b", "c", "a"]


# Types


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_rounded_and_stay_integers(dtype: torch.dtype):
    """Median of 10, 13: 11.5 → 12; of 1, 4: 2.5, and halves go to the even number: 2. The same with nothing trimmed."""
    values = [{"n": torch.tensor(v, dtype=dtype)} for v in ([10, 1], [13, 4])]
    deltas = [{"x": torch.zeros(3)}] * 2
    for text in ["median", "trimmed_mean", "multi_krum(share=0)", "geometric_median"]:
        _, buffers = build_rule(text)(deltas, values, [2.0, 2.0])
        assert buffers["n"].dtype == dtype
        assert buffers["n"].tolist() == [12, 2]


@pytest.mark.parametrize("text", ROBUST)
def test_large_integers_are_not_squeezed_through_single_precision(text: str):
    """2²⁴ + 1 is no float32."""
    values = [{"n": torch.tensor(2**24 + 1)}] * 6
    _, buffers = build_rule(text)([{"x": torch.ones(2)}] * 6, values, [3.0] * 6)
    assert buffers["n"].item() == 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", ROBUST)
def test_half_precision_is_computed_in_single(text: str, dtype: torch.dtype):
    """The bits are those of the same numbers in single precision, rounded once."""
    found, values, weights = clients(9, 3, dtype), clients(9, 4, dtype), weights_of(9)
    wide, wide_values = ([{n: t.float() for n, t in c.items()} for c in part] for part in (found, values))
    for half, single in zip(
        build_rule(text)(found, values, weights), build_rule(text)(wide, wide_values, weights), strict=True
    ):
        assert same(half, {n: t.to(dtype) for n, t in single.items()})


def test_half_precision_does_not_overflow():
    """60 000 is the largest number there but one or two; the sum of two of them is none, and neither is its square."""
    found = [{"x": torch.full((2,), 60_000.0, dtype=torch.float16)} for _ in range(4)]
    for text in ROBUST:
        delta, _ = build_rule(text)(found, [{}] * 4, [10_000.0] * 4)
        assert delta["x"].tolist() == [60_000.0, 60_000.0]


@pytest.mark.parametrize("text", ROBUST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_single_and_double_precision_are_kept(text: str, dtype: torch.dtype):
    delta, buffers = build_rule(text)(clients(5, 1, dtype), clients(5, 2, dtype), [1.0] * 5)
    assert {t.dtype for t in [*delta.values(), *buffers.values()]} == {dtype}
    assert {n: tuple(t.shape) for n, t in delta.items()} == SHAPES


# Edges


@pytest.mark.parametrize("text", [*ROBUST, "trimmed_mean(share=0.49)", "krum(share=0.49)", "multi_krum(share=0.49)"])
def test_one_client_is_its_own_result(text: str):
    found, values = clients(1, 1, torch.float32), [{"n": torch.tensor(7), **clients(1, 2)[0]}]
    delta, buffers = build_rule(text)(found, values, [1.0])
    assert same(delta, found[0])
    assert same(buffers, values[0])


def test_krum_returns_the_chosen_one_to_the_bit():
    """49·x/49 is not always x."""
    found = [{"x": torch.linspace(0.1, 1, 1000) + k} for k in (0, 0, 5)]
    delta, _ = build_rule("krum")(found, [{}] * 3, [49.0] * 3)
    assert not torch.equal(found[0]["x"] * 49 / 49, found[0]["x"])
    assert torch.equal(delta["x"], found[0]["x"])


def test_two_clients():
    """1 and 4, weights 3 and 1. The two are as far from each other: krum takes the first, and the geometric median goes
    to the heavier."""
    values, weights = [1.0, 4.0], [3.0, 1.0]
    expected = {
        "median": 2.5,
        "trimmed_mean(share=0.49)": 2.5,
        "krum(share=0.49)": 1.0,
        "multi_krum(share=0.49)": 1.75,
        "multi_krum(keep=1)": 1.0,
    }
    assert {text: reduce_values(text, values, weights) for text in expected} == expected
    assert reduce_values("geometric_median", values, weights) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("share", [0.49, 0.499999999999, math.nextafter(0.5, 0)])
@pytest.mark.parametrize("count", range(1, 12))
def test_something_is_left_for_any_share(share: float, count: int):
    """What remains of 0, 1, …, n − 1 lies around their middle, (n − 1)/2; a mean of nothing would be NaN."""
    assert reduce_values(f"trimmed_mean(share={share!r})", [float(k) for k in range(count)]) == (count - 1) / 2
    assert math.isfinite(reduce_values(f"krum(share={share!r})", [float(k) for k in range(count)]))


def test_a_share_is_taken_as_it_is_written():
    """0.29 · 100 is a little below 29 in floating point; of 71 zeros and 29 ones, all ones go all the same."""
    assert int(0.29 * 100) == 28
    assert arithmetic.floor_share(0.29, 100) == 29
    assert [arithmetic.floor_share(0.1, n) for n in (9, 10, 19, 20, 30)] == [0, 1, 1, 2, 3]
    assert reduce_values("trimmed_mean(share=0.29)", [0.0] * 71 + [1.0] * 29) == 0.0


@pytest.mark.parametrize("text", ROBUST)
@pytest.mark.parametrize("size", [3, 200_000])
def test_equal_deltas(text: str, size: int):
    """The delta is theirs, and nobody is nearer than another: whole-vector reducers keep the clients' weights for
    buffers, or take the first ones: krum 0; multi_krum (1·0 + 2·2)/3; all, (1·0 + 2·2 + 1·8)/4."""
    x = torch.linspace(-300.1, 700, size)
    values = [{"s": torch.tensor(v)} for v in (0.0, 2.0, 8.0)]
    delta, buffers = build_rule(text.replace("multi_krum", "multi_krum(share=0.34)"))(
        [{"x": x}] * 3, values, [1.0, 2.0, 1.0]
    )
    torch.testing.assert_close(delta["x"], x, rtol=3e-7, atol=0)
    expected = {"median": 2.0, "krum": 0.0, "multi_krum": 4 / 3, "geometric_median": 3.0, "norm_clip": 2.0}.get(
        text, 10 / 3
    )
    assert buffers["s"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("nothing", [{}, {"x": torch.empty(0, 3)}])
def test_where_nothing_travels_the_buffers_are_reduced_all_the_same(nothing: Tensors):
    """0, 1, 2, 3 and 14: coordinate-wise ones by their own rule (2; (1 + 2 + 3)/3 = 2), as norm_clip (2) and bulyan,
    which suspects nobody of five (20/5), the others by the weighted mean, (2·0 + 1 + 2 + 3 + 14)/6."""
    values = [{"s": torch.tensor(v, dtype=torch.float64)} for v in (0.0, 1.0, 2.0, 3.0, 14.0)]
    for text in ROBUST:
        delta, buffers = build_rule(text)([nothing] * 5, values, [2.0, 1.0, 1.0, 1.0, 1.0])
        assert {n: t.shape for n, t in delta.items()} == {n: t.shape for n, t in nothing.items()}
        own = {**dict.fromkeys(BY_COORDINATE, 2.0), "norm_clip": 2.0, "bulyan": 4.0}
        assert buffers["s"].item() == pytest.approx(own.get(text, 20 / 6), rel=1e-15)
        assert build_rule(text)([{}] * 5, [{}] * 5, [1.0] * 5) == ({}, {})


@pytest.mark.parametrize(
    "text", ["median", "trimmed_mean(share=0.4)", "krum(share=0.4)", "multi_krum(share=0.4)", PRECISE]
)
@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 3e38), (torch.float64, 1e20), (torch.float64, 1e300)])
def test_a_minority_cannot_take_the_result_away(text: str, dtype: torch.dtype, huge: float):
    """Six clients within 1 of each other, four that send huge numbers: the mean is huge, the result stays near the six.

    For the geometric median the bound is C = 2(1 − α)/(1 − 2α) = 6 times the six's largest distance from a point.
    """
    good = [{"x": torch.rand(20, dtype=dtype, generator=torch.Generator().manual_seed(k))} for k in range(6)]
    bad = [{"x": torch.full((20,), huge, dtype=dtype)} for _ in range(4)]
    found = [*bad[:2], *good, *bad[2:]]
    delta, _ = build_rule(text)(found, [{}] * 10, [1.0] * 10)
    mean, _ = WeightedMean()([{"x": c["x"] / 16} for c in found], [{}] * 10, [1.0] * 10)
    assert mean["x"].min() > huge / 100
    centre = torch.stack([c["x"] for c in good]).mean(0)
    radius = max((c["x"] - centre).norm().item() for c in good)
    assert (delta["x"] - centre).norm().item() <= (6 if text == PRECISE else 2) * radius


def test_deltas_whose_squares_are_no_numbers_have_no_weight():
    """2.9e153 squared, times 20, is just a double; spread from 20 to 1020 elements, it is none. Where the good clients
    hold fewer names than the bad ones, that must not turn the good ones' distances to infinity."""
    good = [{"x": torch.full((20,), float(k), dtype=torch.float64)} for k in range(3)]
    huge = torch.full((20,), 2.9e153, dtype=torch.float64)
    bad = [{"x": huge, "z": torch.zeros(1000, dtype=torch.float64)}] * 2
    delta, _ = build_rule(PRECISE)([*bad, *good], [{}] * 5, [1.0] * 5)
    assert list(delta) == ["x"]
    torch.testing.assert_close(delta["x"], good[1]["x"], rtol=0, atol=1e-4)


def test_rounding_does_not_weigh_equal_deltas():
    """Inner products of equal rows may differ in the last bit; far from zero, that is a distance well above ν."""
    weights = [float(3 + k) for k in range(23)]
    found = [{"x": torch.linspace(-300.1, 700, 100_001)}] * 23
    values = [{"s": torch.tensor(float(k**3), dtype=torch.float64)} for k in range(23)]
    _, buffers = build_rule("geometric_median")(found, values, weights)
    assert buffers["s"].item() == pytest.approx(np.average([k**3 for k in range(23)], weights=weights), rel=1e-12)


# Bits


@pytest.mark.parametrize("text", ROBUST)
def test_memory_layout_does_not_matter(text: str):
    """Contiguous, channels last, transposed, and a window into something larger: the same bits."""
    generator = torch.Generator().manual_seed(0)
    plain = [{"x": torch.randn(6, 5, 3, 4, generator=generator)} for _ in range(6)]

    def last(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last)

    def turned(t: Tensor) -> Tensor:
        return t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)

    def window(t: Tensor) -> Tensor:
        larger = torch.full((8, 7, 5, 9), math.nan)
        larger[1:7, 1:6, 1:4, 1::2] = t
        return larger[1:7, 1:6, 1:4, 1::2]

    layouts = [last, turned, window]
    other = [{"x": layouts[k % 3](c["x"])} for k, c in enumerate(plain)]
    assert not any(c["x"].is_contiguous() for c in other)
    for found in (other, other[::-1]):
        order = plain if found is other else plain[::-1]
        expected = build_rule(text)(order, order, weights_of(6))
        for left, right in zip(build_rule(text)(found, found, weights_of(6)), expected, strict=True):
            assert same(left, right)


@pytest.mark.parametrize("text", ROBUST)
def test_blocks_do_not_matter(text: str, monkeypatch: pytest.MonkeyPatch):
    found, values, weights = clients(5, 1), clients(5, 2), weights_of(5)
    expected = build_rule(text)(found, values, weights)
    for width in (1, 2, 5):  # the longest tensor has twelve elements
        monkeypatch.setattr(arithmetic, "WIDTH", width)
        for left, right in zip(build_rule(text)(found, values, weights), expected, strict=True):
            close(left, arrays([right])[0], rtol=1e-9)


def test_blocks_are_small(monkeypatch: pytest.MonkeyPatch):
    """Every element once, in order, and never more than WIDTH of them together."""
    monkeypatch.setattr(arithmetic, "WIDTH", 16)
    tensors = [torch.arange(77.0).reshape(7, 11) + 1000 * k for k in range(6)]
    blocks = list(arithmetic.blocks(tensors, torch.float64))
    assert [(start, block.shape) for start, block in blocks] == [
        *((s, (6, 16)) for s in (0, 16, 32, 48)),
        (64, (6, 13)),
    ]
    assert torch.equal(torch.cat([b for _, b in blocks], dim=1), torch.stack(tensors).reshape(6, 77).double())


@pytest.mark.parametrize("text", ROBUST)
def test_twice_the_same_and_nothing_written_to(text: str):
    found, values, weights = clients(8, 1, torch.float32), clients(8, 2, torch.float32), weights_of(8)
    before = [clone(c) for c in (*found, *values)]
    once = build_rule(text)(found, values, weights)
    for left, right in zip(once, build_rule(text)(found, values, weights), strict=True):
        assert same(left, right)
    for result in once:
        for tensor in result.values():
            tensor.fill_(7)
    assert all(same(a, b) for a, b in zip((*found, *values), before, strict=True))


@pytest.mark.parametrize("text", BY_COORDINATE)
def test_the_order_of_clients_does_not_matter_coordinate_wise(text: str):
    found = clients(8, 1, torch.float32)
    turned = [found[k] for k in (3, 0, 7, 5, 1, 6, 2, 4)]
    assert same(build_rule(text)(found, [{}] * 8, [1.0] * 8)[0], build_rule(text)(turned, [{}] * 8, [1.0] * 8)[0])


def test_multi_krum_without_suspects_has_the_bits_of_the_mean():
    found, values, weights = clients(8, 1, torch.float32), clients(8, 2, torch.float32), weights_of(8)
    expected = WeightedMean()(found, values, weights)
    for left, right in zip(build_rule("multi_krum(share=0)")(found, values, weights), expected, strict=True):
        assert same(left, right)


# Names


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("trimmed_mean(share=0.2)", {"share": 0.2}),
        ("trimmed_mean(0.2)", {"share": 0.2}),
        ("trimmed_mean", {"share": 0.1}),
        ("krum(share=0)", {"share": 0.0}),
        ("krum", {"share": 0.3}),
        ("multi_krum(share=0.1, keep=3)", {"share": 0.1, "keep": 3}),
        ("multi_krum", {"share": 0.3, "keep": None}),
        ("geometric_median(smooth=1e-3, steps=5)", {"smooth": 1e-3, "steps": 5, "tolerance": 1e-6}),
        ("median", {}),
    ],
)
def test_reducers_by_name(text: str, settings: dict[str, Any]):
    reducer = build_rule(text)
    assert reducer == REDUCERS[text.partition("(")[0]](**settings)
    assert type(reducer) is REDUCERS[text.partition("(")[0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medain", "there is no reducer 'medain' (did you mean 'median'?)"),
        ("mean(share=0.1)", "reducer 'mean' has no argument 'share'; it takes none"),
        ("median(share=0.1)", "reducer 'median' has no argument 'share'; it takes none"),
        ("trimmed_mean(shares=0.1)", "has no argument 'shares' (did you mean 'share'?)"),
        ("trimmed_mean(share='a')", "reducer 'trimmed_mean', argument 'share': 'a' does not fit"),
        ("trimmed_mean(share=0.5)", "trimmed_mean's share must be 0 or more and below 0.5, not 0.5"),
        ("trimmed_mean(share=-0.1)", "trimmed_mean's share must be 0 or more and below 0.5, not -0.1"),
        ("krum(share=0.5)", "krum's share must be 0 or more and below 0.5, not 0.5"),
        ("krum(share=1e999)", "krum's share must be 0 or more and below 0.5, not inf"),
        ("multi_krum(share=3)", "multi_krum's share must be 0 or more and below 0.5, not 3.0"),
        ("multi_krum(keep=0)", "multi_krum's keep must be 1 or more, not 0"),
        ("multi_krum(keep=1.5)", "reducer 'multi_krum', argument 'keep': 1.5 does not fit"),
        ("geometric_median(smooth=0)", "geometric_median's smooth must be above 0, not 0.0"),
        ("geometric_median(smooth=1e999)", "geometric_median's smooth must be above 0, not inf"),
        ("geometric_median(steps=0)", "geometric_median's steps must be 1 or more, not 0"),
        ("geometric_median(tolerance=-1)", "geometric_median's tolerance must be 0 or more, not -1.0"),
        ("krum(", "'krum(' cannot be read"),
        ("krum() + median", "cannot be read"),
    ],
)
def test_bad_names_and_arguments(text: str, message: str):
    with pytest.raises(UsageError) as caught:
        build_reducer(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_not_a_number_is_no_share():
    for kind in (TrimmedMean, Krum, MultiKrum, Bulyan):
        with pytest.raises(UsageError, match="share must be"):
            kind(share=math.nan)


def test_every_reducer_has_a_line_of_help():
    whole = ["krum", "multi_krum", "geometric_median", "bulyan", "norm_clip", "fltrust"]
    assert list(REDUCERS) == ["mean", "median", "trimmed_mean", *whole]
    for target in REDUCERS.values():
        assert summary(target).endswith(".")
    assert signature(REDUCERS["multi_krum"]) == "share=0.3, keep=None, per='model'|'stratum'"
