"""Commands that others start, as forks of a process that has imported what they need, and has done nothing else.

A script stands for such a command. It asks for a fork, which has the script's arguments, streams, working directory and
environment, and lasts as long as that: whoever kills one of the two ends the other.
"""

from __future__ import annotations

from pathlib import Path

SERVER = """
import gc, json, os, signal, socket, sys, threading
path, imports, command = sys.argv[1:]
exec(imports)

def accept():
    '''Fork for every connection; returns in a fork, with what it is asked for.'''
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(path)
    server.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    gc.freeze()  # else every fork copies all that was imported when it looks for garbage at its end
    while True:
        near, _ = server.accept()
        data, streams, _, _ = socket.recv_fds(near, 1 << 20, 3)
        if os.fork() == 0:
            server.close()
            return near, streams, json.loads(data)
        for number in (near.detach(), *streams):
            os.close(number)

def end_with(near):
    '''End with the process that asked: whoever kills that one means this one.'''
    near.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)

near, streams, asked = accept()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = asked["arguments"]
threading.Thread(target=end_with, args=(near,), daemon=True).start()
try:
    exec(command)
except SystemExit as end:
    if end.code not in (None, 0):
        sys.stdout.flush()
        near.send(bytes([end.code if isinstance(end.code, int) else 1]))
    raise
"""
"""A program with three arguments: the path of its socket, what to import, and what a fork does with its `sys.argv`."""

ASKING = """
import json, os, socket, sys
asked = {{"arguments": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as far:
    far.connect({path!r})
    socket.send_fds(far, [json.dumps(asked).encode()], [0, 1, 2])
    code = far.recv(1)
sys.exit(code[0] if code else 0)
"""
"""Asks for a fork, lasts as long as that, and ends with its exit code."""


def write_script(script: Path, path: str) -> None:
    """Write the script that asks whoever listens at the path for a fork."""
    script.write_text(ASKING.format(path=path))
