"""The user's own modules: where they are found, what is passed on, and one sentence where they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core import own_code, spec
from fedstrata.core.own_code import load_object, open_folders, opened_folders, settle_source
from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.errors import UsageError
from fedstrata.models.registry import build_model
from fedstrata.run import open_run, resume_run
from tests.small_runs import fedstrata, one_sentence

CODE = """
import numpy as np
import torch
import fedstrata as fs
from own_neighbour import SCALE

def load(rows=6, clients=2, seed=0, floats=False):
    rng = np.random.default_rng(seed)
    def part():
        x = rng.normal(size=(rows, 3)) * SCALE
        return x, (x[:, 0] if floats else (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))
    return {f"site {n}": part() for n in range(clients)}, part()

def whole(**given):
    return fs.load_dataset(f"synthetic(examples={given['examples']})")

def wrong():
    return 3

def parts(kind):
    x, y = torch.arange(12).reshape(4, 3), torch.tensor([0, 1, 2, 0])
    pair, images = (x.double(), y), torch.zeros(4, 1, 2, 2)
    bytes_ = fs.TensorExamples(x.to(torch.uint8), y, (0.5,), (0.25,))
    return {
        "pairs": ([pair, pair], pair),
        "map": ([torch.utils.data.TensorDataset(*pair), pair], pair),
        "bytes": ([bytes_, bytes_.select(torch.tensor([3, 0]))], bytes_),
        "mixed": ([bytes_, pair], pair),
        "tokens": ([(x, x + 1)], (x, x)),
        "masks": ([(images, images[:, 0].byte() + 1)], (images, images[:, 0])),
        "parts": ([({"a": x, "b": x.float()}, y)], ({"a": x, "b": x.float()}, y)),
        "in order": ([((x, x.float()), y)], ((x, x.float()), y)),
        "nobody": ([], pair),
        "empty": ([(x[:0].double(), y[:0])], pair),
        "targets": ([pair, (x.double(), x.double())], pair),
        "inputs": ([pair, (x.double()[:, :2], y)], pair),
        "number": ([3], pair),
        "three": (pair, pair, pair),
    }[kind]

def failing():
    raise KeyError("lost")

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs, width=4):
        super().__init__(torch.nn.Linear(input_shape[0], width), torch.nn.ReLU(), torch.nn.Linear(width, outputs))

class Several(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, a, b):
        return self.head(a.float() + b)

class Asking(Several):
    def __init__(self, input_shape):
        super().__init__()
        self.shape = input_shape

def plain(sizes):
    return torch.nn.Linear(*sizes)

