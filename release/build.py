"""What is published of a version, in dist/: wheel, source, their bill of materials, and the checksums of all three.

The same commit gives the same bytes. `make dist` runs this; CONTRIBUTING.md says what comes before and after.

    python release/build.py TOOLS        # the Python that has release/requirements.txt
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from clean_environment import make

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def version() -> str:
    """The version, which must have a heading in the changelog unless it is one of development."""
    found: str = runpy.run_path(str(ROOT / "src" / "fedstrata" / "_version.py"))["__version__"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    if cited is None or cited[1] != found:
        raise SystemExit(f"CITATION.cff does not say version: {found}")
    if "dev" not in found and f"## [{found}]" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"CHANGELOG.md has no heading for {found}")
    return found


def run(*command: str | Path, **environment: str) -> None:
    """Run a command of the tools."""
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, env={**os.environ, **environment})


def commit_time() -> str:
    """Seconds since 1970 of the commit that is built, which stand for the time of building."""
    asked = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def normalise(archive: Path, epoch: int) -> None:
    """Rewrite a source archive without what differs from one building to the next: times, users, the order of files."""
    with tarfile.open(archive) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        contents = {member.name: source.read() for member in members if (source := old.extractfile(member))}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() else 0o644, {}
            new.addfile(member, io.BytesIO(contents[member.name]) if member.name in contents else None)
    archive.write_bytes(gzip.compress(plain.getvalue(), 9, mtime=epoch))


def write_bill(tools: str, wheel: Path, epoch: str) -> Path:
    """The bill of materials, CycloneDX: the wheel, and what is installed with it at the versions that CI uses."""
    path = DIST / f"{wheel.name.split('-py3')[0]}.cdx.json"
    with tempfile.TemporaryDirectory() as folder:
        python = make(wheel, Path(folder) / "clean")
        options = ["--mc-type", "library", "--output-reproducible", "--of", "JSON", "-o", path]
        pyproject = ROOT / "pyproject.toml"
        run(
            tools, "-m", "cyclonedx_py", "environment", "--pyproject", pyproject, *options, python,
            SOURCE_DATE_EPOCH=epoch,
        )  # fmt: skip
    bill = json.loads(path.read_text())
    names = {component["name"] for component in bill["components"]}
    assert {"torch", "numpy", "safetensors"} <= names, names
    told = version()  # which the tool does not find, since pyproject.toml leaves it to a file
    bill["metadata"]["component"] |= {"version": told, "purl": f"pkg:pypi/fedstrata@{told}"}
    path.write_text(json.dumps(bill, indent=2) + "\n")
    return path


def main() -> None:
    """Build, check, list, sum up."""
    tools, epoch = sys.argv[1], commit_time()
    told = version()
    shutil.rmtree(DIST, ignore_errors=True)
    run(tools, "-m", "build", "--outdir", DIST, SOURCE_DATE_EPOCH=epoch)
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    normalise(source, int(epoch))
    run(tools, "-m", "twine", "check", "--strict", wheel, source)
    files = [wheel, source, write_bill(tools, wheel, epoch)]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for path in files:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    print(f"version {told}; dist/SHA256SUMS is to be signed")


if __name__ == "__main__":
    main()
