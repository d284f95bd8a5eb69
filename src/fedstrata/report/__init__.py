"""What does a run look like? As one HTML file, as a live page while it goes on, and as figures for papers."""

from __future__ import annotations

from fedstrata.report.page import page, write

__all__ = ["page", "write"]
