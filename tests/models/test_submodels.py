"""Clients of different architecture: named in a run, grouped, nested, judged one by one, or kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.errors import UsageError
from fedstrata.models.isolated_architectures import isolate_architectures
from fedstrata.models.registry import build_model
from fedstrata.models.submodels import deepest, groups, shares, split_adapter
from fedstrata.run import open_run
from tests.small_runs import config, fedstrata, one_sentence

DEPTHS = "resnet10(width=2); resnet14(width=2); resnet18(width=2)"
RUN: dict[str, Any] = {"archs": DEPTHS, "clients": 6, "rounds": 2, "steps": 1, "partition": "iid", "workers": 1}


def test_shares() -> None:
    assert shares(" resnet10 ;resnet14*2; ") == {"resnet10": 1 / 3, "resnet14": 2 / 3}
    assert shares("mlp(hidden=(8, 8))*0.5; mlp(hidden=(8,))*1.5") == {
        "mlp(hidden=(8, 8))": 0.25,
        "mlp(hidden=(8,))": 0.75,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "archs names no model"),
        ("resnet1O", "there is no model 'resnet1O' (did you mean"),
        ("resnet10; resnet10", "archs names 'resnet10' twice"),
        ("resnet10*0", "the weight must be a number above 0, not '0'"),
        ("resnet10*nan", "the weight must be a number above 0"),
        ("resnet10*1e308; resnet14*1e308", "too large to add up"),
        ("resnet10*two", "the weight must be a number above 0, not 'two'"),
        ("resnet10(width=)", "cannot be read"),
    ],
)
def test_what_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        shares(text)
    assert sentence in str(refusal.value)


def test_groups_follow_each_other() -> None:
    equal = groups(shares("resnet10; resnet14; resnet18; resnet22; resnet26"), 100)
    assert [equal(client) for client in (0, 19, 20, 40, 60, 80, 99)] == [
        "resnet10",
        "resnet10",
        "resnet14",
        "resnet18",
        "resnet22",
        "resnet26",
        "resnet26",
    ]
    with pytest.raises(UsageError, match="archs: with 2 clients none has 'resnet14'; take more clients"):
        groups(shares("resnet10; resnet14; resnet18"), 2)
    unequal = groups(shares("resnet10; resnet14*3"), 8)
    assert [unequal(client) for client in range(8)] == ["resnet10"] * 2 + ["resnet14"] * 6


@pytest.mark.parametrize(
    "names",
    [
        ("resnet10(width=2)", "resnet14(width=2)", "resnet18(width=2)", "resnet22(width=2)", "resnet26(width=2)"),
        ("cnn4(width=2)", "cnn8(width=2)"),
        ("vgg9(width=2, hidden=8)", "vgg9(width=2, hidden=8, convs=3)", "vgg9(width=2, hidden=8, convs=4)"),
        ("vit(dim=8, heads=2, depth=1)", "vit(dim=8, heads=2, depth=2)", "vit(dim=8, heads=2, depth=3)"),
        ("mlp(hidden=(8,))", "mlp(hidden=(8, 8))", "mlp(hidden=(8, 8, 8))"),
        ("unet(width=4, convs=1)", "unet(width=4)", "unet(width=4, convs=3)"),
    ],
)
def test_depths_nest(names: tuple[str, ...]) -> None:
    assert deepest({name: _model(name) for name in reversed(names)}) == names[-1]


def test_the_family_of_inco_aggregation() -> None:
    """Blocks of each layer, as in the authors' code."""
    for depth, blocks in ((10, "1111"), (14, "1122"), (18, "2222"), (22, "2233"), (26, "3333")):
        model = _model(f"resnet{depth}(width=2)")
        assert "".join(str(len(model.get_submodule(f"layer{at}"))) for at in range(1, 5)) == blocks


def test_a_vgg_has_at_least_two_convolutions_a_layer() -> None:
    with pytest.raises(UsageError, match="model 'vgg9': convs must be 2 or more, not 1"):
        _model("vgg9(convs=1)")


def _model(name: str) -> nn.Module:
    return build_model(name, (1, 8, 8), 10, seed=0)


