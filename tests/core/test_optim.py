"""Local optimisers against torch.optim, and schedules by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstrata.core.optim import OPTIMIZERS, SCHEDULES, build_optimizer, build_schedule
from fedstrata.errors import UsageError

STEPS = 7
LR = 0.05


def problem(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters of three shapes, and gradients for several steps that do not shrink."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (4,), ()]
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(STEPS)]
    return params, grads


def ours(text: str, dtype: torch.dtype = torch.float32, scale: list[Tensor] | None = None) -> list[Tensor]:
    params, grads = problem(dtype)
    step = build_optimizer(text).start(params, LR, scale)
    for gradient in grads:
        step(gradient)
    return params


def theirs(build: Callable[[list[Tensor]], Any], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params, grads = problem(dtype)
    optimizer = build(params)
    for gradient in grads:
        for p, g in zip(params, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return params


SGD = {
    "sgd": {},
    "sgd(momentum=0.9)": {"momentum": 0.9},
    "momentum": {"momentum": 0.9},
    "momentum(momentum=0.5, nesterov=True)": {"momentum": 0.5, "nesterov": True},
    "sgd(weight_decay=0.1)": {"weight_decay": 0.1},
    "sgd(momentum=0.9, weight_decay=0.1)": {"momentum": 0.9, "weight_decay": 0.1},
    "sgd(momentum=0.9, weight_decay=0.1, nesterov=True)": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
}
ADAM = {
    "adam": {},
    "adam(beta1=0.5, beta2=0.9, eps=1e-3)": {"betas": (0.5, 0.9), "eps": 1e-3},
    "adam(beta1=0.0)": {"betas": (0.0, 0.999)},
    "adam(weight_decay=0.1)": {"weight_decay": 0.1},
}
ADAMW = {
    "adamw": {},
    "adamw(weight_decay=0.3, beta2=0.9)": {"weight_decay": 0.3, "betas": (0.9, 0.9)},
    "adam(weight_decay=0.01, decoupled=True)": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", SGD)
def test_sgd_has_the_bits_of_torch(text: str, dtype: torch.dtype):
    """Against torch.optim.SGD(foreach=False), whose operations per tensor are the same ones."""
    expected = theirs(lambda p: torch.optim.SGD(p, lr=LR, foreach=False, **SGD[text]), dtype)
    for mine, other in zip(ours(text, dtype), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("text", ADAM)
def test_adam_is_that_of_torch(text: str):
    """Against torch.optim.Adam in float64, where the order of operations changes only the last digits."""
    expected = theirs(lambda p: torch.optim.Adam(p, lr=LR, **ADAM[text]), torch.float64)
    torch.testing.assert_close(ours(text, torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", ADAMW)
def test_adamw_is_that_of_torch(text: str):
    """Against torch.optim.AdamW, which decays by w ← w − lr·λ·w before the step: the same w is decayed here."""
    expected = theirs(lambda p: torch.optim.AdamW(p, lr=LR, **ADAMW[text]), torch.float64)
    torch.testing.assert_close(ours(text, torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("text", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_in_single_precision(text: str, kind: Callable[..., torch.optim.Optimizer]):
    expected = theirs(lambda p: kind(p, lr=LR))
    torch.testing.assert_close(ours(text), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("sgd(weight_decay=0.1)", lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.1)),
        ("momentum(weight_decay=0.1)", lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1)),
        ("adam", lambda p: torch.optim.Adam(p, lr=LR)),
        ("adamw(weight_decay=0.1)", lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_parameter_without_a_gradient_stays_for_that_step(
    text: str, build: Callable[[list[Tensor]], torch.optim.Optimizer], scaled: bool
):
    """As in torch.optim: no decay, no momentum, no count of Adam's; it goes on where it was when a gradient comes.

    The first parameter has none in the steps 0, 3 and 4, the third never; nobody has any in step 4. A scale of ones,
    of its own shape, must stay beside its own parameter.
    """
    params, grads = problem(torch.float64)
    expected, _ = problem(torch.float64)
    start = params[2].clone()
    ones = [torch.ones(p.shape, dtype=torch.float64) for p in params]
    step = build_optimizer(text).start(params, LR, ones if scaled else None)
    optimizer = build(expected)
    for number, gradient in enumerate(grads):
        given = [None if k == 2 or (k == 0 and number in (0, 3)) else g for k, g in enumerate(gradient)]
        if number == 4:
            given = [None] * 3
        step(given)
        for p, g in zip(expected, given, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(params[2], start)


def test_one_step_of_adam_by_hand():
    """m̂ = g and v̂ = g² after one step, so d = g/(|g| + ε): with g = (4, −2, 0), lr 0.1: w = (−0.1, 0.1, 0)."""
    w = torch.zeros(3, dtype=torch.float64)
    build_optimizer("adam").start([w], 0.1, None)([torch.tensor([4.0, -2.0, 0.0], dtype=torch.float64)])
    torch.testing.assert_close(w, torch.tensor([-0.1, 0.1, 0.0], dtype=torch.float64), rtol=1e-7, atol=1e-12)


def test_two_steps_of_momentum_by_hand():
    """v₁ = 1, w = −0.1; v₂ = 0.9·1 + 2 = 2.9, w = −0.1 − 0.29 = −0.39."""
    w = torch.zeros(1, dtype=torch.float64)
    step = build_optimizer("momentum").start([w], 0.1, None)
    step([torch.ones(1, dtype=torch.float64)])
    step([torch.full((1,), 2.0, dtype=torch.float64)])
    assert w.item() == pytest.approx(-0.39, abs=1e-15)


@pytest.mark.parametrize("text", [*SGD, *ADAM, *ADAMW])
def test_gradients_are_not_written_to(text: str):
    params, grads = problem()
    before = [g.clone() for g in grads[0]]
    step = build_optimizer(text).start(params, LR, None)
    step(grads[0])
    step(grads[1])
    assert all(torch.equal(a, b) for a, b in zip(before, grads[0], strict=True))


@pytest.mark.parametrize("text", [*SGD, *ADAM, *ADAMW])
def test_a_start_is_a_new_beginning(text: str):
    """Momentum and moments belong to the visit: the second start repeats the first bit for bit."""
    optimizer = build_optimizer(text)
    results = []
    for _ in range(2):
        params, grads = problem()
        step = optimizer.start(params, LR, None)
        for gradient in grads:
            step(gradient)
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("text", ["sgd", "momentum", "momentum(nesterov=True)", "adam"])
def test_a_scale_multiplies_the_step(text: str):
    """These steps do not depend on w, so the whole way is scaled: w_T − w_0 = s·(w_T − w_0 unscaled).

    The scale is 0 for one entry (it must not move), 3 for others, and broadcasts: a row scale on a matrix, a scalar.
    Under Adam a scaled gradient would change nothing; the step must be scaled.
    """
    scale = [torch.tensor([[3.0], [0.0], [1.0], [0.5]]), torch.tensor([2.0, 0.0, 1.0, 3.0]), torch.tensor(4.0)]
    start, _ = problem(torch.float64)
    plain = ours(text, torch.float64)
    scaled = ours(text, torch.float64, [s.double() for s in scale])
    for w, p, q, s in zip(start, plain, scaled, scale, strict=True):
        assert not torch.equal(p, w)
        torch.testing.assert_close(q - w, s * (p - w), rtol=1e-9, atol=1e-12)
    assert torch.equal(scaled[0][1], start[0][1])


@pytest.mark.parametrize("text", ["sgd(weight_decay=0.1)", "adamw(weight_decay=0.1)", "adam(weight_decay=0.1)"])
def test_a_scale_multiplies_the_first_step_with_decay(text: str):
    """The decay is part of the step: after one step, w₁ − w₀ = s·(w₁ − w₀ unscaled)."""
    moved = []
    for scale in (None, [torch.tensor(2.5, dtype=torch.float64)] * 3):
        params, grads = problem(torch.float64)
        start = [p.clone() for p in params]
        build_optimizer(text).start(params, LR, scale)(grads[0])
        moved.append([p - s for p, s in zip(params, start, strict=True)])
    for plain, scaled in zip(*moved, strict=True):
        torch.testing.assert_close(scaled, 2.5 * plain, rtol=1e-9, atol=1e-12)


def test_a_scale_of_one_changes_no_bit():
    for text in ("sgd(momentum=0.9, weight_decay=0.1)", "adam", "adamw"):
        ones = [torch.ones(()) for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(ours(text), ours(text, scale=ones), strict=True))


def test_parameters_move_in_place():
    params, grads = problem()
    pointers = [p.data_ptr() for p in params]
    build_optimizer("adam").start(params, LR, None)(grads[0])
    assert [p.data_ptr() for p in params] == pointers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sgdm", "did you mean 'sgd'"),
        ("sgd(lr=0.1)", "no argument 'lr'"),
        ("sgd(momentum=-0.1)", "momentum"),
        ("sgd(weight_decay=-1.0)", "weight_decay"),
        ("sgd(weight_decay=1e999)", "weight_decay"),
        ("sgd(nesterov=True)", "nesterov needs a momentum"),
        ("momentum(momentum=0.0, nesterov=True)", "nesterov needs a momentum"),
        ("sgd(momentum='much')", "does not fit"),
        ("sgd(nesterov=1)", "does not fit"),
        ("adam(beta1=1.0)", "below 1"),
        ("adam(beta2=1.5)", "below 1"),
        ("adam(beta1=-0.1)", "beta1"),
        ("adam(eps=-1e-8)", "eps"),
        ("adamw(weight_decay=-0.1)", "weight_decay"),
        ("adamw(decoupled=True)", "no argument"),
        ("", "cannot be read"),
        ("sgd + adam", "cannot be read"),
    ],
)
def test_bad_optimizers(text: str, says: str):
    with pytest.raises(UsageError) as error:
        build_optimizer(text)
    assert says in str(error.value)


def test_every_optimizer_builds_by_its_bare_name():
    for name in OPTIMIZERS:
        params, grads = problem()
        before = [p.clone() for p in params]
        build_optimizer(name).start(params, LR, None)(grads[0])
        assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))


# Schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rounds", "factors"),
    [
        ("constant", 4, [1.0, 1.0, 1.0, 1.0]),
        # (1 + cos(π·r/4))/2 for r = 0…3: cos 0 = 1, cos 45° = √½, cos 90° = 0, cos 135° = −√½
        ("cosine", 4, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        # 0.2 + 0.8·(the above), of two rounds: cos 0 = 1, cos 90° = 0
        ("cosine(final=0.2)", 2, [1.0, 0.6]),
        ("step(every=2, factor=0.1)", 5, [1.0, 1.0, 0.1, 0.1, 0.01]),
        ("step(every=1, factor=0.5)", 4, [1.0, 0.5, 0.25, 0.125]),
        ("step", 31, [1.0] * 30 + [0.1]),
        ("exponential(factor=0.5)", 4, [1.0, 0.5, 0.25, 0.125]),
        ("exponential", 3, [1.0, 0.998, 0.996004]),
    ],
)
def test_schedules_by_hand(text: str, rounds: int, factors: list[float]):
    schedule = build_schedule(text)
    assert [schedule(r, rounds) for r in range(rounds)] == pytest.approx(factors, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("step(every=0)", "1 or more"),
        ("step(every=-3)", "1 or more"),
        ("step(every=1.5)", "does not fit"),
        ("cosine(start=1.0)", "no argument"),
        ("constant(1.0)", "at most 0"),
        ("exponential(factor='half')", "does not fit"),
    ],
)
def test_bad_schedules(text: str, says: str):
    with pytest.raises(UsageError) as error:
        build_schedule(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "cosine(final=-1.0)",
        "cosine(final=1e999)",
        "step(factor=-0.1)",
        "exponential(factor=-1.0)",
        "step(factor=1e999)",
    ],
)
def test_schedules_never_turn_the_learning_rate_round(text: str):
    with pytest.raises(UsageError):
        build_schedule(text)


def test_every_schedule_begins_with_the_full_learning_rate():
    for name in SCHEDULES:
        assert build_schedule(name)(0, 10) == pytest.approx(1.0)
