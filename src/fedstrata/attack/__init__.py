"""What could an attacker learn from what a run shares?

`fedstrata attack invert` and `fedstrata attack update`, or from Python `invert(directory, split="layer1")` and
`attack_update(directory)`.
"""

from __future__ import annotations

from fedstrata.attack.images import ImageUpdate
from fedstrata.attack.inversion import AttackRow, Inversion, invert
from fedstrata.attack.texts import TextUpdate, TokenRow
from fedstrata.attack.update import attack_update

__all__ = ["AttackRow", "ImageUpdate", "Inversion", "TextUpdate", "TokenRow", "attack_update", "invert"]
