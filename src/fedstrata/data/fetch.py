"""Downloads: upstream's files, resumed where they broke off, checked, and only then given their name.

A file grows as `NAME.part` and is renamed in one step when its size and md5 are right, so a file under its
own name is always whole. A broken connection is tried again, from where it broke, a bounded number of times;
what was received is kept for the next call. A file that comes too slowly is given up: `GRACE` seconds, and one more
for every `SLOWEST` bytes that have come, are what it may take with all attempts and pauses.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fedstrata._version import __version__
from fedstrata.data.sources import ELSEWHERE, SOURCES, Remote
from fedstrata.errors import UsageError, did_you_mean

if sys.platform != "win32":
    import fcntl

Progress = Callable[[int, int | None, str], None]
"""Called with (bytes so far, bytes in all or None, file name) after every block."""

MIRROR_VARIABLE = "FEDSTRATA_MIRROR"
GRACE = 120.0
"""Seconds that a file may take, however slowly it arrives."""
SLOWEST = 20_000.0
"""Lowest average speed after that, in bytes per second."""
_BLOCK = 1 << 18
_LONGEST_PAUSE = 30.0


class _WrongFileError(UsageError):
    """The server's bytes are not the file's: nothing received is worth keeping."""


def fetch(
    name: str,
    data_dir: str | Path,
    *,
    mirror: str | None = None,
    optional: bool = False,
    progress: Progress | None = None,
    attempts: int = 5,
    pause: float = 1.0,
    timeout: float = 30.0,
    grace: float = GRACE,
    slowest: float = SLOWEST,
) -> list[Path]:
    """Download the files of a dataset into `data_dir/name/`; what is there and whole is left as it is.

    Args:
        name: as in `SOURCES`.
        data_dir: the folder that holds the datasets; made where it is missing.
        mirror: take `MIRROR/name/file` in place of upstream's addresses, so that any data folder served over
            HTTP is a mirror; the environment's FEDSTRATA_MIRROR where None.
        optional: fetch the optional files too.
        progress: told of every block.
        attempts: how often a file is asked for before giving up.
        pause: seconds before the second attempt, doubled before each further one.
        timeout: seconds without an answer after which a connection counts as broken.
        grace: seconds that a file may take, however slowly it arrives.
        slowest: lowest average speed after that, in bytes per second.

    Returns:
        The files, in the table's order.
    """
    if name in ELSEWHERE:
        raise UsageError(f"upstream has no files of '{name}' to fetch: {ELSEWHERE[name]}")
    if name not in SOURCES:
        raise UsageError(f"there is nothing to fetch for '{name}'{did_you_mean(name, SOURCES)}")
    if attempts < 1:
        raise UsageError(f"a download needs at least one attempt, not {attempts}")
    base = mirror if mirror is not None else os.environ.get(MIRROR_VARIABLE)
    folder = Path(data_dir).expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None
    paths = []
    with _lock_folder(folder):
        for remote in SOURCES[name]:
            if remote.optional and not optional:
                continue
            url = f"{base.rstrip('/')}/{name}/{remote.name}" if base else remote.url
            if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
                raise UsageError(f"{url} is not an http or https address")
            pace = _Pace(timeout, grace, slowest)
            paths.append(_fetch_file(remote, url, folder, progress or _silent, attempts, pause, pace))
    return paths


def _silent(done: int, total: int | None, name: str) -> None:
    """No progress wanted."""


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder against a second download into it: two writers of one part would mix their bytes."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another download into {folder} is under way") from None
        except OSError:
            pass  # a file system without locks: the md5 still keeps mixed bytes from getting a name
        yield
        with suppress(OSError):  # not every file system syncs folders
            os.fsync(handle)
    finally:
        os.close(handle)


class _Pace:
    """How much longer a file may take."""

    def __init__(self, timeout: float, grace: float, slowest: float) -> None:
        self._timeout, self._grace, self._slowest = timeout, grace, slowest
        self._began, self.come = time.monotonic(), 0

    def seconds_left(self) -> float:
        """Seconds, below 0 where it took too long."""
        return self._grace + self.come / self._slowest - (time.monotonic() - self._began)

    def wait(self) -> float:
        """Seconds that may pass until the next bytes come.

        Raises:
            TimeoutError: if there are none left.
        """
        left = self.seconds_left()
        if left <= 0:
            raise TimeoutError(self.complaint())
        return min(self._timeout, left)

    def complaint(self) -> str:
        """Why a file is given up."""
        return f"it came too slowly, {self.come:,} bytes in {time.monotonic() - self._began:.0f} seconds"


class _Paced(io.RawIOBase):
    """What comes through a socket, with the time that is left as its timeout: else a byte now and then would do."""

    def __init__(self, sock: socket.socket, pace: _Pace) -> None:
        self._sock, self._pace = sock, pace
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._pace.wait())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedResponse(http.client.HTTPResponse):
    """An answer whose head and body are read at a pace."""

    def __init__(self, sock: socket.socket, *about: Any, pace: _Pace, **more: Any) -> None:
        super().__init__(sock, *about, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_Paced(sock, pace))


class _AtPace:
    """Has a handler's connections answer at a pace."""

    pace: _Pace

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        def connection(host: str, **more: Any) -> http.client.HTTPConnection:
            made: http.client.HTTPConnection = http_class(host, **more)
            made.response_class = partial(_PacedResponse, pace=self.pace)  # type: ignore[assignment]
            return made

        return super().do_open(connection, req, **options)  # type: ignore[misc]


class _Http(_AtPace, urllib.request.HTTPHandler):
    """For http."""


class _Https(_AtPace, urllib.request.HTTPSHandler):
    """For https."""


