"""Compiled training steps equal the others up to rounding, and what cannot be compiled is refused in one sentence."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.client import vectorised
from fedstrata.client.compiling import compile_function, compiler_options
from tests.engines.worlds import check_close, check_same, federation, flat, paced, run, seeded

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    """What torch keeps of compiled functions is thrown away; warnings of the compiler's own are not ours to raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_cohort_equals_one_that_is_not() -> None:
    """Two rounds with momentum at a rate far from 1: a step that forgot it, as torch's compiler makes some do, would
    show.

    Clients of two steps and of one; the schedule changes the rate from round to round, which must not be compiled in.
    """
    settings: dict[str, Any] = {
        "model": seeded(lambda: nn.Linear(6, 4)),
        "clients": flat(7, 3),
        "participation": 1.0,
        "rounds": 2,
        "lr": 0.3,
        "optimizer": "momentum",
        "schedule": "step(every=1, factor=0.1)",
        "engine": "vmap",
    }
    found, reference = run(**settings, compile=True), run(**settings)
    check_close(found, reference)
    start = federation(**settings).state.params
    assert max((reference.state.params[n] - p).abs().max().item() for n, p in start.items()) > 0.01


def test_plain_steps_of_dense_models_are_quicker_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of stacks are what `compile` gives there, to the last bit."""
    monkeypatch.setattr(vectorised, "compile_function", None)
    settings: dict[str, Any] = {"clients": flat(7, 3, 12), "participation": 1.0, "engine": "vmap"}
    check_same(run(**settings, compile=True), run(**settings))


@pytest.mark.slow
def test_a_technique_that_reads_the_learning_rate_of_a_schedule() -> None:
    """The second round's is another one; what was compiled for the first must take it."""
    check_close(run(**paced(), engine="vmap", compile=True), run(**paced(), engine="serial"))


def test_a_compiled_model_equals_one_that_is_not() -> None:
    """With equal FLOPs, although a compiled step cannot be counted while it runs."""
    settings: dict[str, Any] = {"clients": flat(10, 5), "participation": 1.0, "rounds": 2, "engine": "serial"}
    found, reference = run(**settings, compile=True), run(**settings)
    check_close(found, reference)
    assert all(record.flops > 0 for record in found.records)


@pytest.mark.parametrize("width", [0, 256, 512])
def test_the_width_of_vectors_is_part_of_the_compilers_key(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are; what a processor without vectors is told is the compiler's own choice."""
    from torch._inductor import config, cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: SimpleNamespace(bit_width=lambda: width))
    options = compiler_options()
    assert options.get("cpp.simdlen", 0) == width
    assert options.keys() <= config.get_config_copy().keys()


def test_a_function_that_cannot_be_compiled() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no way\nto do it\n  in one line")

    with pytest.raises(fs.UsageError, match=r"^the training step cannot be compiled here: no way; leave compile out$"):
        compile_function(broken, (torch.ones(3),))


def test_a_function_that_looks_at_values() -> None:
    """Traced once for all values, it would be wrong for most of them."""

    def choosy(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else -x

    with pytest.raises(fs.UsageError, match=r"^the training step cannot be compiled here: ") as error:
        compile_function(choosy, (torch.ones(3),))
    assert "\n" not in str(error.value)


def test_a_usage_error_stays_what_it_is() -> None:
    def refused(x: Tensor) -> Tensor:
        raise fs.UsageError("not with me")

    with pytest.raises(fs.UsageError, match=r"^not with me$"):
        compile_function(refused, (torch.ones(3),))


def test_nested_arguments_and_results() -> None:
    """Tuples, dicts and None go in and come out as they were; other values of the same form give other results."""

    def function(pair: tuple[Tensor, Tensor | None], named: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        x, missing = pair
        assert missing is None
        return {"sum": x + named["y"]}, x @ named["y"]

    compiled = compile_function(function, ((torch.ones(3), None), {"y": torch.ones(3)}))
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    named, product = compiled((x, None), {"y": y})
    assert torch.equal(named["sum"], x + y)
    assert product == 32
