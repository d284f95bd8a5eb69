"""Whatever the guides show was run: every block of code, every line of a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from .snippets import DOCS, read_snippets, run_page

GUIDES = sorted(path for path in DOCS.glob("howto/*.md") if path.stem != "index")
EXTRAS = {
    "deploy-with-flower": ("flwr", "cryptography"),
    "run-on-ray": ("ray",),
    "compare-and-publish": ("matplotlib",),
    "tune": ("optuna",),
}
"""Guide → the packages of extras that it is about."""


def test_every_guide_has_something_to_run() -> None:
    assert len(GUIDES) >= 12
    for path in GUIDES:
        assert any(snippet.language in ("python", "console") for snippet in read_snippets(path)), path


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=[path.stem for path in GUIDES])
def test_guides(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, from the top to the bottom; runs of the command are cut short."""
    for package in EXTRAS.get(page.stem, ()):
        pytest.importorskip(package)
    run_page(page, tmp_path, monkeypatch)
