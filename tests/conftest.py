"""The longest files go first, and `--quick` leaves out what takes long: what `make test` and `make quick` run."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
"""No example fails because the machine is busy."""
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
"""torch's compiler takes the processor's word for its instructions: to try them all takes longer than our kernels."""
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
"""And it compiles in its own process: others would import torch first, for a few kernels."""

T = TypeVar("T")

HERE = Path(__file__).parent
LONGEST = (
    "flower/test_deployment.py",
    "contract/test_matrix.py",
    "engines/test_ray.py",
    "docs/test_notebooks.py",
    "reproduce/test_reproduce.py",
    "models/test_layouts.py",
    "system/test_signals.py",
    "engines/test_same_bits.py",
    "engines/test_devices.py",
    "runs/test_resume.py",
    "flower/test_everywhere.py",
    "docs/test_first_pages.py",
    "docs/test_guides.py",
    "docs/test_site.py",
    "probes/test_runner.py",
    "diagnosis/test_diagnosis.py",
    "aggregation/test_robust.py",
    "report/test_browser.py",
    "tuning/test_tuning.py",
    "tracking/test_trackers.py",
    "tracking/test_real_libraries.py",
    "compare/test_compare.py",
    "engines/test_ends.py",
    "test_independent_fedavg.py",
    "wire/test_fuzz.py",
    "diagnosis/test_command.py",
    "techniques/test_fedpart.py",
    "techniques/test_inco.py",
    "system/test_kills.py",
    "techniques/test_limits.py",
    "tasks/test_tasks.py",
    "test_benchmarks.py",
    "test_architecture.py",
)
"""Files that take longest, so that none of them is begun when everybody else is done.

Clusters and deployments mostly wait, and take turns with what uses the processor.
"""
SLOW_FIXTURES = frozenset({"on_ray", "deployed", "browser", "made", "told", "offline", "searched"})
"""What takes long to make: whatever needs one of them is slow, too."""
SEARCHED = HERE / "probes/test_similarity.py"
"""Tests of what a map of features shows; all others look at whether there is one, and whose points are on it."""
SHORTEST = 250
"""Steps of a search for a map, instead of 1,000: scikit-learn takes no fewer."""
FEW, MOST = 2, 10
"""Cases of one test, and of one file, that `--quick` runs, of those that are not slow."""


@pytest.fixture(scope="session", autouse=True)
def _one_command() -> Iterator[None]:
    """The command is put together once and not for each of hundreds of calls in a process, of which users make one."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _never_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have measured the machine, and `auto` would choose by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTRATA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """A map of features is searched for in as few steps as there may be, except where it is looked at."""
    from fedstrata.probes.measures import feature_map

    whole = feature_map._plane

    def plane(*arguments: Any) -> Any:
        from sklearn import manifold

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(manifold, "TSNE", partial(manifold.TSNE, max_iter=SHORTEST))
            return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if request.path != SEARCHED:
            patch.setattr(feature_map, "_plane", plane)
        yield


def pytest_collection(session: pytest.Session) -> None:
    """Each of several workers imports the files of tests from another one on.

    pytest rewrites and keeps what is imported for the first time, which takes longer than all other imports: so each
    worker rewrites its share, and finds what the others have kept.
    """
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    chosen = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = sorted(file for file in HERE.rglob("test_*.py") if any(file.is_relative_to(path) for path in chosen))
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # pytest will meet it again, and tell of it
            import_module(".".join(file.relative_to(HERE.parent).with_suffix("").parts))


def pytest_configure() -> None:
    gc.disable()  # until all tests are known


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import stay: who looks for garbage need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # models and runs leave little garbage
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"no slow tests, and at most {MOST} others per file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {HERE / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in order), "a file of tests was renamed: LONGEST in tests/conftest.py"
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if config.getoption("quick"):
        chosen = choose_quick(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def choose_quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """A few cases of tests that are not slow, from the first of a file to its last; every folder must have some."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for found in cases.values():
        files[found[0].path] += spread(found, FEW)
    chosen = {item for found in files.values() for item in spread(found, MOST)}
    if missing := {item.path.parent for item in items} - {item.path.parent for item in chosen}:
        raise pytest.UsageError(f"nothing in {', '.join(sorted(map(str, missing)))} is quick")
    return chosen


def spread(items: list[T], few: int) -> list[T]:
    """At most so many of them, evenly from the first to the last."""
    last = len(items) - 1
    return items if last < few else [items[place * last // (few - 1)] for place in range(few)]
