"""The table of `tests/counted.md` that bounds kernels, waits and copies on a GPU.

    python -m tests.device.speed_table

measures on the simulated device and writes the table; with `--lines` it prints the lines of code
that cost most, and writes nothing. Each figure of the page is the upper bound
of `test_budgets.py`, so a change that lowers one writes the table anew.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tests.simulated_device.client import Devices, devices

PAGE = Path(__file__).parents[1] / "counted.md"
BODY = "tests.device.measures:all_figures"
BODY_OF_TWO = "tests.device.measures:figures_of_two"
LINES = "tests.device.measures:lines"
_BEGIN = "<!-- counted: python -m tests.device.speed_table -->"
_END = "<!-- end of what is counted -->"
_ROW = re.compile(r"^\| (.+?) \| ([0-9.]+) \|$", re.MULTILINE)


def bounds() -> dict[str, float]:
    """The figures of the page, by name."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(_BEGIN) : text.index(_END)]
    return {name: float(number) for name, number in _ROW.findall(table)}


def figures(server: Devices) -> dict[str, float]:
    """Measure on one rank and on two."""
    (of_one,) = server.run(BODY)
    of_two, _ = server.run(BODY_OF_TWO, world_size=2)
    return {**of_one, **of_two}


def write(found: dict[str, float]) -> None:
    """Put the figures into the page."""
    rows = ["| count | |", "|---|---|"]
    rows += [f"| {name} | {number:g} |" for name, number in found.items()]
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
            (costs,) = server.run(LINES)
            for name, counts in costs.items():
                print(f"## {name}\n{counts.describe(most=20)}")
            return
        found = figures(server)
    write(found)


if __name__ == "__main__":
    main()
