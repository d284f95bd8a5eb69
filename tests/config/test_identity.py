"""Which configurations are of the same run, also across versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.config.identity import check_same_config, check_unedited, select_deciding
from fedstrata.config.schema import ADDED_LATER, RunConfig, validate_settings
from fedstrata.config.toml import to_toml
from fedstrata.errors import UsageError

CONFIG = validate_settings(RunConfig, {"rounds": 3}).model_dump()


def run_without(field: str, directory: Path) -> Path:
    """A run.toml of a version that did not have a field."""
    path = directory / "run.toml"
    path.write_text(to_toml({name: value for name, value in CONFIG.items() if name != field}))
    return path


@pytest.mark.parametrize("field", sorted(ADDED_LATER))
def test_a_run_from_before_a_setting_goes_on_with_its_default(field: str, tmp_path: Path) -> None:
    path = run_without(field, tmp_path)
    check_same_config(path, CONFIG)
    check_unedited(path, select_deciding(CONFIG))


def test_and_with_nothing_else(tmp_path: Path) -> None:
    path = run_without("precision", tmp_path)
    with pytest.raises(UsageError, match="was run with precision = None, not 'bf16'"):
        check_same_config(path, {**CONFIG, "precision": "bf16"})
    with pytest.raises(UsageError, match="precision was 'bf16', is not set"):
        check_unedited(path, select_deciding({**CONFIG, "precision": "bf16"}))


def test_a_default_that_older_runs_did_not_have_is_refused(tmp_path: Path) -> None:
    """Before `channels_last` was a setting, no convolution had its channels last."""
    path = run_without("channels_last", tmp_path)
    with pytest.raises(UsageError, match="was run with channels_last = None, not True"):
        check_same_config(path, CONFIG)
