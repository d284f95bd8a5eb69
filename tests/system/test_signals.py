"""Whatever tells a command to end, Ctrl-C, SIGTERM or SIGHUP: a checkpoint, one sentence, an exit code that says it."""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.run import open_run, resume_run
from fedstrata.system import signals
from tests.small_runs import (
    LONG,
    config,
    fedstrata,
    metrics,
    options,
    process,
    rounds_written,
    sentence,
    shorten,
    strays,
)
from tests.warm import COMMAND, Warm, warm

Child = subprocess.Popen[str] | Warm
ENDLESS: dict[str, Any] = {"rounds": 100_000, "checkpoint_seconds": 1e6}


def eventually(condition: Callable[[], Any], child: Child) -> None:
    """Wait until something is so, while the process lives."""
    end = time.monotonic() + LONG
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def start_small_run(tmp_path: Path, *words: object, code: str = COMMAND, start: Any = warm) -> Any:
    """The small run, a long way from its end and in a group of its own, once it has done two rounds."""
    arguments = ("run", "--out", tmp_path / "run", *options(**ENDLESS), *words)
    child = start(*arguments, cwd=tmp_path, code=code, start_new_session=True)
    eventually(lambda: rounds_written(tmp_path / "run") >= 2, child)
    return child


def goes_on(run: Path, done: int, tmp_path: Path) -> None:
    """A run that was stopped at a round has left nothing half-written, and goes on to the bits of one that was not."""
    assert not strays(run)
    assert resume_run(run).state.round == done == len(metrics(run))
    shorten(run, done + 1)
    assert fedstrata("resume", run, "--quiet") == 0
    open_run(config(rounds=done + 1, checkpoint_seconds=1e6, workers=1), tmp_path / "reference").fit()
    models = [(path / "model.safetensors").read_bytes() for path in (run, tmp_path / "reference")]
    assert models[0] == models[1]


def round_in_sentence(error: str, run: Path) -> int:
    """The round that the one sentence names, which says how to go on."""
    said = re.fullmatch(rf"stopped after round (\d+); go on with: fedstrata resume {quote(str(run))}", sentence(error))
    assert said, error
    return int(said[1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_a_signal_is_a_ctrl_c(how: signal.Signals, workers: int, tmp_path: Path) -> None:
    """Sent to all processes of the command, as batch systems and terminals do."""
    child = start_small_run(tmp_path, "--workers", workers)
    os.killpg(child.pid, how)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 128 + how
    goes_on(tmp_path / "run", round_in_sentence(error, tmp_path / "run"), tmp_path)


@pytest.mark.slow
def test_nohup(tmp_path: Path) -> None:
    """What was ignored when the command began stays ignored."""
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); import fedstrata.__main__ as m; m.main()"
    child = start_small_run(tmp_path, "--workers", 2, code=ignore, start=process)
    os.killpg(child.pid, signal.SIGHUP)
    before = rounds_written(tmp_path / "run")
    eventually(lambda: rounds_written(tmp_path / "run") > before + 3, child)
    child.terminate()
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 128 + signal.SIGTERM
    round_in_sentence(error, tmp_path / "run")


SLOW = """
import sys, time
from pathlib import Path
from fedstrata.runs import checkpoint
write = checkpoint.write_sealed
def slowly(path, data):
    Path("saving").touch()
    time.sleep(3)
    write(path, data)
checkpoint.write_sealed = slowly
from fedstrata.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda s: s.name)
def test_a_second_signal_while_it_is_saved(second: signal.Signals, tmp_path: Path) -> None:
    """Right after the first and, for somebody who has lost patience, later."""
    child = start_small_run(tmp_path, code=SLOW)
    child.terminate()
    eventually((tmp_path / "saving").exists, child)
    for pause in (0.0, signals.PATIENCE + 0.3):
        time.sleep(pause)
        child.send_signal(second)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 128 + signal.SIGTERM
    goes_on(tmp_path / "run", round_in_sentence(error, tmp_path / "run"), tmp_path)


# --- terminals -------------------------------------------------------------------------------------------------------


def on_terminal(tmp_path: Path, *words: object, nohup: bool = False) -> tuple[Warm, int]:
    """The small run in a terminal of its own, and the other end of that."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")  # 40 rows, 120 columns
    words = ("run", "--out", tmp_path / "run", *options(**ENDLESS), *words)
    child = warm(*words, cwd=tmp_path, terminal=theirs, nohup=nohup)
    os.close(theirs)
    return child, ours


