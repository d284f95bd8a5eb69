"""An environment with the packages that a wheel says it needs, and nothing else, without installing them again.

They are linked from the environment that runs this, so it takes a second and no network. What is not named among the
wheel's requirements, or theirs, is not there: extras, the tests' packages, this repository's source.

    python release/clean_environment.py WHEEL DIR
"""

from __future__ import annotations

import csv
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(wheel: Path) -> list[str]:
    """What a wheel says it needs."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def closure(listed: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Every distribution that is needed, by name, with what those need in turn.

    Raises:
        SystemExit: if one is not installed here, or in a version that does not fit.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [(Requirement(line), "") for line in listed]
    seen: set[tuple[str, str]] = set()
    while waiting:
        need, extra = waiting.pop()
        name = canonicalize_name(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        try:
            there = found.setdefault(name, metadata.distribution(need.name))
        except metadata.PackageNotFoundError:
            raise SystemExit(f"{need} is not installed here") from None
        if not need.specifier.contains(there.version, prereleases=True):
            raise SystemExit(f"{name} is {there.version} here, and {need} is needed")
        for wanted in {"", *need.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, wanted))
            waiting += [(Requirement(line), wanted) for line in there.requires or []]
    return found


def entries(distribution: metadata.Distribution) -> list[str]:
    """The files of a distribution below its site-packages."""
    listed = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return [row[0] for row in listed if row and not row[0].startswith(("../", "/")) and not row[0].endswith(".pyc")]


def link(distributions: Iterable[metadata.Distribution], site: Path) -> None:
    """Link distributions into a site-packages folder: whole folders where only one of them has anything there."""
    owners: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        name = distribution.name  # which is read from a file each time
        for top in {file.partition("/")[0] for file in entries(distribution)}:
            owners.setdefault(top, set()).add(name)
    for distribution in distributions:
        source, files = Path(str(distribution.locate_file(""))).resolve(), entries(distribution)
        tops = dict.fromkeys(file.partition("/")[0] for file in files)
        whole = [top for top in tops if len(owners[top]) == 1]
        for part in (*whole, *(file for file in files if file.partition("/")[0] not in whole)):
            if (source / part).exists() and not (site / part).exists():
                (site / part).parent.mkdir(parents=True, exist_ok=True)
                (site / part).symlink_to(source / part)


def make(wheel: Path, directory: Path) -> Path:
    """Make the environment with the wheel in it; returns its Python."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    link(closure(requirements(wheel)).values(), site)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), Path(sys.argv[2])))
