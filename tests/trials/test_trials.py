"""Remedies that are tried: what is chosen, what the intervals say, and that nothing is run twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.diagnosis import Diagnosis, Finding, Remedy, diagnose
from fedstrata.run import open_run
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import read_tried
from fedstrata.trials import Budget, Trial, choose_trials, summarise_trials, tried_text, try_federation, try_remedies
from fedstrata.trials.outcome import Guessing, TrialScore, judge_gain
from tests.small_runs import config, fedstrata, one_sentence

PLANTED: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp(hidden=(8,))",
    "method": "fedavg",
    "clients": 6,
    "participation": 1.0,
    "rounds": 3,
    "epochs": 2,
    "workers": 1,
    "faults": "inputs(gain=255, share=0.17)",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one client whose inputs were multiplied, drawn by lot."""
    out = tmp_path_factory.mktemp("planted") / "run"
    open_run(config(**PLANTED, probe="visits"), out).fit()
    return out


def remedy(**settings: Any) -> Remedy:
    return Remedy(settings.pop("method", None), settings, "why", "")


# What is chosen -----------------------------------------------------------------------------------------------


def test_several_causes_share_a_few_trials() -> None:
    """Worth: clip 0.5·0.6 = 0.3, lr 0.5, median 0.9, without 0.54, mu of a symptom 0.3·1.0 = 0.3, after clip."""
    findings = (
        Finding(
            "broken-inputs", 0.9, "", {}, (remedy(method="fedavg(reduce='median')"), remedy(without="3")), (), (3,)
        ),
        Finding("rate-too-large", 0.5, "", {}, (remedy(lr=0.01), remedy(clip=1.0), remedy(rounds=90))),
        Finding("no-learning", 1.0, "", {}, (remedy(method="fedprox"), Remedy(None, {}, "words", "")), ("x",)),
    )
    saved = SavedRun("run", {"method": "fedavg", "without": "5"}, ())
    trials, left_out = choose_trials(
        Diagnosis("run", "fedavg", findings), saved, 4, {"method", "buffers", "lr", "clip", "without"}
    )
    assert [trial.name for trial in trials if trial.kind == "remedy"] == [
        "--method \"fedavg(reduce='median')\"",
        "--without 3",
        "--lr 0.01",
        "--clip 1.0",
    ]
    assert left_out == ["--rounds 90 (it takes more rounds)"]
    references = {trial.name: trial.changes for trial in trials if trial.kind == "reference"}
    assert references["without client 3"] == {"without": "3,5"}
    assert references["centralised, without client 3"] == {"without": "3,5", "method": "centralised", "buffers": None}


def test_faults_hit_the_same_clients_under_every_seed(planted: Path) -> None:
    saved = SavedRun.read(planted)
    (hit,) = saved.facts["faults"][0]["clients"]
    trials, _ = choose_trials(diagnose(saved), saved, 1, {"method"})
    assert all(trial.changes["faults"] == f"inputs(clients=({hit},))" for trial in trials)


def test_faults_of_updates_are_no_part_of_pooled_data() -> None:
    told = [{"fault": "signflip", "clients": [1]}, {"fault": "inputs", "clients": [2]}]
    saved = SavedRun("run", {"method": "fedavg", "faults": "signflip + inputs"}, (), facts={"faults": told})
    trials, _ = choose_trials(Diagnosis("run", "fedavg", ()), saved, 1, ())
    assert trials[0].changes == {"faults": "signflip(clients=(1,)) + inputs(clients=(2,))"}
    assert trials[1].changes["faults"] == "inputs(clients=(2,))"


def test_clients_of_different_depth_are_tried_like_others(tmp_path: Path) -> None:
    """Who pools everybody's data has the deepest of the models."""
    archs = {"archs": "resnet10(width=2); resnet18(width=2)", "method": "heteroavg", "model": ""}
    given = {**PLANTED, **archs, "clients": 4, "rounds": 1, "epochs": 1, "steps": 1, "probe": "visits"}
    open_run(config(**given | {"faults": "inputs(gain=255, clients=(3,))"}), tmp_path / "run").fit()
    saved = SavedRun.read(tmp_path / "run")
    finding = Finding("broken-inputs", 1.0, "", {}, (remedy(without="3"),), (), (3,))
    tried = try_remedies(tmp_path / "run", Diagnosis("run", "heteroavg", (finding,)), Budget(1, 1, 1))
    assert saved.config["archs"]
    assert all(one.scores[0] is not None for one in (*tried.references, *tried.remedies))
    assert [one.name for one in tried.references] == ["centralised, without client 3"]


