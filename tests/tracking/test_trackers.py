"""Trackers and the run: what they are told, and that nothing they do stops it. The library here is a stand-in."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.core.extras import EXTRAS
from fedstrata.run import open_run, resume_run
from fedstrata.runs.reader import SavedRun
from fedstrata.tracking import tracker
from fedstrata.tracking.kinds import TRACKERS, build_kind, read_trackers
from fedstrata.tracking.numbers import as_csv, client_table, round_values, summary_values
from tests.small_runs import config, fedstrata, metrics, one_sentence, options, process, shorten

NO_LIBRARY = "needs the package"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[Any]]]:
    """What the stand-in for W&B has been told so far; the processes of trackers find it instead of the real one."""
    library, log = tmp_path / "library", tmp_path / "log.jsonl"
    library.mkdir()
    shutil.copy(Path(__file__).with_name("fake_wandb.py"), library / "wandb.py")
    monkeypatch.syspath_prepend(library)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def logged(told: list[list[Any]]) -> list[int]:
    """The rounds that were logged, in order."""
    return [what[1] for what in told if what[0] == "log"]


# What is told --------------------------------------------------------------------------------------------------------


def test_a_run_is_told_from_beginning_to_end(told: Callable[[], Any], tmp_path: Path) -> None:
    run, quiet = tmp_path / "run", ("--quiet", "--eval-every", 2)
    assert fedstrata("run", "--out", run, *options(rounds=3), *quiet, "--track", "wandb(project='digits')") == 0
    begun, settings, *rounds, files, end = told()
    assert begun[1] | {"dir": None} == {
        "project": "digits",
        "entity": None,
        "name": "run",
        "id": None,
        "resume": None,
        "dir": None,
        "mode": None,
    }
    assert begun[1]["dir"] == str(run)
    assert settings[1]["method"] == "fedavg(buffers='local')"
    assert settings[1]["rounds"] == 3
    assert settings[1]["versions"]["torch"] == torch.__version__
    assert [what[:2] for what in rounds] == [["log", 1], ["log", 2], ["log", 3]]
    records = SavedRun.read(run).records
    assert [what[2] for what in rounds] == [round_values(record) for record in records]
    assert "accuracy/test" not in rounds[0][2], "round 1 is not evaluated"
    assert files[1].keys() == {"clients.csv", "model.safetensors", "report.html", "run.toml"}
    assert files[1]["model.safetensors"] == (run / "model.safetensors").stat().st_size
    assert files[1]["report.html"] == (run / "report.html").stat().st_size
    where, code, summary = end
    assert (where, code) == ("finish", 0)
    assert summary["final/score"] == records[-1].score
    assert [row["client"] for row in summary["clients"]] == list(range(5))
    assert sum(row["rounds"] for row in summary["clients"]) == sum(len(record.clients) for record in records)


def test_a_run_without_a_directory_is_told_too(told: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Its report and model are made for the tracker."""
    history = open_run(config(rounds=2), None).fit(fs.Tracker("wandb"), progress=False)
    assert logged(told()) == [1, 2]
    ((_, files),) = [what for what in told() if what[0] == "artifact"]
    assert files.keys() == {"clients.csv", "model.safetensors", "report.html"}
    assert files["model.safetensors"] > sum(4 * p.numel() for p in history.model.parameters())
    assert capsys.readouterr() == ("", "")


