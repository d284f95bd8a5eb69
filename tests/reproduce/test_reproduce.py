"""Reproductions: all papers at their smallest scale, their claims' arithmetic, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.compare import plan
from fedstrata.compare.runner import read_finished_records
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.errors import UsageError
from fedstrata.models.registry import build_model
from fedstrata.models.stages import params_above as upper
from fedstrata.models.strata import strata
from fedstrata.reproduce import PAPERS, SCALES, Reproduction, parts, reproduce
from fedstrata.reproduce.fedimpro_divergence import (
    LocalModels,
    balanced_labels,
    distances,
    shared_features,
    variances,
)
from fedstrata.reproduce.fedimpro_divergence import assess as assess_divergence
from fedstrata.reproduce.fedimpro_divergence import measure_run as measure_divergence
from fedstrata.reproduce.fedimpro_inversion import decode_images, encode_images
from fedstrata.reproduce.fedimpro_settings import SCALES as FEDIMPRO
from fedstrata.reproduce.fedpart import SCALES as FEDPART
from fedstrata.reproduce.fedpart_trace import GradientTrace, gradient_norm, jumps, measure_norms
from fedstrata.reproduce.inco_settings import SCALES as INCO
from fedstrata.reproduce.inco_settings import arch_accuracy, clients_accuracy, inco_method
from fedstrata.reproduce.inco_similarity import GROUP, HARDER, HETERO, PLAIN_INCO, fill_model
from fedstrata.reproduce.inco_similarity import INCO as CROSSED
from fedstrata.reproduce.inco_similarity import assess as assess_similarity
from fedstrata.reproduce.inco_similarity import measure_run as measure_similarity
from fedstrata.reproduce.inco_similarity import observe as observe_archs
from fedstrata.reproduce.local_models import read_local_models
from fedstrata.reproduce.part_runs import build_config, build_federation
from fedstrata.reproduce.parts import Grid, OwnWork, PartResources
from fedstrata.run import open_run
from fedstrata.system.machine import processor
from tests.small_runs import fedstrata, one_sentence

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FEDSTRATA_DATA", "FEDSTRATA_DEBUG"):
        monkeypatch.delenv(name, raising=False)


Made = dict[str, tuple[Reproduction, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All papers at scale smoke, made once; those of test_deeper.py and test_together.py are made there."""
    places = {paper: tmp_path_factory.mktemp(paper) for paper in PAPERS if paper not in ("deeper", "together")}
    return {paper: (reproduce(paper, "smoke", out=out), out) for paper, out in places.items()}


# --- the command -----------------------------------------------------------------------------------------------------


PICTURES = {
    "fedpart": ["trace.png"],
    "fednlr": ["temperatures.png"],
    "fedimpro": ["table.png", "epochs.png", "many.png", "divergence.png", "layers.png", "inversion.png"],
    "inco": [
        "decisive.png",
        "coefficients.png",
        "environments.png",
        "distributions.png",
        "groups.png",
        "similarity.png",
        "heatmaps.png",
        "tsne.png",
    ],
}


NO_INTERVAL = {
    "one seed gives no interval",
    "no two methods have two seeds in common",
    "5 seeds would decide it at this spread",  # of rounds, by signs
    "all seeds are equal",
}
"""Why claims of one seed are not decided."""


