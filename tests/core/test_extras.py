"""Every optional package, when it is missing: one sentence that names the extra, and nothing half-written."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.extras import EXTRAS, extra_of, missing
from tests.report.synthetic import write_run
from tests.small_runs import fedstrata, one_sentence, options

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
ROOT = Path(fs.__file__).parent


def test_the_table_is_that_of_pyproject() -> None:
    """All but the one that puts others together, and those for who works on the project."""
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert declared.pop("vit") == ["fedstrata[hf]"]
    named = {name: {re.split(r"[<>=]", line)[0] for line in lines} for name, lines in declared.items()}
    (every,) = named["all"]
    assert set(every.removeprefix("fedstrata[").removesuffix("]").split(",")) == set(EXTRAS)
    del named["all"], named["test"], named["docs"]
    named["peft"].remove("fedstrata[hf]")
    assert named == {name: {*extra.distributions} for name, extra in EXTRAS.items()}


class Partitioner:
    """What `partition` takes for one of flwr-datasets'."""

    num_partitions = 2

    def load_partition(self, number: int) -> None: ...


def _labels() -> Any:
    return torch.arange(8) % 2


def _transport() -> None:
    from fedstrata.probes.measures.features import _transport

    _transport(torch.zeros(2, 2).numpy(), torch.zeros(2, 2).numpy())


def _server_app() -> None:
    from fedstrata.flower import server_app

    server_app(nn.Linear(1, 1))


def _client_app() -> None:
    from fedstrata.flower import client_app

    client_app(nn.Linear(1, 1), lambda *given: None)


def _reproduction_plots() -> None:
    from fedstrata.reproduce.plots import check_plots

    check_plots()


def _frame() -> None:
    from fedstrata.runs.frames import build_frame

    build_frame([], "round")


COMMANDS: list[tuple[str, list[str]]] = [
    ("kornia", ["run", *options(augment="flip"), "--out", "run"]),
    ("transformers", ["model", "show", "vit"]),
    ("transformers", ["run", *options(model="vit"), "--out", "run"]),
    ("peft", ["run", *options(adapter="lora(r=2)"), "--out", "run"]),
    ("ray", ["run", *options(engine="ray"), "--out", "run"]),
    ("cryptography", ["flower", "certs", "keys"]),
    ("matplotlib", ["plot", "there"]),
    ("matplotlib", ["data", "show", "--plot", "x.png"]),
    ("matplotlib", ["attack", "invert", "there"]),
    ("tensorboard", ["run", *options(), "--tensorboard", "--out", "run"]),
    ("wandb", ["run", *options(), "--track", "wandb", "--out", "run"]),
    ("optuna", ["tune", *options(), "--out", "run"]),
    ("mlflow", ["run", *options(), "--track", "mlflow", "--out", "run"]),
]
CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("datasets", lambda: fs.partition(_labels(), Partitioner(), 2, seed=0)),
    ("ot", _transport),
    ("flwr", _server_app),
    ("flwr", _client_app),
    ("matplotlib", _reproduction_plots),
    ("pandas", _frame),
]
NEVER_IMPORTED = {"flwr_datasets", "sqlalchemy", "alembic", "IPython"}
"""Packages whose objects users bring along, that another one imports, or from which the code is run."""


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be as if a package was not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def test_every_package_is_asked_for() -> None:
    assert {package for package, _ in [*COMMANDS, *CALLS]} | NEVER_IMPORTED == {
        package for extra in EXTRAS.values() for package in extra.packages
    }


@pytest.mark.parametrize(("package", "words"), COMMANDS, ids=lambda given: given if isinstance(given, str) else "")
def test_a_command(
    package: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "there", rounds=2, strata=2)
    before = sorted(tmp_path.rglob("*"))
    hide(package, monkeypatch)
    assert fedstrata(*words) == 2
    told = one_sentence(capsys)
    assert told.endswith(f"pip install 'fedstrata[{extra_of(package)}]'")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("package", "call"), CALLS, ids=[package for package, _ in CALLS])
def test_a_call(package: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hide(package, monkeypatch)
    with pytest.raises(fs.UsageError) as caught:
        call()
    assert str(caught.value).endswith(f"pip install 'fedstrata[{extra_of(package)}]'")


def test_no_sentence_of_this_kind_is_written_by_hand() -> None:
    """They all come from the table, so that an extra that is renamed is renamed everywhere."""
    for path in ROOT.rglob("*.py"):
        if path.name not in ("extras.py", "doctor.py", "template.py", "vits.py"):
            assert "fedstrata[" not in path.read_text(), path


def test_a_package_of_no_extra() -> None:
    assert extra_of("numpy") is None
    with pytest.raises(AssertionError):
        missing("numpy", "this needs")
