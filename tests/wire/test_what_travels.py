"""docs/federation.md says what the server sees of a client under each method; here all of them are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata import wire
from fedstrata.core.types import Update
from fedstrata.techniques import TECHNIQUES
from tests.contract.rows import ADAPTER_ROWS
from tests.engines.worlds import seeded

PAGE = Path(__file__).parents[2] / "docs" / "federation.md"
PARAMETER, STRATUM = "one tensor a parameter", "one tensor a stratum"
NUMBER = "a number per stratum"
ROUNDS = 3
REFERENCES = {"centralised", "local"}
ADAPTED = {row.technique.name for row in ADAPTER_ROWS}
ARGUMENTS = {
    "fedbuff": "buffer=2",
    "fedpart": "full_rounds=1, rounds_per_stratum=1",
    "fedimpro": "split=1, counts=True",
    "select": "score='gradnorm'",
    "fedldf": "refresh=1",
    "progressive": "strata=('*',)",
}


def rows() -> dict[str, tuple[str, str, str]]:
    """Technique → the table's cells: which parameters, what else, of labels."""
    found = {}
    for line in PAGE.read_text().partition("## What the server sees")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), tuple(cells[1:]))
    return found


def layers() -> nn.Sequential:
    """A convolution with a batch norm, and two dense layers."""
    net = nn.Sequential()
    net.add_module("conv", nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    net.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()))
    net.add_module("dense", nn.Sequential(nn.Linear(16, 8), nn.ReLU()))
    net.add_module("head", nn.Linear(8, 4))
    return net


def model_for(name: str) -> nn.Sequential:
    """The same, with adapters for a technique that needs them."""
    net = seeded(layers)
    if name in ADAPTED:
        pytest.importorskip("peft", reason="the extra peft is not installed")
        fs.adapt(net, "lora(r=2)", torch.zeros(2, 1, 6, 6), seed=1)
    return net


def pictures(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of two classes of four."""
    rng = torch.Generator().manual_seed(seed)
    labels = (torch.randint(0, 2, (size,), generator=rng) + seed) % 4
    return torch.randn(size, 1, 6, 6, generator=rng) + labels[:, None, None, None], labels


def updates_of(method: str, monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """All updates of a run, as they come off the wire."""
    found: list[Update] = []
    decode = wire.decode_update

    def noted(message: bytes) -> Update:
        found.append(decode(message))
        return found[-1]

    monkeypatch.setattr(wire, "decode_update", noted)
    given: dict[str, Any] = {"rounds": ROUNDS, "batch_size": 5, "engine": "wire", "public": torch.randn(8, 1, 6, 6)}
    if fs.method(method).arrivals is not None:  # a few updates a round
        given |= {"fleet": "slow*2(flops='1M/s'); fast*2(flops='2M/s')", "rounds": 4 * ROUNDS}
    name = method.partition("(")[0]
    fs.Federation(model_for(name), [pictures(12, k) for k in range(4)], pictures(10, 9), method=method, **given).fit()
    return found


def test_every_technique_is_in_the_table() -> None:
    assert rows().keys() == TECHNIQUES.keys() - REFERENCES


@pytest.mark.parametrize("name", sorted(TECHNIQUES.keys() - REFERENCES))
def test_the_table_says_what_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, beside, _ = rows()[name]
    updates = updates_of(f"{name}({ARGUMENTS.get(name, '')})", monkeypatch)
    assert len(updates) >= 4 * ROUNDS
    params = [n for n, p in model_for(name).named_parameters() if p.requires_grad]
    trained = [update for update in updates if update.round < ROUNDS]
    if "one stratum" in which:
        assert [sorted({n.split(".")[0] for n in u.delta}) for u in trained[4::4]] == [["conv"], ["dense"]]
        trained = trained[:4]
    if "in turns" in which:
        assert len({tuple(update.delta) for update in trained}) == 2
        trained = trained[:4]
    if "stay" in which or "body" in which or "in turns" in which:
        kept = {n for n in params if any(n not in update.delta for update in trained)}
        assert kept
        assert kept < set(params)
        params = [n for n in params if n not in kept]
    strata = [s.name for s in fs.strata(model_for(name)) if not {*s.params}.isdisjoint(params)]
    assert all(list(update.delta) == (strata if "encoded" in which else params) for update in trained)
    sent = {(n, tensor.dim()) for update in updates for slot in update.slots.values() for n, tensor in slot.items()}
    words = {**dict.fromkeys(strata, STRATUM), **dict.fromkeys(params, PARAMETER)}
    told = {words.get(name, name) if dim or name not in params else NUMBER for name, dim in sent}
    # What stands in the last cell belongs to an argument that is given here.
    named = set(re.findall(r"`(\w+)`", f"{beside} {rows()[name][2]}")) - TECHNIQUES.keys()
    assert told == named | {words for words in (PARAMETER, STRATUM, NUMBER) if words in beside}
    assert {metric for update in updates for metric in update.metrics} == {"train_loss", "flops", "memory"}
    assert all(name.startswith("conv.1.") for update in updates for name in update.buffers)


def test_nothing_is_sent_of_running_statistics_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(update.buffers for update in updates_of("fedavg(buffers='drop')", monkeypatch))
    assert all(update.buffers for update in updates_of("fedavg", monkeypatch))
