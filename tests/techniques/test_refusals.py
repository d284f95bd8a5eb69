"""Pairs that would run and mean nothing, refused with a sentence that names the two and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.techniques.fednlr import FedNLR
from fedstrata.techniques.fedpart import FedPart

SERVERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        ("fedrs", "fedlc", "nothing left to scale"),
        ("fedspeed", "feddyn", "with a memory of their own"),
        ("fedspeed", "feddf(noise=True)", "a corrected point"),
        ("fedspeed", "fednova", "cannot divide by the number of steps"),
        *((base, server, "add it up again") for base in ("feddyn", "fedspeed") for server in SERVERS),
        *((a, b, "only one can move the model") for a in SERVERS for b in SERVERS if a != b),
        *(("centralised", other, "plain training") for other in ("fedprox", "local", "ccvr")),
        ("local", "scaffold", "plain training"),
    ],
)
def test_pairs(one: str, two: str, why: str) -> None:
    names = [text.partition("(")[0] for text in (one, two)]
    for text in (f"{one} + {two}", f"{two} + {one}"):
        with pytest.raises(fs.UsageError, match=why) as refusal:
            fs.method(text)
        assert all(f"'{name}'" in str(refusal.value) for name in names)


@pytest.mark.parametrize(
    ("reference", "base"),
    [
        *((one, base) for one in ("centralised", "local") for base in ("server_lr=0.1", "reduce='median'")),
        ("local", "buffers='average'"),
    ],
)
def test_a_reference_is_not_altered_by_the_mean(reference: str, base: str) -> None:
    with pytest.raises(fs.UsageError, match=f"'{reference}' and fedavg"):
        fs.method(f"fedavg({base}) + {reference}")


@pytest.mark.parametrize(
    "text",
    [
        "fedprox(mu=-1.0)",
        "feddyn(alpha=0.0)",
        "moon(tau=0.0)",
        "moon(mu=-0.1)",
        "fedrs(alpha=1.5)",
        "fedlc(tau=-1.0)",
        "ccvr(samples=-1)",
        "ccvr(lr=0.0)",
        "fednlr(mu=0.9)",
        "fednlr(mu=0.0)",
        "fednlr(mu=1e999)",
        "fednlr(mu0=0.5)",
        "fednlr(a1=-0.1)",
        "fednlr(a2=-1.0)",
        "fednlr(a1=1e999)",
        "fednlr(layers='head')",
        "fedpart(full_rounds=-1)",
        "fedpart(rounds_per_stratum=0)",
        "fedpart(warmup=-1)",
        "fedpart(group=0)",
        "fedpart(cycles=-1)",
        "fedpart(full_rounds=1.5)",
        "fedpart(order='backwards')",
        "fedpart(strata='head')",
        "fedpart(group=2, strata=('head',))",
        "fedspeed(lambda_=0.0)",
        "fedspeed(alpha=2.0)",
        "feddf(steps=-1)",
        "feddf(batch_size=0)",
        "fedavgm(beta=1.0)",
        "fedadam(beta2=1.0)",
        "fedyogi(tau=0.0)",
        "fedadagrad(lr=-0.1)",
        "fedprox(mu='much')",
        "fedprox(mu=1e999)",
        "fedavg(reduce='')",
    ],
)
def test_wrong_arguments_get_one_sentence(text: str) -> None:
    with pytest.raises(fs.UsageError) as refusal:
        fs.method(text)
    assert "\n" not in str(refusal.value)


def test_ccvr_and_an_early_end_exclude_each_other() -> None:
    data = fs.load_dataset("digits")
    model = fs.build_model("logreg", data.input_shape, data.classes)
    with pytest.raises(fs.UsageError, match="stop_at_target would end the run"):
        fs.Federation(model, [data.train], data.test, method="ccvr", target=0.5, stop_at_target=True)


def test_freeze_norm_needs_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    clients = [(torch.randn(6, 3), torch.randint(0, 2, (6,)))]
    fs.Federation(model, clients, method="fedpart(freeze_norm=True)", buffers="local")
    with pytest.raises(fs.UsageError, match="freeze_norm needs running statistics"):
        fs.Federation(model, clients, method="fedpart(freeze_norm=True)", buffers="drop")


@pytest.mark.parametrize(
    ("technique", "fields", "words"),
    [
        (FedPart, {"order": "up"}, "one of sequential, reverse, random"),
        (FedPart, {"full_rounds": 2.5}, "a whole number"),
        (FedPart, {"full_rounds": "5"}, "a whole number"),
        (FedPart, {"group": None}, "a whole number"),
        (FedPart, {"strata": "head"}, r"write \('head',\)"),
        (FedNLR, {"layers": "fc*"}, r"write \('fc\*',\)"),
    ],
)
def test_mistakes_in_python(technique: type[fs.Technique], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(fs.UsageError, match=words):
        technique(**fields)
