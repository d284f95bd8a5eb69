"""The libraries themselves, without a network: what a run wrote is read back from their local stores."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.run import open_run
from fedstrata.runs.reader import SavedRun
from fedstrata.tracking.numbers import round_values
from tests.small_runs import config, fedstrata, metrics, options, shorten

Points = dict[str, list[tuple[int, float]]]
"""A name → its (round, value) pairs."""
ARTIFACTS = ["clients.csv", "model.safetensors", "report.html", "run.toml"]


def need(package: str, extra: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: the extra [{extra}]")


def expected(run: Path) -> Points:
    """All numbers of a run by its own files."""
    found: Points = {}
    for record in SavedRun.read(run).records:
        for name, value in round_values(record).items():
            found.setdefault(name, []).append((record.round, float(value)))
    return found


def check_points(found: Points, wanted: Points, but: tuple[str, ...] = ("cost/seconds", "cost/memory")) -> None:
    """The same points, none missing and none doubled; seconds and memory of rounds that are done again are others."""
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        if name not in but:
            assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6), name


def run_and_go_on(run: Path, tracked: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four rounds; the last checkpoint is lost, so one is done again; two more."""
    assert fedstrata("run", "--out", run, *options(rounds=4, holdout=0.3), "--quiet", "--track", tracked) == 0
    (run / "checkpoints" / "round-000004.checkpoint").unlink()
    shorten(run, 6)
    assert fedstrata("resume", run, "--quiet") == 0
    assert len(metrics(run)) == 6
    assert capsys.readouterr().err == ""


# W&B -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("wandb", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-of-the-user"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: the library's own messages, in the blocks of a LevelDB log after its header."""
    import wandb.proto.wandb_internal_pb2 as messages

    Record: Any = vars(messages)["Record"]
    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block holds no header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(run: Path) -> tuple[list[Any], Points]:
    """All records of a run's offline directories, oldest first, and the points of its history."""
    paths = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    records = [record for path in paths for record in wandb_records(path)]
    points: Points = {}
    for record in records:
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                points.setdefault(name, []).append((record.history.step.num, float(json.loads(item.value_json))))
    return records, points


def test_wandb_offline(offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run_and_go_on(run, "wandb(project='digits')", capsys)
    records, points = read_wandb(run)
    check_points(points, expected(run))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len({found.run_id for found in runs}) == 1
    assert {(found.project, found.display_name) for found in runs} == {("digits", "run")}
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    told = {item.key: json.loads(item.value_json) for record in records for item in record.config.update}
    assert told["method"] == "fedavg(buffers='local')"
    assert told["rounds"] == 6
    kept = [record.artifact for record in records if record.artifact.type == "fedstrata-run"]
    assert [sorted(entry.path for entry in found.manifest.contents) for found in kept] == [ARTIFACTS] * 2
    last = {item.key: json.loads(item.value_json) for record in records for item in record.summary.update if item.key}
    assert last["final/score"] == SavedRun.read(run).summary["score"]
    assert last["clients"]["_type"] == "table-file"
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0, 0]
    table = json.loads(sorted(run.glob("wandb/offline-run-*/files/media/table/*.json"))[-1].read_text())
    assert table["columns"][:3] == ["client", "examples", "rounds"]
    assert len(table["data"]) == 5


