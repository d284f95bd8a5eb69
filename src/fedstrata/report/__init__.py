"""What a run looks like: one HTML file, a live page while it goes on, and figures for papers."""

from __future__ import annotations

from fedstrata.report.page import page, write

__all__ = ["page", "write"]
