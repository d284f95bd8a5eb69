"""What may go wrong at a client, on purpose? One paper, or one kind of fault, one file, one row in the table."""

from __future__ import annotations

from fedstrata.core.spec import Registry, bind, parse_sum
from fedstrata.faults.alie import Alie
from fedstrata.faults.backdoor import Backdoor
from fedstrata.faults.drop import Drop
from fedstrata.faults.fault import Fault
from fedstrata.faults.gaussian import Gaussian
from fedstrata.faults.inputs import Inputs
from fedstrata.faults.ipm import Ipm
from fedstrata.faults.labelflip import LabelFlip
from fedstrata.faults.late import Late
from fedstrata.faults.missing import Missing
from fedstrata.faults.nan import NotANumber
from fedstrata.faults.scale import Scale
from fedstrata.faults.signflip import SignFlip
from fedstrata.faults.stuck import Stuck

FAULTS: Registry = {
    "labelflip": LabelFlip,
    "inputs": Inputs,
    "missing": Missing,
    "backdoor": Backdoor,
    "signflip": SignFlip,
    "scale": Scale,
    "nan": NotANumber,
    "gaussian": Gaussian,
    "stuck": Stuck,
    "alie": Alie,
    "ipm": Ipm,
    "drop": Drop,
    "late": Late,
}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults such as `"signflip(share=0.3, scale=4) + labelflip(clients=(2, 5))"`.

    Raises:
        UsageError: for an unknown name (with the nearest known one) or a wrong argument.
    """
    found = []
    for call in parse_sum(text):
        target, kwargs = bind("fault", FAULTS, call)
        found.append(target(**kwargs))
    return tuple(found)


def write_faults(faults: tuple[Fault, ...]) -> str:
    """The text that `parse_faults` reads back."""
    return " + ".join(map(str, faults))
