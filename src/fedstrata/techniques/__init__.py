"""The techniques by name: one paper, one file, one line in the table."""

from __future__ import annotations

from fedstrata.core import FedAvg, Method, parse
from fedstrata.spec import Table

TECHNIQUES: Table = {
    "fedavg": FedAvg,
}


def method(text: str | Method) -> Method:
    """Read a method string such as `"fedavg(buffers='local')"` or `"feddyn(alpha=0.1) + fednlr"`.

    Raises:
        UsageError: for an unknown name (with the nearest known one), a wrong argument or a pair that has no meaning.
    """
    return text if isinstance(text, Method) else parse(text, TECHNIQUES)