def test_what_does_not_nest_is_named() -> None:
    with pytest.raises(UsageError, match=r"archs do not nest: 'stem.conv.weight' is \[2, 1, 3, 3\] in 'a' and \[4, 1"):
        deepest({"a": _model("resnet10(width=2)"), "b": _model("resnet10(width=4)")})
    with pytest.raises(UsageError, match=r"archs do not nest: 'c' has 'layer1.conv1.weight', which 'r' lacks"):
        deepest({"c": _model("cnn4(width=2)"), "r": _model("resnet18(width=8)")})


def test_a_run_is_judged_by_every_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    assert fedstrata("run", *options, "--method", "heteroavg + inco", "--out", tmp_path / "run") == 0
    assert "by model" in capsys.readouterr().out
    text = (tmp_path / "run/run.toml").read_text()
    assert 'model = ""' in text  # the deepest
    assert f'archs = "{DEPTHS}"' in text
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert list(rows[-1]["arch_accuracy"]) == DEPTHS.split("; ")
    assert rows[-1]["arch_accuracy"]["resnet18(width=2)"] == rows[-1]["accuracy"]
    assert fedstrata("resume", tmp_path / "run", "--quiet") == 0
    assert fedstrata("run", tmp_path / "run/run.toml", "--quiet", "--out", tmp_path / "again") == 0
    again = [json.loads(line) for line in (tmp_path / "again/metrics.jsonl").read_text().splitlines()]
    assert [row["arch_accuracy"] for row in again] == [row["arch_accuracy"] for row in rows]


@pytest.mark.slow
def test_a_comparison_of_architectures_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What run.toml says of the model is what the plan says: a second call finds the first one's runs."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    for _ in range(2):
        call = ("compare", *options, "--methods", "heteroavg; groupavg", "--seeds", "0", "--out", tmp_path)
        assert fedstrata(*call) == 0
    assert "2 of 2 runs already finished" in capsys.readouterr().out


def test_a_run_from_before_its_models_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ResNet-14 and 22 had other blocks: such a run is read, and refused in a sentence where it would go on."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    words = ["compare", *options, "--methods", "heteroavg", "--seeds", "0", "--out", tmp_path / "runs"]
    assert fedstrata(*words) == 0, capsys.readouterr().err
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("run.toml"))
    about = json.loads((run / "versions.json").read_text())
    assert about["models"] == "2"
    (run / "versions.json").write_text(json.dumps({name: value for name, value in about.items() if name != "models"}))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    for command in (["resume", run], words):
        assert fedstrata(*command) == 2
        assert "resnet14 had blocks [1, 2, 2, 1]" in one_sentence(capsys)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert fedstrata("report", run) == 0, capsys.readouterr().err


def test_an_architectures_accuracy_is_that_of_its_part() -> None:
    federation = open_run(validate_settings(RunConfig, RUN), None)
    federation.fit()
    part = build_model("resnet10(width=2)", (1, 8, 8), 10)
    part.load_state_dict({n: federation.model.state_dict()[n] for n in part.state_dict()})
    data = fs.load_dataset("digits").test
    x, y = data.batch(torch.arange(len(data)))
    with torch.no_grad():
        right = (part.eval()(x).argmax(1) == y).float().mean().item()
    assert federation.records[-1].arch_accuracy["resnet10(width=2)"] == pytest.approx(right, abs=1e-6)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, sentence in (
        (["--archs", "resnet10; resnet10"], "twice"),
        (["--archs", "resnet10(width=2); resnet14(width=4)"], "archs do not nest: 'stem.conv.weight'"),
        (["--archs", "resnet10(width=2)", "--model", "cnn2"], "which the server's model lacks"),
        (["--archs", "resnet10(width=2)", "--set", "model.width=4"], "the deepest of archs; set it there"),
    ):
        assert fedstrata("run", *given, "--out", tmp_path / "run") == 2
        assert sentence in one_sentence(capsys)
        assert not (tmp_path / "run").exists()