def test_no_report_is_handed_on_if_none_is_wanted(told: Callable[[], Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fedstrata("run", "--out", out, *options(rounds=1), "--quiet", "--no-report", "--track", "wandb") == 0
    ((_, files),) = [what for what in told() if what[0] == "artifact"]
    assert files.keys() == {"clients.csv", "model.safetensors", "run.toml"}


def test_an_old_report_is_not_handed_on(told: Callable[[], Any], tmp_path: Path) -> None:
    fed = open_run(config(rounds=1), tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("of old")
    os.utime(tmp_path / "run" / "report.html", (1, 1))
    fed.fit(fs.Tracker("wandb"), progress=False)
    ((_, files),) = [what for what in told() if what[0] == "artifact"]
    assert files["report.html"] > 1000
    assert (tmp_path / "run" / "report.html").read_text() == "of old"


def test_a_tracker_changes_no_bit(told: Callable[[], Any], tmp_path: Path) -> None:
    """Nor the state of this process's random numbers; the stand-in draws and seeds as it likes."""
    open_run(config(), tmp_path / "plain").fit(progress=False)
    random.seed(3)
    before = random.getstate()
    open_run(config(), tmp_path / "tracked").fit(fs.Tracker("wandb"), progress=False)
    assert random.getstate() == before
    assert len(logged(told())) == 4
    plain, tracked = (tmp_path / name / "model.safetensors" for name in ("plain", "tracked"))
    assert plain.read_bytes() == tracked.read_bytes()


# Going on ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_goes_on_is_the_same_run(named: bool, told: Callable[[], Any], tmp_path: Path) -> None:
    """With the tracker named again or not; rounds that are done again are told once, and missing ones are told."""
    run = tmp_path / "run"
    tracked = ("--track", "wandb(project='digits')")
    assert fedstrata("run", "--out", run, *options(rounds=4), "--quiet", *tracked) == 0
    (run / "checkpoints" / "round-000004.checkpoint").unlink()
    shorten(run, 6)
    assert fedstrata("resume", run, "--quiet", *(("--track", "wandb") if named else ())) == 0
    assert len(metrics(run)) == 6
    assert logged(told()) == [1, 2, 3, 4, 5, 6]
    first, second = [what[1] for what in told() if what[0] == "init"]
    assert (first["id"], second["id"], second["resume"]) == (None, "made", "allow")
    assert second["project"] == "digits"


def test_a_run_goes_on_without_its_trackers_if_that_is_wanted(told: Callable[[], Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fedstrata("run", "--out", run, *options(rounds=2), "--quiet", "--track", "wandb") == 0
    shorten(run, 3)
    assert fedstrata("resume", run, "--quiet", "--track", "none") == 0
    assert len(metrics(run)) == 3
    assert logged(told()) == [1, 2]


def test_a_tracker_that_comes_late_is_told_all(told: Callable[[], Any], tmp_path: Path) -> None:
    """Also of a run that is done."""
    open_run(config(rounds=2), tmp_path / "run").fit(progress=False)
    assert fedstrata("resume", tmp_path / "run", "--quiet", "--track", "wandb") == 0
    assert logged(told()) == [1, 2]
    assert told()[-1][0] == "finish"


def test_another_project_is_another_run(told: Callable[[], Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fedstrata("run", "--out", run, *options(rounds=1), "--quiet", "--track", "wandb(project='a')") == 0
    assert fedstrata("resume", run, "--quiet", "--track", "wandb(project='b')") == 0
    assert [what[1]["id"] for what in told() if what[0] == "init"] == [None, None]
    assert logged(told()) == [1, 1]


@pytest.mark.parametrize("text", ["", "[1]", '{"kind": 3}', '{"kind": "nonsense", "run": [], "round": "x"}'])
def test_a_file_that_was_edited_begins_a_new_run(text: str, told: Callable[[], Any], tmp_path: Path) -> None:
    open_run(config(rounds=1), tmp_path / "run").fit(progress=False)
    (tmp_path / "run" / "tracking").mkdir()
    (tmp_path / "run" / "tracking" / "wandb.json").write_text(text)
    resume_run(tmp_path / "run").fit(fs.Tracker("wandb"), progress=False)
    assert told()[0][1]["id"] is None
    assert logged(told()) == [1]


def test_the_same_tracker_in_the_same_program(told: Callable[[], Any]) -> None:
    """A loop that was left, and then `fit`: one run, no round twice."""
    fed, tracked = open_run(config(rounds=4), None), fs.Tracker("wandb")
    for record in fed.rounds(tracked):
        if record.round == 2:
            break
    fed.fit(tracked, progress=False)
    assert logged(told()) == [1, 2, 3, 4]
    assert [what[1]["id"] for what in told() if what[0] == "init"] == [None, "made"]
    assert [what[1] for what in told() if what[0] == "finish"] == [130, 0]


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_tracker_in_order(told: Callable[[], Any], tmp_path: Path) -> None:
    """kill -9: the tracker hands on what it was told, and ends; the run goes on with no point missing or doubled."""
    run = tmp_path / "run"
    long = options(rounds=400, checkpoint_seconds=1e6)
    started = process("run", "--out", run, *long, "--quiet", "--track", "wandb", cwd=tmp_path)
    try:
        wait_for(lambda: len(logged(told())) > 3)
    finally:
        started.kill()
        started.communicate()
    wait_for(lambda: told()[-1][:2] == ["finish", 130])
    shorten(run, last := len(logged(told())) + 5)
    assert fedstrata("resume", run, "--quiet") == 0
    assert logged(told()) == list(range(1, last + 1))
    assert told()[-1][:2] == ["finish", 0]


def wait_for(happens: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)


# Failing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["init", "log", "artifact", "finish"])
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_a_tracker_that_fails_never_stops_a_run(
    how: str,
    where: str,
    told: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At its start, in the middle or at its end; one sentence tells of it."""
    monkeypatch.setenv("FAKE", f"{how}:{where}")
    assert fedstrata("run", "--out", tmp_path / "run", *options(rounds=3), "--quiet", "--track", "wandb") == 0
    printed = capsys.readouterr()
    why = {
        "raise": f"the server is on fire, in {where}",
        "exit": "3",
        "kill": "its process was ended by SIGKILL",
    }[how]
    assert printed.err == f"fedstrata: note: W&B failed: {why}; the run is good without it\n"
    assert "after 3 rounds" in printed.out
    assert (tmp_path / "run" / "report.html").exists()
    assert len(metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_hangs_never_stops_a_run(
    where: str,
    told: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is waited for as long as it says, then its process is ended."""
    monkeypatch.setenv("FAKE", f"hang:{where}")
    arguments = (*options(rounds=3), "--quiet", "--track", "wandb(wait=2)")
    assert fedstrata("run", "--out", tmp_path / "run", *arguments) == 0
    sentence = "fedstrata: note: W&B failed: it has not finished after 2 s; the run is good without it\n"
    assert capsys.readouterr().err == sentence
    hung = int((tmp_path / "log.jsonl.pid").read_text())
    wait_for(lambda: not alive(hung))


def alive(number: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_tracker_that_hangs_does_not_hold_up_rounds(told: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More is told than the pipe to its process has room for."""
    monkeypatch.setenv("FAKE", "hang:init")
    notes: list[str] = []
    follows = fs.Tracker("wandb(wait=1)", tell=notes.append)
    fed = open_run(config(rounds=1), None)
    follows.on_begin(fed)
    record = next(fed.rounds())
    begun = time.monotonic()
    for _ in range(3000):
        follows.on_round(fed, record)
    assert time.monotonic() - begun < 10
    follows.on_end(fed, None)
    assert notes == ["W&B failed: it has not finished after 1 s; the run is good without it"]


@pytest.mark.slow
def test_a_password_in_an_address_is_told_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor can others read it in the run's directory, where the address is kept to go on with."""
    pytest.importorskip("mlflow", reason=f"{NO_LIBRARY} mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run, uri = tmp_path / "run", "http://ada:secret@127.0.0.1:9"
    assert fedstrata("run", "--out", run, *options(rounds=1), "--quiet", "--track", f"mlflow(uri='{uri}')") == 0
    told = capsys.readouterr().err
    assert told.startswith("fedstrata: note: MLflow failed: ")
    assert "secret" not in told
    tracker = fs.Tracker("tensorboard", tell=(heard := []).append)
    tracker._tell(f"{uri}/#/runs and x@y")
    assert heard == ["http://…@127.0.0.1:9/#/runs and x@y"]


def test_a_password_with_an_at_sign_is_told_nobody() -> None:
    tracker = fs.Tracker("tensorboard", tell=(heard := []).append)
    tracker._tell("http://ada:sec@ret@127.0.0.1:9/#/runs and x@y")
    assert heard == ["http://…@127.0.0.1:9/#/runs and x@y"]


def test_the_file_of_a_tracker_is_for_its_user_alone(told: Callable[[], Any], tmp_path: Path) -> None:
    assert fedstrata("run", "--out", tmp_path / "run", *options(rounds=1), "--quiet", "--track", "wandb") == 0
    assert (tmp_path / "run" / "tracking" / "wandb.json").stat().st_mode & 0o777 == 0o600


def test_many_open_files_do_not_matter(
    told: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With select() a socket whose number is 1024 or more could not be waited for."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("so many files cannot be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert fedstrata("run", "--out", tmp_path / "run", *options(rounds=1), "--quiet", "--track", "wandb") == 0
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert capsys.readouterr().err == ""
    assert told()[-1][0] == "finish"


def test_one_tracker_that_fails_leaves_the_others(
    told: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: the extra [tensorboard]")
    monkeypatch.setenv("FAKE", "raise:init")
    arguments = (*options(rounds=2), "--json", "--track", "wandb,tensorboard")
    assert fedstrata("run", "--out", tmp_path / "run", *arguments) == 0
    printed = capsys.readouterr()
    assert printed.err.count("fedstrata: note: ") == 1
    assert json.loads(printed.out)["rounds"] == 2
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_process_that_cannot_be_started(
    told: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    open_run(config(rounds=1), None).fit(fs.Tracker("wandb"), progress=False)
    sentence = "fedstrata: note: W&B failed: Resource temporarily unavailable; the run is good without it\n"
    assert capsys.readouterr().err == sentence


def test_a_full_disk_at_the_end(
    told: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    history = open_run(config(rounds=2), None).fit(fs.Tracker("wandb"), progress=False)
    assert len(history.records) == 2
    sentence = "fedstrata: note: W&B failed: No space left on device; the run is good without it\n"
    assert capsys.readouterr().err == sentence


def test_ctrl_c_does_not_wait_for_a_tracker(
    told: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that hangs is waited for a moment; one that works hears how the run has ended."""
    monkeypatch.setattr(tracker, "GRACE", 5.0)

    def stop(record: fs.Record) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    fed = open_run(config(), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        fed.fit(fs.Tracker("wandb"), stop, progress=False)
    assert logged(told()) == [1, 2]
    assert told()[-1] == ["finish", 130, told()[-1][2]]
    monkeypatch.setenv("FAKE", "hang:init")
    monkeypatch.setattr(tracker, "GRACE", 0.2)
    fed = open_run(config(), None)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fed.fit(fs.Tracker("wandb"), stop, progress=False)
    assert time.monotonic() - begun < 10
    wait_for((tmp_path / "log.jsonl.pid").exists)
    os.kill(int((tmp_path / "log.jsonl.pid").read_text()), signal.SIGKILL)


def test_a_run_that_diverges_is_told_as_failed(told: Callable[[], Any], tmp_path: Path) -> None:
    """With its report, and without a model."""
    diverging = options(rounds=8, lr=1e30, method="fedavg")
    assert fedstrata("run", "--out", tmp_path / "run", *diverging, "--quiet", "--track", "wandb") == 1
    assert told()[-1][:2] == ["finish", 1]
    ((_, files),) = [what for what in told() if what[0] == "artifact"]
    assert files.keys() == {"clients.csv", "report.html", "run.toml"}


# Names and refusals --------------------------------------------------------------------------------------------------


def test_trackers_are_read_as_people_write_them() -> None:
    found = read_trackers(["wandb, mlflow(uri='http://here:5000', experiment='a, b')", "tensorboard"])
    assert [str(kind) for kind in found] == [
        "wandb",
        "mlflow(uri='http://here:5000', experiment='a, b')",
        "tensorboard",
    ]
    assert [build_kind(str(kind)) for kind in found] == found
    assert read_trackers([]) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("wandbb", "there is no tracker 'wandbb' (did you mean 'wandb'?)"),
        ("wandb(projekt='x')", "tracker 'wandb' has no argument 'projekt' (did you mean 'project'?)"),
        ("wandb(wait=0)", "wandb's wait must be above 0, not 0.0"),
        ("wandb(", "'wandb(' cannot be read; write it like name or name(argument=value)"),
        ("wandb][", "'wandb][' cannot be read; write it like name or name(argument=value)"),
        ("'wandb'", "''wandb'' cannot be read; write it like name or name(argument=value)"),
        ("wandb, wandb(project='a')", "the tracker 'wandb' is given twice"),
    ],
)
def test_wrong_trackers_are_refused_in_a_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedstrata("run", "--out", tmp_path / "run", *options(), "--track", text) == 2
    assert one_sentence(capsys) == sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_without_the_extra_nothing_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = build_kind(name)
    monkeypatch.setitem(sys.modules, kind.package, None)
    assert fedstrata("run", "--out", tmp_path / "run", *options(), "--track", name) == 2
    package = EXTRAS[name].packages[kind.package]
    assert one_sentence(capsys) == f"{kind.title} needs the package {package}: pip install 'fedstrata[{name}]'"
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_where_the_library_of_its_tracker_is_missing(
    told: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert fedstrata("run", "--out", run, *options(rounds=2), "--quiet", "--track", "wandb") == 0
    shorten(run, 3)
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert fedstrata("resume", run, "--quiet") == 0
    note = "fedstrata: note: W&B needs the package wandb: pip install 'fedstrata[wandb]'; the run goes on without it\n"
    assert capsys.readouterr().err == note
    assert len(metrics(run)) == 3


# Numbers -------------------------------------------------------------------------------------------------------------


def test_the_table_of_clients() -> None:
    """Counted by hand: client 1 took part twice and was refused once, client 3 never."""
    common: dict[str, Any] = {"active": [], "bytes_up": 0, "bytes_down": 0, "flops": 0, "train_loss": None}
    common |= {"examples": 0, "steps": 0, "lr": 0.1, "seconds": 0.0, "memory": 0, "accuracy": None}
    refused = [{"client": 1, "why": "no"}]
    judged = [{"accuracy": 0.5}, {"accuracy": 1.0}, None]
    records = [
        fs.Record(round=1, clients=[0, 1], refused=refused, loss=None, **common),
        fs.Record(round=2, clients=[1, 2], refused=[], loss=1.0, client_metrics=judged, **common),
    ]
    assert client_table(records, ["a, b"], [7, 8, 9, 10]) == [
        {"client": 0, "name": "a, b", "examples": 7, "rounds": 1, "refused": 0, "accuracy": 0.5},
        {"client": 1, "examples": 8, "rounds": 2, "refused": 1, "accuracy": 1.0},
        {"client": 2, "examples": 9, "rounds": 1, "refused": 0},
        {"client": 3, "examples": 10, "rounds": 0, "refused": 0},
    ]
    assert as_csv(client_table(records, ["a, b"], [7])) == (
        'client,name,examples,rounds,refused,accuracy\n0,"a, b",7,1,0,0.5\n1,,,2,1,1.0\n2,,,1,0,\n'
    )
    assert as_csv([]) == "\n"


def test_the_numbers_of_a_round_and_of_a_run() -> None:
    history = open_run(config(rounds=2, holdout=0.3), None).fit(progress=False)
    record = history.records[-1]
    values = round_values(record)
    assert values["accuracy/test"] == record.accuracy
    assert values["cost/bytes_up"] == record.bytes_up
    assert values["accuracy/clients worst"] == record.fairness.worst
    assert values["accuracy/global clients mean"] == record.global_fairness.mean
    assert all(isinstance(value, int | float) for value in values.values())
    found = summary_values(history.summary)
    assert found["score"] == history.score
    assert found["costs_flops"] == history.costs.flops


def test_the_process_of_a_tracker_needs_no_torch() -> None:
    """It starts beside the run, and should be there soon."""
    code = "import sys, fedstrata.tracking.worker; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
