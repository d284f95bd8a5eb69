"""What did a round do, layer by layer? Measures as pure functions, and the probes that take them during a run.

The measures (`fedstrata.probes.measures`) can be used from here by themselves: `fedstrata.probes.divergence(…)`. They
are imported when the first of them is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.probes.measures import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Not `from fedstrata.probes import measures`, which would ask for the attribute `measures` and end up here again.
    measures = importlib.import_module("fedstrata.probes.measures")
    if name in measures.__all__:
        return getattr(measures, name)
    raise AttributeError(f"module 'fedstrata.probes' has no attribute '{name}'")
