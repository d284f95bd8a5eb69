"""What the command does before it does anything: help as it should look, and no torch where none is needed."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from fedstrata import reproduce
from fedstrata.attack.inversion import NOISE
from fedstrata.cli import main
from fedstrata.cli import reproduce as command
from fedstrata.config import registries
from fedstrata.core import lazy
from fedstrata.report.plots import FORMATS
from tests.report.synthetic import write_run
from tests.small_runs import SETTINGS, fedstrata, process

Capture = pytest.CaptureFixture[str]


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command, and all below it, as words."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


EVERY = list(commands(typer.main.get_command(main.app)))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Neither what is meant for another renderer, nor a default that is none."""
    monkeypatch.setenv("COLUMNS", "400")
    assert fedstrata(*words, "--help") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Usage: fedstrata" in printed.out
    assert "\\" not in printed.out
    assert "default: None" not in printed.out
    assert "default: ]" not in printed.out


def test_help_of_every_kind_was_seen() -> None:
    assert {(), ("run",), ("data", "fetch"), ("model", "show"), ("attack", "invert"), ("flower", "certs")} <= {*EVERY}


def test_defaults_are_shown(capsys: Capture) -> None:
    assert fedstrata("watch", "--help") == 0
    assert "[default: 0;" in capsys.readouterr().out
    assert fedstrata("run", "--help") == 0
    assert "[default: 20]" in " ".join(capsys.readouterr().out.split())


def test_help_says_what_is_imported_too_late_for_it(capsys: Capture) -> None:
    """Names that help gives without asking the modules that have them."""
    assert tuple(reproduce.PAPERS) == command.PAPERS
    assert command.SCALES == reproduce.SCALES
    assert fedstrata("attack", "invert", "--help") == 0
    levels = ",".join(f"{level:g}" for level in NOISE)
    assert f"[default: {levels}]" in " ".join(capsys.readouterr().out.split())
    assert fedstrata("plot", "--help") == 0
    *others, last = FORMATS
    assert f"{', '.join(others)} or {last}" in capsys.readouterr().out


# --- without torch ---------------------------------------------------------------------------------------------------

