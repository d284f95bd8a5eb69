"""What to cite: the papers of a comparison's methods, of the faults in it, and this software."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata._version import __version__
from fedstrata.config.schema import RunConfig
from fedstrata.core.citation import bibtex_entry
from fedstrata.faults import parse_faults
from fedstrata.techniques import method

TITLE = "fedstrata: federated learning, layer by layer, for PyTorch"
AUTHORS = "The fedstrata authors"
"""As in CITATION.cff."""


def bibtex(configs: Sequence[RunConfig]) -> str:
    """A bibliography, each paper once, in the order of the runs, none of which need have been run."""
    papers = [paper for text in dict.fromkeys(config.method for config in configs) for paper in method(text).papers]
    faults = dict.fromkeys(config.faults for config in configs if config.faults)
    papers += [paper for text in faults for fault in parse_faults(text) for paper in fault.papers]
    entries = [paper.bibtex() for paper in dict.fromkeys(papers)]
    return "\n\n".join([*entries, _own_entry()])


def _own_entry() -> str:
    fields = {"author": f"{{{AUTHORS}}}", "title": f"{{{TITLE}}}", "howpublished": f"Software, version {__version__}"}
    return bibtex_entry("misc", "fedstrata", fields)  # styles of BibTeX know no software
