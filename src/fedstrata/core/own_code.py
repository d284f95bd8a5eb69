"""The user's own code, named `module:name`: a module of the working directory, or one that is installed.

`DIR/module:name` names the directory too. A run writes it down in this way, so that it can go on from anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from fedstrata.errors import FedstrataError, UsageError, did_you_mean, one_line

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SOURCE = re.compile(rf"(?:(?P<folder>.*)[/\\])?(?P<module>{_DOTTED}):(?P<name>{_DOTTED})")


def settle_path(text: str) -> str:
    """The whole path."""
    return str(Path(text).expanduser().resolve())


def settle_source(text: str) -> str:
    """`module:name` with the module's directory; what is installed, or is no source at all, stays as it is."""
    read = _SOURCE.fullmatch(text)
    if read is None:
        return text
    folder = Path(read["folder"] or ("/" if text[0] == "/" else ".")).expanduser().resolve()
    known = read["folder"] is not None or _file_of(folder, read["module"]) is not None
    return f"{folder.as_posix().rstrip('/')}/{read['module']}:{read['name']}" if known else text


PathText = Annotated[str, AfterValidator(settle_path)]
"""An argument that names a file or a folder."""
SourceText = Annotated[str, AfterValidator(settle_source)]
"""An argument that names a function or a class of the user's own."""


def _file_of(folder: Path, module: str) -> Path | None:
    """The file of a module in a folder."""
    place = folder.joinpath(*module.split("."))
    return next((path for path in (place.with_name(f"{place.name}.py"), place / "__init__.py") if path.is_file()), None)


def load_object(source: str) -> Callable[..., Any]:
    """The function or class that a source names; its module is imported, which runs the user's code.

    Raises:
        UsageError: if there is none, or if the module cannot be imported.
    """
    read = _SOURCE.fullmatch(source)
    if read is None:
        raise UsageError(f"python('{source}') cannot be read; write it like python('module:name')")
    found: Any = _import(read["folder"], read["module"])
    for part in read["name"].split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise UsageError(f"{source}: '{read['module']}' has no '{part}'{did_you_mean(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{source} is neither a function nor a class, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _import(given: str | None, module: str) -> ModuleType:
    """A module of that folder; without one, of the working directory, or an installed one."""
    folder = Path("." if given is None else given or "/").expanduser().resolve()
    path = _file_of(folder, module)
    if path is None and given is not None:
        raise UsageError(f"there is no module '{module}' in {folder}")
    if path is not None:
        open_folders([str(folder)])
    importlib.invalidate_caches()
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if path is None and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"there is no module '{module}' in {folder}, and none is installed") from None
        raise UsageError(f"{module} cannot be imported: {_told(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{module} cannot be imported: {_told(error)}") from error
    taken = getattr(loaded, "__file__", None)
    if path is not None and (taken is None or Path(taken).resolve() != path):
        raise UsageError(f"the name of {path} is taken by {taken or 'a module of Python'}: give the file another name")
    return loaded


_open: dict[str, None] = {}
"""Folders that modules were found in, in this order."""


def open_folders(folders: Iterable[str]) -> None:
    """Let Python find the modules of some folders, in this process.

    They stay open: the user's code may import its neighbours at any time.
    """
    for folder in folders:
        _open[folder] = None
        if folder not in sys.path:
            sys.path.insert(0, folder)


def opened_folders() -> tuple[str, ...]:
    """The folders that the user's own code was found in so far: another process must open them to know its classes."""
    return tuple(_open)


def takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function has an argument of that name."""
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def call_own(source: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What the user's function returns.

    Raises:
        UsageError: if it does not take these arguments, or fails, with the place in the user's code.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValueError:
        pass  # it says nothing of its arguments
    try:
        return function(**arguments)
    except FedstrataError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{source} failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """An error in one line, with the last line of code that was on the way to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(str(error), 300)}{place}"
