"""Who follows a run: callbacks, which the progress display, trackers and users' own code share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedstrata.errors import UsageError, did_you_mean
from fedstrata.runs.records import Record

if TYPE_CHECKING:
    from torch import nn

    from fedstrata.config.schema import Settings
    from fedstrata.core.method import Method
    from fedstrata.core.types import Examples, Stratum
    from fedstrata.runs.reader import SavedRun


class Followed(Protocol):
    """What callbacks may use of the `Federation` that they are called with."""

    @property
    def method(self) -> Method:
        """What runs."""
        ...

    @property
    def settings(self) -> Settings:
        """How it trains."""
        ...

    @property
    def records(self) -> Sequence[Record]:
        """All rounds so far, with those before a resume."""
        ...

    @property
    def strata(self) -> Sequence[Stratum]:
        """The model's layer groups."""
        ...

    @property
    def clients(self) -> Sequence[Examples]:
        """The clients' training examples."""
        ...

    @property
    def engine(self) -> str:
        """What trains them."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of the results must know."""
        ...

    @property
    def client_names(self) -> Sequence[str]:
        """Names of the clients, if they have any."""
        ...

    @property
    def out(self) -> Path | None:
        """The run's directory, None if it has none."""
        ...

    @property
    def total(self) -> int:
        """How many rounds there will be."""
        ...

    @property
    def model(self) -> nn.Module:
        """A copy of the global model as it is now."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """The run so far in a few numbers."""
        ...

    def saved_run(self) -> SavedRun:
        """The run so far, as its files would tell it."""
        ...

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run so far as one HTML file."""
        ...


class Callback:
    """Follows a run: `federation.fit(MyCallback())`. Override what is wanted; the methods here do nothing.

    Each is called in the process that called `fit`, with the `Federation` first, and may look at all of it. What one
    raises ends the run, as any other error does: a checkpoint is kept, every callback hears of the end, and the error
    goes on to the caller with a note that names the callback. So a run can also be stopped early, or in a loop:
    `for record in federation.rounds(): …`, which may be left at any time.
    """

    def on_begin(self, federation: Followed) -> None:
        """Before the first round of this call; `federation.records` has those that were run before."""

    def on_visit(self, federation: Followed, done: int, total: int) -> None:
        """After a client's update has come in: `done` of the round's `total`. Visits of a worker may come together."""

    def on_round(self, federation: Followed, record: Record) -> None:
        """After a round: it is evaluated, measured and written."""

    def on_end(self, federation: Followed, error: BaseException | None) -> None:
        """After the last round (None), or after what ended the run before it: an error, Ctrl-C, a loop that was left.

        The final model and the summary are written by then.
        """


RecordListener = Callable[[Record], object]
"""The short form of a callback: a function of a round's record, such as `print`."""


class _EachRecord(Callback):
    """A function of records as a callback."""

    def __init__(self, listener: RecordListener) -> None:
        self.listener = listener

    def on_round(self, federation: Followed, record: Record) -> None:
        """Pass the record on."""
        self.listener(record)


def _as_callback(given: Any) -> Callback:
    """What was given, as a callback.

    Raises:
        UsageError: if it is none.
    """
    if isinstance(given, Callback):
        _check_names(given)
        return given
    if isinstance(given, type) and issubclass(given, Callback):
        raise UsageError(f"a callback is an object, not a class: {given.__name__}()")
    if not callable(given):
        raise UsageError(f"a callback is a fedstrata.Callback, or a function of a round's record, not {given!r}")
    return _EachRecord(given)


def _check_names(callback: Callback) -> None:
    """Refuse a method that would never be called: `on_rounds` would be silent for a whole run."""
    kind = type(callback)  # what an object is given beside its methods is its own affair
    for name in dir(kind):
        if name.startswith("on_") and callable(getattr(kind, name)) and not hasattr(Callback, name):
            known = [known for known in dir(Callback) if known.startswith("on_")]
            raise UsageError(f"nothing calls the method '{name}' of {kind.__name__}{did_you_mean(name, known)}")


class Followers:
    """The callbacks of one call of `fit` or `rounds`, in their order."""

    def __init__(self, callbacks: Sequence[Callback | RecordListener]) -> None:
        self._callbacks = [_as_callback(given) for given in callbacks]
        self._visited = [c for c in self._callbacks if type(c).on_visit is not Callback.on_visit]

    def visit_listener(self, federation: Followed) -> Callable[[int, int], None] | None:
        """What hears of every visit; None where nobody wants to."""
        return partial(self._visit, federation) if self._visited else None

    def _visit(self, federation: Followed, done: int, total: int) -> None:
        for callback in self._visited:
            with _naming(callback, "on_visit"):
                callback.on_visit(federation, done, total)

    def tell_round(self, federation: Followed, record: Record) -> None:
        """A round is over."""
        for callback in self._callbacks:
            with _naming(callback, "on_round"):
                callback.on_round(federation, record)

    @contextmanager
    def following(self, federation: Followed) -> Iterator[None]:
        """Tell of the beginning, and however this ends of the end: all that heard of the one, whoever fails."""
        begun: list[Callback] = []
        is_finalizing = sys.is_finalizing  # modules lose their names when the interpreter ends
        error: BaseException | None = None
        try:
            for callback in self._callbacks:
                with _naming(callback, "on_begin"):
                    callback.on_begin(federation)
                begun.append(callback)
            yield
        except BaseException as ended:
            error = ended
            if is_finalizing():  # the interpreter is half gone: nobody can be told any more
                raise
        failed = error
        for callback in begun:
            try:
                with _naming(callback, "on_end"):
                    callback.on_end(federation, error)
            except BaseException as another:
                failed = failed or another
        try:
            if failed is not None:
                raise failed
        finally:
            del error, failed  # an error that a variable of its own traceback holds is not freed


@contextmanager
def _naming(callback: Callback, method: str) -> Iterator[None]:
    """Errors say whose they are, and keep their type and their traceback."""
    try:
        yield
    except BaseException as error:
        listener = callback.listener if isinstance(callback, _EachRecord) else None
        name = (
            f"{type(callback).__name__}.{method}" if listener is None else getattr(listener, "__name__", repr(listener))
        )
        error.add_note(f"It was raised by the callback {name}; the run has kept its last complete round.")
        raise