def test_branches_share_nothing_and_answer_with_the_largest() -> None:
    small, large = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    models, arch_of = isolate_architectures({"": large, "a.b": small}, lambda client: "a.b" if client else "", 3)
    assert [arch_of(client) for client in range(3)] == ["whole", "a.b", "a.b"]
    assert {n for n, _ in models[""].named_parameters()} == {
        n for arch in ("whole", "a.b") for n, _ in models[arch].named_parameters()
    }
    assert not {n for n, _ in models["whole"].named_parameters()} & {n for n, _ in models["a.b"].named_parameters()}
    x = torch.randn(4, 2)
    assert torch.equal(models[""](x), large(x))
    assert torch.equal(models["a.b"](x), small(x))
    alone, same = isolate_architectures({"": large, "a": small}, lambda client: "", 3)
    assert alone[""] is large
    assert same(0) == ""


def test_a_reducer_that_chooses_clients_would_mix_the_groups() -> None:
    fs.method("fedavg(reduce='median') + groupavg")
    with pytest.raises(
        UsageError, match="'groupavg' and reduce='krum' cannot be combined: it chooses among all clients"
    ):
        fs.method("fedavg(reduce='krum') + groupavg")


def test_krum_may_leave_out_what_inco_crosses() -> None:
    """The layers that only unchosen clients hold have no change to cross."""
    config = validate_settings(RunConfig, {**RUN, "method": "fedavg(reduce='krum') + inco", "rounds": 3})
    federation = open_run(config, None)
    federation.fit()
    assert all(torch.isfinite(p).all() for p in federation.state.params.values())


def test_clients_are_judged_by_their_own_part() -> None:
    config = validate_settings(RunConfig, {**RUN, "method": "groupavg", "eval_clients": True})
    federation = open_run(config, None)
    federation.fit()
    assert federation.records[-1].client_accuracy is not None
    whole = federation.model
    branch = whole.get_submodule("resnet10_width_2_0")
    x, y = federation.clients[0].batch(torch.arange(len(federation.clients[0])))
    with torch.no_grad():
        right = (branch(x).argmax(1) == y).float().mean().item()
    assert federation.records[-1].client_accuracy[0] == pytest.approx(right, abs=1e-6)


def test_adapters_after_a_plus() -> None:
    """In shares, with weights, and with a plus inside of a text; several of them, or unknown ones, are refused."""
    assert shares("mlp + lora(r=2)*3; mlp(hidden=(8,)) + lora; cnn2") == {
        "mlp + lora(r=2)": 0.6,
        "mlp(hidden=(8,)) + lora": 0.2,
        "cnn2": 0.2,
    }
    assert split_adapter("hf('a+b') + lora(targets='q,v')") == ("hf('a+b')", "lora(targets='q,v')")
    assert split_adapter("mlp") == ("mlp", None)
    for wrong, why in {
        "mlp + lora + ia3": "names several adapters",
        "mlp + lorra": "there is no adapter 'lorra'",
        "mlp + lora(rank=2)": "adapter 'lora' has no argument 'rank'",
        "lora(r=2) + mlp": "there is no model 'lora'",
    }.items():
        with pytest.raises(fs.UsageError, match=why):
            shares(wrong)


def test_a_run_of_several_ranks_and_depths(tmp_path: Path) -> None:
    """From the command's settings to a file and back; a shallow model's drawn base is the deep one's."""
    pytest.importorskip("peft", reason="the extra peft is not installed")
    archs = "mlp(hidden=(8,)) + lora(r=1)*2; mlp(hidden=(8, 8)) + lora(r=2); mlp(hidden=(8, 8)) + lora(r=4)"
    made = config(model="", archs=archs, method="hetlora", clients=4, rounds=1, partition="iid")
    fed = open_run(made, tmp_path / "run")
    assert [fed.sampler.arch_of(client) for client in range(4)].count("mlp(hidden=(8,)) + lora(r=1)") == 2
    record = next(fed.rounds())
    assert len(record.arch_accuracy) == 3
    assert "lora(r=1)*2" in (tmp_path / "run" / "run.toml").read_text()
    base = {name: held.base for name, held in fed._server.architectures.items()}
    assert all(n in base[""] for names in base.values() for n in names)
    for arch in base:
        own = fed._context.base(arch)
        assert all(torch.equal(p, fed.state.params[n]) for n, p in own.items())
