"""Every fault once, with settings under which it does something to the small federations of the engines' tests."""

from __future__ import annotations

from fedstrata.faults import FAULTS, parse_faults

ROWS = (
    "labelflip(clients=(0, 2))",
    "labelflip('next', clients=(0, 2))",
    "labelflip(how='shuffle', clients=(0, 2))",
    "inputs(gain=25.0, noise=0.5, clients=(1,))",
    "missing(rate=0.3, fill=-9.0, clients=(1, 4))",
    "backdoor(size=2, target=1, value=3.0, boost=2.0, clients=(3,))",
    "signflip(scale=4, share=0.4)",
    "scale(7.0)",
    "nan(clients=(1, 3))",
    "gaussian(sigma=0.1, share=0.4)",
    "stuck(clients=(0, 1, 2))",
    "stuck(sends='zeros', begin=2)",
    "alie(z=1.5, share=0.4)",
    "ipm(epsilon=2.0, share=0.4)",
    "drop(0.5, share=0.7)",
    "late(clients=(0, 2, 5))",
    "signflip(clients=(1,)) + stuck(clients=(1, 2)) + drop(0.3, clients=(2,)) + ipm(clients=(4, 5)) + inputs(9.0)",
)

assert {fault.name for row in ROWS for fault in parse_faults(row)} == set(FAULTS), "give the fault a row"
