"""Stands in for W&B's library, in a process of its own: writes down what it is told, and fails where FAKE says so.

FAKE is what happens and where: `raise:log`, `hang:init`, `kill:finish`; FAKE_LOG is the file.
"""

import json
import os
import random
import signal
import sys
import time


def _act(where, *what):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps([where, *what]) + "\n")
    print("noise", flush=True)
    print("noise", file=sys.stderr, flush=True)
    random.seed(where)
    how, _, at = os.environ.get("FAKE", "").partition(":")
    if at != where:
        return
    if how == "raise":
        raise RuntimeError(f"the server\nis on fire, in {where}.")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        with open(os.environ["FAKE_LOG"] + ".pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(10_000)


def Settings(**settings):
    return settings


class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


class Artifact:
    def __init__(self, name, type):
        self.files = {}

    def add_file(self, path, name):
        with open(path, "rb") as file:
            self.files[name] = len(file.read())


class _Config:
    def update(self, values, allow_val_change):
        _act("config", values)


class _Run:
    step = 0
    offline = True
    config = _Config()

    def __init__(self, id):
        self.id = id or "made"
        self.summary = {}

    def log(self, values, step, commit):
        _act("log", step, values)

    def log_artifact(self, artifact):
        _act("artifact", artifact.files)

    def finish(self, exit_code):
        _act("finish", exit_code, {name: getattr(value, "rows", value) for name, value in self.summary.items()})


def init(**arguments):
    arguments.pop("settings")
    _act("init", arguments)
    return _Run(arguments["id"])
