"""Every client judged by its own test examples: fairness against NumPy, metrics recomputed, engines, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedstrata as fs
from fedstrata.compare import compare
from fedstrata.compare.show import csv_text, markdown
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.types import BUFFERS, PERSONAL
from fedstrata.data.datasets import load_dataset
from fedstrata.data.partitions import partition
from fedstrata.data.tables import Table, TableOptions, table_dataset
from fedstrata.evaluation import evaluator
from fedstrata.evaluation.fairness import fairness_of
from fedstrata.run import deal, divide, open_run, training_parts
from fedstrata.runs.records import Record
from tests.engines.worlds import check_same
from tests.real_data import DATA
from tests.small_runs import fedstrata, one_sentence

Pair = tuple[Tensor, Tensor]


def test_fairness_by_hand():
    """0.5, 1 and 1.5: mean 1, std √((¼ + 0 + ¼)/3) = √(1/6), Jain 3²/(3·(¼ + 1 + 9/4)) = 9/10.5."""
    found = fairness_of([0.5, None, 1.0, 1.5])
    assert found is not None
    assert (found.clients, found.worst, found.worst_client, found.worst_tenth) == (3, 0.5, 0, 0.5)
    assert found.mean == 1.0
    assert found.std == pytest.approx((1 / 6) ** 0.5, rel=1e-12)
    assert found.jain == pytest.approx(9 / 10.5, rel=1e-12)


@pytest.mark.parametrize("lower_is_better", [False, True])
@pytest.mark.parametrize("count", [1, 9, 10, 35, 200])
def test_fairness_against_numpy(count: int, lower_is_better: bool):
    x = np.random.default_rng(count).random(count)
    found = fairness_of(x.tolist(), lower_is_better)
    assert found is not None
    worst_first = np.sort(x)[::-1] if lower_is_better else np.sort(x)
    expected = {
        "clients": count,
        "worst": worst_first[0],
        "worst_client": int(x.argmax() if lower_is_better else x.argmin()),
        "worst_tenth": worst_first[: max(1, count // 10)].mean(),
        "mean": x.mean(),
        "std": x.std(),
        "jain": x.sum() ** 2 / (count * (x**2).sum()),
    }
    assert vars(found) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_fairness_of_nobody_and_of_zeros():
    assert fairness_of([]) is None
    assert fairness_of([None, None]) is None
    zeros = fairness_of([0.0, 0.0])
    assert zeros is not None
    assert (zeros.mean, zeros.std, zeros.jain) == (0.0, 0.0, None)


def test_fairness_of_huge_numbers():
    """In a regression that goes wrong: 1e200 and 3e200 have the mean 2e200, the deviation 1e200, and Jain 16/20."""
    found = fairness_of([1e200, 3e200], lower_is_better=True)
    assert found is not None
    assert (found.worst_client, found.mean, found.std) == (1, pytest.approx(2e200), pytest.approx(1e200))
    assert found.jain == pytest.approx(0.8)


def points(count: int, seed: int) -> Pair:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.ReLU(), nn.Linear(8, 3))


TESTS = [points(12, 10), points(7, 11), points(5, 12)]
CLIENTS: list[Any] = [(points(30, at), test) for at, test in enumerate(TESTS)]


def accuracy(trained: nn.Module, data: Pair) -> float:
    with torch.no_grad():
        return (trained.eval()(data[0]).argmax(1) == data[1]).double().mean().item()


def last(history: fs.History) -> Record:
    return history.records[-1]


def scores(found: Any, metric: str = "accuracy") -> list[float | None]:
    return [None if one is None else one[metric] for one in found]


def test_the_global_model_on_every_clients_test_data():
    """Recomputed from the returned model; a client without any has no entry, and nothing is evaluated in round 1."""
    history = fs.Federation(model(), [*CLIENTS, points(9, 5)], points(20, 9), rounds=2, eval_every=2).fit()
    record = last(history)
    expected = [accuracy(history.model, test) for test in TESTS]
    assert scores(record.client_metrics) == [*map(pytest.approx, expected), None]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(history.model(TESTS[1][0]), TESTS[1][1]).item()
    assert scores(record.client_metrics, "loss")[1] == pytest.approx(loss, abs=1e-6)
    assert record.own_metrics is None
    assert record.fairness == fairness_of(scores(record.client_metrics))
    assert history.fairness == record.fairness
    assert history.client_metrics == record.client_metrics
    assert history.summary["fairness"]["worst"] == pytest.approx(min(expected))
    assert history.records[0].client_metrics is None
    assert history.records[0].fairness is None


def test_without_a_test_set_all_clients_data_is_one():
    record = last(fs.Federation(model(), CLIENTS, rounds=1).fit())
    sizes = [len(y) for _, y in TESTS]
    assert record.accuracy == pytest.approx(np.average(np.array(scores(record.client_metrics), float), weights=sizes))


def test_test_data_never_trains():
    """The same bits, whatever the test data is."""
    plain = fs.Federation(model(), [train for train, _ in CLIENTS], rounds=2)
    judged = fs.Federation(model(), CLIENTS, rounds=2)
    plain.fit(), judged.fit()
    assert all(torch.equal(judged.state.params[n], value) for n, value in plain.state.params.items())


def test_held_out_examples_never_train():
    """As if the rest had been given alone."""
    held = fs.Federation(model(), [train for train, _ in CLIENTS], rounds=2, holdout=0.3, seed=4)
    kept = [(c.x[c.index], c.y[c.index]) for c in held.clients]  # type: ignore[attr-defined]
    rest = fs.Federation(model(), kept, rounds=2, seed=4)
    held.fit(), rest.fit()
    assert all(torch.equal(held.state.params[n], value) for n, value in rest.state.params.items())
    assert [len(y) for _, y in kept] == [30 - len(test or ()) for test in held.client_tests or ()]


def test_own_models_under_local():
    federation = fs.Federation(model(), CLIENTS, rounds=3, method="local", lr=0.3)
    history = federation.fit()
    own = []
    for client, test in enumerate(TESTS):
        trained = copy.deepcopy(history.model)
        trained.load_state_dict({**trained.state_dict(), **federation.memory(client)[PERSONAL]})
        own.append(accuracy(trained, test))
    record = last(history)
    assert scores(record.own_metrics) == pytest.approx(own)
    assert record.client_metrics is None  # the server's model is nobody's
    assert record.fairness == fairness_of(own)
    assert record.global_fairness is None


def test_own_statistics_with_local_buffers():
    federation = fs.Federation(model(norm=True), CLIENTS, rounds=2, buffers="local", lr=0.3, batch_size=10)
    history = federation.fit()
    own = []
    for client, test in enumerate(TESTS):
        trained = copy.deepcopy(history.model)
        trained.load_state_dict({**trained.state_dict(), **federation.memory(client)[BUFFERS]})
        own.append(accuracy(trained, test))
    record = last(history)
    assert scores(record.own_metrics) == pytest.approx(own)
    assert scores(record.client_metrics) == pytest.approx([accuracy(history.model, test) for test in TESTS])


def test_centralised_training_is_judged_by_the_clients_too():
    history = fs.Federation(model(), CLIENTS, rounds=2, method="centralised").fit()
    assert scores(last(history).client_metrics) == pytest.approx([accuracy(history.model, test) for test in TESTS])
    assert last(history).own_metrics is None


def test_less_is_better():
    clients = [((points(20, at)[0], points(20, at)[0].sum(1)), (torch.eye(4), torch.ones(4) * at)) for at in range(3)]
    record = last(fs.Federation(nn.Linear(4, 1), clients, rounds=1, task="regression(primary='mae')").fit())
    found = scores(record.client_metrics, "mae")
    assert record.fairness is not None
    assert record.fairness.worst == max(value for value in found if value is not None)


def test_of_many_clients_the_fairness_alone_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluator, "MOST_CLIENTS", 2)
    record = last(fs.Federation(model(), CLIENTS, rounds=1).fit())
    assert record.client_metrics is None
    assert record.fairness is not None
    assert record.fairness.clients == 3


@pytest.mark.parametrize("engine", ["processes", "wire"])
@pytest.mark.parametrize("kind", ["given", "held out"])
def test_same_bits_on_all_engines(engine: str, kind: str):
    datasets: list[Any] = [TensorDataset(*train) for train, _ in CLIENTS]
    clients, more = (CLIENTS, {}) if kind == "given" else (datasets, {"holdout": 0.25})
    made = []
    for name, workers in (("serial", 1), (engine, 2 if engine == "processes" else 1)):
        made.append(fs.Federation(model(), clients, rounds=2, engine=name, workers=workers, **more))  # type: ignore[arg-type]
        made[-1].fit()
    assert made[0].records[-1].fairness is not None
    check_same(made[1], made[0])


def test_records_on_disk(tmp_path: Path):
    history = fs.Federation(model(), CLIENTS, rounds=2, out=tmp_path / "run", client_names=["a", "b", "c"]).fit()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert Record.read(rows[-1]).fairness == last(history).fairness
    assert Record.read(rows[-1]).client_metrics == last(history).client_metrics
    assert json.loads((tmp_path / "run" / "facts.json").read_text())["client_names"] == ["a", "b", "c"]
    older = {n: v for n, v in rows[-1].items() if n not in ("client_metrics", "own_metrics", "fairness")}
    assert Record.read(older).fairness is None


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.2, 1.5])
def test_a_share_outside_0_and_1_is_refused(holdout: float):
    with pytest.raises(fs.UsageError, match=r"holdout = .* does not fit: input should be"):
        fs.Federation(model(), [points(9, 0)], rounds=1, holdout=holdout)


def test_test_data_that_does_not_fit_is_refused():
    with pytest.raises(fs.UsageError, match="the test data of client 1"):
        fs.Federation(model(), [points(9, 0), (points(9, 1), (torch.zeros(2, 4), torch.tensor([0, 3])))])


RUN = [
    *("--dataset", "synthetic(shape=(4,), classes=3, examples=120, test_examples=30)", "--model", "logreg"),
    *("--partition", "dirichlet(alpha=1.0)", "--clients", "3", "--rounds", "2", "--workers", "1"),
]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last lines tell of the worst client; 120 examples are 96 to train on and 24 to judge by, up to rounding."""
    assert fedstrata("run", *RUN, "--holdout", "0.2", "--out", tmp_path / "run", "--no-report") == 0
    told = capsys.readouterr().out
    assert "3 of 3 in every round, 3 judged by test examples of their own" in told
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    worst, mean = row["fairness"]["worst"], row["fairness"]["mean"]
    assert f"worst {100 * worst:.2f} % (client {row['fairness']['worst_client']}), mean {100 * mean:.2f} %," in told
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["fairness"] == row["fairness"]
    assert abs(row["examples"] - 96) <= 5
    assert [set(entry) > {"accuracy", "loss"} for entry in row["client_metrics"]] == [True] * 3