def read(terminal: int, until: Callable[[bytes], bool]) -> str:
    """What a terminal shows, until it shows something or is closed."""
    seen, end = b"", time.monotonic() + LONG
    while not until(seen) and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:
                break
    return seen.decode()


@pytest.mark.slow
def test_the_table_stays_after_ctrl_c(tmp_path: Path) -> None:
    child, terminal = on_terminal(tmp_path, "--workers", 2)
    read(terminal, lambda seen: rounds_written(tmp_path / "run") >= 4)
    os.write(terminal, b"\x03")
    shown = read(terminal, lambda seen: False)
    os.close(terminal)
    assert child.wait(LONG) == 130
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rpartition("\x1b[2K")[2])  # what nothing erased again
    done = int(re.findall(r"stopped after round (\d+); go on with", last)[0])
    assert "accuracy" in last
    assert re.search(rf"│ +{done} │", last), last
    assert last.index("accuracy") < last.index("stopped after round")
    assert resume_run(tmp_path / "run").state.round == done


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--quiet",)], ids=["shown", "quiet"])
@pytest.mark.parametrize("nohup", [False, True], ids=["SIGHUP", "no signal"])
def test_a_terminal_that_is_closed(words: tuple[str, ...], nohup: bool, tmp_path: Path) -> None:
    """All printing fails from then on; without the signal that is how the command learns of it, if it prints."""
    child, terminal = on_terminal(tmp_path, "--workers", 2, *words, nohup=nohup)
    read(terminal, lambda seen: rounds_written(tmp_path / "run") >= 3)
    os.close(terminal)
    if words and nohup:
        before = rounds_written(tmp_path / "run")
        while rounds_written(tmp_path / "run") < before + 3:
            assert child.poll() is None
            time.sleep(0.05)
        child.terminate()
    code = child.wait(LONG)
    expected = {129} if not nohup else {143} if words else {1, 2}
    assert code in expected
    state = resume_run(tmp_path / "run").state
    goes_on(tmp_path / "run", state.round, tmp_path)
    assert state.round >= 2


# --- start-up --------------------------------------------------------------------------------------------------------

EARLY = """
import os, signal, sys, weakref
from fedstrata.system import signals
how = signal.Signals[os.environ["HOW"]]

def ask():
    os.kill(os.getpid(), how)

class Mortal:
    pass

def in_a_finalizer():
    mortal = Mortal()
    weakref.finalize(mortal, ask)
    del mortal  # what is raised in there is ignored

def swallowed():
    try:
        ask()
    except BaseException:
        pass

def before(module, name, what):
    inside = getattr(module, name)
    def patched(*args, **kwargs):
        what()
        return inside(*args, **kwargs)
    setattr(module, name, patched)

import fedstrata.run, fedstrata.federation, fedstrata.engines.processes, fedstrata.runs.directory, fedstrata.cli.run
what = {"ask": ask, "finalizer": in_a_finalizer, "swallowed": swallowed}[os.environ["WHAT"]]
before(*{
    "data": (fedstrata.run, "load_dataset", what),
    "directory": (fedstrata.runs.directory, "write_atomic", what),
    "workers": (fedstrata.engines.processes, "serve", lambda: None),
    "screen": (fedstrata.cli.run, "open_screen", what),
}[os.environ["WHERE"]])
if os.environ["WHERE"] == "workers":
    from multiprocessing import context
    before(context.ForkProcess, "start", what)
from fedstrata.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ask", "finalizer", "swallowed"])
@pytest.mark.parametrize("where", ["data", "directory", "workers"])
def test_early(where: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While data are read, the directory is made and workers are started; also where an exception is swallowed."""
    how = signal.SIGTERM if what == "ask" else signal.SIGINT
    for name, value in {"HOW": how.name, "WHAT": what, "WHERE": where}.items():
        monkeypatch.setenv(name, value)
    child = warm("run", "--out", "run", *options(rounds=100_000), "--workers", 2, cwd=tmp_path, code=EARLY)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 128 + how, error
    said = sentence(error)
    assert not strays(tmp_path)
    if (tmp_path / "run").exists():
        assert re.fullmatch(r"stopped after round \d+; go on with: fedstrata resume run", said)
        resume_run(tmp_path / "run")
    else:
        assert said == "stopped"
    if where != "directory" or what == "ask":  # an interrupt that was lost comes again, there perhaps too late
        assert (tmp_path / "run").exists() == (where == "workers")


