"""tried.json: what was tried is read back as it was written, and nothing else is taken for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstrata.errors import UsageError
from fedstrata.runs.tried import Control, Reference, Tried, TriedRemedy, read_tried, write_tried

GAIN: dict[str, Any] = {"command": "fedstrata run", "scores": (0.9, None), "gained": 0.4, "low": None, "high": None}


def tried() -> Tried:
    return Tried(
        metric="accuracy",
        higher_is_better=True,
        rounds=3,
        seeds=(0, 1),
        control=Control(scores=(0.5, 0.5)),
        references=(Reference(name="centralised", **GAIN),),
        remedies=(TriedRemedy(finding="label-skew", change="--method feddyn", verdict="not decided", **GAIN),),
    )


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_tried(None) is None
    assert read_tried(tmp_path) is None
    write_tried(tmp_path, tried())
    assert read_tried(tmp_path) == tried()
    assert [path.name for path in tmp_path.iterdir()] == ["tried.json"]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"format": 2}, "format"),
        ({"seeds": [0]}, "1 seeds and 2 scores"),
        ({"control": {"scores": ["good", 0.1]}}, "control.scores.0"),
        ({"control": {"scores": [float("nan"), 0.1]}}, "control.scores.0"),
        ({"rounds": 0}, "rounds"),
        ({"remedies": [{**GAIN, "finding": "x", "change": "y", "verdict": "wonderful"}]}, "remedies.0.verdict"),
    ],
)
def test_an_edited_file_is_refused_in_one_sentence(tmp_path: Path, edit: dict[str, Any], why: str) -> None:
    values = {**json.loads(tried().model_dump_json()), **edit}
    (tmp_path / "tried.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=why) as caught:
        read_tried(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tried.json").write_text("[1, 2")
    with pytest.raises(UsageError, match="not a JSON object"):
        read_tried(tmp_path)
