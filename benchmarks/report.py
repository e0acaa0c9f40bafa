"""Measures the report of a large run: writing it, and using it in a headless Chromium.

    python benchmarks/report.py [--steps 500] [--samples 10] [--tokens 500] [--json FILE]

The run is made up: `samples` responses of up to `tokens` tokens at each step. The browser is
Debian's package `chromium`, driven by playwright. First paint is the browser's own figure, from the
start of loading. Switching is measured in the page, from a click until the second frame after the
new content is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from report_run import RunSize, write_run

from mrlhf.report.write import write_report

REPEATS = 5
RANKS = 8

# Clicks or changes something, waits until `ready` is true, then for two frames.
_TIMED = """
async () => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const began = performance.now();
  %s;
  while (!(%s)) await frame();
  await frame();
  await frame();
  return performance.now() - began;
}
"""
# What is measured, in this order: name, action, condition.
_ACTIONS = (
    ("to the curves", "open('curves')", "document.querySelector('.chart canvas')"),
    ("to the timeline", "open('timeline')", "document.querySelector('.lane .span')"),
    ("to the overview", "open('overview')", "document.querySelector('.card canvas')"),
    ("to the rollouts", "open('rollouts')", "document.querySelector('.rows tbody tr')"),
    (
        "open a sample",
        "views = []; document.querySelectorAll('.rows button')[Math.floor(Math.random() * 90)]"
        ".click()",
        "views.length && document.querySelector('.sample .token')",
    ),
    (
        "another colour",
        "coloring.quantity = 'entropy'; views.forEach((view) => view.paint())",
        "document.querySelector('.scale').textContent.includes('entropy')",
    ),
    (
        "to another step",
        "const s = document.getElementById('step-filter'); s.selectedIndex = "
        "1 + Math.floor(Math.random() * 400); s.dispatchEvent(new Event('change'))",
        "document.querySelector('.rows tbody tr')",
    ),
)


def main() -> None:
    """Write, open, click, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--samples", type=int, default=10, help="of each step")
    parser.add_argument("--tokens", type=int, default=500, help="of the longest response")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("there is no chromium: apt-get install chromium")

    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        write_run(run, RunSize(arguments.steps, arguments.samples, arguments.tokens, RANKS))
        report = Path(directory) / "report.html"
        began = time.perf_counter()
        size = write_report([run], report, most_samples=arguments.steps * arguments.samples)
        figures: dict[str, Any] = {
            "write, s": time.perf_counter() - began,
            "size, MB": size / 1e6,
            **_measure(browser, report),
        }

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    print("| what | median | most |\n|---|---|---|")
    for name, value in figures.items():
        numbers = value if isinstance(value, list) else [value]
        print(f"| {name} | {statistics.median(numbers):.4g} | {max(numbers):.4g} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _measure(browser: str, report: Path) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"first paint, ms": [], "whole page read, ms": []}
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(REPEATS):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(report.as_uri())
            page.wait_for_selector(".card canvas")
            figures["first paint, ms"].append(
                page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            figures["whole page read, ms"].append(
                page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
            )
            for name, milliseconds in _switches(page).items():
                figures.setdefault(f"{name}, ms", []).append(milliseconds)
            page.close()
        chromium.close()
    return figures


def _switches(page: Page) -> dict[str, float]:
    """Milliseconds of each action; texts are unpacked meanwhile, as they are for a user."""
    return {name: page.evaluate(_TIMED % (act, ready)) for name, act, ready in _ACTIONS}


if __name__ == "__main__":
    main()