IMPORTING = """
import sys
from fedstrata.system import signals
with signals.handle_signals() as stop:
    if sys.argv[1] == "working":
        signals.begin_work()
    try:
        import heavy
        while True:
            pass
    except KeyboardInterrupt:
        print("imported" if "heavy" in sys.modules else "broken")
        print("caught")
        stop.acknowledge()
        sys.exit(stop.code)
"""
HEAVY = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
except BaseException:
    raise ImportError("as NumPy has it")
"""


@pytest.mark.parametrize(("how", "printed"), [("early", ""), ("working", "imported\ncaught\n")])
def test_in_the_middle_of_an_import(how: str, printed: str, tmp_path: Path) -> None:
    """It ends at once if there is nothing to lose, and else when the import is over, which it must not break."""
    (tmp_path / "heavy.py").write_text(HEAVY)
    child = process(how, cwd=tmp_path, code=IMPORTING)
    output, error = child.communicate(timeout=LONG)
    assert child.returncode == 128 + signal.SIGTERM
    assert output == printed
    assert error == ("fedstrata: stopped\n" if how == "early" else "")


TRYING = """
from pathlib import Path
from fedstrata.federation import Federation
tried = Federation.dry_run
def touched(*args):
    Path("trying").touch()
    return tried(*args)
Federation.dry_run = touched
from fedstrata.__main__ import main
main()
"""


@pytest.mark.slow
def test_other_commands(tmp_path: Path) -> None:
    """Whatever runs long: here a diagnosis, which keeps nothing."""
    words = (*options(rounds=100_000), "--probing-rounds", 100_000)
    child = warm("diagnose", *words, cwd=tmp_path, code=TRYING)
    eventually((tmp_path / "trying").exists, child)
    child.terminate()
    output, error = child.communicate(timeout=LONG)
    assert (child.returncode, output, sentence(error)) == (143, "", "stopped")


@pytest.mark.parametrize(("out", "said"), [((), "nothing is kept"), (("--out", "here"), "the same command goes on")])
def test_a_reproduction(
    out: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedstrata.compare.runner._one_by_one", interrupted)
    assert fedstrata("reproduce", "fednlr", "--quiet", *out) == 130
    assert said in sentence(capsys.readouterr().err)


# --- only in processes of our own ------------------------------------------------------------------------------------


def test_the_library_leaves_signals_alone(tmp_path: Path) -> None:
    numbers = [*signals.ENDING, signal.SIGALRM]
    before = [signal.getsignal(number) for number in numbers]
    clients = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    federation = fs.Federation(
        torch.nn.Linear(4, 2), clients, rounds=2, workers=2, engine="processes", out=tmp_path / "x"
    )
    for _ in federation.rounds():
        assert [signal.getsignal(number) for number in numbers] == before
    assert fedstrata("list", "models") == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_listener_that_fails_leaves_a_checkpoint(tmp_path: Path) -> None:
    """At once, and not when somebody collects the garbage."""
    federation = open_run(config(checkpoint_seconds=1e6), tmp_path / "run")
    caught: list[BaseException] = []

    def hear(record: fs.Record) -> None:
        if record.round == 2:
            raise OSError(5, "Input/output error")

    gc.disable()
    try:
        federation.fit(hear)
    except OSError as error:
        caught.append(error)  # with its traceback, which holds the generator of the rounds
    finally:
        gc.enable()
    assert caught
    assert (tmp_path / "run" / "checkpoints" / "round-000002.checkpoint").exists()


def test_an_interrupt_that_was_heard_does_not_come_again() -> None:
    with signals.handle_signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signals.acknowledge_interrupt()
        gc.collect()
        time.sleep(5 * signals.AGAIN)
        signal.raise_signal(signal.SIGTERM)
    time.sleep(5 * signals.AGAIN)
    assert stop.code == 143