@pytest.mark.parametrize(
    ("paper", "claims"),
    [
        (
            "fedpart",
            [
                "FedPart beats full updates (FedAvg, averaged statistics, best so far)",
                "full updates beat FedPart (MOON, local statistics, end of cycle)",
                "full updates beat FedPart (FedProx, client 0's statistics, end of cycle)",
                "uplink is 66.7 % of full updates'",
                "sequential order beats reverse",
                "warm-up helps: 1 full round rather than 0 full rounds",
                "gradient norm spikes after full aggregation",
                "gradient norm spikes less after partial aggregation",
            ],
        ),
        (
            "fednlr",
            [
                "FedNLR beats FedAvg on Dirichlet(0.05)",
                "FedDyn + FedNLR beats FedDyn on Shards(2)",
                "FedNLR gains more over FedAvg on Dirichlet(0.05) than on Dirichlet(0.5)",
                "CCVR's refit costs accuracy on Shards(2)",
                "FedDyn + FedNLR is the best of the four on Dirichlet(0.1)",
                "most points are above FedAvg",
                "the second layer has the highest temperature",
                "bound neurons fall more the deeper the layer (FedAvg)",
                "bound neurons fall less with FedNLR than with FedAvg at equal local loss (clients 1 and 2)",
                "Lemma 4's bounds hold for η·q (Eq. 21)",
                "FedNLR beats its own rates permuted on Shards(2)",
                "FedNLR gains at every learning rate",
                "formula beats fixed μ",
                "bound neurons fall less with FedNLR (clients 1 and 2)",
            ],
        ),
        (
            "fedimpro",
            [
                "FedImpro beats FedAvg on digits, Dirichlet(0.1)",
                "FedImpro is the best on digits, Dirichlet(0.05)",
                "FedImpro needs the fewest rounds to FedAvg's best accuracy on digits, Dirichlet(0.1)",
                "FedImpro gains more over FedAvg with Dirichlet(0.05) than with Dirichlet(0.1) on digits",
                "FedDyn + FedImpro beats FedDyn on digits, Dirichlet(0.05)",
                "mean over n + n̂ (C.3) beats the default",
                "FedImpro beats FedAvg with every option",
                "FedImpro is the best on digits, Dirichlet(0.1), E = 5",
                "FedImpro needs the fewest rounds to FedAvg's best accuracy on digits, Dirichlet(0.1), M = 100",
                "FedImpro beats CCVR at the end",
                "SCAFFOLD is better without momentum",
                "a low or middle cut beats the last one",
                "every cut but the last beats FedAvg",
                "noise of 0.5 costs less than a point",
                "FedImpro beats FedAvg at every level of noise",
                "more clients per round improve FedImpro",
                "FedImpro beats FedAvg with few and with many clients per round",
                "the paper's form beats the released one",
                "FedImpro's local models are nearer to each other in the second half of the run",
                "FedImpro's local models are nearer to each other in the second half of the run (loss as a mean)",
                "low layers' divergence shrinks faster than high layers' with FedAvg",
                "FedImpro's local models are better on other clients' data",
                "sampled features bring the clients' features nearer to each other",
                "FedImpro's local models have larger margins than FedAvg's on other clients' data",
                "Theorem 4.1 holds in the mean over visits, C_d = 0 (FedAvg)",
                "images from raw features are nearer to the originals than those from statistics (PSNR)",
            ],
        ),
        (
            "inco",
            [
                "InCo beats HeteroAvg on digits, Dirichlet(0.5)",
                "InCo beats InCo with layer 0 shuffled on digits, Dirichlet(1)",
                "InCo by length alone does as well as InCo, within a point, on digits, Dirichlet(1)",
                "cos(g₀, g) is larger than with layer 0 shuffled",
                "the first layer's gradients are smoother than later layers' are: layer3, "
                "non-IID, different models (GroupAvg)",
                "InCo improves FedAvg on digits",
                "InCo improves HeteroMOON on digits",
                "InCo improves SCAFFOLD on digits",
                "InCo improves MOON on digits",
                "InCo beats GroupAvg",
                "InCo beats HeteroAvg",
                "InCo beats InCo without optimisation",
                "the form 'theorem' beats HeteroAvg on digits",
                "the form 'released, conv2' beats HeteroAvg on digits",
                "the default form is the best over the datasets",
                "InCo beats GroupAvg with noise 1",
                "InCo beats GroupAvg with batch size 8",
                "InCo beats HeteroAvg on ResNet10",
                "InCo beats HeteroAvg with averaged running statistics",
                "models are less alike in layer4 than in layer1: IID, equal models",
                "accuracy is lower: non-IID, equal models, than IID, equal models",
                "InCo's models are more alike than GroupAvg's in layer3 and layer4",
                "β > 0 in more layers and rounds with optimisation than without",
            ],
        ),
    ],
)
def test_smoke(paper: str, claims: list[str], made: Made) -> None:
    found, out = made[paper]
    assert not found.failures
    checks = {check.name: check for check in found.checks}
    assert set(claims) <= set(checks)
    assert {check.told.rpartition("; ")[2] for check in checks.values() if check.holds is None} <= NO_INTERVAL
    assert {check.rule.kind for check in checks.values() if check.holds is not None} <= {"count"}
    tables = [t for s in found.sections for t in s.findings.tables if not t.title.startswith("Rounds to")]
    assert "–" not in {cell for table in tables for row in table.rows[1:] for cell in row}
    report = (out / "report.md").read_text()
    assert f"$ fedstrata reproduce {paper} --scale smoke --out DIR" in report
    assert all(f"| {check.name} | {check.verdict} | {check.told} |" in report for check in found.checks)
    assert "it proves nothing about the paper" in report
    assert str(out) not in report
    assert f"(made on {processor()}; torch {torch.__version__}, " in report
    data = json.loads((out / "report.json").read_text())
    assert [part["name"] for part in data["parts"]] == [part.name for part in PAPERS[paper]("smoke")]
    assert all((out / name).stat().st_size > 5000 for s in found.sections for name in s.findings.pictures)
    assert [name for s in found.sections for name in s.findings.pictures] == PICTURES[paper]


