"""`describe_model` and `fedstrata model show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import fedstrata as fs
from fedstrata.cli.model import app
from fedstrata.errors import UsageError
from fedstrata.models.flops import FlopCount
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.models.summary import describe_model

SMALL = [
    "logreg",
    "mlp(hidden=(8, 8))",
    "cnn2(width=4, hidden=8)",
    "cnn8(width=4)",
    "vgg9(width=2, hidden=8)",
    "resnet8(width=4)",
    "resnet18(width=4, norm='group')",
    "resnet10(width=4, residual=False)",
    "resnet50(width=4)",
    "vit(dim=16, depth=2, heads=2)",
    "swin(dim=8, heads=(1, 2, 4))",
]


@pytest.mark.parametrize("name", SMALL)
def test_facts_of_the_zoo(name: str) -> None:
    shape = (3, 32, 32)
    model = build_model(name, shape, 10, seed=0)
    facts = describe_model(model, shape)
    groups = strata(model, torch.zeros(1, *shape))
    assert [(s.name, s.stage) for s in facts.strata] == [(g.name, g.stage) for g in groups]
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert {f.layer for f in facts.fields} == {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert json.loads(json.dumps(facts.as_dict()))["parameters"] == facts.parameters


@pytest.mark.parametrize("name", SMALL)
def test_flops_of_a_forward_pass_and_of_a_training_step_are_those_counted(name: str) -> None:
    model = build_model(name, (3, 32, 32), 10, seed=0).train()
    facts = describe_model(model, (3, 32, 32))
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    with FlopCount() as forward:
        loss = F.cross_entropy(model(x), y)
    with FlopCount() as backward:
        loss.backward()
    assert facts.flops == forward.total / 2
    assert facts.step_flops == (forward.total + backward.total) / 2


def test_tokens() -> None:
    """Two GRU layers of 4 units on 20 steps: 2·20·12·(8 + 4), then 2·20·12·(4 + 4); the classifier 2·4·10."""
    facts = describe_model(build_model("chargru(hidden=4)", (20,), 10, seed=0), (20,))
    assert [s.flops for s in facts.strata] == [0, 5760, 3840, 80]
    assert facts.fields == ()


def test_strata_by_hand() -> None:
    """conv: 2·9·4·64 FLOPs, 36 + 4 numbers; its norm layer: 8 numbers, and 8 + 1 running ones (the last of 8 bytes).
    dense: 2·256·3 FLOPs, 768 + 3 numbers."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 3))
    facts = describe_model(model, (1, 8, 8)).as_dict()
    assert facts["strata"] == [
        {"name": "0", "stage": "0", "parameters": 48, "normalised": True, "bytes": 48 * 4 + 8 * 4 + 8, "flops": 4608}
        | {"idle": False, "classifies": False},
        {"name": "3", "stage": "3", "parameters": 771, "normalised": False, "bytes": 3084, "flops": 1536}
        | {"idle": False, "classifies": True},
    ]
    assert facts["fields"] == [{"layer": "0", "field": [3, 3], "input": [8, 8]}]
    assert (facts["parameters"], facts["flops"], facts["step_flops"]) == (819, 6144, 3 * 6144 - 4608)


def test_bytes_are_those_of_an_update(tmp_path: Path) -> None:
    """A message is a head, an index of a few hundred bytes a tensor, and the tensors themselves."""
    torch.manual_seed(0)
    model = build_model("resnet8(width=8)", (1, 8, 8), 3, seed=0)
    data = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
    federation = fs.Federation(model, [data], data, rounds=1, engine="serial")
    (record,) = federation.fit().records
    tensors = len(model.state_dict())
    assert 0 < record.bytes_up - describe_model(model, (1, 8, 8)).bytes < 1000 + 300 * tensors