def test_what_was_held_out_is_known_without_a_federation():
    """For attacks, which look at what a client trained on."""
    values: dict[str, Any] = {"model": "logreg", "clients": 4, "holdout": 0.3, "seed": 2, "workers": 1}
    config = validate_settings(RunConfig, values)
    dataset, parts = deal(config)
    kept = training_parts(config, dataset, parts)
    clients: Sequence[Any] = open_run(config, None).clients
    assert [part.tolist() for part in kept] == [client.index.tolist() for client in clients]
    assert training_parts(config.model_copy(update={"holdout": None}), dataset, parts) is parts


@pytest.mark.parametrize("share", ["0", "1", "-1", "2"])
def test_the_command_refuses(share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fedstrata("run", *RUN, "--holdout", share, "--out", tmp_path / "run") == 2
    assert "holdout" in one_sentence(capsys)


def test_a_comparison_has_two_columns_more(tmp_path: Path):
    """Mean over the seeds of the worst client's accuracy and of the deviation, in percent; elsewhere no such column."""
    settings = {name[2:]: int(v) if v.isdigit() else v for name, v in zip(RUN[::2], RUN[1::2], strict=True)}
    found = compare({**settings, "seed": [0, 1], "holdout": 0.2}, tmp_path / "held")
    each = [result.fairness for result in found.rows[0].results]
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in markdown(found).splitlines()[:3]]
    cells = dict(zip(lines[0], lines[2], strict=True))
    assert cells["worst"].split(" ")[0] == f"{100 * np.mean([one.worst for one in each if one]):.2f}"
    assert cells["spread"].split(" ")[0] == f"{100 * np.mean([one.std for one in each if one]):.2f}"
    assert "worst,worst_std,spread,spread_std" in csv_text(found).splitlines()[0]
    assert found.as_dict()["rows"][0]["worst"]["count"] == 2
    plain = compare({**settings, "seed": [0]}, tmp_path / "plain")
    assert " worst " not in markdown(plain)
    assert "worst" not in csv_text(plain)


