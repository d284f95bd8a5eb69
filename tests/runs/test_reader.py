"""A run as its files tell it: finished, going on, edited, or no run at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedstrata.errors import UsageError
from fedstrata.run import open_run, resume_run
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record
from fedstrata.system.machine import compute_with
from tests.engines.worlds import federation
from tests.small_runs import config

SMALL: dict[str, Any] = {"model": "mlp(hidden=(4,))", "method": "fedavg", "workers": 1, "rounds": 3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads."""
    with compute_with(1):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, all measured."""
    out = tmp_path_factory.mktemp("saved") / "my run"
    with compute_with(1):
        open_run(config(**SMALL, probe="proxy cosine"), out).fit()
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_all_of_it(finished: Path) -> None:
    saved = SavedRun.read(finished)
    assert saved.name == "my run"
    assert saved.path == finished
    assert saved.method == saved.config["method"] == "fedavg"
    assert saved.config["probe"] == "proxy cosine"
    assert [record.round for record in saved.records] == [1, 2, 3]
    assert [row["round"] for row in saved.probes] == [1, 2, 3]
    assert saved.facts["classes"] == 4
    assert saved.summary["rounds"] == 3
    assert "torch" in saved.versions
    assert saved.series("proxy") == {row["round"]: row["proxy"] for row in saved.probes}
    assert saved.latest("proxy") == saved.probes[-1]["proxy"]
    assert saved.latest("cka") is None
    assert saved.series("cka") == {}


def test_reading_changes_nothing(finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    SavedRun.read(finished)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_what_a_federation_tells_of_itself(tmp_path: Path) -> None:
    """The same as its files do; without a directory it tells it too."""
    fed = federation(probe="proxy", out=tmp_path / "run")
    fed.fit()
    told, read = fed.saved_run(), SavedRun.read(tmp_path / "run")
    assert list(told.records) == list(read.records)
    assert list(told.probes) == list(read.probes)
    assert json.loads(json.dumps([told.facts, told.summary, told.versions])) == [
        read.facts,
        read.summary,
        read.versions,
    ]
    assert (told.name, told.path, told.method) == (read.name, read.path, read.method)
    assert {n: v for n, v in told.config.items() if v is not None} == dict(read.config)
    alone = federation(probe="proxy", rounds=1)
    assert alone.saved_run().records == ()
    alone.fit()
    assert alone.saved_run().path is None
    assert [row["round"] for row in alone.saved_run().probes] == [1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "probes.jsonl"])
def test_half_a_line_at_the_end(copied: Path, name: str) -> None:
    """Of a run that goes on: what is being written is not there yet."""
    (copied / "summary.json").unlink()
    whole = (copied / name).read_bytes()
    read_lines = whole.splitlines(keepends=True)
    for end in (read_lines[2][:-1], read_lines[2][:25], read_lines[2][:1], b"\xe2"):
        (copied / name).write_bytes(b"".join(read_lines[:2]) + end)
        saved = SavedRun.read(copied)
        assert [row["round"] for row in saved.probes] == [1, 2]
        assert len(saved.records) == (2 if name == "metrics.jsonl" else 3)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    fed = open_run(config(**SMALL, probe="proxy"), tmp_path / "run")
    assert SavedRun.read(tmp_path / "run").records == ()
    assert SavedRun.read(tmp_path / "run").facts["clients"] == 5
    for done, _ in enumerate(fed.rounds(), 1):
        saved = SavedRun.read(tmp_path / "run")
        assert len(saved.records) == len(saved.probes) == done
        assert saved.summary == {}
    assert SavedRun.read(tmp_path / "run").summary["rounds"] == 3


def test_probes_beyond_the_records_are_left_out(copied: Path) -> None:
    """They are of a round that is not complete, and may be done again."""
    metrics = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(metrics[:1]))
    assert [row["round"] for row in SavedRun.read(copied).probes] == [1]
    (copied / "metrics.jsonl").write_text("")
    assert SavedRun.read(copied).probes == ()


@pytest.mark.parametrize("name", ["facts.json", "summary.json", "versions.json", "probes.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [None, "", "{", "[1, 2]", "null", "12", "\x00\x01", "{}\n[]\n", "NaN\n"])
def test_files_that_are_missing_or_were_edited(copied: Path, name: str, damage: str | None) -> None:
    """A report of the rest is better than none; what is there must be of the right kind."""
    if damage is None:
        (copied / name).unlink()
    else:
        (copied / name).write_text(damage)
    if name.endswith(".jsonl") and damage:  # the run has ended, so half a line is a bad one, too
        with pytest.raises(UsageError, match=rf"line \d of .*{name} (is not a JSON object|lacks)"):
            SavedRun.read(copied)
        return
    saved = SavedRun.read(copied)
    assert all(isinstance(part, dict) for part in (saved.facts, saved.summary, saved.versions))
    assert all(isinstance(row, dict) and isinstance(row["round"], int) for row in saved.probes)
    assert [record.round for record in saved.records] == ([] if name == "metrics.jsonl" else [1, 2, 3])


def test_bytes_that_are_no_text(copied: Path) -> None:
    for name in ("facts.json", "summary.json", "versions.json"):
        (copied / name).write_bytes(b"\xff\xfe{}\n")
    saved = SavedRun.read(copied)
    assert (saved.facts, saved.summary, saved.versions) == ({}, {}, {})
    for name in ("probes.jsonl", "metrics.jsonl"):
        (copied / name).write_bytes(b"\xff\xfe{}\n")
        with pytest.raises(UsageError, match=rf"line 1 of .*{name} is not a JSON object"):
            SavedRun.read(copied)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", ["metrics.jsonl", "probes.jsonl"])
@pytest.mark.parametrize("bad", ["[[[", "", "null", '{"round": 2'])
def test_a_line_in_the_middle_that_is_none(copied: Path, bad: str, name: str, ended: bool) -> None:
    """Also of a run that goes on: only its last line may be half there."""
    if not ended:
        (copied / "summary.json").unlink()
    rows = (copied / name).read_text().splitlines()
    (copied / name).write_text("\n".join([rows[0], bad, rows[2], ""]))
    with pytest.raises(UsageError, match=rf"line 2 of .*{name} is not a JSON object"):
        SavedRun.read(copied)


@pytest.mark.parametrize(("order", "line"), [((2, 2, 1), 1), ((1, 3), 2), ((1, 1, 2), 2), ((1, 2, 3, 1), 4)])
def test_rounds_are_in_order(copied: Path, order: tuple[int, ...], line: int) -> None:
    rows = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text("".join(rows[number - 1] + "\n" for number in order))
    with pytest.raises(UsageError, match=rf"line {line} of .*metrics\.jsonl says round = {order[line - 1]}: "):
        SavedRun.read(copied)


def test_a_last_line_without_its_end(copied: Path) -> None:
    """Of a run that has ended it is whole if it can be read."""
    for name in ("metrics.jsonl", "probes.jsonl"):
        (copied / name).write_bytes((copied / name).read_bytes().removesuffix(b"\n"))
    saved = SavedRun.read(copied)
    assert (len(saved.records), len(saved.probes)) == (3, 3)


def test_odd_lines_of_probes(copied: Path) -> None:
    """Rounds that are no numbers are no rounds."""
    first = (copied / "probes.jsonl").read_text().splitlines(keepends=True)[0]
    odd = ['{"round": "2"}\n', '{"round": null}\n', '{"round": 2.5}\n', "{}\n", '{"round": 99}\n', '{"round": [1]}\n']
    (copied / "probes.jsonl").write_text(first + "".join(odd))
    assert [row["round"] for row in SavedRun.read(copied).probes] == [1]


@pytest.mark.parametrize("line", ['{"round": "2"}\n', '{"round": [1]}\n', '{"round": null}\n', "[]\n", "{}\n"])
def test_a_run_with_an_odd_line_of_probes_can_be_resumed(copied: Path, line: str) -> None:
    with (copied / "probes.jsonl").open("a") as file:
        file.write(line)
    assert [row["round"] for row in resume_run(copied).probes] == [1, 2, 3]


def test_a_record_that_lacks_fields(copied: Path) -> None:
    (copied / "metrics.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl"):
        SavedRun.read(copied)


def test_a_record_of_a_later_version(copied: Path) -> None:
    rows = [json.loads(line) | {"colour": "blue"} for line in (copied / "metrics.jsonl").read_text().splitlines()]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(SavedRun.read(copied).records) == 3


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        SavedRun.read(tmp_path)
    with pytest.raises(UsageError, match="nowhere"):
        SavedRun.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        SavedRun.read(tmp_path / "file")
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(UsageError, match="no run"):
        SavedRun.read(tmp_path)


@pytest.mark.parametrize("text", ["rounds = ", "\x00", "a = 1\na = 2\n"])
def test_a_run_toml_that_is_none(copied: Path, text: str) -> None:
    (copied / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=r"run\.toml"):
        SavedRun.read(copied)


def test_a_run_of_an_older_version(copied: Path) -> None:
    """Without facts and probes, and without a method in its run.toml."""
    for name in ("facts.json", "probes.jsonl"):
        (copied / name).unlink()
    (copied / "run.toml").write_text("rounds = 3\n")
    saved = SavedRun.read(copied)
    assert (saved.facts, saved.probes) == ({}, ())
    assert saved.method == "fedavg"
    assert len(saved.records) == 3


def test_a_run_of_an_older_version_can_be_resumed(copied: Path) -> None:
    """Its run.toml knows nothing of probes."""
    text = (copied / "run.toml").read_text().splitlines(keepends=True)
    (copied / "run.toml").write_text("".join(line for line in text if not line.startswith("probe")))
    (copied / "probes.jsonl").unlink()
    assert resume_run(copied).done
    assert not (copied / "probes.jsonl").exists()


@pytest.mark.parametrize("field", ["accuracy", "loss", "clients", "lr"])
def test_a_line_without_what_every_version_wrote_is_refused(field: str) -> None:
    fed = federation(rounds=1)
    fed.fit()
    row = asdict(fed.records[0])
    assert Record.read(row) == fed.records[0]
    del row[field]
    with pytest.raises(UsageError, match=f"lacks '{field}'"):
        Record.read(row)
