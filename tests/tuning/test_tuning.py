"""Searches: how spaces are written, who ends early, what a whole search leaves, and that nothing of it gets lost."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.compare import News, compare
from fedstrata.compare.cuts import find_cut, least_score, rungs
from fedstrata.compare.plan import Run, directory_name
from fedstrata.compare.runner import run_all
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.validation import set_aside
from fedstrata.errors import FedstrataError, Stopped, UsageError
from fedstrata.run import _public, _trusted, deal
from fedstrata.runs.reader import read_records
from fedstrata.tuning.figures import method_figures, share
from fedstrata.tuning.outcome import FILE, Searched, TriedTrial, Tuned, TunedMethod, read_tuned, values_text
from fedstrata.tuning.plan import plan_search
from fedstrata.tuning.space import Choice, Log, Uniform, Whole, read_template
from tests.small_runs import fedstrata, one_sentence

optuna = pytest.importorskip("optuna", reason="a search needs the extra tune")
from fedstrata.tuning import Budget, TunedComparison, tune  # noqa: E402 – after the question for the extra
from fedstrata.tuning.search import run_to_ends  # noqa: E402
from fedstrata.tuning.study import MethodSearch, open_storage  # noqa: E402

Capture = pytest.CaptureFixture[str]
SMALL: dict[str, Any] = {
    "dataset": "synthetic(shape=(4,), classes=3, examples=120, test_examples=60, separation=0.7)",
    "model": "logreg",
    "partition": "dirichlet(alpha=1.0)",
    "clients": 3,
    "rounds": 6,
    "workers": 1,
    "checkpoint_seconds": 0.0,
}
WORDS = [str(word) for n, v in SMALL.items() for word in (f"--{n.replace('_', '-')}", v)]
METHODS = ["fedavg", "fedprox(mu=log(1e-4, 1))"]
SEARCH = {"lr": "log(1e-3, 3)"}
BUDGET = Budget(trials=6, seed=7)


# --- spaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "spaces", "values", "filled"),
    [
        ("lr", "log(1e-3, 1)", {"lr": Log(low=1e-3, high=1)}, {"lr": 0.5}, 0.5),
        ("clip", "uniform(1, 9)", {"clip": Uniform(low=1, high=9)}, {"clip": 2.5}, 2.5),
        ("batch_size", "int(8, 64, log=True)", {"batch_size": Whole(low=8, high=64, log=True)}, {"batch_size": 9}, 9),
        (
            "method",
            "fedprox(mu=log(1e-4, 1)) + fedavg('uniform', server_lr=choice(0.5, 1.0))",
            {"fedprox.mu": Log(low=1e-4, high=1), "fedavg.server_lr": Choice((0.5, 1.0))},
            {"fedprox.mu": 0.25, "fedavg.server_lr": 1.0},
            "fedprox(mu=0.25) + fedavg('uniform', server_lr=1.0)",
        ),
        (
            "model",
            "mlp(hidden=choice((8,), (16, 16)))",
            {"model.hidden": Choice(((8,), (16, 16)))},
            {"model.hidden": (16, 16)},
            "mlp(hidden=(16, 16))",
        ),
    ],
)
def test_spaces_stand_where_values_would(field: str, text: str, spaces: Any, values: Any, filled: Any) -> None:
    template = read_template(field, text)
    assert template is not None
    assert template.spaces == spaces
    assert template.fill(values) == filled
    assert all(read_template("lr", str(space)).value == space for space in spaces.values())
    assert all(space.contains(space.middle) for space in spaces.values())


def test_values_are_no_spaces() -> None:
    assert read_template("lr", 0.1) is None
    assert read_template("method", "fedavg + catalog(x=1)") is None
    assert Log(low=1e-4, high=1).middle == pytest.approx(0.01)
    assert not Log(low=1e-4, high=1).contains(True)
    assert not Choice((1, 2)).contains(1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--search", "lr=log(1, 0.1)"], "log(1, 0.1) needs 0 < low < high"),
        (["--search", "lr=log(0, 1)"], "needs 0 < low < high"),
        (["--search", "lr=uniform(1, 1)"], "needs low < high"),
        (["--search", "batch_size=int(8, 9.5)"], "9.5 does not fit"),
        (["--search", "optimizer=choice('sgd')"], "needs two different values or more"),
        (["--search", "lr=log(__import__('os').system('x'), 1)"], "is not a literal value"),
        (["--search", "lr=log(1e-3)"], "needs the argument 'high'"),
        (["--search", "lr"], "write it like 'lr=log(1e-3, 1)"),
        (["--search", "lr=0.1"], "says nothing to search in"),
        (["--search", "lr=log(1e-3, 1); lr=log(1e-2, 1)"], "--search names lr twice"),
        (["--search", "lrr=log(1e-3, 1)"], "there is no setting 'lrr' to search (did you mean 'lr'?)"),
        (["--search", "scaffold.mu=log(1e-3, 1)"], "there is no method or setting 'scaffold' to search"),
        (["--search", "fedprox.muu=log(1e-3, 1)", "--methods", "fedprox"], "has no argument 'muu'"),
        (["--search", "fedavg=log(1e-3, 1)"], "fedavg is a method: name what is searched in it, as in fedavg.mu"),
        (["--search", "epochs=log(1, 3)"], "epochs cannot be searched in log(1, 3): epochs"),
        (["--search", "rounds=int(1, 9)"], "rounds cannot be searched"),
        (["--search", "partition.alpha=log(0.1, 1)"], "partition cannot be searched"),
        (["--search", "lr=log(1e-3, 1)", "--vary", "lr=0.1; 1"], "lr is varied already"),
        (["--methods", "fedprox(log(1e-3, 1))"], "name the argument that is searched"),
        (["--methods", "fedavg", "--search", "method=fedprox(mu=log(1e-4, 1))"], "the methods are set already"),
        (["--seeds", "7", "--search-seed", "7"], "seed 7 is the one that is tuned on"),
        (["--trials", "0"], "a search needs trials of 1 or more"),
        (["--halving", "1"], "a factor of 2 or more, or 0 for none"),
        (["--validation", "1.5"], "validation"),
        (["--vary", "validation=0.1; 0.2"], "a search has one validation share"),
        (["--dataset", "mnist"], "FEDSTRATA_DATA"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_input(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    assert fedstrata("tune", *words) == 2
    assert said in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "values", [{"validation": 0.3}, {"validation": [0.1, 0.3]}, {"method": [{"method": "fedavg", "validation": 0.3}]}]
)
def test_nothing_is_reported_on_validation_data(values: dict[str, Any]) -> None:
    """A run with the setting would be judged by what its settings were chosen by, and told to be on the test set."""
    with pytest.raises(UsageError, match="a search has one validation share"):
        plan_search(values, None, Budget())


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True])
def test_no_runs_at_once_are_refused(jobs: Any, tmp_path: Path) -> None:
    """With none a search would wait for ever for one to end."""
    with pytest.raises(UsageError, match="jobs must be a whole number of 1 or more"):
        tune({**SMALL, "method": "fedavg"}, SEARCH, tmp_path / "out", jobs=jobs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trials": 2.5}, "trials must be a whole number, not 2.5"),
        ({"trials": "3"}, "trials must be a whole number, not '3'"),
        ({"factor": True}, "factor must be a whole number, not True"),
        ({"validation": "x"}, "validation must be a number, not 'x'"),
    ],
)
def test_wrong_budgets(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Budget(**given)


def test_python_takes_spaces_as_the_command_does() -> None:
    values = {"method": ["fedavg", "fedprox"]}
    text = plan_search(values, "lr=log(1e-3, 1); fedprox.mu=log(1e-4, 1)", Budget())
    assert text == plan_search(values, {"lr": "log(1e-3, 1)", "fedprox.mu": "log(1e-4, 1)"}, Budget())


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*search: not a directory"):
        tune({**SMALL, "method": "fedavg"}, SEARCH, tmp_path / "file" / "out")


def test_where_a_search_begins() -> None:
    """With the settings as they are: of the run, of the method's text, of the technique; or in the middle."""
    methods = ["fedprox(mu=0.5)", "fedprox + fedlc", {"method": "fedavg", "lr": 0.25, "label": "F"}]
    search = {"lr": "log(1e-2, 0.3)", "fedprox.mu": "log(1e-3, 1)", "model.width": "choice(8, 16)"}
    plan = plan_search({"method": methods, "model": "cnn2(width=16)", "lr": 0.03}, search, Budget())
    first, second, third = plan.candidates
    assert first.initial == {"lr": 0.03, "fedprox.mu": 0.5, "model.width": 16}
    assert second.initial["fedprox.mu"] == 0.01
    assert third.initial == {"lr": 0.25, "model.width": 16}
    assert [candidate.label for candidate in plan.candidates] == ["fedprox(mu=0.5)", "fedprox + fedlc", "F"]
    assert second.trial(second.initial, Budget(seed=9)).seed == 9
    outside = plan_search({"method": "fedavg"}, {"lr": "log(1e-4, 1e-2)"}, Budget()).candidates[0]
    assert outside.initial == {"lr": pytest.approx(1e-3)}
    (usual,) = plan_search({"method": "fedavg"}, None, Budget()).candidates
    assert usual.spaces == {"lr": Log(low=0.001, high=1)}


