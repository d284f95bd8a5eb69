"""`fedstrata doctor`: what is broken comes first, with the line that mends it; it needs nothing that may be missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.cli import checkup
from fedstrata.cli.checkup import CPU_BUILD, Checkup, fits, install_line
from fedstrata.core.extras import EXTRAS
from fedstrata.data.found import find_by_name
from tests.small_runs import fedstrata

Capture = pytest.CaptureFixture[str]
REQUIRES = ["torch>=2.13", "numpy>=1.26", "kornia>=0.8; extra == 'augment'", "pytest>=8; extra == 'test'"]


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A machine on which nothing is wrong, whatever this one is like; versions that tests may change."""
    there = {"torch": metadata.version("torch"), "numpy": "2.0", "kornia": "0.9"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.11,<3.99"})
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(checkup, "_capability", lambda torch: "AVX2")
    monkeypatch.setattr(checkup, "available_memory", lambda: 8 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 50 << 30}))
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return there


def told(capsys: Capture, code: int) -> dict[str, Any]:
    assert fedstrata("doctor", "--json") == code
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    assert found["ok"] == (code == 0)
    return found


def test_nothing_is_broken(sound: dict[str, str], capsys: Capture) -> None:
    found = told(capsys, 0)
    assert (found["problems"], found["advice"]) == ([], [])
    assert found["versions"]["fedstrata"] == fs.__version__
    assert found["versions"]["numpy"] == "2.0"
    assert found["extras"]["augment"] == {"kornia": "0.9"}
    assert found["extras"]["ray"] == {"ray": None}
    assert found["machine"]["cores"] >= 1
    assert fedstrata("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "This machine"
    assert lines[-1].startswith("nothing is broken")
    assert any("not installed" in line and "pip install 'fedstrata[ray]'" in line for line in lines)


def test_every_extra_is_named_with_its_line(sound: dict[str, str], capsys: Capture) -> None:
    del sound["kornia"]
    assert fedstrata("doctor") == 0
    text = capsys.readouterr().out
    for name in EXTRAS:
        assert f"pip install 'fedstrata[{name}]'" in text


def test_torch_is_missing(sound: dict[str, str], capsys: Capture) -> None:
    """The build for CPUs, whose line is another."""
    del sound["torch"]
    (problem,) = told(capsys, 1)["problems"]
    line = f'pip install "torch>=2.13" {CPU_BUILD}'
    assert problem == {"what": "torch is missing", "fix": line}
    assert fedstrata("doctor") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Broken", "  torch is missing", f"    → {line}"]
    assert lines[-1] == "1 thing must be put right before runs work"


def test_torch_is_there_and_does_not_work(
    sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (problem,) = told(capsys, 1)["problems"]
    assert problem["what"].startswith("torch is installed and does not work: ")
    assert problem["fix"].startswith("pip install --force-reinstall torch==2.")
    assert problem["fix"].endswith(CPU_BUILD)
    assert "+" not in problem["fix"]


@pytest.mark.parametrize(
    ("package", "version", "kind"), [("numpy", "1.24.4", "problems"), ("kornia", "0.7.9", "advice")]
)
def test_a_package_is_too_old(package: str, version: str, kind: str, sound: dict[str, str], capsys: Capture) -> None:
    sound[package] = version
    found = told(capsys, 1 if kind == "problems" else 0)
    (remark,) = found[kind]
    assert remark["what"].startswith(f"{package} is {version}, and ")
    assert remark["fix"].startswith(f'pip install "{package}>=')


def test_another_python(sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": "<3.8"})
    (problem,) = told(capsys, 1)["problems"]
    assert "fedstrata needs <3.8" in problem["what"]


def test_from_bare_source(sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    found = told(capsys, 0)
    assert "runs from its source" in found["advice"][0]["what"]
    assert found["versions"]["torch"] == sound["torch"]


@pytest.mark.parametrize(
    ("free", "code", "kind"), [(50 << 20, 1, "problems"), (1 << 30, 0, "advice"), (50 << 30, 0, "")]
)
def test_the_disk(
    free: int, code: int, kind: str, sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_disk = lambda path: type("Usage", (), {"free": 50 << 30 if str(path) == "/dev/shm" else free})  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", of_disk)
    found = told(capsys, code)
    assert [name for name in ("problems", "advice") if found[name]] == ([kind] if kind else [])


def test_little_memory_and_an_old_processor(
    sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "available_memory", lambda: 100 << 20)
    monkeypatch.setattr(checkup, "_capability", lambda torch: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    slow, memory = told(capsys, 0)["advice"]
    assert slow["fix"] == "unset ATEN_CPU_CAPABILITY"
    assert "--workers 1" in memory["fix"]


def test_a_data_folder(sound: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "nowhere"))
    (problem,) = told(capsys, 1)["problems"]
    assert "there is no such folder" in problem["what"]
    assert "mkdir -p" in problem["fix"]
    (tmp_path / "nowhere" / "cifar-10-batches-py").mkdir(parents=True)
    found = told(capsys, 0)["data"]["found"]
    assert found == {"cifar-10": str(tmp_path / "nowhere" / "cifar-10-batches-py")}


def test_datasets_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("deep/er/FashionMNIST", "mnist", ".hidden/svhn", "femnist_all", "a/b/c/d/e/cinic-10"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("cifar-100-python.tar.gz", "deep/train_32x32.mat", "train-images-idx3-ubyte.gz"):
        (tmp_path / name).touch()
    found = {name: str(path.relative_to(tmp_path)) for name, path in find_by_name(tmp_path).items()}
    assert found == {
        "mnist": "mnist",
        "fashion-mnist": "deep/er/FashionMNIST",
        "cifar-100": "cifar-100-python.tar.gz",
        "svhn": "deep/train_32x32.mat",
        "femnist": "femnist_all",
    }


def test_versions() -> None:
    assert fits("2.13.0+cpu", ">=2.13")
    assert fits("3.11.7", ">=3.11,<3.12")
    assert not fits("3.12.0", ">=3.11,<3.12")
    assert not fits("1.9", ">=1.10")
    assert fits("1.0", "")
    assert install_line("numpy", ">=1.26") == 'pip install "numpy>=1.26"'
    assert vars(Checkup())["problems"] == []


def run_without(package: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process in which a package cannot be imported."""
    code = f"import sys; sys.modules['{package}'] = None; sys.argv[0] = 'fedstrata'\n"
    code += "from fedstrata.__main__ import main; main()"
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)


def test_it_runs_without_torch() -> None:
    done = run_without("torch", "doctor")
    assert done.returncode == 1
    assert done.stdout.startswith("Broken\n  torch is installed and does not work")
    assert done.stderr == ""


@pytest.mark.parametrize(("package", "words"), [("torch", ["run", "--rounds", "1"]), ("typer", ["doctor"])])
def test_a_command_that_lacks_a_package_says_so(package: str, words: list[str]) -> None:
    done = run_without(package, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fedstrata: the package {package} is missing: ")
