"""Callbacks: what they are told, in which order, and what happens when one fails."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.runs import checkpoint


def federation(out: Path | None = None, scale: float = 1.0, **settings: Any) -> fs.Federation:
    """Three clients of a small linear model, with inputs on some scale."""
    generator = torch.Generator().manual_seed(0)
    clients = [(scale * torch.randn(6, 4, generator=generator), torch.tensor([0, 1] * 3)) for _ in range(3)]
    torch.manual_seed(0)
    return fs.Federation(nn.Linear(4, 2), clients, clients[0], **{"rounds": 3, **settings}, out=out)


class Diary(fs.Callback):
    """Writes down what it is told; `fails` says where it raises what."""

    def __init__(self, name: str = "", fails: str = "", error: BaseException | None = None) -> None:
        self.name, self.fails, self.error = name, fails, error or ZeroDivisionError("mine")
        self.told: list[Any] = []

    def _write(self, where: str, *what: Any) -> None:
        self.told.append((where, *what))
        if self.fails == where:
            raise self.error

    def on_begin(self, federation: Any) -> None:
        self._write("begin", len(federation.records))

    def on_visit(self, federation: Any, done: int, total: int) -> None:
        self._write("visit", done, total)

    def on_round(self, federation: Any, record: fs.Record) -> None:
        assert federation.records[-1] is record
        self._write("round", record.round)

    def on_end(self, federation: Any, error: BaseException | None) -> None:
        self._write("end", None if error is None else type(error).__name__)


def test_all_is_told_in_order() -> None:
    diary = Diary()
    federation(rounds=2).fit(diary, progress=False)
    visits = [("visit", done, 3) for done in (1, 2, 3)]
    assert diary.told == [("begin", 0), *visits, ("round", 1), *visits, ("round", 2), ("end", None)]


def test_callbacks_hear_of_rounds_in_a_loop_too() -> None:
    """A loop that is left says so; going on begins with the rounds so far."""
    fed, diary = federation(), Diary()
    for record in fed.rounds(diary):
        if record.round == 2:
            break
    assert diary.told[-2:] == [("round", 2), ("end", "GeneratorExit")]
    again = Diary()
    assert [record.round for record in fed.rounds(again)] == [3]
    assert again.told[0] == ("begin", 2)
    assert again.told[-2:] == [("round", 3), ("end", None)]


def test_a_function_hears_of_records() -> None:
    seen: list[fs.Record] = []
    history = federation().fit(seen.append, progress=False)
    assert tuple(seen) == history.records


@pytest.mark.parametrize("where", ["begin", "visit", "round"])
def test_a_callback_that_fails_ends_the_run_and_is_named(where: str, tmp_path: Path) -> None:
    """Its own error, with its type; the others hear of the end, and the run goes on later to the same bits."""
    whole = federation()
    whole.fit(progress=False)
    first, broken, last = Diary("first"), Diary("broken", fails=where), Diary("last")
    fed = federation(tmp_path / "run", checkpoint_seconds=1e6)
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        fed.fit(first, broken, last, progress=False)
    assert error.value.__notes__ == [
        f"It was raised by the callback Diary.on_{where}; the run has kept its last complete round."
    ]
    assert first.told[-1] == ("end", "ZeroDivisionError")
    assert broken.told[-1] == (("begin", 0) if where == "begin" else ("end", "ZeroDivisionError"))
    assert last.told == [] if where == "begin" else last.told[-1] == ("end", "ZeroDivisionError")
    assert len(checkpoint.paths(tmp_path / "run" / "checkpoints")) == (where != "begin")
    resumed = federation(tmp_path / "run", resume=True)
    assert resumed.state.round == (where == "round")
    resumed.fit(progress=False)
    assert all(torch.equal(resumed.state.params[n], p) for n, p in whole.state.params.items())


def test_a_callback_that_fails_at_the_end_leaves_the_result(tmp_path: Path) -> None:
    """All others hear of the end; without another error, its own is raised."""
    broken, last = Diary(fails="end"), Diary()
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        federation(tmp_path / "run").fit(broken, last, progress=False)
    assert "Diary.on_end" in error.value.__notes__[0]
    assert last.told[-1] == ("end", None)
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_what_ended_the_run_is_not_hidden_by_a_callback_that_fails_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt):
        federation().fit(Diary(fails="end"), Diary(fails="round", error=KeyboardInterrupt()), progress=False)


def test_a_function_that_fails_is_named() -> None:
    def mine(record: fs.Record) -> None:
        raise KeyError(record.round)

    with pytest.raises(KeyError) as error:
        federation().fit(mine, progress=False)
    assert "the callback mine;" in error.value.__notes__[0]


def test_callbacks_hear_when_training_diverges(tmp_path: Path) -> None:
    diary = Diary()
    fed = federation(tmp_path / "run", scale=1e15, lr=1e30)
    with pytest.raises(fs.Diverged):
        fed.fit(diary, progress=False)
    assert diary.told[-1] == ("end", "Diverged")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("wrong", [3, Diary])
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(
        fs.UsageError, match=r"a callback is (a fedstrata.Callback, or .* not 3|an object, .*: Diary\(\))"
    ):
        federation().fit(wrong, progress=False)


def test_a_method_that_nothing_calls_is_refused() -> None:
    class Mistyped(fs.Callback):
        def on_rounds(self, federation: Any, record: fs.Record) -> None:
            """Would be silent."""

    with pytest.raises(
        fs.UsageError, match=r"^nothing calls the method 'on_rounds' of Mistyped \(did you mean 'on_round'\?\)$"
    ):
        federation().fit(Mistyped(), progress=False)


def test_what_a_callback_keeps_may_have_any_name() -> None:
    class Keeps(fs.Callback):
        on_disk = True

        def __init__(self) -> None:
            self.on_change = print

    assert len(federation().fit(Keeps(), progress=False).records) == 3


class Draws(fs.Callback):
    """Draws random numbers, and seeds, wherever it is called."""

    def draw(self, *told: Any) -> None:
        random.seed(1)
        torch.manual_seed(2)
        np.random.seed(3)
        torch.rand(3)

    on_begin = on_visit = on_round = on_end = draw


def test_random_numbers_of_a_callback_do_not_matter() -> None:
    """With dropout, so that training draws, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = [(torch.randn(6, 4), torch.tensor([0, 1] * 3)) for _ in range(3)]
    plain, followed = (fs.Federation(model, data, rounds=3) for _ in range(2))
    plain.fit(progress=False)
    followed.fit(Draws(), progress=False)
    assert all(torch.equal(followed.state.params[name], value) for name, value in plain.state.params.items())


class Mine(Exception):
    """An error that can be referred to weakly."""


def test_an_error_is_let_go_of() -> None:
    """No frame of its own traceback holds it: it is freed when the caller is done with it."""
    gc.disable()
    try:
        error = Mine()
        gone = weakref.ref(error)
        diary = Diary(fails="round", error=error)
        with suppress(Mine):
            federation().fit(diary, progress=False)
        del error, diary.error, diary
        assert gone() is None
    finally:
        gc.enable()


def test_dry_runs_are_not_followed() -> None:
    """Visits of a diagnosis are none of the run's."""
    diary, fed = Diary(), federation()
    fed.fit(diary, progress=False)
    told = len(diary.told)
    fed.dry_run(1)
    assert len(diary.told) == told
