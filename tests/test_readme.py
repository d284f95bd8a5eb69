"""The README's promises: its snippet runs and is short, its commands are understood."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from fedstrata.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rounds", "printed"), [(0, 5, "head"), (1, 20, "'auroc': 0.")])
def test_snippets(number: int, rounds: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SNIPPETS) == 3
    assert sum(bool(line.strip()) for line in SNIPPETS[number].splitlines()) <= 15
    names: dict[str, object] = {}
    exec(compile(SNIPPETS[number], "README.md", "exec"), names)
    assert len(names["history"].records) == rounds  # type: ignore[attr-defined]
    assert printed in capsys.readouterr().out


@pytest.mark.slow
def test_the_snippet_of_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In six lines, with a tiny model and a few sentences in the places of those that it names."""
    from tests.tiny_transformers import write_bert

    assert sum(bool(line.strip()) for line in SNIPPETS[2].splitlines()) == 6
    model = write_bert(tmp_path / "minilm")
    (tmp_path / "sst-2").mkdir()
    for part, rows in (("train", 60), ("test", 10)):
        lines = [f"w{row % 60} w{row % 7}\t{row % 2}" for row in range(rows)]
        (tmp_path / "sst-2" / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    text = SNIPPETS[2].replace('"data"', repr(str(tmp_path))).replace("models/minilm", str(model))
    text = text.replace("clients=20", "clients=3").replace("rounds=20", "rounds=2")
    exec(compile(text, "README.md", "exec"), {})
    assert 0 < int(capsys.readouterr().out) < 2 * 3 * 12_000


def test_the_two_commands_come_first() -> None:
    (first, *_) = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    assert "make demo" in first
    assert "make test" in first


def read_lines() -> list[list[str]]:
    """Every `fedstrata` line of the README, as words."""
    text = "\n".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[2:] for line in text.splitlines() if line.startswith("$ fedstrata")]


def read_groups() -> list[list[list[str]]]:
    """The lines in their order, those together of which one needs what another has made."""
    groups: list[list[list[str]]] = []
    for line in read_lines():
        needed = [g for g in groups if any(word.startswith(made) for one in g for made in outs(one) for word in line)]
        groups = [g for g in groups if g not in needed]
        groups.append([*(one for group in needed for one in group), line])
    return groups


def outs(line: list[str]) -> list[str]:
    """What a line makes: the words after --out and --plot."""
    return [word for option, word in itertools.pairwise(line) if option in ("--out", "--plot")]


CUT_SHORT = {
    "run": "--rounds 2 --steps 1",
    "compare": "--rounds 2 --steps 1",
    "reproduce": "--only trace",  # tests/reproduce has all parts
    "--probe": "--probe-clients 4 --probe-examples 64",
    "--try": "--try-seeds 1",  # tests/trials has several
    "ray": "--workers 1",  # tests/engines/test_ray.py has two
}
"""What is added to a line that has a word."""
GROUPS = read_groups()


def test_every_line_is_in_a_group() -> None:
    assert sorted(line for group in GROUPS for line in group) == sorted(read_lines())
    assert len(read_lines()) >= 6
    assert len(GROUPS) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=[" ".join(group[0])[:60] for group in GROUPS])
def test_commands(
    group: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of the README, in an empty folder; runs are cut short, and nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedstrata.data.fetch.fetch", lambda name, where, **settings: [])
    for line in group:
        shorter = [option for word, options in CUT_SHORT.items() if word in line for option in options.split()]
        assert main._run_guarded([*line, *shorter], debug=True) == 0, line
        assert all((tmp_path / made).exists() for made in outs(line)), line
    made = [place for line in group for place in outs(line)]
    if "runs/wider" in made:
        assert (tmp_path / "runs/wider/model.safetensors").exists()
        assert 'model = "cnn2(width=32)"' in (tmp_path / "runs/wider/run.toml").read_text()
    if group[0][0] == "compare":
        assert len(list((tmp_path / "runs/compare").glob("*/summary.json"))) == 9
        assert "gap" in capsys.readouterr().out


def test_what_is_checked_by_name_is_in_the_readme() -> None:
    lines = read_lines()
    assert {"runs/wider", "partition.png"} <= {made for line in lines for made in outs(line)}
    assert [group for group in GROUPS if group[0][0] == "compare"]
