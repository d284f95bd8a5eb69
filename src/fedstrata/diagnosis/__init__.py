"""What is wrong with a run, layer by layer, how severe is it, and what should one try?

`diagnose` reads a run's facts and probes; every finding has a figure, a severity by one table (`thresholds`), and
remedies with the paper behind each.
"""

from __future__ import annotations

from fedstrata.diagnosis.findings import Diagnosis, Finding, Remedy
from fedstrata.diagnosis.rules import diagnose

__all__ = ["Diagnosis", "Finding", "Remedy", "diagnose"]
