"""The table of `docs/speed.md` that bounds kernels, waits and copies on a GPU.

    python -m tests.device.speed_table

measures on the simulated device and writes the table; with `--lines` it prints the lines of code
that cost most, and writes nothing. Each figure of the page is the upper bound
of `test_budgets.py`, so a change that lowers one writes the table anew.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tests.simulated_device.client import devices

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
BODY = "tests.device.measures:all_figures"
LINES = "tests.device.measures:lines"
_BEGIN = "<!-- counted: python -m tests.device.speed_table -->"
_END = "<!-- end of what is counted -->"
_ROW = re.compile(r"^\| (.+?) \| ([0-9.]+) \|$", re.MULTILINE)


def bounds() -> dict[str, float]:
    """The figures of the page, by name."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(_BEGIN) : text.index(_END)]
    return {name: float(number) for name, number in _ROW.findall(table)}


def write(figures: dict[str, float]) -> None:
    """Put the figures into the page."""
    rows = ["| count | |", "|---|---|"]
    rows += [f"| {name} | {number:g} |" for name, number in figures.items()]
    text = PAGE.read_text(encoding="utf-8")
    before = text[: text.index(_BEGIN)]
    after = text[text.index(_END) :]
    PAGE.write_text("\n".join([before + _BEGIN, *rows, after]), encoding="utf-8")


def main() -> None:
    """Measure, and write the table or print lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", action="store_true", help="print the lines that cost most")
    arguments = parser.parse_args()
    with devices() as server:
        if arguments.lines:
            (found,) = server.run(LINES)
            for name, counts in found.items():
                print(f"## {name}\n{counts.describe(most=20)}")
            return
        (figures,) = server.run(BODY)
    write(figures)


if __name__ == "__main__":
    main()