# What it says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.001, 0.2, "helps"),
        (-0.2, -0.001, "hurts"),
        (-0.009, 0.009, "no gain"),
        (-0.02, 0.009, "not decided"),
        (None, None, "not decided"),
    ],
)
def test_what_an_interval_says(low: float | None, high: float | None, verdict: str) -> None:
    assert judge_gain(low, high, 0.01) == verdict


def test_gains_are_seed_by_seed_and_positive_where_it_is_better() -> None:
    """Errors fall by 1, 2 and 3: the mean is 2, s = 1, t(2, 90 %) = 2.920, so ± 2.920/√3 = 1.686."""
    control = {seed: TrialScore(10.0 * seed, 100) for seed in (1, 2, 3)}
    better = {seed: TrialScore(10.0 * seed - seed, 50) for seed in (1, 2, 3)}
    trials = [Trial("control", "itself", {}), Trial("remedy", "--lr 0.1", {}, "rate-too-large")]
    tried = summarise_trials(trials, [control, better], ["a", "b"], "rmse", False, 5, (1, 2, 3))
    (found,) = tried.remedies
    assert (found.gained, found.cost, found.verdict) == (2.0, 0.5, "helps")
    assert (found.low, found.high) == pytest.approx((2 - 1.686, 2 + 1.686), abs=1e-3)
    assert "Helps: b" in tried_text(tried)


def test_what_has_no_result_decides_nothing() -> None:
    trials = [Trial("control", "itself", {}), Trial("remedy", "--lr 0.1", {}, "x")]
    given = ["a", "b"], "accuracy", True, 5, (0, 1), ["could not be run: --lr 0.1: because"]
    tried = summarise_trials(trials, [{0: TrialScore(0.5)}, {}], *given)
    assert tried.control.scores == (0.5, None)
    assert tried.remedies[0].verdict == "not decided"
    assert "Not decided" not in tried_text(tried)
    assert "Could not be run: --lr 0.1: because." in tried_text(tried)


def test_nothing_counts_for_less_than_guessing() -> None:
    """Errors of 0.75 are guessing: a seed that is far beyond, and one that diverged, count as that."""
    guessing = Guessing(0.75, higher_is_better=False)
    control = {0: guessing.judge(9.5e8, 10, diverged=False), 1: guessing.judge(None, 4, diverged=True)}
    other = {seed: guessing.judge(0.5, 8, diverged=False) for seed in (0, 1)}
    assert [one.score for one in control.values()] == [0.75, 0.75]
    trials = [Trial("control", "itself", {}), Trial("remedy", "--lr 0.1", {}, "x")]
    (found,) = summarise_trials(trials, [control, other], ["a", "b"], "rmse", False, 5, (0, 1)).remedies
    assert found.gained == 0.25
    assert found.cost == 0.8  # of seed 0 alone: the other one was cut short
    assert Guessing(0.1, higher_is_better=True).judge(0.05, 1, diverged=False) == TrialScore(0.1, 1)
    assert Guessing(None, higher_is_better=True).judge(0.05, 1, diverged=False) == TrialScore(0.05, 1)


# The command --------------------------------------------------------------------------------------------------


