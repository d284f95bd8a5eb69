"""Milliseconds until a report is painted, and until what is in sight of it is drawn, in Chromium without a screen.

    python benchmarks/report_speed.py [REPORT.html] [--repeats 5] [--rounds 50]

Without a file it is a page of three methods with three seeds, 100 clients with test examples of their own, 21 strata
and every probe in every round: what the tests make up, for nobody's training is measured here. Each time the page is
opened by a browser that does not know it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from fedstrata import report
from fedstrata.runs.reader import SavedRun
from tests.report.synthetic import write_comparison

SCREENS = {"1400 × 900": {"width": 1400, "height": 900}, "390 × 844": {"width": 390, "height": 844}}
NOTE_WHEN_READY = """new MutationObserver(() => {
  if (document.documentElement?.dataset.ready === "true") window.drawn ??= performance.now();
}).observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] })"""


def make(folder: Path, rounds: int) -> Path:
    """The page."""
    home = write_comparison(folder / "runs", rounds=rounds, seeds=3, clients=100, sampled=10, judged=True)
    return report.write([SavedRun.read(path) for path in sorted(home.iterdir())], folder / "report.html")


def visit(chromium: Any, page: Path, screen: dict[str, int]) -> tuple[float, float]:
    """(first contentful paint, all that is in sight drawn), in milliseconds since the navigation began."""
    browser = chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    tab = browser.new_context(viewport=screen).new_page()
    tab.set_default_timeout(120_000)
    tab.add_init_script(NOTE_WHEN_READY)
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready=true]")
    painted = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    drawn = tab.evaluate("window.drawn")
    browser.close()
    return painted, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = options.page.resolve() if options.page else make(Path(folder), options.rounds)
        print(f"{page.name}: {page.stat().st_size / 1e6:.1f} MB")
        for name, screen in SCREENS.items():
            found = [visit(driver.chromium, page, screen) for _ in range(options.repeats)]
            for what, times in zip(("painted", "drawn"), zip(*found, strict=True), strict=True):
                shown = f"{statistics.median(times):.0f} ms (from {min(times):.0f} to {max(times):.0f})"
                print(f"{name}: {what} after {shown}")


if __name__ == "__main__":
    main()
