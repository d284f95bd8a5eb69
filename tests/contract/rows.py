"""The rows of the contract matrix: adding a technique to the library means adding one row here."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.core import Technique
from tests.contract import standins


@dataclass(frozen=True)
class Row:
    """A technique to test.

    Args:
        technique: with settings under which it does something.
        neutral: with settings under which it must equal FedAvg bit for bit; None where there are none.
        order_free: True if the design promises that its place in the method does not matter.
        refits: parameters that it changes on the server although no client trained them.
        serial: why many clients cannot be trained with it at once; empty if they can.
    """

    technique: Technique
    neutral: Technique | None
    order_free: bool = True
    refits: frozenset[str] = frozenset()
    serial: str = ""


ROWS = [
    Row(standins.Pull(mu=0.5), standins.Pull(mu=0.0)),
    Row(standins.Steer(), None),
    Row(standins.Turn(), standins.Turn(full=1000)),
    Row(standins.Pace(), standins.Pace(factor=1.0)),
    Row(standins.Cool(), standins.Cool(temperature=1.0), order_free=False),
    Row(standins.Even(), standins.Even(on=False)),
    Row(standins.Heavy(), standins.Heavy(beta=0.0), order_free=False),
    Row(standins.Twin(), standins.Twin(weight=0.0), order_free=False, serial="it draws rows of noise in every step"),
    Row(standins.Blur(), standins.Blur(std=0.0), serial="it draws noise"),
    Row(standins.Look(), standins.Look(radius=0.0)),
    Row(
        standins.Lean(),
        standins.Lean(mu=0.0),
        order_free=False,
        serial="its loss is a mean over a batch's rows, some of which would be padding",
    ),
    Row(
        standins.Census(),
        standins.Census(size=0.0),
        order_free=False,
        refits=frozenset({"head.bias"}),
        serial="it only counts, in a round without training, and so has nothing to gain",
    ),
    Row(standins.Keep(limit=0.01), standins.Keep(limit=1e9), order_free=False),
]