# --- validation data -------------------------------------------------------------------------------------------------


def test_validation_data_are_of_the_training_examples() -> None:
    whole = load_dataset("digits")
    aside = set_aside(whole, 0.25)
    assert torch.equal(set_aside(whole, 0.25).test.index, aside.test.index)
    both = torch.cat([aside.train.index, aside.test.index]).sort().values
    assert torch.equal(both, whole.train.index if whole.train.index is not None else torch.arange(len(whole.train)))
    before, after = whole.labels.bincount(), aside.test.labels().bincount()
    assert ((after - 0.25 * before).abs() < 1).all()
    assert "training examples are the validation set" in aside.note
    with pytest.raises(UsageError, match="leaves"):
        set_aside(replace(whole, train=whole.train.select(torch.arange(1))), 0.5)


def test_natural_clients_are_judged_by_their_own() -> None:
    x = torch.arange(40.0)[:, None]
    groups = (torch.arange(0, 20, 2), torch.arange(1, 21, 2))
    made = Dataset("made", TensorExamples(x, torch.zeros(40, dtype=torch.int64)), None, 1, groups=groups)
    aside = set_aside(replace(made, test_groups=(torch.arange(1),) * 2, deal_by=torch.zeros(40).long()), 0.3)
    for before, train, test in zip(groups, aside.groups, aside.test_groups, strict=True):
        found = torch.cat([aside.train.batch(train)[0], aside.test.batch(test)[0]]).flatten().sort().values
        assert torch.equal(found.long(), before)
        assert len(test) == 3
    assert len(aside.deal_by) == len(aside.train) == 40 - len(aside.test)


