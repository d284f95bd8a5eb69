"""Pack what a report needs of finished runs, so that others can judge them again, or go on with the rest elsewhere.

    python benchmarks/pack_runs.py runs/evidence docs/results/fednlr/runs.tar.xz
    mkdir -p runs/evidence && tar -xf docs/results/fednlr/runs.tar.xz -C runs/evidence

The archive holds each finished run's settings, records, summary and versions, and a reproduction's own figures; no
models, checkpoints or clients' memories. The same runs give the same bytes. `fedstrata reproduce … --out runs/evidence
--no-run` reports on what is there, and without `--no-run` makes what is missing.
"""

from __future__ import annotations

import argparse
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

OF_A_RUN = ("run.toml", "metrics.jsonl", "summary.json", "versions.json")
BESIDE = ("probes.jsonl", "client-*.json", "divergences.json", "reestimated.json")
"""What only some runs have."""
HERE = re.compile(rb"^data_dir = .*\n", re.MULTILINE)
MADE_ANEW = {"report.json", "pilot.json"}
"""Of a reproduction: a report is written again, and a pilot is of one machine."""


def chosen(out: Path) -> Iterator[Path]:
    """The files to pack: of finished runs, and a reproduction's figures."""
    for summary in sorted(out.rglob("summary.json")):
        run = summary.parent
        yield from (run / name for name in OF_A_RUN if (run / name).is_file())
        yield from (path for pattern in BESIDE for path in sorted(run.glob(pattern)))
    yield from (path for path in sorted(out.glob("*.json")) if path.name not in MADE_ANEW)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without whose and how old a file is."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def content(path: Path) -> bytes:
    """Of a file, without where the data were on this machine."""
    found = path.read_bytes()
    return HERE.sub(b"", found) if path.name == "run.toml" else found


def pack(out: Path, archive: Path) -> int:
    """Write the archive: how many files it has."""
    files = list(chosen(out))
    if not files:
        raise SystemExit(f"{out} holds no finished run")
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        for path in files:
            entry = plain(packed.gettarinfo(path, str(path.relative_to(out))))
            found = content(path)
            entry.size = len(found)
            packed.addfile(entry, io.BytesIO(found))
    return len(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="what --out was")
    parser.add_argument("archive", type=Path, help="the file to write, .tar.xz")
    given = parser.parse_args()
    count = pack(given.out, given.archive)
    print(f"{count} files, {given.archive.stat().st_size / 1000:.0f} kB: {given.archive}")


if __name__ == "__main__":
    main()