def test_wandb_without_a_key_is_told_in_a_sentence(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Online is the library's default, and nobody is asked anything."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fedstrata("run", "--out", tmp_path / "run", *options(rounds=1), "--quiet", "--track", "wandb") == 0
    told = capsys.readouterr().err
    assert told.startswith("fedstrata: note: W&B failed: ")
    assert "wandb login" in told
    assert told.count("\n") == 1


# MLflow --------------------------------------------------------------------------------------------------------------


def file_store(folder: Path) -> str:
    return (folder / "mlruns").as_uri()


def database(folder: Path) -> str:
    need("sqlalchemy", "mlflow")
    return f"sqlite:///{folder / 'runs.db'}"


@pytest.mark.slow
@pytest.mark.parametrize("store", [file_store, database])
def test_mlflow(
    store: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("mlflow", "mlflow")
    monkeypatch.chdir(tmp_path)  # databases put artifacts into ./mlruns
    uri, run = store(tmp_path), tmp_path / "run"
    run_and_go_on(run, f"mlflow(uri={uri!r}, experiment='digits')", capsys)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client = mlflow_client(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    points = {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}
    check_points(points, expected(run))
    assert found.data.params["method"] == "fedavg(buffers='local')"
    assert found.data.params["rounds"] == "4", "as it was begun: MLflow's parameters do not change"
    assert float(found.data.tags["final.score"]) == pytest.approx(SavedRun.read(run).summary["score"], rel=1e-5)
    assert sorted(file.path for file in client.list_artifacts(found.info.run_id)) == ARTIFACTS
    folder = tmp_path / "downloaded"
    folder.mkdir()
    model = client.download_artifacts(found.info.run_id, "model.safetensors", str(folder))
    assert Path(model).read_bytes() == (run / "model.safetensors").read_bytes()


def mlflow_client(uri: str) -> Any:
    """The library's own client; what it warns of while it is imported is not ours."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        return mlflow.MlflowClient(tracking_uri=uri)


@pytest.mark.slow
def test_an_mlflow_run_that_was_deleted_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("mlflow", "mlflow")
    uri, run = file_store(tmp_path), tmp_path / "run"
    open_run(config(rounds=2), run).fit(fs.Tracker(f"mlflow(uri={uri!r})"), progress=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow_client(uri)
    experiment = client.get_experiment_by_name("fedstrata").experiment_id
    (first,) = client.search_runs([experiment])
    client.delete_run(first.info.run_id)
    shorten(run, 3)
    assert fedstrata("resume", run, "--quiet") == 0
    (second,) = client.search_runs([experiment])
    assert second.info.run_id != first.info.run_id
    assert [metric.step for metric in client.get_metric_history(second.info.run_id, "loss/test")] == [1, 2, 3]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_an_mlflow_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the port; the library's retries are over soon, or its process is ended."""
    need("mlflow", "mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    notes: list[str] = []
    follows = fs.Tracker("mlflow(uri='http://127.0.0.1:9', wait=60)", tell=notes.append)
    history = open_run(config(rounds=1), None).fit(follows, progress=False)
    assert len(history.records) == 1
    (note,) = notes
    assert note.startswith("MLflow failed: ")
    assert note.endswith("; the run is good without it")


# TensorBoard ---------------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.slow
def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("tensorboard", "tensorboard")
    run = tmp_path / "run"
    run_and_go_on(run, "tensorboard", capsys)
    events = read_events(run / "tensorboard")
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    check_points(points, expected(run))
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "| method | fedavg(buffers='local') |" in texts["parameters/text_summary"]
    assert texts["clients/text_summary"].startswith("| client | examples | rounds | refused |")
    assert texts["clients/text_summary"].count("\n") == 6


@pytest.mark.slow
def test_tensorboard_in_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("tensorboard", "tensorboard")
    fed = open_run(config(rounds=2), None)
    fed.fit(fs.Tracker(f"tensorboard(dir={str(tmp_path / 'events')!r})"), progress=False)
    assert [e.step for e in read_events(tmp_path / "events").Scalars("loss/test")] == [1, 2]
    assert capsys.readouterr().err == ""
    open_run(config(rounds=1), None).fit(fs.Tracker("tensorboard"), progress=False)
    assert capsys.readouterr().err == (
        "fedstrata: note: TensorBoard failed: events need a directory: Federation(…, out=…), or "
        "tensorboard(dir='events'); the run is good without it\n"
    )


@pytest.mark.slow
def test_the_old_spelling_of_tensorboard(tmp_path: Path) -> None:
    need("tensorboard", "tensorboard")
    assert fedstrata("run", "--out", tmp_path / "run", *options(rounds=1), "--quiet", "--tensorboard") == 0
    assert [e.step for e in read_events(tmp_path / "run" / "tensorboard").Scalars("loss/test")] == [1]
