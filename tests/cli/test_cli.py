"""The command: what it prints, what it writes, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shutil
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import load_file

import fedstrata as fs
from fedstrata.cli import console, main
from fedstrata.config.registries import TABLES, load_table
from fedstrata.config.schema import RunConfig
from fedstrata.core import text as wording
from fedstrata.data.sources import SOURCES, Remote
from fedstrata.progress.terminal import RoundsTable, build_progress
from fedstrata.run import open_run, resume_run
from fedstrata.runs.records import Record
from tests.small_runs import (
    LONG,
    SETTINGS,
    config,
    fedstrata,
    full_disk,
    metrics,
    one_sentence,
    options,
    process,
    same,
    sentence,
    strays,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, without the environment's data."""
    monkeypatch.chdir(tmp_path)
    for name in ("FEDSTRATA_DATA", "FEDSTRATA_DEBUG", "FEDSTRATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, made by the library."""
    out = tmp_path_factory.mktemp("whole") / "run"
    open_run(config(), out).fit()
    return out


# --- a run's directory -----------------------------------------------------------------------------------------------


def test_a_run(whole: Path, capsys: Capture) -> None:
    assert fedstrata("run", "--out", "[bold]run", *options()) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in (
        "fedavg(buffers='local')",
        "buffers: local",
        SETTINGS["model"],
        "round 4/4  accuracy",
        "files",
        "[bold]run/",
    ):
        assert text in printed.out
    run = Path("[bold]run")
    assert same(run, whole)
    assert {p.name for p in run.iterdir()} == {
        ".lock",
        "checkpoints",
        "evaluation.json",
        "facts.json",
        "memory",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "run.toml",
        "summary.json",
        "versions.json",
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        wanted = ["accuracy", "loss", "bytes_up", "bytes_down", "flops", "seconds", "clients", "active", "refused"]
        assert row.keys() >= set(wanted)
        assert row["clients"] == sorted(row["clients"])
        assert len(row["clients"]) == 2
        assert min(row["bytes_up"], row["bytes_down"], row["flops"], row["seconds"]) > 0
        assert row["active"][-1] == "head"
        assert row["refused"] == []
    about = json.loads((run / "versions.json").read_text())
    assert about.keys() == {
        "fedstrata",
        "python",
        "torch",
        "machine",
        "processor",
        "models",
        "data",
        "clients",
        "engine",
    }
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"] == rows[-1]["accuracy"]
    assert summary["costs"]["bytes_up"] == sum(row["bytes_up"] for row in rows)
    assert summary["best_accuracy"] == max(row["accuracy"] for row in rows)


def test_the_final_model_loads_and_is_the_final_state(whole: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    state = resume_run(whole).state
    assert tensors.keys() == state.params.keys() | state.buffers.keys()
    assert all(torch.equal(tensors[n], t) for n, t in {**state.params, **state.buffers}.items())
    model = fs.build_model(SETTINGS["model"], (3, 8, 8), 4)
    model.load_state_dict(tensors)
    test = fs.load_dataset(SETTINGS["dataset"]).test
    x, y = test.batch(torch.arange(len(test)))
    assert (model.eval()(x).argmax(1) == y).float().mean().item() == pytest.approx(metrics(whole)[-1]["accuracy"])


def test_run_toml_is_whole_and_makes_the_same_run_again(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    values = tomllib.loads((whole / "run.toml").read_text())
    optional = {name for name, field in RunConfig.model_fields.items() if field.default is None} - {"buffers"}
    assert values.keys() == RunConfig.model_fields.keys() - optional
    assert fedstrata("run", whole / "run.toml", "--out", "other", "--quiet") == 0
    assert same(tmp_path / "other", whole)
    assert (tmp_path / "other" / "run.toml").read_bytes() == (whole / "run.toml").read_bytes()
    assert (
        capsys.readouterr().out
        == f"accuracy {100 * metrics(whole)[-1]['accuracy']:.2f} % after 4 rounds; files in other\n"
    )
    assert fedstrata("run", whole / "run.toml", "--out", "seeded", "--quiet", "--seed", 1) == 0
    assert metrics(tmp_path / "seeded") != metrics(whole)


def test_json_is_one_object(tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("run", "--out", "a b", *options(rounds=1), "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    shown = json.loads(printed.out)
    assert shown.pop("out") == "a b"
    assert shown == json.loads((tmp_path / "a b" / "summary.json").read_text())


def test_the_default_directory_is_new_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        assert fedstrata("run", *options(rounds=1), "--quiet") == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    assert second.name == first.name + "-2"
    assert re.fullmatch(r"synthetic-[a-z0-9.-]+-seed0", first.name)
    assert same(first, second)


def test_the_default_directory_of_a_file_is_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "Patients 2.csv").write_text("age,sick\n" + "1.5,0\n2.5,1\n" * 30)
    data = ("--dataset", "csv(path='Patients 2.csv', target='sick')", "--model", "logreg", "--clients", "2")
    assert fedstrata("run", *data, "--partition", "iid", "--rounds", "1", "--quiet") == 0
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["patients-2-fedavg-seed0"]


# --- options ---------------------------------------------------------------------------------------------------------


def test_every_option(tmp_path: Path) -> None:
    """The options that scripts rely on, each with a value that is not its default, arrives in run.toml."""
    given = {
        "--dataset": "synthetic(examples=60, test_examples=10)",
        "--data-dir": "somewhere",
        "--model": "mlp(hidden=(4,))",
        "--partition": "iid",
        "--clients": 3,
        "--participation": 2,
        "--method": "fedavg(weight='uniform')",
        "--rounds": 1,
        "--epochs": 2,
        "--batch-size": 7,
        "--lr": 1e-05,
        "--optimizer": "sgd(momentum=0.9)",
        "--seed": 5,
        "--workers": 1,
        "--engine": "wire",
        "--buffers": "drop",
    }
    words = [str(word) for pair in given.items() for word in pair]
    assert fedstrata("run", *words, "--out", "run", "--quiet", "--json") == 0
    values = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    found = {option: values[option[2:].replace("-", "_")] for option in given}
    resolved = {"--method": "fedavg(weight='uniform', buffers='drop')", "--data-dir": str(tmp_path / "somewhere")}
    assert found == given | resolved


def test_every_field_is_an_option(capsys: Capture) -> None:
    assert fedstrata("run", "--help") == 0
    shown = capsys.readouterr().out
    for name, field in RunConfig.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert field.description
        assert field.description.split()[0] in shown


def test_what_wins(tmp_path: Path) -> None:
    """The file, then the options, then --set, of which the last."""
    text = 'rounds = 9\nlr = 0.5\nepochs = 3\nseed = 3\n[model]\nname = "mlp"\nhidden = [9]\n'
    Path("a.toml").write_text(text)
    words = ["--rounds", 1, "--lr", 0.25, "--epochs", 1, "--dataset", "synthetic(examples=100)", "--partition", "iid"]
    sets = ["--set", "lr=0.1", "--set", "lr=0.125", "--set", "model.hidden=[4, 5]", "--set", "participation=0.5"]
    assert fedstrata("run", "a.toml", "--out", "run", "--quiet", *words, *sets) == 0
    values = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert (values["rounds"], values["lr"], values["epochs"], values["seed"]) == (1, 0.125, 1, 3)
    assert (values["model"], values["participation"]) == ("mlp(hidden=(4, 5))", 0.5)


@pytest.mark.parametrize(("text", "clients"), [("2", 2), ("1.0", 5), ("0.4", 2), ("1", 1)])
def test_participation_is_told_apart_by_the_decimal_point(tmp_path: Path, text: str, clients: int) -> None:
    words = options(rounds=1, participation=text, model="logreg", method="fedavg")
    assert fedstrata("run", "--out", "run", "--quiet", *words) == 0
    assert len(metrics(tmp_path / "run")[0]["clients"]) == clients


def test_a_quiet_run_tells_that_it_ended_early(capsys: Capture) -> None:
    Path("t.csv").write_text("client,start,end\n0,0,5\n")
    fleet = "phone*5(up='100B/s', available=\"trace('t.csv')\")"
    assert fedstrata("run", *options(rounds=9, model="logreg", method="fedavg", fleet=fleet), "--quiet") == 0
    said = capsys.readouterr()
    assert "note: the run ends after 1 of 9 rounds: no client's device is there" in said.err
    assert "after 1 round" in said.out


def test_data_dir_and_workers_of_resume(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(whole, tmp_path / "run")
    assert fedstrata("resume", "run", "--data-dir", "elsewhere", "--workers", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 4
    assert fedstrata("resume", "run", "--workers", "many") == 2
    assert "workers = 'many' does not fit: give a number of processes, 1 or more, or auto" in one_sentence(capsys)


# --- lists and data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["60", "100", "200"])
@pytest.mark.parametrize("what", TABLES)
def test_lists(what: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert fedstrata("list", what) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert max(cell_len(line) for line in printed.out.splitlines()) <= int(columns)
    assert fedstrata("list", what, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(load_table(what))
    for row in rows:
        assert re.search(rf"^. {row['name']} ", printed.out, re.M)
        assert row["help"].endswith((".", "…", ")")), row
        assert "\n" not in row["help"]
        for argument in re.findall(r"(\w+)=", row["arguments"]):
            assert f"{argument}=" in printed.out


def test_data_show(tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("data", "show", "--clients", 4, "--partition", "iid", "--plot", "a.png") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in (
        "1,442 train and 355 test examples of 1×8×8",
        "iid, seed 0: 4 clients, 1,442 examples",
        "plotted to a.png",
    ):
        assert text in printed.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["a.png"]
    assert fedstrata("data", "show", "--clients", 4, "--partition", "iid", "--json") == 0
    counts = torch.tensor(json.loads(capsys.readouterr().out)["counts"])
    assert counts.shape == (10, 4)
    assert counts.sum() == 1442


@pytest.mark.parametrize(
    ("dataset", "said", "first", "classes"),
    [
        ("diabetes", "for regression", "tenth 1", 10),
        ("digits-segmentation(examples=100)", "for segmentation", "0", 10),
        ("breast-cancer", "for binary", "0", 2),
    ],
)
def test_data_show_of_what_has_no_classes(dataset: str, said: str, first: str, classes: int, capsys: Capture) -> None:
    """The classes are those that examples are dealt out by."""
    arguments = ["data", "show", "--dataset", dataset, "--clients", 3, "--partition", "iid"]
    assert fedstrata(*arguments) == 0
    assert said in capsys.readouterr().out
    assert fedstrata(*arguments, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["classes"][0] == first
    assert len(shown["classes"]) == len(shown["counts"]) == classes
    assert len(shown["counts"][0]) == 3


def test_data_show_names_natural_clients(tmp_path: Path, capsys: Capture) -> None:
    rows = "".join(f"{number},{number % 2},site {number % 23:02}\n" for number in range(230))
    (tmp_path / "t.csv").write_text("age,sick,site\n" + rows)
    table = "csv(path='t.csv', target='sick', client='site')"
    arguments = ["data", "show", "--dataset", table, "--partition", "natural", "--clients", 0]
    assert fedstrata(*arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "clients: 0 site 00, 1 site 01," in printed
    assert "19 site 19 and 3 more" in printed
    assert "test examples of 1 number, for binary" in printed
    assert fedstrata(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["clients"][22] == "site 22"


def test_data_show_deals_as_a_run_does(capsys: Capture) -> None:
    arguments = ["--dataset", SETTINGS["dataset"], "--partition", "dirichlet(alpha=1.0)", "--clients", 5, "--seed", 3]
    assert fedstrata("data", "show", *arguments, "--json") == 0
    counts = torch.tensor(json.loads(capsys.readouterr().out)["counts"])
    federation = open_run(config(partition="dirichlet(alpha=1.0)", seed=3), None)
    dealt = [torch.bincount(client.labels(), minlength=4) for client in federation.clients]
    assert torch.equal(counts, torch.stack(dealt, dim=1))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Nothing on standard error."""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """A data folder, served over HTTP."""
    (tmp_path / "mirror" / "tiny").mkdir(parents=True)
    (tmp_path / "mirror" / "tiny" / "a.gz").write_bytes(b"data")
    handler = lambda *args: _Quiet(*args, directory=str(tmp_path / "mirror"))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_data_fetch(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(SOURCES, "tiny", (Remote("http://nowhere.invalid/a.gz", 4),))
    assert fedstrata("data", "fetch", "tiny", "--data-dir", "data", "--mirror", mirror) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("data/tiny/a.gz\n", "")
    assert (tmp_path / "data" / "tiny" / "a.gz").read_bytes() == b"data"
    monkeypatch.setenv("FEDSTRATA_DATA", "other")
    monkeypatch.setenv("FEDSTRATA_MIRROR", mirror)
    assert fedstrata("data", "fetch", "tiny") == 0
    assert (tmp_path / "other" / "tiny" / "a.gz").exists()


# --- what is wrong ---------------------------------------------------------------------------------------------------

DEEP = "fedavg(" + "(" * 3000 + ")" * 3000 + ")"

WRONG: list[tuple[list[str], str]] = [
    (["--frobnicate"], "No such option"),
    (["--round", "3"], "No such option"),
    (["--roundss", "3"], "--rounds"),
    (["--rounds"], "'--rounds' requires an argument"),
    (["a.toml", "b.toml"], "b.toml"),
    (["--rounds", "abc"], "Invalid value for '--rounds'"),
    (["--rounds", "2.5"], "Invalid value for '--rounds'"),
    (["--rounds", "0"], "rounds = 0 does not fit"),
    (["--lr", "abc"], "Invalid value for '--lr'"),
    (["--lr", "-1"], "lr = -1.0 does not fit"),
    (["--lr", "nan"], "lr = nan does not fit"),
    (["--lr", "inf"], "lr = inf does not fit"),
    (["--participation", "0"], "participation = 0 does not fit"),
    (["--participation", "1.5"], "participation = 1.5 does not fit"),
    (["--participation", "nan"], "participation = nan does not fit"),
    (["--participation", "half"], "participation = 'half' does not fit"),
    (["--clients", "0"], "at least 1 client, not 0"),
    (["--clients", "99999"], "99999 clients"),
    (["--clients", "900"], "min_size"),
    (["--workers", "0"], "workers = 0 does not fit: give a number of processes, 1 or more, or auto"),
    (["--workers", "3", "--engine", "serial"], "workers must be 1, not 3"),
    (["--workers", "3", "--engine", "wire"], "workers must be 1, not 3"),
    (["--engine", "sreial"], "there is no engine 'sreial' (did you mean 'serial'?)"),
    (["--model", "resnet9"], "(did you mean 'resnet"),
    (["--model", "cnn2(widht=3)"], "has no argument 'widht' (did you mean 'width'?)"),
    (["--model", "cnn2(width='x')"], "'x' does not fit"),
    (["--model", "cnn2(width=0)"], "width must be at least 1"),
    (["--model", "cnn2(width=9" + "0" * 30 + ")"], "cannot be built here"),
    (["--model", "cnn2(width=10000000000000)"], "cannot be built here: there is not enough memory"),
    (["--model", "chargru"], "chargru"),
    (["--dataset", "mnits"], "there is no dataset 'mnits' (did you mean 'mnist'?)"),
    (["--dataset", "mnist"], "FEDSTRATA_DATA"),
    (["--dataset", "mnist", "--data-dir", "nowhere"], "nowhere"),
    (["--partition", "dirichlet(alpha=-1)"], "alpha must be a finite number above 0"),
    (["--partition", "natural"], "no natural clients"),
    (["--partition", "shards(classes=11)"], "classes must be 1 to 10"),
    (["--optimizer", "adma"], "there is no optimizer 'adma' (did you mean 'adam'?)"),
    (["--schedule", "cosin"], "there is no schedule 'cosin' (did you mean 'cosine'?)"),
    (["--augment", "rcc"], "there is no augmentation 'rcc' (did you mean 'rrc'?)"),
    (["--buffers", "averag"], "should be 'average', 'local' or 'drop'"),
    (["--device", "cuda:99"], "device 'cuda:99'"),
    (["--device", "gpu"], "device 'gpu'"),
    (["--stop-at-target"], "stop_at_target needs a target"),
    (["--set", "lr"], "write it like name=value"),
    (["--set", "lrr=1"], "there is no setting 'lrr' (did you mean 'lr'?)"),
    (["--set", "model.widht=1"], "has no argument 'widht'"),
    (["--set", "lr=" + "[" * 5000], "lr = '[["),
    (["--set", "data_dir=\udcff"], "not valid Unicode"),
    (["--method", "fedavgg"], "there is no method 'fedavgg' (did you mean 'fedavg'?)"),
    (["--method", "fedavg("], "'fedavg(' cannot be read"),
    (["--method", ""], "'' cannot be read"),
    (["--method", "__import__('os')"], "there is no method '__import__'"),
    (["--method", "fedavg(weight=open('x'))"], "is not a literal value"),
    (["--method", "fedavg + fedavg"], "twice"),
    (["--method", "fedavg(server_lr=1e999)"], "server_lr must be positive"),
    (["--method", DEEP], "cannot be read"),
    (["--method", "x" * 20_000], "at most 10,000 characters"),
    (["--method", "+".join(["fedavg"] * 1400)], "twice"),
    (["--method", "фед🙂avg"], "cannot be read"),
    (["--method", "fedavg\n\x1b[31m"], "cannot be read"),
    (["missing.toml"], "cannot read missing.toml: no such file or directory"),
    (["."], "cannot read .: is a directory"),
    (["--quiet=3"], "--quiet"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"), WRONG, ids=lambda value: str(value)[:40].encode("ascii", "replace").decode()
)
def test_wrong_input_of_run(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("run", "--out", "run", *words) == 2
    assert said in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["list"], "Missing argument 'WHAT'"),
        (["list", "mehtods"], "there is no list of 'mehtods' (did you mean 'methods'?)"),
        (["resume"], "Missing argument 'DIR'"),
        (["resume", "nowhere"], "nowhere has no run.toml"),
        (["data", "frobnicate"], "No such command 'frobnicate'"),
        (["data", "show", "--dataset", "mnits"], "(did you mean 'mnist'?)"),
        (["data", "show", "--clients", "0"], "at least 1 client, not 0"),
        (["data", "show", "--plot", "a.gif"], "a.gif"),
        (["data", "show", "--plot", "no/a.png"], "no/a.png"),
        (["data", "fetch"], "Missing argument 'NAME'"),
        (["data", "fetch", "mnits", "--data-dir", "d"], "(did you mean 'mnist'?)"),
        (["data", "fetch", "mnist"], "FEDSTRATA_DATA"),
        (["data", "fetch", "femnist", "--data-dir", "d"], "LEAF"),
        (["data", "fetch", "mnist", "--data-dir", "d", "--mirror", "ftp://x"], "is not an http or https address"),
        (["demo", "--rounds", "3"], "No such option"),
    ],
    ids=" ".join,
)
def test_wrong_input_of_the_other_commands(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata(*words) == 2
    assert said in one_sentence(capsys)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds = ", "a.toml is not valid TOML"),
        ("roundss = 3", "there is no setting 'roundss' (did you mean 'rounds'?)"),
        ("rounds = '3'", "rounds = '3' does not fit"),
        ("lr = nan", "lr = nan does not fit"),
        ("[train]\nlr = 1.0", "there is no setting 'train'"),
        ("[model]\nwidth = 3", "the table [model] needs a name"),
        ("out = 'x'", "there is no setting 'out'"),
        ("x = " + "[" * 9000, "a.toml is not valid TOML: its lists or tables are nested too deeply"),
        ("\x00", "a.toml is not valid TOML"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_wrong_files(text: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    Path("a.toml").write_text(text)
    assert fedstrata("run", "a.toml", "--out", "run") == 2
    assert said in one_sentence(capsys)
    assert os.listdir(tmp_path) == ["a.toml"]


def test_too_many_clients_asked_for(tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("run", "--out", "run", *options(participation=99)) == 2
    assert "participation = 99, but only 5 clients have examples" in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    Path("file").write_text("")
    shutil.copytree(whole, "a run")
    Path("full").mkdir()
    Path("full/letter").write_text("")
    before = {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for out, said in [
        ("file", "file exists and is not empty"),
        ("full", "full exists and is not empty"),
        ("a run", "a run holds a finished run already: choose another --out"),
        ("file/run", "cannot write file/run: not a directory"),
        ("/proc/fedstrata/run", "cannot write /proc/fedstrata/run: no such file or directory"),
        ("/dev/null/run", "cannot write /dev/null/run: not a directory"),
        ("x" * 300, "file name too long"),
    ]:
        assert fedstrata("run", "--out", out, *options()) == 2, out
        assert said in one_sentence(capsys)
    assert {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    if os.geteuid() != 0:  # root may write anywhere
        Path("locked").mkdir(mode=0o500)
        assert fedstrata("run", "--out", "locked/run", *options()) == 2
        assert "permission denied" in one_sentence(capsys)


def test_a_model_that_does_not_fit_the_data(tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("run", "--out", "run", "--dataset", "synthetic(shape=(5,))", "--model", "cnn2") == 2
    one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    """At every size at which some file no longer fits: one sentence, nothing half-written, and a run that goes on."""
    sizes = sorted({p.stat().st_size for p in whole.rglob("*") if p.is_file()} - {0})
    began = 0
    for number, size in enumerate(sizes):
        run = tmp_path / str(number)
        with full_disk(size - 1):
            assert fedstrata("run", "--out", run, *options(), "--quiet") == 2, size
        assert "file too large" in one_sentence(capsys)
        assert not strays(tmp_path)
        if run.exists():
            began += 1
            assert (run / "run.toml").exists()
            assert not (run / "summary.json").exists()
            assert fedstrata("resume", run, "--quiet") == 0
            assert same(run, whole)
            capsys.readouterr()
    assert 0 < began < len(sizes)


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for words in (["--debug", "list", "x"], ["list", "x", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["fedstrata", *words])
        with pytest.raises(SystemExit, match="2"):
            main.main()
        error = capsys.readouterr().err
        assert error.startswith("Traceback")
        assert error.splitlines()[-1].startswith("fedstrata: there is no list of 'x'")


def test_an_error_of_ours_is_one_sentence_too(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for error, code, said in [
        (RuntimeError("a\nb"), 1, "internal error: RuntimeError: a b (--debug shows where)"),
        (MemoryError(), 2, "there is not enough memory"),
        (KeyboardInterrupt(), 130, "stopped"),
        (PermissionError(13, "Permission denied", "x"), 2, "Permission denied: x"),
    ]:

        def fail(*args: object, error: BaseException = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("fedstrata.run.open_run", fail)
        assert fedstrata("run") == code
        assert one_sentence(capsys) == said


def test_help_and_version(capsys: Capture) -> None:
    assert fedstrata("--version") == 0
    assert capsys.readouterr().out == f"fedstrata {fs.__version__}\n"
    for words in ([], ["data"]):
        assert fedstrata(*words) == 2
        assert capsys.readouterr().err.startswith("Usage: fedstrata")
    for words in (["-h"], ["run", "-h"], ["data", "show", "--help"]):
        assert fedstrata(*words) == 0
        assert capsys.readouterr().out.startswith("Usage: fedstrata")


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipe_that_is_closed(tmp_path: Path) -> None:
    child = process("run", "--out", "run", *options(rounds=100_000), cwd=tmp_path)
    assert child.stdout is not None
    assert "fedstrata" in child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(LONG) in (0, 1)
    assert resume_run(tmp_path / "run").state.round > 0


def test_a_full_device_as_output(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        child = process("list", "models", "--json", cwd=tmp_path, stdout=full)
        _, error = child.communicate(timeout=LONG)
    assert child.returncode == 2
    assert sentence(error) == "No space left on device"


def test_a_full_disk_in_a_process_of_its_own(tmp_path: Path) -> None:
    limited = (
        "from fedstrata.cli.main import main; import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (2000, 2000)); main()"
    )
    child = process("run", "--out", "run", *options(), cwd=tmp_path, code=limited)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 2
    assert re.match(r"cannot write run/.*: file too large$", sentence(error))
    assert not strays(tmp_path)


# --- what a terminal shows -------------------------------------------------------------------------------------------


def record(round: int, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "round": round,
        "accuracy": 0.5,
        "loss": 1234.5678,
        "bytes_up": 123_400_000,
        "bytes_down": 123_400_000,
        "flops": 10**12,
        "seconds": 1234.5,
        "clients": [0],
        "active": [],
        "refused": [],
        "train_loss": 1.0,
        "examples": 1,
        "steps": 1,
        "lr": 0.1,
        "memory": 1,
    }
    return Record(**values | changes)


def screen(width: int, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=20, force_terminal=terminal, markup=False, emoji=False, highlight=False
    )


def shown(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 70, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    on = screen(width)
    on.print(RoundsTable([record(1), record(100, accuracy=None, loss=None)]))
    text = shown(on)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert len(text.splitlines()) == 6
    assert "50.00 %" in text
    assert ("test loss" in text) == (width >= 40)
    assert ("train loss" in text) == (width >= 80)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_says_what_trained_where_that_changes(width: int) -> None:
    on = screen(width)
    on.print(RoundsTable([record(1, active=list("abc")), record(2, active=["layer1.0.conv1"])]))
    text = shown(on)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert ("layer1.0.conv1" in text) == ("3 strata" in text) == (width > 80)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_live_view(terminal: bool, tmp_path: Path) -> None:
    on = screen(60, terminal)
    federation = open_run(config(rounds=3), tmp_path / "[bold] :smile: [/]")
    federation.notes += ("data: a subset", "of it: half", "first", "second")
    on.print(console.header(federation, {"data": SETTINGS["dataset"]}))
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(on))
    assert all(row in re.sub(r" +", " ", told) for row in ("note (data) a s", "note of it: half", "first", "second"))
    progress = build_progress(on, transient=True)

    def refuse(record: Record) -> None:
        """Show a third round with a client that was refused, too."""
        if record.round == 3:
            progress.on_round(federation, replace(record, refused=[{"client": 4, "why": "it has '[/red] :smile:'"}]))

    history = federation.fit(progress, refuse)
    on.print(console.summary(history, federation.out))
    text = shown(on)
    assert "round 3: refused client 4: it has '[/red] :smile:'" in text
    flat = re.sub(r"[^\x21-\x7e]", "", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    assert "[bold]:smile:[/]" in flat
    assert ("clients" in text.partition("files")[2]) == terminal
    assert ("round 2/3  accuracy" in text) == (not terminal)


def test_a_terminal_that_only_knows_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["fedstrata", "data", "show"])
    with pytest.raises(SystemExit, match="0"):
        main.main()
    assert b"10 classes" in raw.getvalue()


def test_numbers_for_people() -> None:
    assert [wording.bytes_text(n) for n in (0, 999, 1000, 1234567, 10**15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "1000.0 TB",
    ]
    assert [wording.flops_text(n) for n in (5, 1e9, 1e18)] == ["5 FLOP", "1 GFLOP", "1e+03 PFLOP"]
    assert [wording.percent(x) for x in (None, 0.91372, 1.0)] == ["–", "91.37 %", "100.00 %"]
    assert [wording.plural(n, "round") for n in (0, 1, 2000)] == ["0 rounds", "1 round", "2,000 rounds"]
