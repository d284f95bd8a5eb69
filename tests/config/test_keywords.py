"""Settings as keywords: the same fields, built into one object once."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.config.keywords import resolve_settings
from fedstrata.config.schema import Settings, SettingsKeywords
from tests.engines.worlds import check_same, flat, mlp, points


def test_keywords_are_the_fields_of_settings() -> None:
    """With the types that they have there, or more: a method may also be an object."""
    keywords, hints = SettingsKeywords.__annotations__, get_type_hints(Settings)
    assert {*keywords, "engine"} == Settings.model_fields.keys()
    for name in keywords.keys() - {"method", "task", "buffers", "precision", "standardise", "stragglers"}:
        kind = hints[name]
        theirs = kind.__name__ if isinstance(kind, type) else str(kind)
        assert set(keywords[name].__forward_arg__.split(" | ")) == set(theirs.split(" | ")), name


def test_every_setting_is_explained() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_one_object_is_the_same_as_keywords() -> None:
    given: dict[str, Any] = {"method": "scaffold + fedprox(mu=0.1)", "rounds": 2, "lr": 0.05, "participation": 3}
    data = [mlp(), flat(), points(40, 99)]
    by_keywords = fs.Federation(*data, **given)
    by_keywords.fit()
    whole = fs.Federation(*data, Settings.model_validate(given))
    whole.fit()
    check_same(whole, by_keywords)
    assert whole.settings == by_keywords.settings


def test_a_keyword_goes_before_the_object() -> None:
    method, _, settings = resolve_settings(
        Settings.model_validate({"rounds": 3, "lr": 0.5, "method": "fedprox"}), {"rounds": 7, "method": "fedavg"}
    )
    assert (settings.rounds, settings.lr, settings.method, str(method)) == (7, 0.5, "fedavg", "fedavg")


def test_a_keyword_that_does_not_exist() -> None:
    """One sentence, with the nearest one."""
    pair = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(fs.UsageError, match=r"there is no setting 'roundz'.*rounds"):
        fs.Federation(nn.Linear(2, 2), [pair], roundz=3)  # type: ignore[call-arg]


def test_settings_of_another_kind() -> None:
    with pytest.raises(fs.UsageError, match="settings must be a Settings object, not a dict"):
        resolve_settings({"rounds": 3}, {})


def test_a_method_brings_its_own_policy_for_running_statistics() -> None:
    """Settings that were resolved for another method hold that one's."""
    _, _, whole = resolve_settings(None, {"method": "fedavg"})
    assert whole.buffers == "average"
    method, _, settings = resolve_settings(whole, {"method": "fedavg(buffers='local')"})
    assert (method.buffers, settings.buffers) == ("local", "local")
