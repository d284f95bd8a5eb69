"""Verdicts: the rule against numbers worked out by hand, and the committed reports recounted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedstrata.reproduce.claims import Check, above, always_above, best, beyond, counted, fewest, within
from fedstrata.reproduce.report import claim_as_dict
from fedstrata.reproduce.verdicts import (
    Rule,
    chance,
    count_signs,
    judge,
    judge_figure,
    judge_signs,
    seeds_to_decide,
    t_interval,
    t_quantile,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FIVE = range(5)


def equal(value: float) -> dict[int, float]:
    """Five seeds with the same figure."""
    return dict.fromkeys(FIVE, value)


# --- the interval ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "confidence", "value"),
    [(1, 0.9, 6.3138), (2, 0.9, 2.9200), (4, 0.9, 2.1318), (4, 0.95, 2.7764), (9, 0.9, 1.8331), (29, 0.95, 2.0452)],
)
def test_quantiles_are_those_of_the_printed_tables(degrees: int, confidence: float, value: float) -> None:
    assert t_quantile(degrees, confidence) == pytest.approx(value, abs=5e-5)


def test_an_interval_by_hand() -> None:
    """1, 2, 3, 4, 5: mean 3, s = √2.5, t = 2.1318: 3 ± 2.1318·1.5811/2.2361 = 3 ± 1.5074."""
    assert t_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((1.4926, 4.5074), abs=1e-4)
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 6.3138, 2 + 6.3138), abs=1e-4)
    assert t_interval([1.0]) is None
    assert t_interval([]) is None


def test_the_seeds_that_would_decide() -> None:
    """With s = 1 and a mean 0.8 away: n = 6 gives 2.0150/√6 = 0.823, n = 7 gives 1.9432/√7 = 0.734.

    With a mean 2 away: n = 2 gives 6.3138/√2 = 4.46, n = 3 gives 2.9200/√3 = 1.686.
    """
    assert seeds_to_decide(0.8, 1.0) == 7
    assert seeds_to_decide(-0.8, 1.0) == 7
    assert seeds_to_decide(2.0, 1.0) == 3
    assert seeds_to_decide(0.0, 1.0) is None
    assert seeds_to_decide(0.001, 1.0) is None


def test_the_three_verdicts() -> None:
    """Mean 3 ± 1.5074 of 1 to 5: above 1, below 5, and 2 is inside; s = 1.5811, 1 away from 2: n = 9.

    n = 8: 1.8946·1.5811/√8 = 1.0591; n = 9: 1.8595·1.5811/3 = 0.9800.
    """
    found = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert judge_figure(found, 1.0, None).holds is True
    assert judge_figure(found, 5.0, None).holds is False
    open_one = judge_figure(found, 2.0, None)
    assert (str(open_one), open_one.seeds) == ("not decided", 9)
    assert open_one.reason == "9 seeds would decide it at this spread"
    assert judge_figure(found, None, 5.0).holds is True
    assert judge_figure(found, None, 1.0).holds is False
    assert judge_figure(found, 1.0, 5.0).holds is True
    assert judge_figure(found, 2.0, 5.0).holds is None
    assert judge_figure(found, 5.0, 6.0).holds is False
    assert judge_figure(found, 3.0, None).reason.startswith("more than 1,000 seeds")


def test_one_seed_decides_nothing() -> None:
    assert judge_figure([9.0], 0.0, None).reason == "one seed gives no interval"
    assert judge_figure([], 0.0, None).reason == "no seed has the figures"


def test_equal_seeds_have_no_spread() -> None:
    """All on one side by chance: 1/16 of four, 1/32 of five; differences by rounding alone are none."""
    four = judge_figure([0.3, 0.1 + 0.2, 0.3, 0.3], 0.0, None)
    assert (four.holds, four.seeds) == (None, 5)
    assert judge_figure([0.3] * 5, 0.0, None).holds is True
    assert judge_figure([0.3] * 5, 0.4, None).holds is False
    assert judge_figure([0.0] * 5, 0.0, None).holds is None


# --- claims ----------------------------------------------------------------------------------------------------------


def test_one_figure_above_another() -> None:
    """Gains 2, −1 and 2 points: 1 in the mean with s = √3; ± 2.9200·1.7321/√3 = 2.92; above in two of three.

    n = 10 gives 1.8331·1.7321/√10 = 1.0041, n = 11 gives 1.8125·1.7321/√11 = 0.9465.
    """
    check = above("x", {0: 0.52, 1: 0.49, 2: 0.52}, {0: 0.50, 1: 0.50, 2: 0.50, 3: 0.9})
    assert check.holds is None
    assert check.figures == (
        "51.00 ± 1.73 % against 50.00 ± 0.00 %, +1.00 ± 1.73 points, 90 % interval -1.92 to +3.92, "
        "above in 2 of 3 seeds"
    )
    assert str(check).startswith("not decided: x: 51.00")
    assert check.told.endswith("above in 2 of 3 seeds; 11 seeds would decide it at this spread")
    assert str(above("x", equal(0.4), equal(0.5)).verdict) == "does not hold"
    assert above("x", equal(0.5), equal(0.4)).holds is True
    assert above("x", {0: 0.5}, {1: 0.4}).told == "no seed has the figures"
    assert above("x", {0: 0.5}, {0: 0.4}).told.endswith("above in 1 of 1 seed; one seed gives no interval")


def test_a_margin() -> None:
    """1 point below in all five seeds: not less than half a point, but less than 1.5."""
    assert above("x", equal(0.49), equal(0.50), margin=0.015).holds is True
    assert above("x", equal(0.49), equal(0.50), margin=0.005).holds is False
    assert above("x", equal(0.49), equal(0.50), margin=0.015).figures.endswith(
        "90 % interval -1.00 to -1.00, above -1.50 points in 5 of 5 seeds"
    )


def test_one_figure_above_another_everywhere() -> None:
    high, low, wide = equal(0.6), equal(0.5), {0: 0.9, 1: 0.3, 2: 0.9, 3: 0.3, 4: 0.6}
    assert always_above("x", {"a": (high, low), "b": (high, low)}).holds is True
    assert always_above("x", {"a": (high, low), "b": (low, high)}).holds is False
    assert always_above("x", {"a": (high, low), "b": (wide, low)}).holds is None
    assert always_above("x", {"a": (low, high), "b": (wide, low)}).holds is False
    assert always_above("x", {"a": (high, low), "b": (low, {})}).verdict.reason == "no seed has the figures"
    assert "b: does not hold, 50.00" in always_above("x", {"a": (high, low), "b": (low, high)}).figures


def test_the_best_of_all() -> None:
    """Each of ours against each of the others: one of ours must be above all."""
    found = {"a": equal(0.5), "b": equal(0.6), "ours": equal(0.55), "theirs": equal(0.7)}
    assert best("x", ["ours"], found).holds is False
    assert best("x", ["ours", "theirs"], found).holds is True
    assert best("x", ["ours", "theirs"], found).figures.startswith("theirs against b: 70.00 ± 0.00 % against 60.00")
    assert best("x", ["ours", "theirs"], found).figures.endswith("of 2 others above 2, below 0")
    unsure = {**found, "b": {0: 0.2, 1: 0.9, 2: 0.2, 3: 0.9, 4: 0.6}}
    assert best("x", ["ours"], {n: v for n, v in unsure.items() if n != "theirs"}).holds is None
    assert best("x", ["ours"], {"ours": equal(0.5)}).holds is None
    once = best("x", ["ours"], {"ours": equal(0.5), "a": equal(0.4), "b": {0: 0.9}})
    assert once.holds is True
    assert once.figures.endswith("left out, with fewer than two seeds: b")


def test_signs() -> None:
    """Five wins of five come by chance once in 32 times, four of four once in 16, nine of ten 11 in 1024."""
    assert chance(5, 0) == 1 / 32
    assert chance(9, 1) == 11 / 1024
    assert judge_signs(5, 0, 0).holds is True
    assert judge_signs(5, 0, 9).holds is True
    assert judge_signs(0, 5, 0).holds is False
    assert (judge_signs(4, 0, 0).holds, judge_signs(4, 0, 0).seeds) == (None, 5)
    assert judge_signs(0, 0, 3).reason == "all seeds are equal"
    assert judge_signs(2, 2, 0).reason.startswith("more than 1,000")
    assert count_signs({0: 3, 1: None, 2: 4, 3: None}, {0: 5, 1: 9, 2: 4, 3: None}) == (1, 1, 2)


def test_the_fewest_rounds() -> None:
    five: dict[int, int | None] = {0: 10, 1: 12, 2: 9, 3: 8, 4: 11}
    more: dict[int, int | None] = {0: 11, 1: None, 2: 10, 3: 9, 4: 12}
    check = fewest("x", "ours", {"ours": five, "a": more})
    assert check.holds is True
    assert check.figures == (
        "ours against a: 10, 12, 9, 8, 11 against 11, –, 10, 9, 12, fewer in 5, more in 0 and as many in 0 of 5 seeds"
    )
    assert fewest("x", "a", {"ours": five, "a": more}).holds is False
    assert fewest("x", "ours", {"ours": five, "a": more, "b": five}).holds is None
    assert fewest("x", "ours", {"ours": {}, "a": more}).holds is None
    assert fewest("x", "ours", {"ours": five}).told == "there is nothing to compare"


def test_limits() -> None:
    assert beyond("x", {0: 1.5, 1: 0.9}, 1).figures == (
        "1.2000 ± 0.4243, 90 % interval -0.6941 to 3.0941, above 1 in 1 of 2 seeds"
    )
    assert beyond("x", equal(-1.0), 0, below=True).holds is True
    assert beyond("x", equal(1.0), 0, below=True).holds is False
    assert beyond("x", {}, 0).told == "no seed has the figures"
    assert within("x", equal(0.25), 0.2, 0.3).holds is True
    assert within("x", equal(0.31), 0.2, 0.3).holds is False
    assert within("x", {0: 0.19, 1: 0.25}, 0.2, 0.3).holds is None


def test_what_is_counted_needs_one_seed() -> None:
    assert counted("x", {3: 0.28}, 0.27, 0.29).holds is True
    assert counted("x", {3: 0.31}, 0.27, 0.29).holds is False
    assert counted("x", {3: 0.31, 4: 0.28}, 0.27, 0.29).told.endswith("the seeds differ")
    assert counted("x", {}, 0, 1).told == "no run has the figure"


def test_a_claim_waits_for_its_runs() -> None:
    """Seeds 3 and 4 are missing for one of the two: the three that are there are not judged."""
    check = above("x", equal(0.6), {0: 0.5, 1: 0.5, 2: 0.5})
    assert check.lacks([3, 4]) == (3, 4)
    assert check.lacks([1]) == ()
    waiting = Check(check.name, check.rule, check.figures, check.paper, check.values, check.lacks([3, 4]))
    assert waiting.holds is None
    assert waiting.told.endswith("runs missing, seeds 3, 4")
    assert above("x", {}, {}).lacks([7]) == (7,)


def test_a_claim_can_be_recounted_from_its_json() -> None:
    rows = {"ours": equal(0.5), "a": equal(0.4)}
    for check in (above("x", *rows.values()), best("x", ["ours"], rows), beyond("x", equal(2.0), 1)):
        kept = json.loads(json.dumps(claim_as_dict(check)))
        assert kept["verdict"] == "holds"
        assert judge(Rule(**kept["rule"]), kept["values"]).holds is True
        assert asdict(check.verdict)["interval"] == (None if kept["interval"] is None else tuple(kept["interval"]))


# --- the committed reports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", ["fedpart", "fednlr", "fedimpro", "inco", "deeper"])
def test_the_pages_have_the_verdicts_that_their_figures_give(paper: str) -> None:
    report: dict[str, Any] = json.loads((RESULTS / paper / "report.json").read_text())
    page = (RESULTS / f"{paper}.md").read_text()
    claims = [claim for part in report["parts"] for claim in part["claims"]]
    assert claims
    for claim in claims:
        found = judge(Rule(**claim["rule"]), claim["values"])
        assert str(found) == claim["verdict"], claim["name"]
        assert f"| {claim['name']} | {claim['verdict']} |" in page
