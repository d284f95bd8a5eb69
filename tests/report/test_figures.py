"""The data of figures, against numbers worked out by hand; and that Plotly accepts every one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report import evaluation_figures, feature_figures, figures, stratum_figures
from fedstrata.report.figures import Figure
from fedstrata.report.run_groups import RunGroup, group_runs, merge_orders
from fedstrata.report.sections import figure_sections
from fedstrata.runs.reader import SavedRun

from .synthetic import THREE, config, saved, write_comparison


def curves_of(figure: Figure, *at: int) -> list[dict[str, Any]]:
    return [trace for trace in figure.traces(*at) if not trace.get("meta", {}).get("band")]


def test_runs_that_differ_only_in_their_seed_are_one_line() -> None:
    runs = [saved([0.1], seed=0), saved([0.2], seed=1, engine="wire"), saved([0.3], method="fedprox")]
    lines = group_runs(runs)
    assert [(line.name, line.seeds) for line in lines] == [("fedavg", [0, 1]), ("fedprox", [0])]


def test_what_was_probed_makes_no_line_of_its_own() -> None:
    """Pictures of one run are of the seed that used the probe."""
    found = {"before": [0.5], "after": [0.25]}
    one = saved([0.1], [{"round": 1, "divergence": {"a": 1.0}}], probe="divergence", probe_every=5)
    two = saved([0.2], [{"round": 1, "calibration": found}], seed=1, probe="calibration")
    lines = group_runs([one, two])
    assert [(line.name, line.seeds) for line in lines] == [("fedavg", [0, 1])]
    (figure,) = feature_figures.calibration(lines)
    assert [trace["y"] for trace in figure.traces(0, 0)] == [[0.5], [0.25]]
    (section,) = [section for section in figure_sections(lines) if section.name == "forgetting"]
    assert section.about.endswith("Class by class is of seed 1 alone.")


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([], ""),
        (["abd", "abcd"], "abcd"),
        (["abcd", "abd"], "abcd"),
        (["cd", "abcd"], "abcd"),
        (["ad", "abcd", "bxd"], "abxcd"),
        (["ab", "cd"], "abcd"),
        (["aba"], "ab"),
    ],
)
def test_orders_are_merged(orders: list[str], expected: str) -> None:
    assert "".join(merge_orders(orders)) == expected


def test_strata_of_models_that_differ_stand_in_the_order_of_both() -> None:
    runs = []
    for names in (["stem", "layer1", "head"], ["stem", "layer1", "layer2", "head"]):
        facts = {"model": {"strata": [{"name": name, "stage": name} for name in names]}}
        probes = [{"round": 1, "divergence": dict.fromkeys(reversed(names), 1.0)}]
        runs.append(saved([0.1], probes, model=f"net{len(names)}", facts=facts))
    heat, _ = stratum_figures.divergence(group_runs(runs))
    assert heat.traces(0, 0)[0]["y"] == ["stem", "layer1", "layer2", "head"]


@pytest.mark.parametrize("told", [False, True])
def test_a_stage_that_comes_later_stands_at_its_place(told: bool) -> None:
    stages = ["stem", "stage1", "head"]
    facts = {"model": {"strata": [{"name": f"{stage}.conv", "stage": stage} for stage in stages]}} if told else {}
    rows = []
    for at, held in enumerate((["stem", "head"], ["stage1"] if told else stages), 1):
        by_stage = dict.fromkeys(held, 0.5)
        found = {"mean": by_stage, "matrix": {stage: [[1.0]] for stage in held}}
        rows.append({"round": at, "clients": [0], "cka": found, "drift": {"held": by_stage, "missing": by_stage}})
    lines = group_runs([saved([0.1], rows, facts=facts)])
    depth, pairs = feature_figures.cka(lines)
    (drift,) = feature_figures.drift(lines)
    assert depth.traces(0)[0]["x"] == stages
    assert pairs.titles == tuple(stages)
    assert drift.traces(0)[0]["x"] == stages


def test_stages_without_parameters_stand_at_their_place() -> None:
    facts = {"model": {"strata": [{"name": f"{stage}.conv", "stage": stage} for stage in ("stem", "stage1", "head")]}}
    stages = ["stem", "pool", "stage1", "flatten", "head"]
    (depth,) = feature_figures.cka(
        group_runs([saved([0.1], [{"round": 1, "cka": {"mean": dict.fromkeys(stages, 0.5)}}], facts=facts)])
    )
    assert depth.traces(0)[0]["x"] == stages


def test_a_stage_that_only_another_seed_has_stands_at_its_place() -> None:
    runs = [
        saved([0.1], [{"round": 1, "cka": {"mean": dict.fromkeys(stages, 0.5)}}], seed=seed)
        for seed, stages in enumerate((["stem", "head"], ["stem", "stage1", "head"]))
    ]
    (depth,) = feature_figures.cka(group_runs(runs))
    assert depth.traces(0)[0]["x"] == ["stem", "stage1", "head"]


def test_what_may_be_negative_has_no_logarithm() -> None:
    row = {"round": 1, "divergence": {"a": 1.0}, "cosine": {"a": -0.5}, "drift": {"held": {"a": -0.1}}}
    row["cka"] = {"mean": {"a": -0.01}}
    lines = group_runs([saved([0.1], [row])])
    for figure in stratum_figures.divergence(lines):
        assert figure.as_dict()["linear"] == ["cosine of updates"]
        assert figure.by[0].values == ("gradient divergence", "cosine of updates")
    (drift,) = feature_figures.drift(lines)
    (cka,) = feature_figures.cka(lines)  # it is the unbiased one
    assert not drift.log
    assert not cka.log


def test_lines_of_one_method_are_told_apart_by_what_differs() -> None:
    lines = group_runs([saved([0.1], lr=0.1), saved([0.2], lr=0.5)])
    assert [line.name for line in lines] == ["fedavg, lr=0.1", "fedavg, lr=0.5"]


def test_the_same_run_twice_is_two_lines() -> None:
    first, second = saved([0.1]), SavedRun("again", config(), saved([0.2]).records)
    assert [line.name for line in group_runs([first, second])] == ["fedavg [run]", "fedavg [again]"]


def test_long_names_are_short_in_a_legend_and_stay_distinct() -> None:
    long = "fedavg(buffers='drop') + heteroavg + inco(normalise=False, optimise=True)"
    (line,) = group_runs([saved([0.1], method=long)])
    assert line.name == long
    assert len(line.label) <= 45
    twins = group_runs([saved([0.1], method=f"{'a' * 40}{n}{'b' * 40}") for n in (1, 2)])
    assert twins[0].label != twins[1].label


def test_accuracy_is_the_mean_over_seeds_with_its_range() -> None:
    """Two seeds: (0.2 + 0.4) / 2 = 0.3 after round 1; round 2 is not evaluated; only seed 0 has round 3."""
    lines = group_runs([saved([0.2, None, 0.6], seed=0), saved([0.4, None], seed=1)])
    (figure,) = figures.metrics(lines)
    (trace,) = curves_of(figure)
    assert (trace["x"], trace["y"]) == ([1, 3], [0.3, 0.6])
    assert trace["customdata"] == [[1, 0.2, 0.4, 2], [3, 0.6, 0.6, 1]]
    (band,) = [t for t in figure.data if t.get("fill")]
    assert (band["x"], band["y"]) == ([1, 3, 3, 1], [0.4, 0.6, 0.6, 0.2])


def test_one_seed_has_no_band() -> None:
    (figure,) = figures.metrics(group_runs([saved([0.2, 0.3])]))
    assert [trace.get("fill") for trace in figure.data] == [None]


def test_bytes_and_operations_are_cumulated() -> None:
    """Every round sends 1000 + 500 bytes and computes a million operations, in rounds without evaluation too."""
    lines = group_runs([saved([0.2, None, 0.6])])
    by_bytes, by_flops = figures.against_costs(lines)
    assert curves_of(by_bytes)[0]["x"] == [1500, 4500]
    assert curves_of(by_flops)[0]["x"] == [1e6, 3e6]
    assert curves_of(by_bytes)[0]["y"] == [0.2, 0.6]


def test_loss_has_a_frame_for_test_and_one_for_training() -> None:
    (figure,) = figures.loss(group_runs([saved([0.2, 0.3])]))
    assert figure.by[0].values == ("test loss", "training loss")
    assert figure.traces(0)[0]["y"] == [0.2, 0.3]
    assert figure.traces(1)[0]["y"] == [1.0, 1.0]


def test_partition_has_a_row_for_each_class() -> None:
    facts = {"counts": [[4, 0], [1, 9], [0, 16]], "class_names": ["cat", "cat"]}
    (figure,) = figures.partition(group_runs([saved([0.1], facts=facts)]))
    (trace,) = figure.traces(0)
    assert trace["y"] == ["cat", "cat (2)"]
    assert trace["customdata"] == [[4, 1, 0], [0, 9, 16]]
    assert trace["z"] == [[2, 1, 0], [0, 3, 4]]


def test_divergence_is_the_mean_over_seeds_stratum_by_stratum() -> None:
    facts = {"model": {"strata": [{"name": "stem", "stage": "stem"}, {"name": "head", "stage": "head"}]}}
    one = [{"round": 2, "divergence": {"head": 1.0, "stem": 3.0}}, {"round": 4, "divergence": {"head": 2.0}}]
    two = [{"round": 2, "divergence": {"head": 2.0, "stem": 5.0}}]
    lines = group_runs([saved([0.1], one, seed=0, facts=facts), saved([0.1], two, seed=1, facts=facts)])
    heat, profile = stratum_figures.divergence(lines)
    (trace,) = heat.traces(0, 0)
    assert (trace["x"], trace["y"]) == ([2, 4], ["stem", "head"])
    assert trace["z"] == [[4.0, None], [1.5, 2.0]]
    assert heat.cursor == profile.by[1]
    assert profile.traces(0, 0)[0]["x"] == [4.0, 1.5]
    assert profile.traces(0, 1)[0]["x"] == [None, 2.0]


@pytest.mark.parametrize(
    ("rounds", "ticks"),
    [([2, 4, 6], [2, 4, 6]), (range(1, 21), [2, 5, 8, 11, 14, 17, 20]), ([], [])],
)
def test_ticks_of_a_heat_map_are_at_its_cells(rounds: list[int], ticks: list[int]) -> None:
    """Of probed rounds 2, 4, 6 there is nothing at 5; of many rounds every third is named, counted from the last."""
    assert figures.cell_rounds_axis(rounds)["tickvals"] == ticks


def test_one_control_chooses_the_method_of_both_pictures_of_classes() -> None:
    """Two lists that are both called "Method" stood beside each other."""
    two = [replace(saved([0.5], method=m), evaluation={"confusion": [[3, 1], [0, 4]]}) for m in ("fedavg", "moon")]
    lines = group_runs(two)
    (confusion,), (scores,) = evaluation_figures.confusion(lines), evaluation_figures.class_scores(lines)
    assert confusion.by == scores.by
    assert confusion.by[0].values == ("fedavg", "moon")


def test_gradient_norms_of_all_strata_and_the_jump() -> None:
    """‖(3, 4)‖ = 5 alone, ‖(6, 8)‖ = 10 averaged: the jump is 2."""
    found = {"alone": {"a": [3.0, 1.0], "b": [4.0, 0.0]}, "averaged": {"a": [6.0, 1.0], "b": [8.0, 0.0]}}
    spike, steps = stratum_figures.gradnorm(group_runs([saved([0.1], [{"round": 1, "gradnorm": found}])]))
    assert curves_of(spike, 0)[0]["y"] == [2.0]
    assert [trace["y"] for trace in steps.traces(0, 0)] == [[5.0, 1.0], [10.0, 1.0]]
    assert [trace["y"] for trace in steps.traces(1, 0)] == [[3.0, 1.0], [6.0, 1.0]]


def test_the_jump_is_thinned_in_long_runs() -> None:
    found = {"alone": {"a": [1.0]}, "averaged": {"a": [3.0]}}
    rows = [{"round": at, "gradnorm": found} for at in range(1, 1001)]
    spike, _ = stratum_figures.gradnorm(group_runs([saved([0.1], rows)]))
    for stratum in (0, 1):
        (trace,) = curves_of(spike, stratum)
        assert (trace["x"][0], trace["x"][-1], len(trace["x"])) == (1, 1000, stratum_figures.MOST_ROUNDS)
    assert "in that round, for a client that goes on alone" in spike.about
    assert spike.about.endswith("Some rounds are left out.")


def test_cka_of_the_clients_that_took_part() -> None:
    found = {"mean": {"stem": 0.5}, "matrix": {"stem": [[1.0, 0.12345], [0.12345, None]]}}
    depth, pairs = feature_figures.cka(group_runs([saved([0.1], [{"round": 1, "clients": [3, 7], "cka": found}])]))
    assert depth.traces(0)[0]["y"] == [0.5]
    (trace,) = pairs.traces(0, 0)
    assert trace["z"] == [[1.0, 0.123], [0.123, None]]
    assert trace["x"] == ["client 3", "client 7"]


def test_many_large_matrices_are_thinned_evenly() -> None:
    matrix = [[0.5] * 40] * 40
    rows = [{"round": r, "clients": list(range(40)), "cka": {"matrix": {"a": matrix}}} for r in range(1, 301)]
    (pairs,) = feature_figures.cka(group_runs([saved([0.1], rows)]))
    rounds = list(map(int, pairs.by[1].values))
    assert (rounds[0], rounds[-1], len(rounds)) == (1, 300, 150_000 // 1600)
    assert "some rounds are left out" in pairs.about


def test_embedding_is_coloured_by_class_or_by_client() -> None:
    found = {"points": [[0, 1], [2, 3], [4, 5]], "labels": [1, 0, 1], "clients": [7, 7, 8]}
    run = saved([0.1], [{"round": 1, "embedding": found}], facts={"class_names": ["cat", "dog"]})
    (figure,) = feature_figures.embedding(group_runs([run]))
    assert [(t["name"], t["x"]) for t in figure.traces(0, 0)] == [("cat", [2.0]), ("dog", [0.0, 4.0])]
    assert [(t["name"], t["x"]) for t in figure.traces(0, 1)] == [("client 7", [0.0, 2.0]), ("client 8", [4.0])]


def test_runs_without_rounds_and_without_probes_have_no_figures() -> None:
    assert figure_sections(group_runs([saved([])])) == []
    assert [section.name for section in figure_sections(group_runs([saved([0.1])]))] == ["results", "curves"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[RunGroup]:
    directory: Path = write_comparison(tmp_path_factory.mktemp("runs") / "three", rounds=4)
    return group_runs([SavedRun.read(path) for path in sorted(directory.iterdir())])


def test_every_section_is_there_once_everything_is_probed(lines: list[RunGroup]) -> None:
    names = [section.name for section in figure_sections(lines)]
    assert names[:6] == ["results", "layers", "one-by-one", "partition", "curves", "ranking"]
    assert names[6:9] == ["architectures", "gradients", "similarity"]
    assert names[9:] == ["forgetting", "drift", "statistics", "crossing", "embedding"]
    assert len(lines) == len(THREE)


def test_no_two_figures_have_one_name(lines: list[RunGroup]) -> None:
    """A page keeps figures by name: of two, one would be drawn in both places."""
    run = lines[0].runs[0]
    bins = {"count": [4], "confidence": [0.5], "right": [0.5], "ece": 0.1}
    judged = replace(run, evaluation={"calibration": bins})
    names = [figure.name for section in figure_sections(group_runs([judged])) for figure in section.figures]
    assert "reliability" in names
    assert len(set(names)) == len(names)


def test_pictures_of_one_seed_say_so(lines: list[RunGroup]) -> None:
    about = {section.name: section.about for section in figure_sections(lines)}
    assert about["similarity"].endswith("Client by client is of seed 0 alone.")
    assert "alone" not in about["curves"]


def test_plotly_accepts_every_figure_in_every_state(lines: list[RunGroup]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for section in figure_sections(lines):
        for figure in section.figures:
            for at in product(*(range(len(control.values)) for control in figure.by)):
                graph_objects.Figure(data=figure.traces(*at), layout=figure.layout)