HEAVY = ("torch", "scipy", "sklearn", "optuna", "fedstrata.engines")
CODE = f"""
import sys
from fedstrata.cli import main
try:
    main.main()
finally:
    found = [m for m in {HEAVY} if m in sys.modules]
    found += sorted(m for m in sys.modules if m.startswith("fedstrata.engines."))
    print(*found, file=sys.stderr)
"""
ONE_BY_ONE = f"""
import contextlib, io, json, sys
from fedstrata.cli import main
told = []
for words in json.loads(sys.argv[1]):
    before = set(sys.modules)
    sys.argv[1:] = words.split()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main.main()
        except SystemExit as end:
            code = end.code
    new = sorted(m for m in set(sys.modules) - before if m in {HEAVY} or m.startswith("fedstrata.engines."))
    told.append([code, out.getvalue(), new])
print(json.dumps(told))
"""
"""Commands one after the other in one process: of each its exit code, what it printed, and what it imported first."""
TABLE_OF_ENGINES = ["fedstrata.engines", "fedstrata.engines.registry"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with probes, and a comparison."""
    home = tmp_path_factory.mktemp("start")
    small: dict[str, Any] = {"rounds": 4, "strata": 6}
    write_run(home / "runs" / "one", **small)
    write_run(home / "runs" / "two", method="fedprox(mu=0.1)", lift=0.1, **small)
    settings: dict[str, Any] = {**SETTINGS, "method": "fedavg; fedprox", "rounds": 1, "model": "logreg"}
    methods = ["--methods", settings.pop("method"), "--seeds", "0"]
    options = [word for n, v in settings.items() for word in (f"--{n.replace('_', '-')}", str(v))]
    (home / "options.txt").write_text("\n".join([*methods, *options]))
    assert fedstrata("compare", *methods, *options, "--out", home / "compared", "--quiet", "--no-report") == 0
    return home


def start(home: Path, *words: object) -> tuple[str, list[str]]:
    """What the command printed, and which large packages and engines it had imported in the end."""
    done = process(*words, cwd=home, code=CODE)
    out, error = done.communicate(timeout=300)
    assert done.returncode == 0, error
    return out, error.splitlines()[-1].split()


LIGHT = [
    ("--version", "fedstrata "),
    ("--help", "Look around:"),
    ("run --help", "--participation"),
    ("attack invert --help", "--noise"),
    ("machine tune --help", "--seconds"),
    ("tune --help", "--search-seed"),
    *((f"list {what}", what) for what in registries.TABLES if what != "engines"),
    ("report runs/one", "report.html"),
    ("report runs", "report.html"),
    ("diagnose runs/one", "Looked at"),
    ("diagnose runs/two --json", '"findings"'),
    ("plot runs/one --format svg", ".svg"),
]


@pytest.fixture(scope="module")
def answers(home: Path) -> dict[str, tuple[int, str, list[str]]]:
    """Exit codes of commands that need no torch, what they print and what they import."""
    done = process(json.dumps([words for words, _ in LIGHT]), cwd=home, code=ONE_BY_ONE)
    out, error = done.communicate(timeout=300)
    assert done.returncode == 0, error
    return {words: tuple(answer) for (words, _), answer in zip(LIGHT, json.loads(out), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "told"), LIGHT)
def test_without_torch_and_engines(answers: dict[str, tuple[int, str, list[str]]], words: str, told: str) -> None:
    code, out, imported = answers[words]
    assert code == 0
    assert told in out
    assert imported == []


def test_the_list_of_engines_imports_their_table_only(home: Path) -> None:
    out, imported = start(home, "list", "engines")
    assert "processes" in out
    assert imported == TABLE_OF_ENGINES


def test_a_comparisons_table_without_torch_and_engines(home: Path) -> None:
    words = (home / "options.txt").read_text().split("\n")
    out, imported = start(home, "compare", *words, "--out", "compared", "--table-only")
    assert out.count("fedprox") == 1
    assert " 1/1" not in out
    assert (home / "compared" / "report.html").exists()
    assert imported == []


def test_a_watched_run_without_torch_and_engines(home: Path) -> None:
    """The page is asked for once, and then the server ends."""
    code = """
import sys, threading, urllib.request
from fedstrata.cli import main
from fedstrata.report import watch
def ask(address):
    def once():
        print(len(urllib.request.urlopen(address).read()))
        import _thread
        _thread.interrupt_main()
    threading.Thread(target=once).start()
serve = watch.serve
watch.serve = lambda run, port, tell: serve(run, port, [*tell, ask])
try:
    main.main()
finally:
    print(*(m for m in sys.modules if m == "torch" or m.startswith("fedstrata.engines")), file=sys.stderr)
"""
    done = process("watch", home / "runs" / "one", cwd=home, code=code)
    out, error = done.communicate(timeout=300)
    assert int(out.split()[-1]) > 10_000, error
    assert error.splitlines()[-1] == ""


def test_a_run_does_import_torch_and_its_engine(home: Path) -> None:
    """Lest the tests above look for the wrong thing."""
    words = ["--rounds", "1", "--steps", "1", "--model", "logreg", "--workers", "1", "--out", "trained", "--quiet"]
    imported = start(home, "run", *words)[1]
    assert {"torch", "fedstrata.engines.serial"} <= {*imported}
    assert not {"fedstrata.engines.processes", "fedstrata.engines.ray"} & {*imported}


# --- a lazy module ---------------------------------------------------------------------------------------------------


def test_a_lazy_module_is_the_module_once_it_is_used() -> None:
    module = lazy.Lazy("fedstrata.core.text")
    assert "plural" not in vars(module)
    from fedstrata.core import text

    assert module.plural is text.plural
    assert type(module) is type(text)
    assert inspect.ismodule(module)
    with pytest.raises(AttributeError):
        module.nothing  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, fedstrata; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