def test_the_server_is_given_none_of_the_validation_data() -> None:
    """Neither to trust nor to distil on, where it has the same dataset: a trial would be judged by what it has seen."""
    config = validate_settings(RunConfig, {"dataset": "digits", "validation": 0.25})
    dataset, _ = deal(config)
    for given in (_trusted("digits", config), _public("digits", config)):
        assert torch.equal(given.index, dataset.train.index)
    assert len(_trusted("synthetic", config)) == 1000  # others are not in it


# --- successive halving ----------------------------------------------------------------------------------------------


def test_rungs() -> None:
    assert rungs(20, 1, 3) == [3, 7]
    assert rungs(100, 10, 3) == [20, 40]
    assert rungs(9, 1, 3) == [3]
    assert rungs(4, 1, 2) == [2]
    assert rungs(2, 1, 3) == []


@pytest.mark.parametrize("lower", [False, True])
def test_who_goes_on_is_who_does_in_optuna(lower: bool) -> None:
    """Trials one after the other, all judged at step 2; Optuna's pruner decides by the same scores."""
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3)
    study = optuna.create_study(pruner=pruner, direction="minimize" if lower else "maximize")
    known: list[float] = []
    decisions = []
    for score in np.random.default_rng(0).random(30).round(1).tolist():
        trial = study.ask()
        trial.report(score, step=2)
        least = least_score(known, 3, lower)
        goes_on = least is None or (score <= least if lower else score >= least)
        assert goes_on is not trial.should_prune()
        decisions.append(goes_on)
        known.append(score)
        study.tell(trial, score)
    assert 5 < sum(decisions) < 25