class Odd(nn.Module):
    """Needs two inputs, and refuses to run without them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.conv(x) + y
        return out


def test_a_model_that_cannot_be_run_has_strata_all_the_same() -> None:
    facts = describe_model(Odd(), (1, 8, 8))
    assert [(s.name, s.parameters, s.flops) for s in facts.strata] == [("conv", 20, None)]
    assert (facts.fields, facts.flops, facts.step_flops) == ((), None, None)


class Closed(nn.Module):
    """Fails in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no hooks here")


def test_a_model_that_takes_no_hooks() -> None:
    facts = describe_model(Closed(), (2,))
    assert [(s.name, s.parameters, s.flops) for s in facts.strata] == [("dense", 6, None)]


def test_the_model_stays_as_it_was() -> None:
    model = build_model("resnet8(width=4)", (3, 32, 32), 10, seed=0).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    describe_model(model, (3, 32, 32))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


# The command --------------------------------------------------------------------------------------------------


def command_output(*words: str) -> str:
    result = CliRunner().invoke(app, ["show", *words], catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table() -> None:
    """With a 3×3 stem the last field is 109; the 7×7 one doubles the stride of all that follows: 7 + 2·(109 − 3)."""
    text = command_output("resnet18(width=16, stem='7x7')", "--input", "3,32,32")
    assert "resnet18(width=16, stem='7x7'): inputs of 3×32×32, 10 classes" in text
    (row,) = [line for line in text.splitlines() if "layer4.1.conv2" in line]
    assert "│ 219×219 ▲ │" in row
    assert "▲" not in next(line for line in text.splitlines() if "stem.conv" in line)
    assert "21 strata" in text
    assert "of an image of 32×32; ▲ larger, in 13 of 20 layers" in text


def test_the_digits_are_the_default() -> None:
    assert (
        command_output("cnn2")
        == command_output("cnn2", "--dataset", "digits")
        == command_output("cnn2", "--input", "1,8,8")
    )
    assert "1×16×16" in command_output("cnn2", "--dataset", "digits(resolution=16)")


def test_no_column_for_models_without_convolutions() -> None:
    text = command_output("mlp", "--input", "12", "--classes", "3")
    assert "inputs of 12, 3 classes" in text
    assert "field" not in text


def test_json() -> None:
    found: dict[str, Any] = json.loads(
        command_output("cnn4(width=2)", "--input", "3,32,32", "--classes", "7", "--json")
    )
    assert (found["model"], found["input_shape"], found["classes"]) == ("cnn4(width=2)", [3, 32, 32], 7)
    assert [f["field"] for f in found["fields"]] == [[3, 3], [8, 8], [18, 18]]
    assert [s["name"] for s in found["strata"]] == ["layer1.conv1", "layer2.conv1", "layer3.conv1", "head"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resnt8"], r"there is no model 'resnt8' \(did you mean 'resnet8'\?\)"),
        (["resnet8(wdth=2)"], r"has no argument 'wdth' \(did you mean 'width'\?\)"),
        (["cnn2", "--dataset", "digts"], r"there is no dataset 'digts' \(did you mean 'digits'\?\)"),
        (["cnn2", "--input", "3,x"], "--input 3,x: write the sizes of one example, as in 3,32,32"),
        (["cnn2", "--input", "3,0,32"], "write the sizes of one example"),
        (["cnn2", "--input", "3,32,32", "--classes", "0"], "classes must be at least 1, not 0"),
        (["cnn2", "--input", "3,32,32", "--dataset", "digits"], "exclude each other"),
        (["cnn2", "--classes", "3"], "--classes goes with --input"),
        (["cnn2", "--input", "3"], "takes images"),
        (["cnn2", "--input", "3,2,2"], "needs images of at least 4×4"),
    ],
)
def test_mistakes(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        command_output(*words)


@pytest.mark.slow
def test_looking_at_a_model_loads_no_compiler() -> None:
    """It would take longer than all the rest."""
    code = """
import sys, torch
from fedstrata.models.summary import describe_model
describe_model(torch.nn.Conv2d(1, 2, 3), (1, 8, 8))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