def _open(request: urllib.request.Request, pace: _Pace) -> Any:
    """The answer to a request, read at a pace."""
    handlers: list[_Http | _Https] = [_Http(), _Https()]
    for handler in handlers:
        handler.pace = pace
    return urllib.request.build_opener(*handlers).open(request, timeout=pace.wait())


def _fetch_file(
    remote: Remote, url: str, folder: Path, progress: Progress, attempts: int, pause: float, pace: _Pace
) -> Path:
    """One file, attempt after attempt, under its own name once it is whole."""
    final = folder / remote.name
    part = folder / f"{remote.name}.part"
    try:
        if final.is_file() and _fault(final, remote) is None:
            progress(final.stat().st_size, final.stat().st_size, remote.name)
            return final
        with part.open("r+b" if part.exists() else "w+b") as file:
            for attempt in range(attempts):
                if attempt:
                    time.sleep(max(0.0, min(pause * 2 ** (attempt - 1), _LONGEST_PAUSE, pace.seconds_left())))
                broken = _transfer(file, url, remote, progress, pace)
                if broken is None:
                    break
                if pace.seconds_left() <= 0:
                    raise _giving_up_error(file, part, f"{url}: {pace.complaint()}, given up")
            else:
                raise _giving_up_error(file, part, f"{url}: {broken}, given up after {_times(attempts)}")
            file.flush()
            os.fsync(file.fileno())
        fault = _fault(part, remote)
        if fault is not None:
            raise _WrongFileError(f"{url} is not the file that was expected: {fault}")
        os.replace(part, final)
    except UsageError as error:
        if part.exists() and (isinstance(error, _WrongFileError) or part.stat().st_size == 0):
            part.unlink()
        raise
    except OSError as error:
        raise UsageError(f"cannot save {final}: {error.strerror or error}") from None
    return final


def _giving_up_error(file: BinaryIO, part: Path, why: str) -> UsageError:
    kept = f"; what came is kept in {part} and the next fetch goes on from there"
    return UsageError(f"{why}{kept if file.seek(0, os.SEEK_END) else ''}")


def _times(count: int) -> str:
    return "one attempt" if count == 1 else f"{count} attempts"


def _fault(path: Path, remote: Remote) -> str | None:
    """What is wrong with a file that should be `remote`, None where nothing is."""
    size = path.stat().st_size
    if remote.size is not None and size != remote.size:
        return f"it has {size:,} bytes, not {remote.size:,}"
    if remote.md5 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != remote.md5:
            return f"its md5 is {found}, not {remote.md5}"
    return None


def _transfer(file: BinaryIO, url: str, remote: Remote, progress: Progress, pace: _Pace) -> str | None:
    """One attempt to bring `file` to its full length: None when it is whole, else why it broke off."""
    have = file.seek(0, os.SEEK_END)
    if have == remote.size:
        return None
    if remote.size is not None and have > remote.size:
        have = _empty(file)
    headers = {"User-Agent": f"fedstrata/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _open(urllib.request.Request(url, headers=headers), pace)
    except urllib.error.HTTPError as error:
        with error:
            return _explain_refusal(file, url, error, have)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({_reason(error)})"
    with response:
        if response.status == 206:
            start, total = _content_range(response.headers.get("Content-Range"))
            if start != have:
                _empty(file)
                return "the server resumed at another place"
        else:  # the server ignores Range and sends the whole file
            have = _empty(file)
            total = _number(response.headers.get("Content-Length"))
        whole = _whole_length(url, total, remote)
        return _receive(response, file, url, have, whole, pace, lambda done: progress(done, whole, remote.name))


def _whole_length(url: str, announced: int | None, remote: Remote) -> int | None:
    """The file's length, as the table or else the server says; a refusal where they disagree."""
    if remote.size is None:
        return announced
    if announced is not None and announced != remote.size:
        raise _WrongFileError(
            f"{url} is not the file that was expected: it has {announced:,} bytes, not {remote.size:,}"
        )
    return remote.size


def _receive(
    response: Any,
    file: BinaryIO,
    url: str,
    have: int,
    whole: int | None,
    pace: _Pace,
    progress: Callable[[int], None],
) -> str | None:
    """Append what comes to the `have` bytes that are there: None when all has come, else why it broke off."""
    while True:
        try:
            block = response.read1(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            return f"the connection broke after {have:,} bytes ({_reason(error)})"
        if not block:
            break
        file.write(block)
        have += len(block)
        pace.come += len(block)
        if whole is not None and have > whole:
            raise _WrongFileError(f"{url} is not the file that was expected: it has more than {whole:,} bytes")
        progress(have)
    if whole is not None and have < whole:
        return f"the connection ended after {have:,} of {whole:,} bytes"
    return None


def _explain_refusal(file: BinaryIO, url: str, error: urllib.error.HTTPError, have: int) -> str | None:
    """What an HTTP error means: the part is whole (None), try again (why), or there is no hope (raises)."""
    if error.code == 416 and have:
        if _content_range(error.headers.get("Content-Range"))[1] == have:
            return None
        _empty(file)
        return "the server would not resume"
    if error.code in (408, 425, 429) or error.code >= 500:
        return f"the server answers {error.code} ({error.reason})"
    raise UsageError(f"{url} cannot be fetched: the server answers {error.code} ({error.reason})")


def _empty(file: BinaryIO) -> int:
    """Start the part again."""
    file.seek(0)
    file.truncate()
    return 0


def _content_range(text: str | None) -> tuple[int | None, int | None]:
    """(start, total) of a Content-Range header, None where it does not say."""
    match = re.fullmatch(r"\s*bytes\s+(?:(\d+)-\d+|\*)/(\d+|\*)\s*", text or "")
    return (None, None) if match is None else (_number(match[1]), _number(match[2]))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner) or type(inner).__name__