def test_what_fedpart_sends_is_what_its_schedule_says(made: Made) -> None:
    """A cycle of 2 full and 2·2 partial rounds of half the strata each: 2 + 2 of 6 networks up."""
    checks = {check.name: check for check in made["fedpart"][0].checks}
    (share,) = checks["uplink is 66.7 % of full updates'"].values["figure"].values()
    assert share == pytest.approx(4 / 6, abs=0.01)
    assert checks["uplink is 66.7 % of full updates'"].holds


def test_what_is_equal_in_two_parts_is_run_once(made: Made) -> None:
    """Of 71 runs in ten parts, FedAvg and FedImpro on the first setting stand in most of them."""
    _, out = made["fedimpro"]
    grids = [plan(part.values, "out").runs for part in parts("fedimpro", "smoke") if isinstance(part, Grid)]
    assert (sum(map(len, grids)), len(list((out / "runs").iterdir()))) == (71, 53)


def test_inco_and_what_it_is_compared_with_are_run_once(made: Made) -> None:
    """8 decisive, 1 more for coefficients, 13 of the table, 2 of the ablation, 4 forms, 4 disturbed, 3 averaged."""
    _, out = made["inco"]
    grids = [plan(part.values, "out").runs for part in parts("inco", "smoke") if isinstance(part, Grid)]
    assert [len(runs) for runs in grids] == [8, 3, 15, 6, 6, 6, 3, 6]
    assert len(list((out / "runs").iterdir())) == 8 + 1 + 13 + 2 + 4 + 4 + 3


def test_a_second_call_redoes_nothing(made: Made, capsys: Capture) -> None:
    _, out = made["fednlr"]
    before = _times(out)
    report = (out / "report.md").read_text()
    assert fedstrata("reproduce", "fednlr", "--out", out) == 0
    assert "bound neurons fall less with FedNLR" in capsys.readouterr().out
    assert _times(out) == before
    assert (out / "report.md").read_text() == report


def _times(out: Path) -> dict[Path, int]:
    """When every file was written but for the report and its pictures, which are made anew."""
    files = (path for path in out.rglob("*") if path.is_file() and path.suffix != ".png")
    return {path: path.stat().st_mtime_ns for path in files if "report" not in path.name}


