"""The table of `tests/counted.md` that compares activations of whole updates with a plan.

    python -m tests.device.peaks_table

measures on the simulated device and writes the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.simulated_device.client import Devices, devices

PAGE = Path(__file__).parents[1] / "counted.md"
BODY = "tests.device.peaks_here:peaks"
_BEGIN = "<!-- counted: python -m tests.device.peaks_table -->\n"
_END = "<!-- end of what is counted -->"
_HEAD = "| update | ranks | predicted | counted | error |\n|---|---|---|---|---|"


class Peak(NamedTuple):
    """The most activations of one rank, in bytes."""

    case: str
    ranks: int
    stage: int
    counted: int
    predicted: int


def peaks(server: Devices) -> list[Peak]:
    """All ranks of all cases, case by case."""
    found = []
    for ranks in (1, 2, 4):
        of_ranks = server.run(BODY, ranks, world_size=ranks)
        for case in zip(*of_ranks, strict=True):
            found += [Peak(name, ranks, *numbers) for name, *numbers in case]
    return found


def lines(found: Sequence[Peak]) -> dict[str, str]:
    """Of each case the cells that are predicted, and those that are counted; 10⁶ bytes.

    They are those of the rank that has most.
    """
    cells = {}
    for (case, ranks), each in groupby(found, key=lambda peak: (peak.case, peak.ranks)):
        of_case = list(each)
        counted = max(peak.counted for peak in of_case)
        predicted = max(peak.predicted for peak in of_case)
        error = 100 * (predicted / counted - 1)
        first = f"| {case} | {ranks} | {predicted / 1e6:.1f} |"
        cells[first] = f" {counted / 1e6:.1f} | {error:+.1f}% |"
    return cells


def main() -> None:
    """Measure and write."""
    with devices() as server:
        cells = lines(peaks(server))
    rows = [_HEAD, *(first + rest for first, rest in cells.items())]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    after = rest[rest.index(_END) :]
    PAGE.write_text(before + _BEGIN + "\n" + "\n".join(rows) + "\n\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
