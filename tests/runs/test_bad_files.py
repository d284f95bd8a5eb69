"""Spoilt files: every command that reads a run says in one sentence what is wrong, or goes on without what it lacks.

Changes are drawn from seeds, so that a failure comes again: its seed is in the test's name.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.diagnosis import diagnose
from fedstrata.errors import FedstrataError, UsageError
from fedstrata.report.page import page
from fedstrata.run import open_run, resume_run
from fedstrata.runs import checkpoint
from fedstrata.runs.client_memory import unpack_memory
from fedstrata.runs.files import Damaged, read_sealed, write_sealed
from fedstrata.runs.reader import SavedRun
from fedstrata.system.machine import compute_with
from fedstrata.wire.packing import WireError, pack, unpack
from tests.mutations import CHANGES, DEEP, spoil, spoil_sealed
from tests.small_runs import SETTINGS, config, fedstrata, options, sentence

SMALL: dict[str, Any] = {
    "model": "mlp(hidden=(4,))",
    "method": "scaffold + fedavgm(beta=0.5)",
    "participation": 0.6,
    "workers": 1,
}
LOOKED_AT = ("run.toml", "metrics.jsonl", "probes.jsonl", "facts.json", "summary.json", "versions.json")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads."""
    with compute_with(1):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all probes, one that was left after two rounds, and one without probes."""
    home = tmp_path_factory.mktemp("runs")
    with compute_with(1):
        open_run(config(**SMALL, probe="all"), home / "done").fit()
        left = open_run(config(**SMALL, probe="proxy"), home / "left").rounds()
        for _ in range(2):
            next(left)
        left.close()
        open_run(config(**{**SMALL, "rounds": 2}), home / "bare").fit()
    return home


def spoilt(source: Path, home: Path, rng: random.Random) -> Path:
    """A copy of a run with one file changed, of a kind that is drawn first: there are more memories than facts."""
    run = Path(shutil.copytree(source, home / "run"))
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        kinds.setdefault(path.suffix, []).append(path)
    del kinds[""]  # the lock
    spoil(rng.choice(kinds[rng.choice(sorted(kinds))]), rng)
    return run


def said(capsys: pytest.CaptureFixture[str], code: int) -> None:
    """Nothing went wrong inside: the command ended as it should, with one sentence where the file is to blame."""
    words = capsys.readouterr().err
    assert "internal error" not in words
    assert "the report failed" not in words
    assert code in (0, 2) or "diverged" in words
    if code:
        sentence("\n".join(words.splitlines()[-1:]) + "\n")


COMMANDS: dict[str, tuple[str, list[str]]] = {
    "report": ("done", ["--out", "report.html"]),
    "plot": ("left", ["--out", "plots", "--format", "png"]),
    "diagnose": ("done", ["--json"]),
    "diagnose a run without probes": ("bare", ["--probing-rounds", "1"]),
    "resume": ("left", ["--quiet"]),
    "resume a finished run": ("done", ["--quiet"]),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("what", COMMANDS)
def test_commands(
    what: str,
    seed: int,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, words = COMMANDS[what]
    run = spoilt(runs / source, tmp_path, random.Random(f"{what} {seed}"))
    monkeypatch.chdir(tmp_path)
    said(capsys, fedstrata(what.split()[0], run, *words))
    if (tmp_path / "report.html").exists():
        assert "The diagnosis failed" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("seed", range(120))
def test_looking_at_a_run(seed: int, runs: Path, tmp_path: Path) -> None:
    """Several changes at once, without what a command takes."""
    rng = random.Random(seed)
    run = Path(shutil.copytree(runs / "done", tmp_path / "run", ignore=shutil.ignore_patterns("memory", "checkpoints")))
    for name in rng.sample(LOOKED_AT, rng.choice([1, 1, 2, 3])):
        spoil(run / name, rng)
    with suppress(FedstrataError):
        saved = SavedRun.read(run)
        assert "The diagnosis failed" not in page([saved])
        found = diagnose(saved)
        assert all([str(found), found.markdown(), found.as_dict()])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("compared")
    with compute_with(1):
        assert fedstrata("compare", "--out", home / "all", *COMPARED) == 0
    return home / "all"


COMPARED = [
    *options(**{**SMALL, "rounds": 2, "participation": 1.0, "method": "fedavg"}),
    *("--vary", "lr=0.1; 0.2", "--target", "0.9", "--quiet", "--json"),
]


@pytest.mark.parametrize("seed", range(24))
def test_compare(seed: int, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was spoilt is run again or refused; it may fail alone, and then the others are shown."""
    rng = random.Random(seed)
    copy = Path(shutil.copytree(compared, tmp_path / "all"))
    run = rng.choice(sorted(path.parent for path in copy.glob("*/run.toml")))
    names = ("run.toml", "metrics.jsonl", "summary.json", "summary.json")
    path = run / rng.choice(names)
    spoil(path, rng)
    if path.name == "metrics.jsonl" and rng.random() < 0.7:
        (run / "summary.json").unlink()
    code = fedstrata("compare", "--out", copy, *COMPARED)
    printed = capsys.readouterr()
    assert "internal error" not in printed.err
    assert code in (0, 2) or "failed" in printed.err


