"""Flower's own mods around what a client sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.flower.worlds import data, grid, plan, silos  # isort: skip  # skips without flwr

from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

import fedstrata as fs
from fedstrata import wire
from fedstrata.flower import client_app
from fedstrata.flower.messages import TrainReply, from_records, to_records
from tests.engines.worlds import mlp, staged


def let_pass(message: Any, context: Any, call: Any) -> Any:
    return call(message, context)


def one_round(*mods: Any, model: Any = mlp, **settings: Any) -> fs.Federation:
    return silos(grid(3, model=model, mods=mods), model=model, participation=3, rounds=1, **settings)  # type: ignore[no-any-return]


def moved(fed: fs.Federation, model: nn.Module) -> torch.Tensor:
    return torch.cat([(fed.state.params[n] - p).flatten() for n, p in model.named_parameters()]).detach()


def test_what_does_not_travel_is_not_noised() -> None:
    """After the last round nothing does: clients are tuned, and what they answer is taken."""
    fed = one_round(LocalDpMod(0.01, 0.0, 1.0, 0.5), method="fedavg(weight='uniform') + finetune(epochs=1)")
    assert [record.refused for record in fed.records] == [[], []]


def test_what_passes_unchanged_differs_by_rounding_only() -> None:
    """(w + Δ) − w is Δ up to the last bits of w."""
    found, plain = moved(one_round(let_pass), mlp()), moved(one_round(), mlp())
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    assert plain.norm() > 0.01


def test_local_differential_privacy_clips() -> None:
    """Without noise (sensitivity 0) each client's change has at most norm 0.01, and so has their mean."""
    fed = one_round(LocalDpMod(0.01, 0.0, 1.0, 0.5))
    assert not fed.records[0].refused
    assert 0.001 < moved(fed, mlp()).norm() <= 0.01 + 1e-5


def test_its_noise_is_not_the_run_seeds() -> None:
    """A server that knows the seed of every visit must not be able to take the noise away again."""
    noisy = [moved(one_round(LocalDpMod(0.01, 0.1, 1.0, 0.1), seed=3), mlp()) for _ in range(2)]
    assert not torch.equal(*noisy)


def test_more_than_parameters_is_refused() -> None:
    slots = one_round(let_pass, method="scaffold").records[0].refused
    assert len(slots) == 3
    assert slots[0]["why"].startswith("it says: Flower's mods change parameters only, and what 'scaffold' sends would")
    statistics = one_round(let_pass, model=staged).records[0].refused
    assert "running statistics would leave this site as is" in statistics[0]["why"]
    assert not one_round(let_pass, method="fedprox + fedlc").records[0].refused


def test_a_mod_that_breaks_the_form_is_refused() -> None:
    def cut(message: Any, context: Any, call: Any) -> Any:
        reply = call(message, context)
        reply.content = RecordDict({"arrays": ArrayRecord()})
        return reply

    assert "with the names that it found" in one_round(cut).records[0].refused[0]["why"]


def test_a_mod_that_needs_another_server_is_refused() -> None:
    with pytest.raises(fs.UsageError, match="adaptiveclipping_mod needs one of Flower's own strategies"):
        client_app(mlp, data, mods=[adaptiveclipping_mod])


UNIFORM = "fedavg(weight='uniform')"


def test_changes_are_clipped_to_the_servers_norm() -> None:
    fed = one_round(fixedclipping_mod, method=UNIFORM, dp_clip=0.01)
    assert not fed.records[0].refused
    assert 0.001 < moved(fed, mlp()).norm() <= 0.01 + 1e-5


def test_the_means_noise_has_the_deviation_that_was_asked_for() -> None:
    """z·C/n with n = 3, over a model of 92 numbers and 40 runs; the noise is another one every time."""
    plain = moved(one_round(fixedclipping_mod, method=UNIFORM, dp_clip=0.01), mlp())
    noisy = [moved(one_round(fixedclipping_mod, method=UNIFORM, dp_clip=0.01, dp_noise=30.0), mlp()) for _ in range(40)]
    noise = torch.stack(noisy) - plain
    count = noise.numel()
    assert count == 40 * 92
    # The deviation of a deviation of n numbers is 1/√(2n) of it.
    assert abs(noise.std() / 0.1 - 1) < 5 / (2 * count) ** 0.5
    assert abs(noise.mean()) < 5 * 0.1 / count**0.5


def test_clipping_needs_both_sides() -> None:
    assert (
        "client_app(…, mods=[fixedclipping_mod])" in one_round(method=UNIFORM, dp_clip=1.0).records[0].refused[0]["why"]
    )
    assert "server_app(…, dp_clip=…)" in one_round(fixedclipping_mod, method=UNIFORM).records[0].refused[0]["why"]


def test_a_change_that_is_too_long_is_refused() -> None:
    def fixedclipping_mod(message: Any, context: Any, call: Any) -> Any:
        return call(message, context)  # has the name, and does not clip

    refused = one_round(fixedclipping_mod, method=UNIFORM, dp_clip=0.001).records[0].refused
    assert [row["why"] for row in refused] == ["its change is longer than dp_clip allows"] * 3


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"method": "fedavg"}, r"write fedavg\(weight='uniform'\)"),
        ({"method": "fedadam + fedavg(weight='uniform')"}, "'fedadam' makes something else of the mean"),
        ({"method": "fedavg(reduce='median')"}, r"write fedavg\(weight='uniform'\)"),
        ({"method": UNIFORM, "dp_clip": -1.0}, "dp_clip"),
        ({"method": UNIFORM, "dp_clip": 0.0, "dp_noise": 1.0}, "give both"),
    ],
)
def test_where_the_bound_would_be_wrong(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(fs.UsageError, match=why):
        plan(mlp, **{"dp_clip": 1.0, **settings}).with_config({})


def test_sub_models_are_refused() -> None:
    with pytest.raises(fs.UsageError, match="a mean of one model"):
        plan(mlp, dp_clip=1.0, method=UNIFORM, archs={"small": mlp}).with_config({})


def test_an_update_without_any_change_does_not_stop_the_server() -> None:
    def empty(message: Any, answer: Any) -> Any:
        reply = answer()
        head, update = from_records(reply.content, TrainReply, 10**9)
        reply.content = to_records(head, wire.encode(replace(wire.decode_update(update), delta={})))
        return reply

    world = grid(3, model=mlp, mods=[fixedclipping_mod])
    world.faults[101] = empty
    fed = silos(world, model=mlp, participation=3, rounds=1, method=UNIFORM, dp_clip=1.0)
    assert [row["client"] for row in fed.records[0].refused] == [1]


def test_privacy_is_not_dropped_by_a_resume(tmp_path: Path) -> None:
    private = {"method": UNIFORM, "dp_clip": 1.0, "dp_noise": 0.1, "out": tmp_path / "run"}
    one_round(fixedclipping_mod, **private)
    assert "differential privacy" in (tmp_path / "run" / "summary.json").read_text()
    with pytest.raises(fs.UsageError, match="dp_noise"):
        one_round(fixedclipping_mod, **{**private, "dp_noise": 0.0}, resume=True)