@pytest.mark.slow
def test_a_run_ends_where_it_falls_short(tmp_path: Path) -> None:
    """In a process of its own, too; its rounds are kept, and nothing claims that it has finished."""
    config = validate_settings(RunConfig, SMALL)
    run = Run("fedavg", {}, {}, config, tmp_path / directory_name(config), {2: 0.0, 4: 1.01})
    heard: list[News] = []
    assert run_all([run], 2, heard.append) == {}
    assert [(news.rounds, news.is_cut) for news in heard if news.is_last] == [(4, True)]
    assert find_cut(run.directory, run.cuts) == 4
    assert len(read_records(run.directory / "metrics.jsonl")) in (4, 5)
    assert not (run.directory / "summary.json").exists()


@pytest.mark.slow
def test_trials_that_share_a_run_come_to_their_own_ends(tmp_path: Path) -> None:
    """The same values in two searches, whose earlier trials were unlike: one ends where the other goes on."""
    config = validate_settings(RunConfig, SMALL)
    runs = [Run("fedavg", {}, {}, config, tmp_path / directory_name(config), {rung: 1.01}) for rung in (2, 4)]
    assert run_to_ends(runs, 1, lambda news: None) == {}
    assert [find_cut(run.directory, run.cuts) for run in runs] == [2, 4]


# --- a whole search --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TunedComparison]:
    out = tmp_path_factory.mktemp("searched")
    return out, tune({**SMALL, "method": METHODS, "seed": [0, 1]}, SEARCH, out, budget=BUDGET)


def test_what_a_search_finds(searched: tuple[Path, TunedComparison]) -> None:
    out, found = searched
    assert read_tuned(out) == found.tuned
    assert [method.label for method in found.tuned.methods] == ["fedavg", "fedprox"]
    assert found.tuned.rungs == [2]
    for method in found.tuned.methods:
        assert [trial.number for trial in method.trials] == [*range(6)]
        assert method.trials[0].values["lr"] == "0.1"  # as it was
        complete = [trial for trial in method.trials if trial.state == "complete"]
        assert method.best_trial.score == max(trial.score or 0.0 for trial in complete)
        assert {trial.state for trial in method.trials[:4]} <= {"complete", "diverged"}  # nobody to compare them with
        for trial in method.trials:
            values = read_toml(out / "search" / trial.directory / "run.toml")
            assert (values["seed"], values["validation"]) == (7, 0.2)
            rounds = read_records(out / "search" / trial.directory / "metrics.jsonl")
            assert trial.by_round[2] == rounds[1].score
            assert trial.rounds == (6 if trial.state == "complete" else 2)
    early = [t for m in found.tuned.methods for t in m.trials if t.state == "ended early"]
    assert early
    # The same first random numbers: what the methods have in common is not tried at other places.
    assert found.tuned.methods[0].trials[1].values["lr"] == found.tuned.methods[1].trials[1].values["lr"]


def test_what_is_reported(searched: tuple[Path, TunedComparison]) -> None:
    """Plain runs of the best settings, on the whole training data: a comparison with these settings finds them."""
    out, found = searched
    assert found.comparison.failures == {}
    for row, method in zip(found.comparison.rows, found.tuned.methods, strict=True):
        assert row.method == method.label
        assert row.run.config.lr == pytest.approx(float(method.best_trial.values["lr"]))
        assert [result.seed for result in row.results] == [0, 1]
        assert row.run.config.validation is None
    entries = [{**row.run.own, "method": row.run.config.method, "label": row.method} for row in found.comparison.rows]
    again = compare({**SMALL, "method": entries, "seed": [0, 1]}, out, run=False)
    assert [row.results for row in again.rows] == [row.results for row in found.comparison.rows]
    told = found.comparison.as_dict()["tuning"]
    assert "judged on 20 % of the training examples" in told
    assert f"chosen: fedavg: lr={found.tuned.methods[0].best_trial.values['lr']}; fedprox: lr=" in told


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a place of the test's choice."""


