"""The wheel, built from this clone and installed without extras, runs the demo: what CI runs, and one before a release.

python release/clean_wheel_demo.py [WHEEL]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clean_environment import make

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.8
"""The accuracy of the demo's best method is above that."""
EXTRAS = (
    *("kornia", "transformers", "peft", "ray", "flwr", "flwr_datasets", "cryptography", "matplotlib", "ot"),
    *("tensorboard", "wandb", "mlflow", "optuna", "pandas", "IPython"),
)
NEEDING = {
    "augment": ["run", "--augment", "flip"],
    "ray": ["run", "--engine", "ray"],
    "wandb": ["run", "--track", "wandb"],
    "mlflow": ["run", "--track", "mlflow"],
    "tune": ["tune"],
}
"""Extra → a command that cannot do without it."""


def build(into: Path) -> Path:
    """Build the wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


class Clean:
    """The command in the clean environment, in a folder where nothing of the clone can be found."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDSTRATA"))}
        self.environment = {**kept, "HOME": str(folder)}

    def python_says(self, code: str) -> str:
        """What a piece of Python prints."""
        return self._run([str(self.python), "-c", code], 0)[0].strip()

    def fedstrata(self, *words: str, code: int = 0) -> tuple[str, str]:
        """What the command prints, on standard output and on standard error; it must end with that exit code."""
        return self._run([str(self.python.parent / "fedstrata"), *words], code)

    def _run(self, command: list[str], code: int) -> tuple[str, str]:
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode != code:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout, done.stderr


def check_environment(clean: Clean) -> None:
    """It is the wheel's code that runs, and no extra is there."""
    where = clean.python_says("import fedstrata; print(fedstrata.__file__)")
    assert Path(where).is_relative_to(clean.python.parents[1]), where
    looked = f"from importlib.util import find_spec; print([n for n in {EXTRAS} if find_spec(n)])"
    assert clean.python_says(looked) == "[]", clean.python_says(looked)


def check_commands(clean: Clean) -> None:
    """It says what is missing, and by which extra it comes."""
    found = json.loads(clean.fedstrata("doctor", "--json")[0])
    assert found["ok"], found["problems"]
    assert not any(version for extra in found["extras"].values() for version in extra.values()), found["extras"]
    for extra, words in NEEDING.items():
        told = clean.fedstrata(*words, "--out", "never", code=2)[1]
        assert told.rstrip().endswith(f"pip install 'fedstrata[{extra}]'"), told
        assert not (clean.folder / "never").exists()


def main() -> None:
    """Build, install, run."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").mkdir()
        wheel = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else build(folder)
        clean = Clean(make(wheel, folder / "clean"), folder / "work")
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, installed after {time.perf_counter() - begun:.1f} s")
        check_environment(clean)
        check_commands(clean)
        start = time.perf_counter()
        found = json.loads(clean.fedstrata("demo", "--out", "demo", "--json")[0])
        best = max(found["rows"], key=lambda row: row["score"]["mean"])
        assert best["score"]["mean"] > LEAST, found
        assert found["tried"]["remedies"], found
        assert (folder / "work" / "demo" / "report.html").stat().st_size > 100_000
        spent = f"{time.perf_counter() - start:.1f} s, of {time.perf_counter() - begun:.1f} s in all"
        print(f"demo: {best['method']} reaches {best['score']['mean']:.3f}, in {spent}", *found["learnt"], sep="\n  ")


if __name__ == "__main__":
    main()