def test_some_parts_and_nothing_kept(tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("reproduce", "fedpart", "--only", "trace", "--quiet") == 0
    told = capsys.readouterr().out
    assert "of 2 claims 0 hold, 0 do not hold, 2 are not decided at scale smoke" in told
    assert "cycles:" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fedpar"], "there is no reproduction of 'fedpar' (did you mean 'fedpart'?)"),
        (["fedpart", "--scale", "smal"], "there is no scale 'smal' (did you mean 'small'?)"),
        (["fednlr", "--only", "cycles"], "fednlr has no part 'cycles'"),
        (["fednlr", "--out", __file__], "test_reproduce.py is not a directory"),
        (["fedpart", "--scale", "small"], "--data-dir DIR"),
        (["fednlr", "--scale", "paper"], "FEDSTRATA_DATA"),
        (["fedpart", "--scale", "small", "--data-dir", "nowhere"], "nowhere"),
        (["fednlr", "--scale", "evidence", "--data-dir", "nowhere", "--out", "out"], "nowhere"),
        (["fednlr", "--scale", "evidence", "--data-dir", "nowhere", "--plan"], "nowhere"),
        (["fednlr", "--scale", "small", "--only", "drift", "--data-dir", "nowhere", "--out", "out"], "nowhere"),
        (["fedpart", "--jobs", "0"], "--jobs"),
        (["fedpart", "--parts", "cycle"], "fedpart has no part 'cycle' (did you mean 'cycles'?)"),
        (["fedpart", "--seeds", "0"], "--seeds 0: there must be 1 or more"),
        (["fedpart", "--seeds", "-3"], "--seeds -3: give a number of seeds"),
        (["fedpart", "--seeds", "1,1"], "a seed is given twice"),
        (["fedpart", "--seeds", "many"], "--seeds many: give a number of seeds"),
        (["fedpart", "--set", "round=3"], "--set round=3: there is no field 'round' (did you mean 'rounds'?)"),
        (["fedpart", "--set", "rounds"], "--set rounds: write it like name=value"),
        (["fedpart", "--set", "rounds=3", "--parts", "warmup"], "the part 'warmup' gives its runs several values"),
        (["fedpart", "--set", "rounds=none", "--parts", "cycles"], "rounds"),
        (["fedpart", "--set", "seed=3"], "--set seed=3: use --seeds"),
        (["fednlr", "--set", "method=fedavg"], "the methods are what is compared"),
        (["fednlr", "--set", "lr=1", "--parts", "lr"], "the part 'lr' gives its runs several values of lr"),
        (["fedpart", "--plan", "--no-run"], "exclude each other"),
        (["fedpart", "--no-run"], "--out DIR"),
        (["fedpart", "--no-run", "--out", "nowhere"], "--out DIR"),
        ([], "PAPER"),
    ],
    ids=" ".join,
)
def test_wrong_input(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("reproduce", *words) == 2
    assert said in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install 'fedstrata\\[report\\]'"):
        reproduce("fedpart", out="out")
    assert list(tmp_path.iterdir()) == []


def test_without_optimal_transport_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ot", None)
    with pytest.raises(UsageError, match="pip install 'fedstrata\\[probes\\]'"):
        reproduce("fedimpro", out="out")
    assert list(tmp_path.iterdir()) == []
    assert [part.name for part in parts("fedimpro", "smoke", ["inversion"])] == ["inversion"]


# --- the plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "scale"),
    [(paper, scale) for paper in PAPERS for scale in SCALES if (paper, scale) != ("together", "paper")],
)
def test_every_scale_can_be_planned(paper: str, scale: str) -> None:
    """Every configuration is valid, and every one would be built but for its data."""
    for part in PAPERS[paper](scale):
        if isinstance(part, Grid):
            runs = plan(part.values, "out").runs
            assert len(runs) >= 2
            assert {run.config.seed for run in runs} == set(part.values["seed"])
        else:
            config = validate_settings(RunConfig, {**part.settings["run"], "seed": part.seeds[0]})
            assert config.model


def test_the_papers_settings() -> None:
    cycles, _, warmup, trace = parts("fedpart", "paper")
    assert isinstance(cycles, Grid)
    assert isinstance(warmup, Grid)
    assert isinstance(trace, OwnWork)
    runs = plan(cycles.values, "out").runs
    assert len(runs) == 2 * 3 * 2 * 3
    assert {run.config.rounds for run in runs} == {100}
    assert {run.config.eval_every for run in runs} == {1}
    assert {(run.config.clients, run.config.epochs, run.config.optimizer) for run in runs} == {(40, 8, "adam")}
    assert {run.buffers for run in runs} == {"average", "local"}
    assert [run.config.rounds for run in plan(warmup.values, "out").runs[::3]] == [80, 85, 140]
    assert trace.settings["methods"]["FedPart"] == "fedpart"


def test_fedimpros_settings() -> None:
    """Table 5: lr 0.1 but for SCAFFOLD; table 3: after the 5th, 9th, 13th and 17th convolution."""
    names = ["table", "split", "noise", "selected"]
    table, split, noise, selected = parts("fedimpro", "paper", names)
    assert isinstance(table, Grid)
    assert isinstance(split, Grid)
    assert isinstance(noise, Grid)
    assert isinstance(selected, Grid)
    runs = plan(table.values, "out").runs
    assert len(runs) == 8 * 2 * 2 * 3
    assert {(run.config.rounds, run.config.batch_size, run.config.participation) for run in runs} == {(1000, 128, 5)}
    assert {run.label for run in runs if run.config.lr != 0.1} == {"SCAFFOLD"}
    model = build_model("resnet18", (3, 32, 32), 10)
    convs = [s.params[0] for s in strata(model) if s.stage != "head" and "shortcut" not in s.name]
    cuts = [entry["method"] for entry in split.values["method"][1:]]
    places = [run.label.removeprefix("after ") for run in plan(split.values, "out").runs[3::3]]
    assert [len(convs) - len(set(upper(model, place)) & set(convs)) for place in places] == [5, 9, 13, 17]
    assert cuts[1] == "fedimpro"
    assert len(noise.values["method"]) == 1 + 7
    assert selected.values["participation"] == [5, 10]


