"""One system in a process of its own, told what to do line by line. Started by run.py.

It builds the system, runs the first round and writes a line `{"event": "ready", …}`. For every line `go N` on its
input it runs N rounds and writes `{"event": "rounds", …}`; it ends at the end of its input. With `--once N` it runs one
round and N more without being asked, and ends. If anything raises, it writes `{"event": "failed", "why": one sentence}`
and ends.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from dataclasses import asdict
from typing import Any, Protocol

import torch
from work import DOORS, Round, Workload, workload


class System(Protocol):
    """What every system can do."""

    def burst(self, rounds: int) -> list[Round]: ...

    def weights(self) -> dict[str, torch.Tensor] | None: ...

    def close(self) -> None: ...


def build(system: str, work: Workload, clients: list[int]) -> System:
    """The system of a name; a peer's package is imported only where it is asked for.

    The reference trains the clients that it is told; all others choose them.
    """
    if system == "flower":
        from peer_flower import Flower

        return Flower(work)
    if system == "pfl":
        from ranks import become_rank_0

        second = become_rank_0(work.name, work.door)
        from peer_pfl import Pfl

        return Pfl(work, second)
    import by_hand

    if system == "reference":
        return by_hand.Reference(work, clients)
    if system in (hand := {"bare": by_hand.Bare, "bare-2": by_hand.Bare2, "floor": by_hand.Floor}):
        return hand[system](work)
    from ours import Ours

    return Ours(work, system)


def versions() -> dict[str, str]:
    """What is installed here."""
    found = {}
    for name in ("torch", "flwr", "ray", "pfl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--door", choices=DOORS, default="plain")
    parser.add_argument("--clients", type=int, nargs="*", default=[], help="of the reference")
    parser.add_argument("--weights", required=True, help="where to write the weights after the first round")
    parser.add_argument("--once", type=int, default=0)
    options = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between our lines
    torch.set_num_threads(1)

    def say(event: str, **more: Any) -> None:
        channel.write(json.dumps({"event": event, **more}) + "\n")
        channel.flush()

    try:
        system = build(options.system, workload(options.workload, options.door), options.clients)
        rounds = system.burst(1 + options.once)
        weights = system.weights()
        if weights is not None:
            torch.save(weights, options.weights)
        say("ready", round=asdict(rounds[0]), versions=versions(), engine=getattr(system, "engine", ""))
        if options.once:
            say("rounds", rounds=[asdict(each) for each in rounds[1:]])
        else:
            for line in sys.stdin:
                say("rounds", rounds=[asdict(each) for each in system.burst(int(line.split()[1]))])
        system.close()
    except Exception as error:
        sentence = (str(error).strip().splitlines() or ["no reason given"])[0]
        say("failed", why=f"{type(error).__name__}: {sentence[:200]}")
        raise


if __name__ == "__main__":
    main()
