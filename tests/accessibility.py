"""What axe-core finds wrong with a page that a browser shows: names, contrasts, landmarks, keys."""

from __future__ import annotations

from typing import Any

import pytest


def violations(page: Any) -> list[str]:
    """A line per rule and element that breaks it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the package axe-playwright-python")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{rule['id']}: {node['target']} {node['html'][:200]}" for rule in found for node in rule["nodes"]]