def test_incos_settings() -> None:
    """Appendix F.3: 500 rounds, 5 epochs, batches of 64, Adam with 0.001; Appendix E.1: 10 clients, 50 rounds."""
    found = {part.name: part for part in parts("inco", "paper")}
    table, images, alike = found["table"], found["table-fashion-mnist"], found["similarity"]
    assert isinstance(table, Grid)
    assert isinstance(images, Grid)
    assert isinstance(alike, OwnWork)
    runs = plan(table.values, "out").runs
    assert len(runs) == 5 * 3 * 3
    assert {run.config.augment for run in runs} == {"crop + flip + cutout(size=16, fill=(0.4914, 0.4822, 0.4465))"}
    assert {run.config.augment for run in plan(images.values, "out").runs} == {"none"}
    assert {(run.config.clients, run.config.participation, run.config.rounds) for run in runs} == {(100, 0.1, 500)}
    assert {(run.config.epochs, run.config.batch_size, run.config.lr) for run in runs} == {(5, 64, 0.001)}
    depths = (10, 14, 18, 22, 26)
    assert {run.config.archs for run in runs} == {"; ".join(f"resnet{d}(stem='7x7', maxpool=True)" for d in depths)}
    methods = {run.label: run.config.method for run in runs}
    assert methods["FedAvg"] == "fedavg(weight='uniform') + groupavg"
    assert methods["HeteroProx"] == "fedprox(mu=0.1) + heteroavg"
    assert methods["FedProx + InCo"] == "fedprox(mu=0.1) + heteroavg + inco(reference='conv2')"
    assert inco_method(form="theorem", normalise=False) == "heteroavg + inco(form='theorem', normalise=False)"
    assert [alike.settings["run"][name] for name in ("clients", "rounds", "participation")] == [10, 50, 1.0]


@pytest.mark.parametrize("scale", SCALES)
def test_a_cycle_has_as_many_rounds_as_the_model_has_strata(scale: str) -> None:
    settings = FEDPART[scale]
    model = build_model(settings.run["model"], (1, 8, 8) if scale == "smoke" else (3, 32, 32), 10)
    assert len(strata(model)) == settings.strata
    assert settings.cycle == {"smoke": 6}.get(scale, 25)
    assert settings.share == pytest.approx({"smoke": 4 / 6}.get(scale, 0.28))


# --- norms -----------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {**FEDPART["smoke"].run, "rounds": 3, "steps": 4, "buffers": "local"}


def test_a_trace_changes_nothing() -> None:
    config = validate_settings(RunConfig, {**RUN, "method": "fedpart(full_rounds=1, group=5)"})
    plain = open_run(config, None).fit()
    federation = build_federation(config, GradientTrace())
    found = measure_norms(federation)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, federation.model.state_dict()[name]), name
    assert [len(steps) for steps in found["norms"]] == [4, 4, 4]
    assert [len(names) for names in found["active"]] == [10, 5, 5]
    assert all(value > 0 for steps in found["norms"] for value in steps)


