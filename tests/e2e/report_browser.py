"""Reports of made-up runs, and Debian's Chromium without a window that opens them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlhf.report.write import write_report
from tools.report_run import RunSize, write_run

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; apt-get install chromium brings it"
)

SIZE = RunSize(steps=30, samples=8, tokens=40, ranks=4)
BREAKS_OUT = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports: of one run, of two runs that differ in a key, of a run with episodes of
    several turns, and of a run without beside it.
    """
    root = tmp_path_factory.mktemp("reports")
    slow = root / "slow"
    fast = root / "fast"
    write_run(slow, SIZE, first_response=BREAKS_OUT)
    write_run(fast, SIZE, learning_rate=5e-5, seed=2)
    write_run(root / "turns", replace(SIZE, steps=3, has_episodes=True))
    write_report([root / "turns"], root / "turns.html", most_samples=1000)
    write_report([slow, root / "turns"], root / "mixed.html", most_samples=1000)
    _write_validations(slow, {0: 11, 10: 12, 30: 13, 99: 14})  # the run has 30 steps
    write_report([slow], root / "one.html", most_samples=1000)
    write_report([slow, fast], root / "two.html", most_samples=1000)
    names = ("one", "two", "turns", "mixed")
    return {name: (root / f"{name}.html").as_uri() for name in names}


def _write_validations(run: Path, answers: dict[int, int]) -> None:
    """Held-out answers to three chats, of the steps in `answers`."""
    (run / "validation").mkdir()
    for step, answer in answers.items():
        rows = []
        for question in ("What is\n1 < 2?", "What is 3?", BREAKS_OUT):
            prompt = f"<|system|>\nBe short.<|end|>\n<|user|>\n{question}<|end|>\n<|assistant|>\n"
            row = {"prompt": prompt, "response": f"{answer}", "stopped": answer > 11, "score": 0.25}
            rows.append(json.dumps(row) + "\n")
        (run / "validation" / f"step_{step:06d}.jsonl").write_text("".join(rows))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1,280 pixels, on which no script may fail and nothing may be loaded."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    yield from watched(opened)


def watched(page: Any) -> Iterator[Any]:
    """The page, on which no script may fail and nothing may be loaded."""
    problems: list[str] = []
    page.set_default_timeout(600_000)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("console", lambda line: line.type == "error" and problems.append(line.text))
    page.on("request", lambda r: r.url.startswith("file:") or problems.append(f"loads {r.url}"))
    yield page
    page.close()
    assert not problems


def open_tab(page: Any, address: str, tab: str) -> None:
    """Open the report, and one of its tabs."""
    page.goto(address)
    page.get_by_role("tab", name=tab).click()


def open_sample(page: Any, address: str, order: str | None = None) -> None:
    """Open the first sample of the rollouts, in this order."""
    open_tab(page, address, "Rollouts")
    if order is not None:
        page.get_by_label("Order").select_option(order)
    page.locator(".rows tbody tr button").first.click()
    page.wait_for_selector(".sample .token")


def wait_for_texts(page: Any) -> None:
    """Wait until the texts of the samples are there."""
    page.wait_for_function("() => !document.querySelector('#count').textContent.includes('unpack')")


def show_scores(page: Any) -> None:
    """Show the curve of the scores alone."""
    page.get_by_label("Metrics").fill("critic/score")
    page.wait_for_function("() => document.querySelectorAll('figure').length === 1")
    page.wait_for_selector("figure canvas")
