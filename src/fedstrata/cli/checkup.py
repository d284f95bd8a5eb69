"""What there is of all that fedstrata needs: packages, the machine, data; torch is imported only if it is installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedstrata import __version__
from fedstrata.core.extras import EXTRAS
from fedstrata.core.text import bytes_text
from fedstrata.data.found import find_by_name
from fedstrata.data.readers.archives import DATA_VARIABLE
from fedstrata.errors import UsageError, one_line
from fedstrata.system.machine import (
    available_memory,
    cache_directory,
    cores,
    installed_memory,
    kernel_limits,
    processor_name,
)

CPU_BUILD = "--index-url https://download.pytorch.org/whl/cpu"
"""Where torch's builds for CPUs are; elsewhere its newest one comes with gigabytes of GPU packages."""
NAME = "fedstrata"
GIB = 1 << 30
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)")
_INSTRUCTIONS = (("avx512f", "AVX512"), ("avx2", "AVX2"))


@dataclass(frozen=True)
class Remark:
    """What is wrong, or could be better.

    Args:
        what: is so.
        fix: the line that changes it, or what to do.
    """

    what: str
    fix: str


@dataclass
class Checkup:
    """All that was found.

    Args:
        problems: what is broken: runs fail.
        advice: what could be better.
        machine: this machine, by name.
        versions: Python's and the packages'; None where one is missing.
        extras: extra → its packages' versions; None where one is missing.
        data: where data is, and which datasets seem to be there.
    """

    problems: list[Remark] = field(default_factory=list)
    advice: list[Remark] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    extras: dict[str, dict[str, str | None]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


def check_up() -> Checkup:
    """Look at everything."""
    found = Checkup()
    _check_packages(found)
    torch = _import_torch(found)
    _check_machine(found, torch)
    _check_room(found)
    _check_data(found)
    return found


# --- packages --------------------------------------------------------------------------------------------------------


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _required() -> Iterator[tuple[str, str, str]]:
    """(extra or "", package, its versions) for all that this installation says it needs; nothing for bare source."""
    try:
        listed = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return
    for line in listed:
        match, extra = _REQUIREMENT.match(line), re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if match and match[1] != NAME and (extra is None or extra[1] in EXTRAS):
            yield "" if extra is None else extra[1], match[1], match[2].strip()


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: "2.13.0+cpu" → (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def fits(version: str, wanted: str) -> bool:
    """Whether a version is among those wanted, such as ">=3.11,<3.12"; other signs than these two allow all."""
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        length = max(len(_release(version)), len(_release(bound)))
        own, limit = (release + (0,) * (length - len(release)) for release in (_release(version), _release(bound)))
        if (own < limit) if sign == ">=" else (own >= limit):
            return False
    return True


def install_line(package: str, wanted: str = "") -> str:
    """What to type for a package."""
    return f'pip install "{package}{wanted}"' + (f" {CPU_BUILD}" if package == "torch" else "")


def _reinstall_line(version: str) -> str:
    """What to type for torch's build for CPUs of the same version, whatever is after its plus sign now."""
    return f"pip install --force-reinstall torch=={version.partition('+')[0]} {CPU_BUILD}"


def _check_packages(found: Checkup) -> None:
    python, required = ".".join(map(str, sys.version_info[:3])), list(_required())
    found.versions |= {NAME: __version__, "python": python}
    wanted = metadata.metadata(NAME)["Requires-Python"] if required else ""
    if not fits(python, wanted):
        found.problems.append(Remark(f"Python is {python}, and fedstrata needs {wanted}", "use such a Python"))
    if not required:
        found.versions |= {"torch": _installed("torch")}
        found.advice.append(
            Remark("fedstrata runs from its source: what it requires cannot be looked up", "pip install -e .")
        )
    for extra, package, versions in required:
        if not extra:
            found.versions[package] = _installed(package)
        _check_package(found, extra, package, versions)
    for name, extra_ in EXTRAS.items():
        found.extras[name] = {package: _installed(package) for package in extra_.distributions}


def _check_package(found: Checkup, extra: str, package: str, wanted: str) -> None:
    """Remark on what is missing or too old; an extra may be missing."""
    version = _installed(package)
    if version is None and not extra:
        found.problems.append(Remark(f"{package} is missing", install_line(package, wanted)))
    elif version is not None and not fits(version, wanted):
        why = f"{package} is {version}, and {f'the extra {extra}' if extra else 'fedstrata'} needs {wanted}"
        (found.advice if extra else found.problems).append(Remark(why, install_line(package, wanted)))


def _import_torch(found: Checkup) -> Any:
    """The module, if it is there and works."""
    if found.versions.get("torch") is None:
        if not any(remark.what.startswith("torch ") for remark in found.problems):
            found.problems.append(Remark("torch is missing", install_line("torch")))
        return None
    try:
        import torch

        torch.ones(2, 2) @ torch.ones(2, 2)
    except Exception as error:  # a build for another machine may raise anything
        why = one_line(str(error) or type(error).__name__, 200)
        line = _reinstall_line(str(found.versions["torch"]))
        found.problems.append(Remark(f"torch is installed and does not work: {why}", line))
        return None
    return torch


# --- the machine -----------------------------------------------------------------------------------------------------


def _capability(torch: Any) -> str:
    """The instruction set that torch uses, or without torch the best that the processor has."""
    if torch is not None:
        return str(torch.backends.cpu.get_cpu_capability())
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return "unknown"
    return next((name for flag, name in _INSTRUCTIONS if flag in flags), "DEFAULT")


def _check_machine(found: Checkup, torch: Any) -> None:
    capability = _capability(torch)
    limits = kernel_limits()
    found.machine |= {"processor": processor_name(), "kernels": ", ".join([capability, *limits]), "cores": cores()}
    found.machine |= {"memory": installed_memory(), "free memory": available_memory()}
    if capability in ("DEFAULT", "NO AVX"):
        fix = f"unset {' '.join(limit.partition('=')[0] for limit in limits)}" if limits else "use another machine"
        found.advice.append(Remark("torch uses neither AVX2 nor AVX512 here: training takes several times longer", fix))
    if torch is None:
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.machine["GPUs"] = gpus
    if torch.version.cuda and not gpus:
        line = _reinstall_line(torch.__version__)
        found.advice.append(
            Remark("torch is a build for GPUs, and there is none: the CPU's is gigabytes smaller", line)
        )


def _check_room(found: Checkup) -> None:
    """Memory, disk, and the memory that processes share."""
    memory = found.machine["free memory"]
    if memory and memory < GIB:
        found.advice.append(Remark(f"only {bytes_text(memory)} of memory are free", "use --workers 1, or free some"))
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    found.machine |= {"directory": str(here), "free disk": free}
    if free < GIB // 10:
        found.problems.append(Remark(f"the disk of {here} has {bytes_text(free)} left", "free some, or give --out"))
    elif free < 2 * GIB:
        found.advice.append(Remark(f"the disk of {here} has {bytes_text(free)} left", "free some, or give --out"))
    if not os.access(here, os.W_OK):
        found.advice.append(Remark(f"{here} may not be written to", "give --out, or work elsewhere"))
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = found.machine["shared memory"] = shutil.disk_usage(shared).free
        if room < GIB // 4:
            what = f"worker processes share only {bytes_text(room)}: large models need more"
            found.advice.append(Remark(what, "docker run --shm-size 1g …, or --workers 1"))
    _check_cache(found)


def _check_cache(found: Checkup) -> None:
    """Where what was measured once is kept."""
    try:
        cache = cache_directory()
    except UsageError as error:
        found.advice.append(Remark(str(error), "export FEDSTRATA_CACHE=/a/folder"))
        return
    found.machine["cache"] = str(cache)
    above = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(above, os.W_OK):
        what = f"{cache} may not be written to: `fedstrata machine tune` cannot keep what it measures"
        found.advice.append(Remark(what, "export FEDSTRATA_CACHE=/a/folder"))


def _check_data(found: Checkup) -> None:
    given = os.environ.get(DATA_VARIABLE)
    found.data |= {"folder": given, "found": {}}
    if not given:
        return
    folder = Path(given).expanduser()
    if folder.is_dir():
        found.data["found"] = {name: str(path) for name, path in find_by_name(folder).items()}
    else:
        fix = f"export {DATA_VARIABLE}=/a/folder, or make this one: mkdir -p {folder}"
        found.problems.append(Remark(f"{DATA_VARIABLE} is {given}, and there is no such folder", fix))


def as_dict(found: Checkup) -> Mapping[str, Any]:
    """What was found, for JSON."""
    remarks = {
        "problems": [vars(remark) for remark in found.problems],
        "advice": [vars(remark) for remark in found.advice],
    }
    rest = {name: getattr(found, name) for name in ("machine", "versions", "extras", "data")}
    return {"ok": not found.problems, **remarks, **rest}
