"""More rounds than a run was first asked for: what then differs from asking for all of them at once.

versions.json remembers how far the run was when it was extended, and how many rounds were planned until then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.core.method import Method
from fedstrata.core.optim import build_schedule

EXTENDED = "extended"
"""The name in versions.json."""
_STEP = re.compile(r"(\d{1,9}) of (\d{1,9})")


@dataclass(frozen=True)
class Step:
    """A part of a run.

    Args:
        done: how many rounds it had when it was extended.
        planned: how many it was to have until then.
    """

    done: int
    planned: int


def read_steps(versions: Mapping[str, str]) -> tuple[Step, ...]:
    """The extensions that versions.json tells of."""
    return tuple(Step(int(done), int(planned)) for done, planned in _STEP.findall(versions.get(EXTENDED, "")))


def write_steps(steps: Sequence[Step]) -> dict[str, str]:
    """What versions.json says of extensions."""
    return {EXTENDED: ", ".join(f"{step.done} of {step.planned}" for step in steps)} if steps else {}


def extension_notes(steps: Sequence[Step], config: Mapping[str, Any], method: Method) -> tuple[str, ...]:
    """What a reader must know of a run that was extended: nothing where it has the bits of one that never was."""
    found, began = list[str](), 0
    for step in steps:
        told = f"extended from {step.planned} rounds to {config['rounds']}: "
        other = list(_other_bits(range(began, step.done), step.planned, config, method))
        if other:
            found.append(f"{told}the result is not that of {config['rounds']} at once, for {'; '.join(other)}")
        if step.done >= step.planned and (looked := _looked_at(step.planned, config)):
            found.append(f"{told}round {step.planned} was {looked} because it was the last one")
        if config.get("dp_noise"):
            found.append(f"{told}what was promised of privacy holds for {step.planned} rounds; more rounds reveal more")
        began = step.done
    return tuple(found)


def _other_bits(done: range, planned: int, config: Mapping[str, Any], method: Method) -> Iterator[str]:
    """Why rounds that are done would have been others in a run of as many rounds as there are now."""
    now = config["rounds"]
    schedule = build_schedule(config["schedule"])
    if any(schedule(number, planned) != schedule(number, now) for number in done):
        yield f"the schedule {config['schedule']} goes by the number of rounds"
    if done:
        yield from (f"{t.name} goes by it: {t.whole_run}" for t in method.techniques if t.whole_run)
    if done and config.get("fleet") and len(str(planned)) != len(str(now)):
        yield "messages name the number of rounds, and longer ones take the fleet's devices longer"


def _looked_at(planned: int, config: Mapping[str, Any]) -> str:
    """What was done in the last planned round that is not done in every round."""
    done = ["evaluated"] if planned % config["eval_every"] else []
    if config.get("probe") and planned % config["probe_every"]:
        done.append("measured")
    return " and ".join(done)