def test_the_command_tries_and_does_not_try_again(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("diagnose", planted, "--try", 2, "--try-seeds", 2)
    assert fedstrata(*words) == 0
    printed = capsys.readouterr()
    assert "[8/8]" in printed.err  # the run itself, pooled data, and two remedies
    tried = read_tried(planted)
    assert tried is not None
    assert (tried.rounds, tried.seeds) == (3, (0, 1))
    assert [remedy.verdict for remedy in tried.remedies] == ["helps", "helps"]
    assert all(remedy.gained is not None and remedy.gained > 0.2 for remedy in tried.remedies)
    assert f"Helps: fedstrata run {planted}/run.toml --without 1" in printed.out
    written = {path: path.stat().st_mtime_ns for path in (planted / "tried").rglob("*")}
    assert fedstrata(*words, "--json") == 0
    printed = capsys.readouterr()
    assert "8 of 8 runs already finished" in printed.err
    assert json.loads(printed.out)["tried"]["metric"] == "accuracy"
    assert {path: path.stat().st_mtime_ns for path in (planted / "tried").rglob("*")} == written


def test_what_cannot_be_tried_is_refused(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("diagnose", planted, "--try", 0) == 2
    assert "--try" in one_sentence(capsys)
    assert fedstrata("diagnose", "--try") == 2
    assert "--try needs the directory of a run" in one_sentence(capsys)
    for option in ("--try-rounds", "--try-seeds", "--jobs"):
        assert fedstrata("diagnose", planted, option, 2) == 2
        assert f"{option} is for what --try runs" in one_sentence(capsys)
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.toml", "metrics.jsonl", "facts.json", "summary.json", "probes.jsonl"):
        (copy / name).write_bytes((planted / name).read_bytes())
    (copy / "tried.json").write_text('{"format": 9}')
    assert fedstrata("diagnose", copy, "--try") == 2
    assert "does not say what was tried" in one_sentence(capsys)
    assert not (copy / "tried").exists()


# In Python ----------------------------------------------------------------------------------------------------


def own_world(out: Path | None = None) -> fs.Federation:
    """Six clients of an own module, one of which sees inputs 255 times as large."""
    torch.manual_seed(0)
    centres = 2 * torch.randn(4, 6)
    labels = [torch.arange(32) % 4 for _ in range(7)]
    pairs = [(centres[y] + torch.randn(32, 6), y) for y in labels]
    clients = [(x * (255 if client == 3 else 1), y) for client, (x, y) in enumerate(pairs[:6])]
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return fs.Federation(model, clients, pairs[6], rounds=4, epochs=2, batch_size=8, probe="visits", out=out)


def test_a_federation_of_ones_own(tmp_path: Path) -> None:
    federation = own_world(tmp_path / "run")
    federation.fit()
    before = federation.summary()
    heard: list[tuple[str, int]] = []
    tried = try_federation(federation, budget=Budget(count=2), on_run=lambda *run: heard.append(run))
    assert [(one.finding, one.verdict) for one in tried.remedies] == [("broken-inputs", "helps")] * 2
    assert tried.remedies[0].command == "Federation(…, without='3')"
    assert len(heard) == 3 * 4
    assert federation.summary() == before
    assert read_tried(tmp_path / "run") == tried


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    federation = own_world(tmp_path / "run")
    federation.fit()
    heard: list[tuple[str, int]] = []

    def stop(*run: Any) -> None:
        heard.append(run)
        if len(heard) == 3:
            raise KeyboardInterrupt

    budget = Budget(count=1, rounds=1, seeds=2)
    with pytest.raises(KeyboardInterrupt):
        try_federation(federation, budget=budget, on_run=stop)
    tried = try_federation(federation, budget=budget, on_run=lambda *run: heard.append(run))
    assert len(heard) == 3 + 4  # of six runs two were finished
    assert try_federation(federation, budget=budget, on_run=lambda *run: heard.append(run)) == tried
    assert len(heard) == 3 + 4
    kept = tmp_path / "run" / "tried" / "scores.json"
    kept.write_text(kept.read_text().replace("[", '["x",', 1))
    try_federation(federation, budget=budget, on_run=lambda *run: heard.append(run))
    assert len(heard) == 3 + 4 + 1


def test_what_cannot_be_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = own_world()
    federation.fit()
    whole = fs.Federation.sibling

    def refuse(self: fs.Federation, **changes: Any) -> fs.Federation:
        if "without" in changes:
            raise fs.UsageError("not here")
        return whole(self, **changes)

    monkeypatch.setattr(fs.Federation, "sibling", refuse)
    tried = try_federation(federation, budget=Budget(count=1, rounds=1, seeds=1))
    assert "could not be run: --without 3: not here" in tried.notes
    monkeypatch.setattr(fs.Federation, "sibling", lambda self, **changes: refuse(self, without="3"))
    with pytest.raises(fs.UsageError, match="not here"):
        try_federation(federation, budget=Budget(count=1, rounds=1, seeds=1))


def test_without_a_test_set_nothing_can_be_tried() -> None:
    model, x = torch.nn.Linear(2, 2), torch.zeros(4, 2)
    with pytest.raises(fs.UsageError, match="there is no test set"):
        try_federation(fs.Federation(model, [(x, torch.tensor([0, 1, 0, 1]))] * 2, rounds=1))


def test_a_sibling_shares_all_but_what_is_changed() -> None:
    federation = own_world()
    other = federation.sibling(lr=0.5, buffers="drop", seed=7)
    assert (other.settings.lr, other.settings.seed, other.method.buffers) == (0.5, 7, "drop")
    assert other.settings.epochs == federation.settings.epochs
    assert other.out is None
