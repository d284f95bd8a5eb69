"""What float32 cannot hold, or cannot tell apart, is refused before it is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstrata.data.datasets import load_dataset
from fedstrata.data.single_precision import as_float32, refuse_beyond
from fedstrata.errors import UsageError

Y = np.random.default_rng(0).normal(size=60)
X = np.random.default_rng(1).normal(size=(60, 2))


@pytest.mark.parametrize("far", [1e7, 1e9, -1e12])
def test_targets_that_are_hardly_told_apart(tmp_path: Path, far: float) -> None:
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{n},{y!r}\n" for n, y in enumerate((Y + far).tolist())))
    np.savez(tmp_path / "a.npz", x=X, y=np.stack([Y, Y + far], 1))
    for text in (f"csv(path='{tmp_path}/a.csv', target='y')", f"npz(path='{tmp_path}/a.npz')"):
        with pytest.raises(UsageError, match=r"hardly told apart in float32: subtract their mean"):
            load_dataset(text)


@pytest.mark.parametrize("y", [Y + 1e4, np.full(60, 0.1), np.exp(9 * Y), Y * 1e30, np.zeros(60)])
def test_targets_that_are_sound(y: np.ndarray) -> None:
    np.testing.assert_array_equal(as_float32("it", y, str), y.astype(np.float32))


def test_numbers_beyond_float32(tmp_path: Path) -> None:
    def refused(text: str, why: str) -> None:
        with pytest.raises(UsageError, match=why):
            load_dataset(text)

    cells = [f"{n},{n / 7}" for n in range(40)]
    path = tmp_path / "a.csv"
    path.write_text("a,y\n" + "\n".join([*cells[:6], "1e39,1", *cells[7:]]))
    refused(f"csv(path='{path}', target='y')", "csv: the column 'a' in row 7 is 1e\\+39, which is beyond what float32")
    path.write_text("a,y\n" + "\n".join([*cells[:6], "1,-1e300", *cells[7:]]))
    refused(
        f"csv(path='{path}', target='y')", "csv: the target 'y' in row 7 is -1e\\+300, which is beyond what float32"
    )
    for name, wrong in (("input", {"x": X * [[1, 1e200]], "y": Y}), ("target", {"x": X, "y": Y * 1e200})):
        np.savez(tmp_path / "a.npz", **wrong)
        refused(f"npz(path='{tmp_path}/a.npz')", f"npz: the {name} of example 0 is .*e\\+.*beyond what float32 holds")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int64, np.uint64, np.bool_])
def test_what_float32_holds_whatever_its_type(kind: type) -> None:
    refuse_beyond(np.array([[0, 1], [1, 0]], dtype=kind), str)
    with pytest.raises(UsageError, match=r"^1 is -1e\+40, which"):
        refuse_beyond(np.array([[0, np.nan], [1, -1e40]]), str)


def test_a_test_row_too_many_deviations_away(tmp_path: Path) -> None:
    """Whichever rows are held out: each of two is once among them, and lies 1e40 deviations from the others."""
    path = tmp_path / "a.csv"
    path.write_text("a,y\n" + "".join(f"{n % 7}e-30,{n / 7}\n" for n in range(39)) + "1e30,3.3\n")
    found = set()
    for seed in range(12):
        try:
            load_dataset(f"csv(path='{path}', target='y', seed={seed})")
        except UsageError as error:
            found.add(str(error).partition(" is ")[0])
    assert found == {"csv: the column 'a', standardised, in row 40"}
