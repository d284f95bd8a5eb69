"""The house itself: imports point one way, public names are pinned, nothing forbidden is imported."""

from __future__ import annotations

import ast
from pathlib import Path

import fedstrata

SOURCE = Path(fedstrata.__file__).parent

LAYERS = [
    ["errors", "_version", "wording", "signals"],
    ["spec"],
    ["strata", "tensors", "files", "machine", "compiling", "timing", "branches"],
    ["data", "cost", "prefix", "receptive"],
    ["anatomy"],
    ["zoo"],
    ["core", "reducers", "optim"],
    ["methods"],
    ["techniques", "models"],
    ["wire", "archs"],
    ["workshop", "history"],
    ["crew", "roster"],
    ["client"],
    ["cohort", "server", "evaluate", "store"],
    ["checkpoint", "engines", "fitting", "probes"],
    ["exams", "probing", "facts"],
    ["config"],
    ["rundir"],
    ["saved"],
    ["trained", "journal"],
    ["diagnosis"],
    ["report"],
    ["federation"],
    ["run", "events", "flower"],
    ["compare"],
    [""],
    ["console"],
    ["attack"],
    ["reproduce"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
"""Rooms from the ground up; a room may import from lower ones only ("" is the package itself)."""


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(path: Path) -> set[str]:
    """Modules that a file imports, by full name; `from fedstrata import x` names x if that is a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {n for n in inner if (SOURCE.parent / (n.replace(".", "/") + ".py")).exists()}
            modules |= {n for n in inner if (SOURCE.parent / n.replace(".", "/") / "__init__.py").exists()}
            names |= modules or {node.module}
            if modules and modules != inner:
                names.add(node.module)
    return names


def test_imports_point_one_way() -> None:
    height = {name: level for level, rooms in enumerate(LAYERS) for name in rooms}
    wrong = []
    for path in SOURCE.rglob("*.py"):
        here = path.relative_to(SOURCE).with_suffix("").parts
        own = "" if here == ("__init__",) else here[0]
        assert own in height, f"give {own} a place in LAYERS"
        for name in imported(path):
            if name.split(".")[0] == "fedstrata" and room(name) != own and height[room(name)] >= height[own]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_the_test_above_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("from fedstrata import wire\nfrom fedstrata.federation import Federation\nimport fedstrata.cli\n")
    assert imported(file) == {"fedstrata.wire", "fedstrata.federation", "fedstrata.cli"}


def test_nothing_imports_what_has_no_cpu_build() -> None:
    for path in SOURCE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"torchvision", "timm"}


def test_importing_the_package_loads_no_optional_part() -> None:
    """In a fresh interpreter: extras are imported where they are used, so `import fedstrata` stays quick."""
    import subprocess
    import sys

    extras = "kornia transformers matplotlib tensorboard ray flwr flwr_datasets pandas ot"
    code = f"import sys, fedstrata.cli; print([m for m in '{extras}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_stay_small() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path.name


def test_public_names() -> None:
    assert sorted(fedstrata.__all__) == [
        "Assignment",
        "Batch",
        "ClientView",
        "Costs",
        "Dataset",
        "Diverged",
        "Examples",
        "FedAvg",
        "Federation",
        "FedstrataError",
        "History",
        "Hooks",
        "Into",
        "MapExamples",
        "Method",
        "Record",
        "RoundView",
        "Setting",
        "Slots",
        "Stratum",
        "Technique",
        "TensorExamples",
        "Tensors",
        "Times",
        "Update",
        "UsageError",
        "Work",
        "__version__",
        "build_model",
        "chain",
        "load_dataset",
        "method",
        "partition",
        "partners",
        "run_from",
        "stages",
        "strata",
        "tap",
    ]
    assert all(hasattr(fedstrata, name) for name in fedstrata.__all__)
    assert all(getattr(fedstrata, name).__doc__ for name in fedstrata.__all__ if name not in ("__version__",))