def test_nothing_is_lost_nor_changed_by_interruptions(searched: tuple[Path, TunedComparison], tmp_path: Path) -> None:
    """Stopped in the middle of trials again and again, and with a trial that was only begun: the same search."""

    def stop_after(count: int) -> Any:
        heard: list[News] = []

        def hear(news: News) -> None:
            heard.append(news)
            if len(heard) == count:
                raise Interrupted

        return hear

    values = {**SMALL, "method": METHODS, "seed": [0, 1]}
    stops = 0
    for count in (2, 25):
        with pytest.raises(Stopped, match="the same command goes on"):
            tune(values, SEARCH, tmp_path, budget=BUDGET, on_news=stop_after(count))
        stops += 1
    storage = open_storage(tmp_path / "search")
    first = plan_search(values, SEARCH, BUDGET).candidates[0]
    MethodSearch(storage, first, BUDGET, lower=False, rounds=6).next_batch()  # and then the power went
    assert stops == 2
    assert str(tune(values, SEARCH, tmp_path, budget=BUDGET).tuned) == str(searched[1].tuned)
    assert read_tuned(tmp_path) == read_tuned(searched[0])


def test_a_larger_budget_goes_on(searched: tuple[Path, TunedComparison], tmp_path: Path) -> None:
    before = read_tuned(searched[0])
    shutil.copytree(searched[0], tmp_path / "more")
    more = tune({**SMALL, "method": METHODS, "seed": [0]}, SEARCH, tmp_path / "more", budget=replace(BUDGET, trials=7))
    for old, new in zip(before.methods, more.tuned.methods, strict=True):
        assert new.trials[:6] == old.trials
        assert len(new.trials) == 7


@pytest.mark.slow
def test_a_smaller_budget_tells_of_its_own_trials_alone(tmp_path: Path) -> None:
    """Whoever searches anew with so few trials reads the same: best, importance and all."""
    values = {**SMALL, "rounds": 2, "method": METHODS[1], "seed": [0]}
    more, fewer = Budget(trials=8, factor=0), Budget(trials=6, factor=0)
    first = tune(values, SEARCH, tmp_path / "more", budget=more).tuned.methods[0]
    again = tune(values, SEARCH, tmp_path / "more", budget=fewer).tuned
    assert again == tune(values, SEARCH, tmp_path / "anew", budget=fewer).tuned
    assert first.importance != again.methods[0].importance != {}


@pytest.mark.slow
def test_what_another_search_let_go_on_is_ended_early_here(
    searched: tuple[Path, TunedComparison], tmp_path: Path
) -> None:
    """A search without halving has run the same values to their ends in the same folder: what is told is as anew."""
    values = {**SMALL, "method": "fedavg", "seed": [0]}
    tune(values, SEARCH, tmp_path, budget=replace(BUDGET, factor=0))
    first, again = searched[1].tuned.methods[0], tune(values, SEARCH, tmp_path, budget=BUDGET).tuned.methods[0]
    assert any(trial.state == "ended early" for trial in first.trials)
    assert again.trials == first.trials


