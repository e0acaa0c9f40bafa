"""Takes the pictures of README and docs: a report in a browser, and a run on a terminal.

Usage: tools/screenshots.py RUN_DIR [--english REPORT] [--out DIR] [--step N]

For the terminal the run is begun again, as RUN_DIR-again, stopped at some step and deleted. Each
picture carries a hash of what determines it, see `tools/pictures.py`.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import math
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pyte
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from mrlhf.report.write import write_report
from tools.pictures import COLUMNS, ROWS, TERMINAL, drawn_by, mark

LONGEST_S = 900
SAMPLES = 5000
WINDOW = {"width": 1280, "height": 860}
TERMINAL_PAGE = """<meta charset="utf-8"><style>
body {{ margin: 0; background: {background}; }}
pre {{ display: inline-block; margin: 0; padding: 12px; color: {foreground};
      font: 14px/1.25 "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


def main() -> int:
    """Take all pictures; 2 if something that they need is missing, which is told in one line."""
    parser = argparse.ArgumentParser(
        description="Take the pictures of README and docs, of a finished run of PPO."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="output directory; make demo writes runs/demo"
    )
    parser.add_argument(
        "--english",
        type=Path,
        default=Path("runs/english/report.html"),
        metavar="REPORT",
        help="the report that make english writes; if it is not there, its picture stays as it is",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="DIR")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="so many steps are complete on the picture of the terminal (default: a quarter)",
    )
    arguments = parser.parse_args()

    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("there is no chromium; apt-get install chromium brings it")
    if not (arguments.run / "rollouts").is_dir():
        parser.error(f"{arguments.run} has no rollouts; run make demo, and give runs/demo")
    arguments.out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        report = Path(directory) / "report.html"
        write_report([arguments.run], report, SAMPLES)
        _picture_overview(browser, report, arguments.out / "report.png")
        _picture_rollouts(browser, report, arguments.out / "rollouts.png")
        pages = {"report.png": report, "rollouts.png": report}
        if arguments.english.is_file():
            _picture_overview(browser, arguments.english, arguments.out / "english.png")
            pages["english.png"] = arguments.english

        screen = _watch_run(arguments.run, arguments.step)
        _picture_terminal(browser, screen, arguments.out / TERMINAL)
        browser.close()
        for name in (*pages, TERMINAL):
            page = pages[name].read_text(encoding="utf-8") if name in pages else None
            mark(arguments.out / name, drawn_by(name, page))
            print(f"{arguments.out / name} ({(arguments.out / name).stat().st_size / 1000:.0f} kB)")
    return 0


def _picture_overview(browser: Browser, report: Path, file: Path) -> None:
    """The first view of a report."""
    page = browser.new_page(viewport=WINDOW)
    page.goto(report.absolute().as_uri())
    page.wait_for_selector(".card canvas")
    page.screenshot(path=file)
    page.close()


def _picture_rollouts(browser: Browser, report: Path, file: Path) -> None:
    """A response whose tokens are coloured by their advantage."""
    page = browser.new_page(viewport=WINDOW)
    page.goto(report.absolute().as_uri())
    page.get_by_role("tab", name="Rollouts").click()
    page.wait_for_function("() => !document.querySelector('#count').textContent.includes('unpack')")
    rows = page.locator(".rows tbody tr button")
    for number in range(2):
        rows.nth(number).click()
    page.wait_for_function("() => document.querySelectorAll('.sample .token').length > 0")
    page.locator(".sample").first.evaluate("node => node.scrollIntoView({block: 'end'})")
    page.screenshot(path=file)
    page.close()


def _watch_run(run: Path, step: int | None) -> pyte.Screen:
    """The terminal of a run as `run`, while it updates the policy after `step`, or soon after.

    Without `step` that is after a quarter of the run.
    """
    output_dir = run.with_name(f"{run.name}-again")
    status = json.loads((run / "status.json").read_text())
    step = math.ceil(status["of"] / 4) if step is None else step
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={status['ranks']}", "launch/train_ppo.py"]
    command += ["--config", str(run / "config.yaml"), f"trainer.output_dir={output_dir}"]
    command += ["trainer.overwrite=true"]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    try:
        _read_until(step, process, ours, stream, output_dir / "status.json")
    finally:
        os.close(ours)  # or the run would wait for somebody to read what it writes
        process.terminate()
        process.wait()
        shutil.rmtree(output_dir, ignore_errors=True)
    return screen


def _read_until(
    step: int,
    process: subprocess.Popen[bytes],
    terminal: int,
    stream: pyte.ByteStream,
    status: Path,
) -> None:
    """Feed what the run writes to the screen, until it updates the policy after `step` or later."""
    until = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < until:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                stream.feed(os.read(terminal, 65536))
            except OSError:  # the run has ended
                break
        elif status.exists():
            now = json.loads(status.read_text())
            if now["step"] > step or (now["step"] == step and now["phase"] == "update_actor"):
                return
    raise SystemExit("the run did not come so far; start it by hand to see why")


def _picture_terminal(browser: Browser, screen: pyte.Screen, file: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    for line in _lines(screen):
        console.print(line, no_wrap=True, overflow="crop")

    page = browser.new_page(viewport=WINDOW, device_scale_factor=1.5)
    html = console.export_html(theme=DIMMED_MONOKAI, code_format=TERMINAL_PAGE, inline_styles=True)
    page.set_content(html)
    page.locator("pre").screenshot(path=file)
    page.close()


def _lines(screen: pyte.Screen) -> Sequence[Text]:
    """What is on the screen, without the empty lines below it."""
    lines = []
    for row in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            line.append(cell.data, Style(color=_color(cell.fg), bold=cell.bold))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _color(name: str) -> str | None:
    """Rich's name of a colour of pyte."""
    if name == "default":
        return None
    if len(name) == 6 and all(letter in "0123456789abcdef" for letter in name):
        return f"#{name}"
    name = {"brown": "yellow"}.get(name, name)
    return name.replace("bright", "bright_")


if __name__ == "__main__":
    sys.exit(main())