def test_no_column_of_a_comparison_holds_global_and_own_models(tmp_path: Path):
    """Of `fedper` the server has no whole model: what there is of it is in columns of its own."""
    settings = {name[2:]: int(v) if v.isdigit() else v for name, v in zip(RUN[::2], RUN[1::2], strict=True)}
    chosen = ["fedavg", "fedper", "fedavg + finetune(epochs=1)"]
    settings |= {"model": "mlp(hidden=(4,))", "seed": [0], "holdout": 0.2, "method": chosen}
    found = compare(settings, tmp_path / "held")
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in markdown(found).splitlines()]
    table = {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:5]}
    plain, own, tuned = (table[method] for method in chosen)
    for kind in ("accuracy", "best", "global, by client"):
        assert own[kind] == "–"
        assert "–" not in (plain[kind], tuned[kind])
    assert [row["own models"] == "–" for row in (plain, own, tuned)] == [True, False, True]
    assert [row["own, by client"] == "–" for row in (plain, own, tuned)] == [True, False, False]
    result = found.rows[2].results[0]
    assert result.fairness is not None
    assert result.global_fairness is not None
    assert tuned["own, by client"] == f"{100 * result.fairness.mean:.2f}"
    assert tuned["global, by client"] == plain["global, by client"] == f"{100 * result.global_fairness.mean:.2f}"
    for name, field in (("worst", "worst"), ("spread", "std")):
        whole, theirs = (getattr(kind, field) for kind in (result.global_fairness, result.fairness))
        assert tuned[name] == plain[name] == f"{100 * whole:.2f}"
        assert tuned[f"own, {name}"] == f"{100 * theirs:.2f}"
        assert (own[name], plain[f"own, {name}"]) == ("–", "–")
        assert own[f"own, {name}"] != "–"