def test_a_full_disk_spends_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that no run can have is refused for good; one that only failed here is run when there is room again."""
    from fedstrata.compare import runner

    def full(*given: Any, **how: Any) -> FedstrataError:
        return UsageError("cannot write x: no space left on device")

    values = {**SMALL, "rounds": 2, "method": "fedavg", "seed": [0]}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_attempt", full)
        with pytest.raises(FedstrataError, match=r"no trial is complete.*: cannot write x: no space left.*tries again"):
            tune(values, SEARCH, tmp_path, budget=Budget(trials=2))
    assert [method.trials for method in read_tuned(tmp_path).methods] == [[]]
    found = tune(values, SEARCH, tmp_path, budget=Budget(trials=2))
    assert [trial.state for trial in found.tuned.methods[0].trials] == ["complete"] * 2


def test_no_method_answers_for_the_failures_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of FedAvg's trials diverge; that there was no room for FedProx's is not why FedAvg has no result."""
    from fedstrata.compare import runner

    whole = runner._attempt

    def full(config: RunConfig, *given: Any, **how: Any) -> FedstrataError | None:
        return FedstrataError("no space left") if "fedprox" in config.method else whole(config, *given, **how)

    monkeypatch.setattr(runner, "_attempt", full)
    values = {**SMALL, "epochs": 5, "method": ["fedavg", "fedprox(mu=0.1)"], "seed": [0]}
    with pytest.raises(FedstrataError, match="fedavg: no trial is complete, so there is nothing to report: ") as told:
        tune(values, {"lr": "log(9e37, 1e38)"}, tmp_path, budget=Budget(trials=2))
    assert "no space left" not in str(told.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A value that no run can have is a trial that is refused, and what is varied is tuned for each value."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.toml"
    file.write_text('methods = ["fedavg", "local"]\n[search]\n"fedavg.server_lr" = "choice(1.0, -1.0)"\n')
    words = [*WORDS, "--rounds", "2", "--seeds", "0", "--vary", "epochs=1; 2", "--out", "out"]
    assert fedstrata("compare", file, *words, "--tune", "4", "--table-only") == 2
    assert "nothing was searched in out yet" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()
    assert fedstrata("compare", file, *words, "--tune", "4", "--markdown", "--no-report") == 0
    printed = capsys.readouterr()
    table = printed.out.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:6]] == ["fedavg", "local"] * 2
    assert "fedavg.server_lr in choice(1.0, -1.0)" in printed.out
    assert "local, epochs=2: nothing to search" in printed.err
    assert "halving" not in printed.out  # of two rounds
    again = (*words, "--tune", "4", "--markdown", "--no-report", "--table-only")
    assert fedstrata("compare", file, *again) == 0
    assert capsys.readouterr().out == printed.out
    states = [[t.state for t in method.trials] for method in read_tuned(tmp_path / "out").methods]
    assert states[1] == states[3] == []
    assert {*states[0]} == {*states[2]} == {"complete", "refused"}
    assert fedstrata("compare", file, *words) == 2
    assert "say how often, with --tune N" in one_sentence(capsys)
    assert fedstrata("compare", file, *words, "--tune", "2", "--cite") == 0
    assert "mcmahan2017communication" in capsys.readouterr().out


