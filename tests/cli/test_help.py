"""Help in panels, and what a shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.cli.completion import TABLE_OF, complete_field
from fedstrata.cli.panels import OTHERS, PANEL_OF, PANELS
from fedstrata.config.registries import load_table
from fedstrata.config.schema import RunConfig
from tests.small_runs import fedstrata

Capture = pytest.CaptureFixture[str]


def help_of(capsys: Capture, *words: str) -> str:
    assert fedstrata(*words, "--help") == 0
    return capsys.readouterr().out


def headings(text: str) -> list[str]:
    """Lines that begin at the margin and end with a colon."""
    lines = (line for line in text.splitlines() if line.endswith(":") and not line.startswith(" "))
    return [line.removesuffix(":") for line in lines]


def flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


# --- panels ----------------------------------------------------------------------------------------------------------


def test_every_field_is_in_one_panel() -> None:
    listed = [field for fields in PANELS.values() for field in fields]
    assert sorted(listed) == sorted(RunConfig.model_fields)
    assert len(PANEL_OF) == len(listed)


def test_run_explains_every_field_below_its_heading(capsys: Capture) -> None:
    text = help_of(capsys, "run")
    assert headings(text) == ["Arguments", *PANELS, OTHERS]
    for panel, after in zip(PANELS, [*list(PANELS)[1:], OTHERS], strict=True):
        part = text[text.index(f"\n{panel}:\n") : text.index(f"\n{after}:\n")]
        places = [part.index(f"  {flag(field)} ") for field in PANELS[panel]]
        assert places == sorted(places), panel


def test_resume_has_panels_without_the_empty_ones(capsys: Capture) -> None:
    found = headings(help_of(capsys, "resume"))
    assert found[0] == "Arguments"
    assert found[-2:] == ["Output", OTHERS]
    assert "Simulated devices" not in found


@pytest.mark.parametrize(("command", "own"), [("compare", "What to compare"), ("diagnose", "Trying the remedies")])
def test_commands_that_make_runs_name_settings_and_do_not_explain_them(
    command: str, own: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(capsys, command)
    assert headings(text)[1] == own
    assert {flag(field) for field in RunConfig.model_fields} <= {*text.split()}
    assert not [field for field, info in RunConfig.model_fields.items() if str(info.description) in text]
    assert len(text.splitlines()) < 60


def test_the_commands_are_in_panels(capsys: Capture) -> None:
    text = help_of(capsys)
    assert headings(text) == ["Options", main.TRAIN, main.UNDERSTAND, main.LOOK, main.SHARE]
    for command in ("run", "diagnose", "list", "flower"):
        assert text.count(f"\n  {command} ") == 1


# --- completion ------------------------------------------------------------------------------------------------------


def complete(words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash is offered for the last of some words; nothing goes to standard error."""
    monkeypatch.setenv("_FEDSTRATA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert fedstrata() == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedstrata di", {"diagnose"}),
        ("fedstrata run --part", {"--partition", "--participation"}),
        ("fedstrata run --method fedpro", {"fedprox"}),
        ("fedstrata run --dataset fashion", {"fashion-mnist"}),
        ("fedstrata run --partition dirich", {"dirichlet"}),
        ("fedstrata run --buffers ", {"average", "local", "drop"}),
        ("fedstrata diagnose --model logr", {"logreg"}),
        ("fedstrata resume --probe divergence,gradn", {"divergence,gradnorm"}),
        ("fedstrata run --set participa", {"participation="}),
        ("fedstrata compare --methods fedpro", {"fedprox"}),
        ("fedstrata list prob", {"probes"}),
        ("fedstrata reproduce fedpa", {"fedpart"}),
    ],
)
def test_what_bash_is_offered(words: str, offered: set[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*complete(words, capsys, monkeypatch)} == offered


def test_every_table_completes_its_names() -> None:
    for field, table in TABLE_OF.items():
        asked = complete_field(field)
        assert asked is not None
        assert asked("") == list(load_table(table))
    method = complete_field("method")
    assert method is not None
    assert method("feddyn(alpha=0.1) + fedl") == [
        f"feddyn(alpha=0.1) + {name}" for name in load_table("methods") if name.startswith("fedl")
    ]
    assert complete_field("lr") is None


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **more}


def test_completing_names_imports_no_torch() -> None:
    code = (
        "import sys\nfrom fedstrata.cli import main\ntry:\n    main.main()\nfinally:\n    print('torch' in sys.modules)"
    )
    asked = {"_FEDSTRATA_COMPLETE": "complete_bash", "COMP_WORDS": "fedstrata run --method fedpro", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**asked))
    assert done.stdout.split() == ["fedprox", "False"]
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_works_in_bash(tmp_path: Path) -> None:
    """The script that `--show-completion` prints, asked as bash asks it."""
    from typer._completion_shared import get_completion_script

    program = tmp_path / "fedstrata"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedstrata "$@"\n')
    program.chmod(0o755)
    script = get_completion_script(prog_name="fedstrata", complete_var="_FEDSTRATA_COMPLETE", shell="bash")
    ask = 'COMP_WORDS=(fedstrata data fe); COMP_CWORD=2; _fedstrata_completion fedstrata; echo "${COMPREPLY[@]}"'
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, env=environment(PATH=path)
    )
    assert done.stdout.split() == ["fetch"], done.stderr