number = 3
"""


LOST = CODE.splitlines().index('    raise KeyError("lost")') + 1


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module, of which nothing is left behind."""
    (tmp_path / "own_module.py").write_text(CODE)
    (tmp_path / "own_neighbour.py").write_text("SCALE = 2.0\n")
    (tmp_path / "own_broken.py").write_text("import nothing_of_the_kind\n")
    (tmp_path / "json.py").write_text("def load(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_open", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_clients_of_ones_own() -> None:
    data = load_dataset("python('own_module:load', rows=5, clients=3)")
    assert (data.task, data.classes, data.group_names) == ("classification", 3, ("site 0", "site 1", "site 2"))
    assert [group.tolist() for group in data.groups] == [list(range(a, a + 5)) for a in (0, 5, 10)]
    assert data.train.x.dtype == torch.float32
    rng = np.random.default_rng(0)
    first = rng.normal(size=(5, 3)) * 2
    np.testing.assert_allclose(data.train.x[:5].numpy(), first, rtol=1e-6)
    assert data.train.y[:5].tolist() == ((first[:, 0] > 0).astype(int) + (first[:, 1] > 0)).tolist()
    assert len(data.test) == 5
    assert "15 examples of 3 clients of your own, for classification" in data.note
    assert load_dataset("python('own_module:load', floats=True)").task == "regression"


def own_parts(kind: str) -> Dataset:
    return load_dataset(f"python('own_module:parts', kind='{kind}')")


def test_clients_in_any_form() -> None:
    plain = own_parts("pairs")
    assert torch.equal(plain.train.x, torch.arange(12.0).reshape(4, 3).repeat(2, 1))
    for kind in ("map", "mixed"):
        assert torch.equal(own_parts(kind).train.y, plain.train.y)
        assert own_parts(kind).train.x.dtype == torch.float32
    data = own_parts("bytes")
    assert (data.train.x.dtype, data.train.mean, data.train.y.tolist()) == (torch.uint8, (0.5,), [0, 1, 2, 0, 0, 0])
    assert data.train.batch(torch.tensor([4]))[0].tolist() == [
        pytest.approx([(n / 255 - 0.5) * 4 for n in (9, 10, 11)])
    ]
    assert (own_parts("tokens").task, own_parts("tokens").classes) == ("next_token", 13)
    assert (own_parts("masks").task, own_parts("masks").classes) == ("segmentation", 2)
    inputs: Any = own_parts("parts").train.x
    assert inputs[:2].tensors["b"].shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nobody", "returns no clients"),
        ("empty", "client 0 has no examples"),
        ("targets", r"targets are of several shapes, \[\] and \[3\]"),
        ("inputs", "the clients' inputs are not all of one shape and type"),
        ("number", "client 0: a client's data is a pair of tensors or a map-style Dataset, not int"),
        ("three", "not a tuple of tuple, tuple, tuple"),
    ],
)
def test_clients_that_do_not_fit(kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        own_parts(kind)


def test_a_whole_dataset_of_ones_own() -> None:
    assert len(load_dataset("python('own_module:whole', examples=12)").train) == 12


def test_a_model_of_ones_own() -> None:
    model = build_model("python('own_module:Net', width=7)", (3,), 2, seed=1)
    assert [p.shape for p in model.parameters()] == [(7, 3), (7,), (2, 7), (2,)]
    again = build_model("python('own_module:Net', width=7)", (3,), 2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert build_model("python('own_module:plain', sizes=(4, 5))", (3,), 2).weight.shape == (5, 4)
    assert build_model("python('own_module:Net', outputs=9)", (3,), 2)[2].out_features == 9


@pytest.mark.parametrize(
    ("kind", "shape", "told"),
    [("parts", {"a": (3,), "b": (3,)}, "a 3, b 3"), ("in order", ((3,), (3,)), "3 and 3")],
)
def test_inputs_of_several_parts_from_the_command_line(
    kind: str, shape: Any, told: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of one's own gets what it asks for, and one of ours says that it takes one tensor."""
    dataset = f"python('own_module:parts', kind='{kind}')"
    command = ("run", "--dataset", dataset, "--partition", "natural", "--clients", 0, "--rounds", 1, "--workers", 1)
    for number, model in enumerate(("Several", "Asking")):
        assert fedstrata(*command, "--model", f"python('own_module:{model}')", "--out", own / f"run{number}") == 0
    asking: Any = build_model("python('own_module:Asking')", own_parts(kind).input_shape, 3)
    assert asking.shape == shape == build_model("python('own_module:Asking')", shape, 3).shape
    capsys.readouterr()
    for model in ("mlp", "chargru", "tablemlp"):
        assert fedstrata(*command, "--model", model, "--out", own / "run") == 2
        assert one_sentence(capsys) == f"model '{model}' takes one tensor, and an input has 2 parts: {told}"
        assert not (own / "run").exists()
    assert fedstrata("data", "show", "--dataset", dataset, "--partition", "natural", "--clients", 0) == 0
    assert f"4 train and 4 test examples of {told}" in " ".join(capsys.readouterr().out.split())
    assert fedstrata("model", "show", "python('own_module:Several')", "--dataset", dataset) == 0
    assert f"inputs of {told}, 3 classes" in " ".join(capsys.readouterr().out.split())


def test_what_is_installed_and_what_is_not_a_source_stay_as_they_are(own: Path) -> None:
    assert settle_source("own_module:load") == f"{own}/own_module:load"
    assert settle_source(f"{own}/own_module:load") == f"{own}/own_module:load"
    assert settle_source("collections:OrderedDict") == "collections:OrderedDict"
    assert settle_source("no source") == "no source"
    assert load_object("collections:OrderedDict") is __import__("collections").OrderedDict


def test_folders_are_opened_once_and_known(own: Path) -> None:
    """Another process opens them in the same way, before it reads the user's classes."""
    load_object("collections:OrderedDict")
    assert opened_folders() == ()
    load_object("own_module:load")
    load_object(f"{own}/own_module:Net")
    assert opened_folders() == (str(own),)
    open_folders(["/nowhere", "/nowhere"])
    assert opened_folders() == (str(own), "/nowhere")
    assert sys.path.count("/nowhere") == sys.path.count(str(own)) == 1


def test_a_run_goes_on_from_another_directory(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.toml names the directory of the module."""
    values = {
        "dataset": "python('own_module:load', rows=8)",
        "model": "python('own_module:Net')",
        "partition": "natural",
        "clients": 0,
        "rounds": 1,
        "engine": "serial",
        "workers": 1,
    }
    config = validate_settings(RunConfig, values)
    assert config.dataset == f"python(source='{own}/own_module:load', rows=8)"
    federation = open_run(config, own / "run")
    federation.fit()
    federation.close()
    (own / "elsewhere").mkdir()
    monkeypatch.chdir(own / "elsewhere")
    again = resume_run(own / "run")
    assert again.settings.task == "classification"
    again.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_module", r"python\('own_module'\) cannot be read; write it like python\('module:name'\)"),
        ("own_modul:load", "there is no module 'own_modul' in .*, and none is installed"),
        ("/nowhere/own_module:load", "there is no module 'own_module' in /nowhere"),
        ("own_module:loads", r"'own_module' has no 'loads' \(did you mean 'load'\?\)"),
        ("own_module:number", "is neither a function nor a class, but int"),
        ("own_module:wrong", r"returns a fedstrata.Dataset or \(clients, test\), not int"),
        ("own_module:failing", rf"failed: KeyError: 'lost' \(own_module\.py, line {LOST}\)"),
        ("own_broken:load", r"own_broken cannot be imported: ModuleNotFoundError: .* \(own_broken\.py, line 1\)"),
        ("json:load", r"the name of .*/json\.py is taken by .*json/__init__\.py: give the file another name"),
    ],
)
def test_one_sentence_for_each_thing_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_dataset(f"python('{text}')")


def test_wrong_arguments_and_models() -> None:
    with pytest.raises(UsageError, match="own_module:load: got an unexpected keyword argument 'row'"):
        load_dataset("python('own_module:load', row=3)")
    with pytest.raises(UsageError, match="own_module:plain: missing a required argument: 'sizes'"):
        build_model("python('own_module:plain')", (3,), 2)
    with pytest.raises(UsageError, match=r"makes no torch\.nn\.Module, but int"):
        build_model("python('own_module:wrong')", (3,), 2)
    with pytest.raises(UsageError, match="dataset 'python' needs the argument 'source'"):
        load_dataset("python(rows=3)")


def passed_on(*, depth: int = 2, **others: Any) -> None:
    """Takes anything."""


def test_arguments_are_passed_on_where_a_callable_takes_any() -> None:
    """Those that it names are checked, the others are not; `list` shows that there may be more."""
    _, given = spec.bind("thing", {"it": passed_on}, "it(3, width={'a': 1}, flag=True)")
    assert given == {"depth": 3, "width": {"a": 1}, "flag": True}
    assert spec.signature(passed_on) == "depth=2, …"
    with pytest.raises(UsageError, match="argument 'depth': 'x' does not fit"):
        spec.bind("thing", {"it": passed_on}, "it(depth='x')")
    with pytest.raises(UsageError, match="takes at most 1 arguments"):
        spec.bind("thing", {"it": passed_on}, "it(1, 2)")


def test_relative_paths_are_settled_and_nothing_else(own: Path) -> None:
    (own / "t.csv").write_text("a,y\n1,2\n")
    config = validate_settings(RunConfig, {"dataset": "csv('t.csv','y')", "public": "csv(path='t.csv', target='y')"})
    assert config.dataset == config.public == f"csv(path='{own}/t.csv', target='y')"
    archs = "python('own_module:Net', width=3); mlp(hidden=(3,))*2;logreg"
    settled = validate_settings(RunConfig, {"archs": archs}).archs
    assert settled == archs.replace("'own_module:Net'", f"source='{own}/own_module:Net'")
    untouched = "synthetic( examples=100,noise=1)"
    assert validate_settings(RunConfig, {"dataset": untouched}).dataset == untouched