TOLD = ("accuracy", "best_accuracy", "rounds", "rounds_to_target", "bytes_up", "bytes_down", "flops")


def figures(printed: str) -> list[list[dict[str, Any]]]:
    """What a table says of each run that it shows, without what a run done again measures anew."""
    rows = json.loads(printed)["rows"]
    return [[{name: result[name] for name in TOLD} for result in row["runs"]] for row in rows]


WRONG_LINES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bad first line": lambda rows: [b"[[[\n", *rows[1:]],
    "a bad last line": lambda rows: [*rows[:-1], b"[[[\n"],
    "no first line": lambda rows: rows[1:],
    "no last line": lambda rows: rows[:-1],
    "no line": lambda rows: [],
    "another order": lambda rows: [rows[1], rows[0]],
    "a round twice": lambda rows: [rows[1], rows[1], rows[0]],
    "brackets": lambda rows: [b"[" * DEEP],
}


@pytest.mark.parametrize("change", WRONG_LINES)
def test_a_comparison_shows_no_wrong_figure(
    change: str, compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To another target, which is looked up in metrics.jsonl: a run is shown as it was, or fails with the reason."""
    words = [*COMPARED, "--target", "0.1"]
    copy = Path(shutil.copytree(compared, tmp_path / "all"))
    assert fedstrata("compare", "--out", copy, *words) == 0
    right = figures(capsys.readouterr().out)
    assert all(result["rounds_to_target"] for row in right for result in row)
    path = sorted(copy.glob("*/metrics.jsonl"))[0]
    path.write_bytes(b"".join(WRONG_LINES[change](path.read_bytes().splitlines(keepends=True))))
    code = fedstrata("compare", "--out", copy, *words)
    printed = capsys.readouterr()
    assert sorted(map(len, figures(printed.out))) == [0, 1]
    assert all(now in ([], before) for now, before in zip(figures(printed.out), right, strict=True))
    assert code == 1
    assert f"{path} does not hold the first 2 rounds" in printed.err


@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.parametrize("nested", [b"[" * DEEP, b"[" * DEEP + b"\n", b'{"a":' * DEEP + b"\n"])
def test_nests(name: str, nested: bytes, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """200,000 brackets, of which Python's readers give up with a RecursionError."""
    run = Path(shutil.copytree(runs / "done", tmp_path / "run"))
    (run / name).write_bytes(nested)
    for command in ("report", "diagnose"):
        code = fedstrata(command, run)
        assert code == (2 if name.endswith((".jsonl", ".toml")) else 0)
        said(capsys, code)


RECORD = {"accuracy": "x", "bytes_up": [1], "seconds": None, "round": 0, "refused": [{}], "flops": -1, "clients": "x"}


@pytest.mark.parametrize("field", RECORD)
def test_a_field_of_a_record_is_named(field: str, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "done", tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1][field] = RECORD[field]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=rf"line 2 of .*metrics\.jsonl says {field} = "):
        SavedRun.read(run)


def test_a_setting_of_another_kind_is_named(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "done", tmp_path / "run"))
    with (run / "run.toml").open("a") as file:
        file.write("colour = 3\n")  # of another version
    assert SavedRun.read(run).config["colour"] == 3
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace(f"batch_size = {SETTINGS['batch_size']}", "batch_size = 0"))
    with pytest.raises(UsageError, match=r"run\.toml says batch_size = 0, which does not fit: input should be greater"):
        SavedRun.read(run)


def sealed_again(path: Path, **head: Any) -> None:
    before, tensors = unpack(read_sealed(path))
    write_sealed(path, pack({**before, **head}, tensors))


HEADS: list[dict[str, Any]] = [
    {"round": "2"},
    {"round": None},
    {"round": 3},
    {"techniques": None},
    {"techniques": 7},
    {"techniques": [7]},
    {"techniques": ["scaffold", "scaffold"]},
    {"changed": []},
    {"changed": {"a": "b"}},
    {"changed": {"a": 99}},
    {"changed": {"a": -2}},
]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_head_that_was_sealed_again(head: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "left", tmp_path / "run"))
    newest = checkpoint.paths(run / "checkpoints")[0]
    sealed_again(newest, **head)
    with pytest.raises(Damaged, match="is damaged"):
        checkpoint.load(newest)
    assert any("was damaged" in note for note in resume_run(run).notes)  # the one before it was used


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("large", "negative", "one more")])
@pytest.mark.parametrize("name", ["param/head.weight", "state:scaffold/head.bias", "held", "remembers"])
def test_tensors_that_were_sealed_again(name: str, change: str, runs: Path, tmp_path: Path) -> None:
    """Refused, or taken for damaged, before anything is reckoned with them."""
    run = Path(shutil.copytree(runs / "left", tmp_path / "run"))
    for path in checkpoint.paths(run / "checkpoints"):
        head, tensors = unpack(read_sealed(path))
        assert name in tensors
        write_sealed(path, pack(head, CHANGES[change](dict(tensors), name)))
    if name in ("held", "remembers"):
        found = resume_run(run)
        assert found.state.round == 0
        assert sum("was damaged" in note for note in found.notes) == 2
    else:
        with pytest.raises(UsageError, match="was run with another"):
            resume_run(run)


