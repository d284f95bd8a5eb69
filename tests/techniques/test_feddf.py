"""FedDF, Lin et al. 2020."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.techniques.worlds import (
    HIDDEN,
    INPUTS,
    ClientData,
    Vector,
    agree,
    descend,
    differ,
    differences,
    flat,
    layer,
    mean,
    parties,
    present,
    run,
    softmax,
    two_layers,
)

FIRST = HIDDEN * (INPUTS + 1)
PUBLIC = np.random.default_rng(9).normal(size=(6, INPUTS))


def logits(w: Vector, x: Vector) -> Vector:
    return layer(w[FIRST:], np.tanh(layer(w[:FIRST], x, HIDDEN)))


def task(w: Vector, client: ClientData) -> float:
    x, y = client
    return float(-np.log(softmax(logits(w, x))[np.arange(len(y)), y]).mean())


def divergence(w: Vector, x: Vector, teacher: Vector) -> float:
    """Mean over the inputs of KL(teacher ‖ student)."""
    return float((teacher * (np.log(teacher) - np.log(softmax(logits(w, x))))).sum(1).mean())


def distil(w: Vector, models: list[Vector], x: Vector, steps: int, lr: float) -> Vector:
    """Adam from a zero state; the learning rate falls from lr along half a cosine towards 0."""
    teacher = softmax(mean([logits(m, x) for m in models]))
    m = v = np.zeros_like(w)
    for t in range(steps):
        g = differences(lambda u: divergence(u, x, teacher), w)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        first, second = m / (1 - 0.9 ** (t + 1)), v / (1 - 0.999 ** (t + 1))
        w = w - lr * (1 + math.cos(math.pi * t / steps)) / 2 * first / (np.sqrt(second) + 1e-8)
    return w


def feddf(clients: list[ClientData], rounds: list[list[int]], x: Vector, steps: int, lr: float) -> Vector:
    w = flat(two_layers())
    for took_part in rounds:
        here = [clients[k] for k in took_part]
        ends = [descend(w, lambda v, c=c: differences(lambda u: task(u, c), v)) for c in here]
        w = distil(mean(ends, [len(y) for _, y in here]), ends, x, steps, lr)
    return w


def method(steps: int, lr: float) -> str:
    return f"feddf(noise=False, steps={steps}, lr={lr}, batch_size=6)"


def test_one_step_of_distillation() -> None:
    """One round, one step on all the public inputs at once: w ← w̄ − lr·g/(|g| + ε), Adam's first step.

    w̄ = Σ n_k w_k/Σ n_k. The teacher is softmax(mean of the clients' logits), every client alike; g is the gradient at w̄
    of the mean of KL(teacher ‖ softmax(student's logits)).
    """
    clients, lr = parties(), 0.01
    fed = run(method(1, lr), clients, two_layers(), rounds=1, public=torch.from_numpy(PUBLIC))
    start = flat(two_layers())
    ends = [descend(start, lambda v, c=c: differences(lambda u: task(u, c), v)) for c in clients]
    average = mean(ends, [len(y) for _, y in clients])
    teacher = softmax(mean([logits(w, PUBLIC) for w in ends]))
    g = differences(lambda u: divergence(u, PUBLIC, teacher), average)
    assert np.abs(g).min() > 1e-6, "a gradient of the size of ε would say little"
    w = average - lr * g / (np.abs(g) + 1e-8)
    np.testing.assert_allclose(w, distil(average, ends, PUBLIC, 1, lr), atol=1e-9)
    agree(fed, w, within=1e-6)
    differ(w, average)


@pytest.mark.parametrize("participation", [3, 2])
def test_many_steps_in_three_rounds(participation: int) -> None:
    """Five steps per round, the learning rate on half a cosine, Adam's state anew in every round.

    The public inputs are all the same, so that the reference need not know how batches are drawn. Only those clients
    teach that took part in the round.
    """
    clients, x = parties(), PUBLIC[:1].repeat(6, axis=0)
    settings = {"participation": participation, "public": torch.from_numpy(x)}
    fed = run(method(5, 0.05), clients, two_layers(), **settings)
    w = feddf(clients, present(fed), x, 5, 0.05)
    agree(fed, w, within=1e-6)
    differ(w, feddf(clients, present(fed), x, 0, 0.05))


def test_distillation_brings_the_student_to_its_teachers() -> None:
    """After one round, KL(teacher ‖ student) on the public inputs is far below that of the plain average."""
    clients = parties()
    start = flat(two_layers())
    ends = [descend(start, lambda v, c=c: differences(lambda u: task(u, c), v)) for c in clients]
    teacher = softmax(mean([logits(w, PUBLIC) for w in ends]))
    settings = {"rounds": 1, "public": torch.from_numpy(PUBLIC)}
    after = run(method(200, 0.01), clients, two_layers(), **settings)
    before = mean(ends, [len(y) for _, y in clients])
    assert divergence(flat(after), PUBLIC, teacher) < 0.1 * divergence(before, PUBLIC, teacher)


def test_noise_needs_no_public_data() -> None:
    """Standard-normal inputs take the place of public ones: the student comes nearer to its teachers elsewhere, too."""
    clients = parties()
    start = flat(two_layers())
    ends = [descend(start, lambda v, c=c: differences(lambda u: task(u, c), v)) for c in clients]
    fresh = np.random.default_rng(1).normal(size=(200, INPUTS))
    teacher = softmax(mean([logits(w, fresh) for w in ends]))
    after = run("feddf(noise=True, steps=300, lr=0.01, batch_size=32)", clients, two_layers(), rounds=1)
    before = mean(ends, [len(y) for _, y in clients])
    assert divergence(flat(after), fresh, teacher) < 0.2 * divergence(before, fresh, teacher)