def test_a_trial_that_fails_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The table of what there is, then one sentence and exit code 1."""
    from fedstrata.compare import runner

    attempt, count = runner._attempt, [0]

    def fail_late(config: Any, directory: Path, *rest: Any) -> FedstrataError | None:
        count[0] += directory.parent.name == "search"
        return FedstrataError("the power went") if count[0] == 5 else attempt(config, directory, *rest)

    monkeypatch.setattr(runner, "_attempt", fail_late)
    words = [*WORDS, "--rounds", "2", "--methods", "fedavg", "--seeds", "0", "--out", tmp_path, "--no-report"]
    assert fedstrata("compare", *words, "--tune", "6", "--markdown", "--quiet") == 1
    out, error = capsys.readouterr()
    assert "| fedavg" in out
    assert error.endswith("fedstrata: 1 trial failed: the power went; the same command tries again\n")


# --- files and page --------------------------------------------------------------------------------------------------


def test_files_that_were_edited(searched: tuple[Path, TunedComparison], tmp_path: Path, capsys: Capture) -> None:
    told = json.loads((searched[0] / FILE).read_text())
    told["methods"][0]["trials"][0]["state"] = "<script>"
    (tmp_path / FILE).write_text(json.dumps(told))
    with pytest.raises(UsageError, match=r"tune.json was edited: methods.0.trials.0.state"):
        read_tuned(tmp_path)
    with pytest.raises(UsageError, match="nothing was tuned there"):
        read_tuned(tmp_path / "elsewhere")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search.db").write_text("no database" * 100)
    assert fedstrata("tune", *WORDS, "--out", tmp_path) == 2
    assert "search.db is no file of a search" in one_sentence(capsys)


def test_values_are_told_so_that_they_can_be_given_again() -> None:
    told = values_text({"participation": 1.0, "epochs": 1, "lr": 1e-5, "nesterov": True, "optimizer": "sgd"})
    assert told == {"participation": "1.0", "epochs": "1", "lr": "1e-05", "nesterov": "True", "optimizer": "'sgd'"}


def made() -> Tuned:
    """Two searches: of two values and of one, with trials of every kind."""
    spaces = {"lr": Searched("log(0.01, 1)", 0.01, 1.0, True), "model.width": Searched("…", options=["8", "16", "32"])}
    trials = [
        TriedTrial(0, {"lr": "0.1", "model.width": "8"}, "complete", 0.5, {2: 0.3, 6: 0.5}, 6, "a"),
        TriedTrial(1, {"lr": "1", "model.width": "32"}, "complete", 0.9, {2: 0.6, 6: 0.9}, 6, "b"),
        TriedTrial(2, {"lr": "0.01", "model.width": "16"}, "ended early", None, {2: 0.1}, 2, "c"),
        TriedTrial(3, {"lr": "0.3", "model.width": "16"}, "diverged", None, {}, 1, "d", "training diverged"),
    ]
    two = TunedMethod("<b>", "", spaces, trials, 1, {"lr": 0.75, "model.width": 0.25}, "fedavg", {"lr": 1.0})
    one = replace(two, label="one", spaces={"lr": spaces["lr"]}, importance={})
    return Tuned("tuned: …", "accuracy", "higher", 4, [2], [two, one, TunedMethod("none", "", {}, [])])


def test_figures_of_a_search() -> None:
    """Parallel coordinates by shares of each axis: lr 0.1 is halfway from 0.01 to 1; 0.9 is the top, 0.1 the bottom."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    tuned = made()
    coordinates, curves, progress, importance = method_figures(tuned, tuned.methods[0], 0)
    lines = {line["meta"]["trial"]: line for line in coordinates.data}
    assert lines[0]["y"] == pytest.approx([0.5, 0.0, 0.5])
    assert lines[1]["y"] == [1, 1, 1]
    assert lines[2]["y"] == [0, 0.5, 0]
    assert lines[2]["meta"]["told"] == [0.01, 1, 0.1]
    assert [line["meta"]["trial"] for line in coordinates.data] == [2, 0, 1]
    assert share(Searched("", 1.0, 3.0), 1.5) == 0.25
    assert [trace["y"] for trace in curves.data] == [[0.1], [0.3, 0.5], [0.6, 0.9]]
    assert progress.data[0]["y"] == [0.5, 0.9]
    assert importance.data[0]["x"] == [0.25, 0.75]
    (points, *_) = method_figures(tuned, tuned.methods[1], 1)
    assert {trace["name"]: trace["x"] for trace in points.data} == {
        "ended early": [0.01],
        "complete": [0.1],
        "best": [1.0],
    }
    assert points.layout["xaxis"]["type"] == "log"
    assert method_figures(tuned, tuned.methods[2], 2) == []
    for at, method in enumerate(tuned.methods):
        for figure in method_figures(tuned, method, at):
            graph_objects.Figure(data=[{**t, "meta": None} for t in figure.data], layout=figure.layout)


def test_the_page_of_a_search(searched: tuple[Path, TunedComparison], tmp_path: Path) -> None:
    from fedstrata.tuning.page import write_page

    page = write_page(made(), None, tmp_path).read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "diverged: training diverged" in page
    assert not re.search(r"(src|href)=.https?:", page)
    whole = (searched[0] / "tune.html").read_text()
    score = searched[1].comparison.rows[0].of("score")
    assert f"{100 * score.mean:.2f} ± {100 * score.std:.2f}" in whole
    assert "default-src 'none'" in whole