def test_the_first_norm_is_the_gradients() -> None:
    """One client, one step over all of its data: the norm is that of the mean loss's gradient at the first model."""
    config = validate_settings(
        RunConfig, {**RUN, "model": "logreg", "clients": 1, "rounds": 1, "steps": 1, "batch_size": 2000}
    )
    federation = build_federation(config, GradientTrace())
    model, (data,) = federation.model, federation.clients
    x, y = data.batch(torch.arange(len(data)))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    wanted = gradient_norm({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert measure_norms(federation)["norms"][0] == [pytest.approx(float(wanted), rel=1e-4)]


def test_a_smaller_last_batch_is_left_out() -> None:
    """200 examples in batches of 120 are one batch and a rest of 80; of three steps the first and third count."""
    config = validate_settings(RunConfig, {**RUN, "model": "logreg", "rounds": 1, "steps": 3, "batch_size": 120})
    assert [len(steps) for steps in measure_norms(build_federation(config, GradientTrace()))["norms"]] == [2]


def test_jumps_are_between_rounds_of_the_same_strata() -> None:
    """Rounds a+b, a+b, a, a, b: full 3/1 (the mean of 2 and 4 over that of 1 and 1), partial 6/3; a → b is none."""
    found = {
        "norms": [[9.0, 1.0, 1.0], [2.0, 4.0, 8.0], [5.0, 2.0, 4.0], [5.0, 7.0, 1.0], [9.0, 9.0, 9.0]],
        "active": [["a", "b"], ["a", "b"], ["a"], ["a"], ["b"]],
    }
    assert [(jump.round, jump.full, jump.ratio) for jump in jumps(found, 2)] == [(1, True, 3.0), (3, False, 2.0)]


# --- layers ----------------------------------------------------------------------------------------------------------

IMPRO: dict[str, Any] = {**FEDIMPRO["smoke"].run, "participation": 2, "method": "fedimpro(split='layer1')"}


def test_watching_changes_nothing() -> None:
    config = validate_settings(RunConfig, IMPRO)
    plain = open_run(config, None).fit()
    federation = build_federation(config, LocalModels())
    found = measure_divergence(federation, 2)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, federation.model.state_dict()[name]), name
    assert len(found["whole"]) == config.rounds
    assert list(found["stages"]) == ["stem", "layer1", "layer2", "layer3", "head"]
    for kind in ("strata", "stages"):
        for at, value in enumerate(found["whole"]):
            assert 0 < max(curve[at] for curve in found[kind].values()) <= value * (1 + 1e-6)


def test_local_models_are_what_the_server_averages() -> None:
    """The last round's local models, weighted by their examples, are the last global model, statistics and all."""
    federation = build_federation(validate_settings(RunConfig, IMPRO), LocalModels())
    measure_divergence(federation, 1)
    local = read_local_models(federation.state.techniques["watch"])
    assert sorted(local) == federation.records[-1].clients
    sizes = {client: len(federation.clients[client]) for client in local}
    for name, tensor in (*federation.state.params.items(), *federation.state.buffers.items()):
        if tensor.is_floating_point():
            mean = sum(sizes[c] * tensors[name] for c, tensors in local.items()) / sum(sizes.values())
            torch.testing.assert_close(mean, tensor, rtol=1e-4, atol=1e-6)


def test_shared_features_are_those_of_the_statistics() -> None:
    """Classes 0 and 2 are known, with means 1 and 5 and variances 0 and 4."""
    state = {
        "known": torch.tensor([1, 0, 1], dtype=torch.uint8),
        "mean": torch.tensor([[1.0], [9.0], [5.0]]).expand(3, 4),
        "variance": torch.tensor([[0.0], [9.0], [4.0]]).expand(3, 4),
    }
    labels = balanced_labels(state, 2001)
    features = shared_features(state, labels, torch.Generator().manual_seed(0))
    assert labels.bincount().tolist() == [1001, 0, 1000]
    assert torch.equal(features[labels == 0], torch.ones(1001, 4))
    assert float(features[labels == 2].mean()) == pytest.approx(5, abs=0.1)
    assert float(features[labels == 2].std()) == pytest.approx(2, abs=0.1)


def test_what_shared_features_change_can_go_either_way() -> None:
    """Sampled with a wide spread, features are further apart than the clients' own, and gradients differ more."""
    federation = build_federation(validate_settings(RunConfig, IMPRO), LocalModels())
    federation.fit()
    model, clients = federation.model, list(federation.clients)
    state = federation.state.techniques["fedimpro"]
    wild = {**state, "variance": state["variance"] * 1e4}
    near, far = (distances(model, clients, "layer1", s, 20, 0) for s in (state, wild))
    assert far["own"] == near["own"]
    assert near["shared"]["covered"] == near["own"]["covered"]
    assert near["shared"]["value"] < near["own"]["value"] * 2
    assert far["shared"]["value"] > near["own"]["value"] * 5
    calm, rough = (variances(model, clients, "layer1", s, 0)["shared"] for s in (state, wild))
    assert rough["high"] > calm["high"] * 1.01
    assert rough["low"] == calm["low"]


def _layers(divergence: float, low: list[float], high: list[float], others: float) -> dict[str, Any]:
    curves = {"strata": {"a": low, "b": high}, "stages": {"a": low, "b": high}}
    shared = {"own": {"low": 1.0, "high": 4 * divergence}, "shared": {"low": 1.0, "high": divergence}}
    distance = {"own": {"value": 2.0, "covered": 0.5}, "shared": {"value": 1.0, "covered": 1.0}}
    quality = {"others": others, "averaged": others + 0.05, "own": 0.9, "global": 0.5}
    return {"whole": [9.0, divergence], **curves, **quality, "variance": shared, "distance": distance}


def test_layers_are_judged() -> None:
    """Low layers end at 1/4 of their maximum, high ones at 1/2; FedImpro's models are at 1 and not at 3."""
    avg = _layers(3.0, [4.0, 1.0], [2.0, 1.0], 0.3)
    impro = _layers(1.0, [4.0, 1.0], [2.0, 1.0], 0.4)
    good = {"FedAvg": avg, "FedImpro": impro, "high": ["b"]}
    found = assess_divergence(dict.fromkeys(range(5), good), ["FedAvg", "FedImpro"], 2)
    assert [check.holds for check in found.checks] == [True] * 7
    assert found.checks[0].figures.startswith("3.0000 ± 0.0000 against 1.0000 ± 0.0000, +2.0000")
    assert found.checks[1].figures.startswith("0.5000 ± 0.0000 against 0.2500 ± 0.0000, +0.2500")
    assert found.checks[4].figures.startswith("-5.00 ± 0.00 points against -15.00 ± 0.00 points, +10.00 ± 0.00 points")
    bad = {"FedAvg": impro, "FedImpro": avg, "high": ["a"]}
    found = assess_divergence(dict.fromkeys(range(5), bad), ["FedAvg", "FedImpro"], 2)
    assert [check.holds for check in found.checks] == [False] * 5 + [True, True]


def test_a_run_has_as_many_workers_as_the_bench_unless_it_says_so() -> None:
    run = {"method": "fedavg"}
    assert build_config({"run": run}, 3, PartResources("data", 2)).workers == 2
    config = build_config({"run": {**run, "workers": 1}}, 3, PartResources("data", 2), method="fednova")
    assert (config.workers, config.seed, config.data_dir, config.method) == (1, 3, "data", "fednova")


def test_images_are_kept_as_text() -> None:
    images = torch.arange(24.0).view(2, 3, 2, 2) / 23
    assert (decode_images(encode_images(images), [2, 3, 2, 2]) - images).abs().max() <= 0.5 / 255


# --- clients of different depth --------------------------------------------------------------------------------------

DEPTHS: dict[str, Any] = {
    **INCO["smoke"].run,
    **INCO["smoke"].models,
    "steps": 2,
    "dataset": INCO["smoke"].datasets[0],
    "buffers": "average",
}


def test_accuracy_is_the_mean_over_architectures(made: Made) -> None:
    """Of the last evaluations only: (0.2 + 0.4)/2 and (0.6 + 0.8)/2, and 0.4 and 0.8 of the second one."""
    (record, *_) = read_finished_records(next((made["inco"][1] / "runs").iterdir()))
    rounds = [
        replace(record, arch_accuracy=dict(zip("ab", pair, strict=True)) if pair else {})
        for pair in ((0.9, 0.9), (0.2, 0.4), (), (0.6, 0.8))
    ]
    assert clients_accuracy(2)(rounds) == pytest.approx(0.5)
    assert clients_accuracy(1)(rounds) == pytest.approx(0.7)
    assert arch_accuracy("b", 2)(rounds) == pytest.approx(0.6)
    assert clients_accuracy(2)(rounds[2:3]) is None
    assert arch_accuracy("c", 2)(rounds) is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heteroavg + inco", "groupavg"])
def test_looking_at_clients_of_different_depth_changes_nothing(method: str) -> None:
    config = validate_settings(RunConfig, {**DEPTHS, "method": method})
    plain = open_run(config, None).fit()
    run = observe_archs(config)
    found = measure_similarity(run.federation)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, run.federation.model.state_dict()[name]), name
    last = plain.records[-1].arch_accuracy.values()
    assert found["accuracy"] == pytest.approx(sum(last) / len(last))
    assert bool(found["positive"]) is ("inco" in method)
    assert found["positive"].keys() == found["theta"].keys()
    assert all(0 <= share <= 1 for share in found["positive"].values())