def test_natural_clients_have_their_own_test_rows():
    """A table of three sites, of which two are chosen: each has its own test rows, and its name."""
    rng = np.random.default_rng(0)
    sites = [f"site {at}" for at in rng.integers(3, size=90)]
    columns = {
        "a": [f"{value:.4f}" for value in rng.random(90)],
        "y": [str(value) for value in rng.integers(2, size=90)],
    }
    dataset = table_dataset("sites", Table(columns, sites), TableOptions("y"))
    assert sorted(torch.cat(dataset.test_groups).tolist()) == list(range(len(dataset.test)))
    config = validate_settings(RunConfig, {"partition": "natural", "clients": 2, "seed": 3})
    parts = partition(dataset.labels, "natural", 2, 3, dataset.groups)
    found, names = divide(config, dataset, parts)
    assert len(set(names)) == 2
    for name, part, train, test in zip(names, parts, found.train, found.test or (), strict=True):
        group = dataset.group_names.index(name)
        assert torch.equal(part, dataset.groups[group])
        assert torch.equal(train.labels(), dataset.train.labels()[part])
        assert torch.equal(test.index, dataset.test_groups[group])
    held, _ = divide(config.model_copy(update={"holdout": 0.2}), dataset, parts)
    assert held.test is None
    assert divide(config.model_copy(update={"partition": "iid"}), dataset, parts)[0].test is None


@pytest.mark.skipif(not (DATA / "heart-disease").is_dir(), reason=f"no heart-disease in {DATA}")
def test_hospitals_are_judged_by_their_own_patients():
    settings = {"dataset": "heart-disease", "data_dir": str(DATA), "model": "logreg", "partition": "natural"}
    config = validate_settings(RunConfig, {**settings, "clients": 0, "rounds": 1, "workers": 1})
    federation = open_run(config, None)
    history = federation.fit()
    assert federation.client_names == ("Budapest", "Cleveland", "Long Beach", "Switzerland")
    dataset = load_dataset("heart-disease", str(DATA))
    for group, entry in zip(dataset.test_groups, history.client_metrics or (), strict=True):
        x, y = dataset.test.batch(group)
        with torch.no_grad():
            right = ((history.model(x).flatten() > 0).long() == y).double().mean().item()
        assert entry is not None
        assert entry["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("more", [{}, {"method": "local"}])
def test_a_resumed_run_judges_the_same(more: dict[str, Any], tmp_path: Path):
    """Stopped after a round: the same examples are held out, and the same records come; another share is refused."""
    clients = [train for train, _ in CLIENTS]
    whole = fs.Federation(model(), clients, rounds=3, holdout=0.25, **more)
    whole.fit()
    out = tmp_path / "run"
    next(fs.Federation(model(), clients, rounds=3, holdout=0.25, out=out, **more).rounds())
    resumed = fs.Federation(model(), clients, rounds=3, holdout=0.25, out=out, resume=True, **more)
    resumed.fit()
    assert resumed.records[-1].fairness is not None
    check_same(resumed, whole)
    with pytest.raises(fs.UsageError, match=r"was run with holdout = 0\.25, not None"):
        fs.Federation(model(), clients, rounds=3, out=out, resume=True, **more)
