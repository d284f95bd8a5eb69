"""What could an attacker learn from what a run shares?

`fedstrata attack invert`, or from Python `invert(directory, split="layer1")`.
"""

from __future__ import annotations

from fedstrata.attack.inversion import AttackRow, Inversion, invert

__all__ = ["AttackRow", "Inversion", "invert"]