@pytest.mark.parametrize(("method", "name"), [("heteroavg", "{}"), ("groupavg", "resnet10_width_2_0.{}")])
def test_local_models_of_different_depth(method: str, name: str) -> None:
    """The stem's mean over the clients that share it is the server's; each local model is as deep as its client's."""
    run = observe_archs(validate_settings(RunConfig, {**DEPTHS, "method": f"{method} + fedavg(weight='uniform')"}))
    measure_similarity(run.federation)
    local = run.local()
    assert [len(list(model.parameters())) for model in local] == [len(list(m.parameters())) for m in run.models]
    sharing = local if method == "heteroavg" else local[:2]
    for key in ("stem.conv.weight", "stem.norm.running_mean"):
        mean = torch.stack([model.state_dict()[key] for model in sharing]).mean(0)
        state = {**run.federation.state.params, **run.federation.state.buffers}
        torch.testing.assert_close(mean, state[name.format(key)], rtol=1e-4, atol=1e-6)


def test_a_model_is_filled_with_a_groups_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    copied = fill_model(model, {"group_0.0.weight": torch.ones(1, 2), "0.bias": torch.zeros(1)})
    assert {name: tensor.tolist() for name, tensor in copied.state_dict().items()} == {
        "0.weight": [[1.0, 1.0]],
        "0.bias": [0.0],
    }
    assert model[0].weight.tolist() != [[1.0, 1.0]]


