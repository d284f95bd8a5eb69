"""How a machine is measured: both ways, by the paths that a run would take, in the time that there is."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from fedstrata.engines import tuning
from fedstrata.engines.grouping import MIN_SIZE, ONE_BY_ONE, VECTORISED
from fedstrata.engines.speed_table import Cell, Family
from fedstrata.engines.tuning import Subject, build_subjects, measure, tune
from fedstrata.errors import UsageError
from fedstrata.system.timing import Clock, use_clock


def smallest(family: Family) -> Subject:
    return next(subject for subject in build_subjects() if subject.family == family)


def parameters(subject: Subject) -> int:
    return sum(p.numel() for p in subject.model.parameters())


@pytest.mark.parametrize(
    ("family", "phase"),
    [
        ("dense", "stacked visits"),
        ("dense, torch.func", "vectorised visits"),
        ("convolutional", "vectorised visits"),
    ],
)
def test_a_family_is_trained_by_what_it_is_named_for(family: Family, phase: str) -> None:
    train, spent = tuning._prepare(smallest(family)), {}
    for way in (ONE_BY_ONE, VECTORISED):
        clock = Clock()
        with use_clock(clock):
            assert train(way, MIN_SIZE) > 0
        spent[way] = clock.seconds
    assert phase not in spent[ONE_BY_ONE]
    assert phase in spent[VECTORISED]
    assert len({"stacked visits", "vectorised visits"} & spent[VECTORISED].keys()) == 1


def test_what_is_measured() -> None:
    """Dense models of 784 inputs: 784·10 weights and 10 biases, and so on by hand; 2 FLOPs for each weight."""
    subjects = build_subjects()
    dense = {(s.flops, parameters(s)) for s in subjects if s.family == "dense"}
    assert dense == {
        (2 * 7_840, 7_850),
        (2 * (784 * 64 + 640), 784 * 64 + 64 + 640 + 10),
        (2 * (784 * 256 + 256 * 256 + 2_560), 784 * 256 + 256 + 256 * 256 + 256 + 2_560 + 10),
        (2 * (784 * 1024 + 1024 * 1024 + 10_240), 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10_240 + 10),
    }
    # Two 3×3 convolutions of 4 and 8 channels on images of 8×8, pooled once in between, and 32 features for 10 classes:
    assert smallest("convolutional").flops == 2 * (9 * 4 * 64 + 9 * 4 * 8 * 16 + 32 * 10)
    assert [s.work for s in subjects] == sorted(s.work for s in subjects)


def test_a_cell_is_the_least_time_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds per visit of one by one and at once, in turns; the first of each is not counted. 8 steps: 1e6/8 each."""
    told = iter([9.0, 9.0, 4.0, 2.0, 3.0, 4.0, 5.0, 1.6])
    asked: list[Any] = []

    def train(way: Any, count: int) -> float:
        asked.append((way, count))
        return next(told)

    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(tuning, "_prepare", lambda subject: train)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    cell = measure(Subject("dense", torch.nn.Identity(), (1,), 5, 3, 8, 32), seconds=2.5)
    assert (cell.one_by_one, cell.at_once) == (3e6 / 8, 1.6e6 / 8)
    assert cell.place == ("dense", (5, 3, 8, 32))
    assert asked == [(ONE_BY_ONE, MIN_SIZE), (VECTORISED, 32)] * 4


def test_where_time_is_short_the_first_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the time is shared out among what is left to measure."""
    given: list[float] = []
    now = iter([100.0, 100.0, 110.0, 150.0, 161.0])

    def measure(subject: Subject, seconds: float) -> Cell:
        given.append(seconds)
        return Cell(subject.family, subject.flops, subject.batch, subject.steps, subject.clients, 2.0, 1.0)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    seen: list[tuple[int, int]] = []
    table = tune(60.0, lambda done, total: seen.append((done, total)))
    subjects = build_subjects()
    total = len(subjects)
    assert given == pytest.approx([60 / total, 50 / (total - 1), 10 / (total - 2)])
    assert seen == [(1, total), (2, total), (3, total)]
    assert [cell.place[1][0] for cell in table.cells] == [subject.flops for subject in subjects[:3]]
    assert not any(cell.built_in for cell in table.cells)


def test_measuring_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    assert len(tune(1e-9).cells) == 1
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert time.strftime("%Y-%m-%d") >= tune(1e-9).measured > "2026"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_no_time(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"seconds = .* does not fit: give a number above 0"):
        tune(seconds)
