"""Arithmetic on named tensors, and the seeds of random streams."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.core.rng import derive, generator
from fedstrata.core.tensors import (
    Tensors,
    add,
    add_,
    all_finite,
    clone,
    one_by_one,
    scale,
    subtract,
    swap_values,
    write_difference,
    zeros_like,
)


def pair() -> tuple[Tensors, Tensors]:
    left = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0), "c": torch.tensor([[4.0]])}
    right = {"a": torch.tensor([10.0, 20.0]), "b": torch.tensor(0.5)}
    return left, right


def test_derive_is_the_documented_digest():
    """`printf '7/visit/0/12' | sha256sum` begins with 9388986aab27e10c; shifted right by one bit."""
    assert derive(7, "visit", 0, 12) == 0x9388986AAB27E10C >> 1


def test_derive_separates_rounds_clients_and_purposes():
    seeds = {derive(0, purpose, r, c) for purpose in ("visit", "sample") for r in range(12) for c in range(12)}
    assert len(seeds) == 2 * 12 * 12


@given(st.lists(st.one_of(st.integers(), st.text(st.characters(exclude_categories=["Cs"]))), max_size=4))
def test_derive_fits_a_torch_seed(parts: list[int | str]):
    assert 0 <= derive(*parts) < 2**63
    torch.Generator().manual_seed(derive(*parts))


def test_generator_draws_what_its_seed_draws_and_leaves_the_global_stream():
    expected = torch.rand(3, generator=torch.Generator().manual_seed(derive(1, "x")))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("turned", [False, True])
def test_write_difference(turned: bool):
    """(w − 0.3·d) − w₀ in several pieces: the bits of two steps, and its sum."""
    torch.manual_seed(0)
    w, d, before = torch.randn(3, 301, 503).unbind()
    d = d.t().contiguous().t() if turned else d
    out = torch.full_like(w, torch.nan)
    total = write_difference(w, d, -0.3, before, out)
    assert torch.equal(out, w.clone().add_(d, alpha=-0.3) - before)
    assert total == pytest.approx(out.double().sum().item(), rel=1e-3)
    d[-1, -1] = torch.inf
    assert not math.isfinite(write_difference(w, d, -0.3, before, out))


def test_subtract():
    """(1, 2) − (10, 20) = (−9, −18); only the names asked for, in their order."""
    left, right = pair()
    out = subtract(left, right, ["b", "a"])
    assert list(out) == ["b", "a"]
    assert out["a"].tolist() == [-9.0, -18.0]
    assert out["b"].item() == 2.5
    assert subtract(left, right, []) == {}


def test_add_passes_what_is_missing_on_the_right():
    """(1, 2) + 0.5·(10, 20) = (6, 12); 3 + 0.5·0.5 = 3.25; `c` is the very same tensor, the order is the left one's."""
    left, right = pair()
    out = add(left, right, alpha=0.5)
    assert list(out) == ["a", "b", "c"]
    assert out["a"].tolist() == [6.0, 12.0]
    assert out["b"].item() == 3.25
    assert out["c"] is left["c"]
    assert left["a"].tolist() == [1.0, 2.0]


def test_add_leaves_out_what_is_only_on_the_right():
    left, right = pair()
    assert list(add(left, {**right, "stranger": torch.ones(1)})) == ["a", "b", "c"]
    assert add(left, {}) == left


def test_scale():
    """−2·(1, 2) = (−2, −4)."""
    left, _ = pair()
    out = scale(left, -2.0)
    assert [t.tolist() for t in out.values()] == [[-2.0, -4.0], -6.0, [[-8.0]]]
    assert scale({}, 2.0) == {}


def test_zeros_and_clones_share_nothing():
    left = {"a": torch.tensor([1, 2]), "w": torch.nn.Parameter(torch.ones(2))}
    zeros, copies = zeros_like(left), clone(left)
    assert zeros["a"].dtype == torch.int64
    assert zeros["a"].tolist() == [0, 0]
    assert not copies["w"].requires_grad
    copies["a"][0] = 9
    copies["w"][0] = 9
    assert left["a"].tolist() == [1, 2]
    assert left["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float):
    good = torch.ones(3, dtype=dtype)
    for position in range(3):
        poisoned = good.clone()
        poisoned[position] = bad
        assert not all_finite([good, poisoned, good])
    assert not all_finite([torch.tensor([math.inf, -math.inf], dtype=dtype)])
    assert all_finite([good, good])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_large_finite_numbers_are_finite(dtype: torch.dtype):
    """The largest number four times over: its sum overflows, yet every one of them is finite."""
    assert all_finite([torch.full((4,), torch.finfo(dtype).max, dtype=dtype)])
    assert all_finite([torch.full((2,), torch.finfo(dtype).max, dtype=dtype)] * 2)


def test_nothing_empty_and_integers_are_finite():
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.tensor(3), torch.tensor([True])])


def test_adding_in_place():
    """Into the left tensors, but not where clients are vectorised."""
    left, right = {"a": torch.ones(2), "b": torch.ones(2)}, {"b": torch.ones(2), "c": torch.ones(2)}
    with one_by_one():
        assert add_(left, right, 2.0)["b"].tolist() == [3, 3]
    assert left["b"].tolist() == [1, 1]
    assert add_(left, right, 2.0) is left
    assert [left["a"].tolist(), left["b"].tolist()] == [[1, 1], [3, 3]]


def test_what_is_lent_comes_back():
    """Other values inside, and the very same memory afterwards, whatever happens."""
    own = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.zeros(2)}
    places = [t.data_ptr() for t in own.values()]

    def borrow() -> None:
        with swap_values(own, {"a": torch.full((2,), 5.0)}):
            assert [t.tolist() for t in own.values()] == [[5, 5], [0, 0]]
            raise KeyError

    with pytest.raises(KeyError):
        borrow()
    assert own["a"].tolist() == [1, 1]
    assert [t.data_ptr() for t in own.values()] == places