def test_without_running_statistics_local_models_have_none() -> None:
    run = observe_archs(validate_settings(RunConfig, {**DEPTHS, "rounds": 1, "method": "heteroavg", "buffers": "drop"}))
    measure_similarity(run.federation)
    assert not any("running" in name for model in run.local() for name in model.state_dict())
    assert any("running" in name for name in run.models[0].state_dict())


def _case(accuracy: float, alike: float, positive: float = 0.5) -> dict[str, Any]:
    """Stage b is half as alike as stage a; two layers of stage a and one of b, with β > 0 in so many rounds."""
    means = {"a": alike, "b": alike / 2}
    layers = {"a.1": positive, "a.2": positive, "b.1": 0.2}
    matrices = {stage: [[1.0, mean], [mean, 1.0]] for stage, mean in means.items()}
    drawn = {"points": [[0.0, 1.0]], "labels": [0], "clients": [0]}
    return {
        "accuracy": accuracy,
        "means": means,
        "matrices": matrices,
        "positive": layers,
        "theta": layers,
        "map": drawn,
    }


def test_likeness_is_judged() -> None:
    values = (0.8, 0.6, 0.5)
    cases = {label: _case(value, value) for label, value in zip(HARDER, values, strict=True)}
    cases |= {HETERO: _case(0.6, 0.7), CROSSED: _case(0.7, 0.8, 0.8), PLAIN_INCO: _case(0.6, 0.7, 0.5)}
    found = assess_similarity(dict.fromkeys(range(5), cases))
    assert [check.holds for check in found.checks] == [True] * 10
    assert found.checks[0].figures.startswith("0.8000 ± 0.0000 against 0.4000 ± 0.0000, +0.4000")
    assert found.checks[-2].figures.startswith("0.6000 ± 0.0000 against 0.3750 ± 0.0000, +0.2250")
    assert found.checks[-1].figures.startswith("60.00 ± 0.00 % against 40.00 ± 0.00 %, +20.00 ± 0.00 points")
    found = assess_similarity({0: cases})
    assert [row[1:] for row in found.tables[1].rows] == [
        ("80.00", "50.00", "0.8000"),
        ("20.00", "20.00", "0.2000"),
        ("60.00", "40.00", "0.6000"),
    ]
    turned = dict(zip(HARDER, (cases[label] for label in reversed(HARDER)), strict=True))
    turned |= {HETERO: _case(0.6, 0.1), CROSSED: _case(0.7, 0.1, 0.3), PLAIN_INCO: cases[PLAIN_INCO]}
    assert turned[GROUP] is cases[HARDER[0]]
    found = assess_similarity(dict.fromkeys(range(5), turned))
    assert [check.holds for check in found.checks] == [True] * 3 + [False] * 7
