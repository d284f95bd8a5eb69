"""The house itself: imports point one way, public names are pinned, nothing forbidden is imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import fedstrata

SOURCE = Path(fedstrata.__file__).parent

LAYERS = [
    ["errors", "_version"],
    ["core"],
    ["system", "aggregation", "data", "fleet"],
    ["models", "tasks"],
    ["techniques", "wire"],
    ["client"],
    ["server"],
    ["evaluation"],
    ["engines", "probes"],
    ["faults"],
    ["config"],
    ["runs"],
    ["diagnosis"],
    ["report"],
    ["progress", "tracking"],
    ["federation"],
    ["run", "flower"],
    ["compare"],
    ["tuning"],
    [""],
    ["attack"],
    ["reproduce"],
    ["trials"],
    ["cli"],
    ["__main__"],
]
"""Folders from the ground up, with the modules of the public door; each may import from lower ones only ("" is the
package itself)."""


def folder(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_module(name: str) -> bool:
    path = SOURCE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported(path: Path) -> set[str]:
    """Modules that a file imports, by full name, anywhere in it; `from fedstrata import x` names x if that is a module.

    What is imported when it is first used (`fedstrata.core.lazy`, `fedstrata.config.registries`) is named by a string.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"fedstrata(\.\w+)+", str(node.value)):
            names |= {name for name in [node.value] if is_module(name)}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {n for n in inner if is_module(n)}
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
            if name.split(".")[0] == "fedstrata" and folder(name) != own and height[folder(name)] >= height[own]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_the_test_above_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from fedstrata import wire\nfrom fedstrata.federation import Federation\nimport fedstrata.cli.main\n"
    )
    assert imported(file) == {"fedstrata.wire", "fedstrata.federation", "fedstrata.cli.main"}
    file.write_text("def late():\n    from fedstrata import wire\n\n\nprobes = Lazy('fedstrata.probes.measures')\n")
    assert imported(file) == {"fedstrata.wire", "fedstrata.probes.measures"}


def test_nothing_imports_what_has_no_cpu_build() -> None:
    for path in SOURCE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"torchvision", "timm"}


def test_importing_the_package_loads_no_optional_part() -> None:
    """In a fresh interpreter: extras are imported where they are used, so `import fedstrata` stays quick."""
    import subprocess
    import sys

    extras = (
        "kornia transformers peft matplotlib tensorboard wandb mlflow IPython ray flwr flwr_datasets pandas ot optuna"
    )
    modules = "cli.main, run, attack, compare, cli.console, compare.show, flower.certs, flower.template"
    modules += ", probes.measures, report.plots, reproduce, progress.terminal, tracking.tracker, tuning"
    imports = ", ".join(f"fedstrata.{module}" for module in modules.split(", "))
    code = f"import sys, {imports}; print([m for m in '{extras}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_stay_small() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path.name


def test_functions_stay_short() -> None:
    """At most 40 lines, without their docstrings."""
    long = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0]
                told = 0 if ast.get_docstring(node) is None else (first.end_lineno or 0) - first.lineno + 1
                if (node.end_lineno or 0) - node.lineno + 1 - told > 40:
                    long.append(f"{path.relative_to(SOURCE)}: {node.name}")
    assert not long


def test_the_root_is_the_public_door() -> None:
    names = {path.name for path in SOURCE.glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "_version.py", "errors.py", "federation.py", "run.py"}


def test_every_folder_says_which_question_it_answers() -> None:
    for path in SOURCE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_the_picture_of_the_folders_is_theirs() -> None:
    """After a change of the imports: python docs/folders.py."""
    spec = importlib.util.spec_from_file_location("folders", SOURCE.parents[1] / "docs" / "folders.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    folders = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(folders)
    assert folders.PICTURE.read_text() == folders.draw()


def test_public_names() -> None:
    assert sorted(fedstrata.__all__) == [
        "Assignment",
        "Batch",
        "Callback",
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
        "LowRank",
        "MapExamples",
        "Method",
        "Metric",
        "Record",
        "RoundView",
        "Setting",
        "Slots",
        "Stratum",
        "Task",
        "Technique",
        "TensorExamples",
        "Tensors",
        "Times",
        "Tracker",
        "Update",
        "UsageError",
        "Work",
        "__version__",
        "adapt",
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
        "with_stages",
    ]
    assert all(hasattr(fedstrata, name) for name in fedstrata.__all__)
    assert set(fedstrata.__all__) <= set(dir(fedstrata))
    assert all(getattr(fedstrata, name).__doc__ for name in fedstrata.__all__ if name not in ("__version__",))


def test_public_names_are_imported_from_where_type_checkers_look() -> None:
    """The imports under `TYPE_CHECKING`, which mypy reads, and `_HOMES`, which Python does, say the same."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    typed = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(f"fedstrata.{module}", n) for module, names in fedstrata._HOMES.items() for n in names.split()}
    for module, name in typed:
        assert getattr(fedstrata, name) is getattr(importlib.import_module(str(module)), name)


def test_a_module_is_found_and_a_name_that_is_none_is_not() -> None:
    assert fedstrata.probes.divergence.__module__ == "fedstrata.probes.measures.divergence"
    assert fedstrata.strata.__module__ == "fedstrata.models.strata"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fedstrata.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        from fedstrata import nonsense  # noqa: F401