@pytest.mark.parametrize("listed", [None, 7, [7], ["scaffold", "scaffold"], [], ["fedprox"], [["scaffold"]], {}])
def test_a_memory_that_was_sealed_again(listed: Any, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "left", tmp_path / "run"))
    for path in (run / "memory").iterdir():
        sealed_again(path, techniques=listed)
        with pytest.raises(WireError):
            unpack_memory(read_sealed(path))
    with pytest.raises(Damaged, match=r"is damaged, and with it what client \d remembers"):
        resume_run(run).fit()


def test_a_memory_of_another_model(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "left", tmp_path / "run"))
    for path in (run / "memory").iterdir():
        head, tensors = unpack(read_sealed(path))
        write_sealed(path, pack(head, {name: torch.zeros(3, 1) for name in tensors}))
    with pytest.raises(UsageError, match=r"what client \d remembers does not fit the run: '.*' has another shape"):
        resume_run(run).fit()


NORMS = {"model": "resnet8(width=2, stem='3x3', maxpool=False)"}
REMEMBERING: dict[str, dict[str, Any]] = {
    "moon": NORMS,
    "fedavg(buffers='local')": NORMS,
    "feddyn": {},
    "fedspeed": {},
    "scaffold": {},
    "local": {},
}
"""Methods whose clients remember something, and what they need."""
WHOLE = ("moon", "fedavg(buffers='local')")
"""Those that remember all of something: the others only what has been trained so far."""


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each of them, left after its first round, in which every client took part."""
    home = tmp_path_factory.mktemp("remembering")
    with compute_with(1):
        for method, needs in REMEMBERING.items():
            values = {**SMALL, **needs, "method": method, "participation": 1.0, "rounds": 2, "engine": "serial"}
            left = open_run(config(**values), home / method).rounds()
            next(left)
            left.close()
    return home


def resealed(run: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the tensors of every memory; the head lists the techniques that are left."""
    for path in (run / "memory").iterdir():
        tensors = change(dict(unpack(read_sealed(path))[1]))
        write_sealed(path, pack({"techniques": sorted({name.partition("/")[0] for name in tensors})}, tensors))


RENAMED: dict[str, Callable[[str], str]] = {
    "nothing is remembered as '.*x'": lambda name: f"{name}x",
    "nothing in the method '.*' remembers 'x.*'": lambda name: f"x{name}",
}


@pytest.mark.parametrize("why", RENAMED)
@pytest.mark.parametrize("method", REMEMBERING)
def test_names_that_a_memory_cannot_have(method: str, why: str, remembering: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(remembering / method, tmp_path / "run"))
    resealed(run, lambda tensors: {RENAMED[why](name): tensor for name, tensor in tensors.items()})
    with pytest.raises(UsageError, match=rf"what client \d remembers does not fit the run: {why}"):
        resume_run(run).fit()


@pytest.mark.parametrize("method", REMEMBERING)
def test_names_that_a_memory_lacks(method: str, remembering: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(remembering / method, tmp_path / "run"))
    resealed(run, lambda tensors: dict(list(tensors.items())[1:]))
    if method not in WHOLE:
        assert resume_run(run).fit().records[-1].refused == []
        return
    with pytest.raises(UsageError, match=r"what client \d remembers does not fit the run: '.*' is missing"):
        resume_run(run).fit()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", REMEMBERING)
def test_spoilt_memories(method: str, seed: int, remembering: Path, tmp_path: Path) -> None:
    rng = random.Random(f"{method} {seed}")
    run = Path(shutil.copytree(remembering / method, tmp_path / "run"))
    for path in sorted((run / "memory").iterdir()):
        spoil_sealed(path, rng)
    with suppress(FedstrataError):
        resume_run(run).fit()


@pytest.mark.parametrize("data", [None, 7, ["x"], {}, True])
def test_a_fingerprint_that_is_no_string(data: Any, runs: Path, tmp_path: Path) -> None:
    """It counts as missing: it tells nothing of other data."""
    run = Path(shutil.copytree(runs / "left", tmp_path / "run"))
    about = json.loads((run / "versions.json").read_text())
    (run / "versions.json").write_text(json.dumps({**about, "data": data, "torch": data}))
    assert not any("begun with" in note for note in resume_run(run).notes)
