"""The tiers of the tests: which tier runs which file, and how many seconds it takes there.

`tests/tiers.yaml` holds both; `tests/conftest.py` chooses and orders tests by it. After a run of
`make test`, `make test-full` or `make test-recipes`, this writes the seconds anew:

    python -m tests.tiers runs/tests/verdict.xml

It does not know what a file tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import yaml

HERE = Path(__file__).parent
TABLE = HERE / "tiers.yaml"
TIERS = ("verdict", "full", "recipes")
FIRST = ("test_layering.py", "unit/")
"""These files and folders run before the others, since they are cheap."""

_HEAD = """\
# By tier: its test files, and the seconds that each takes while another worker is busy.
# A file with parts in two tiers stands in both: marks choose those of the later one.
# tests/README.md says what belongs where. `python -m tests.tiers` writes the seconds anew.
"""


def read_table(path: Path = TABLE) -> dict[str, dict[str, float]]:
    """By tier, the seconds of each file, which is named by its path in `tests/`."""
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {tier: table[tier] for tier in TIERS}


def tier_of(file: str, marks: Iterable[str], table: dict[str, dict[str, float]]) -> str | None:
    """The tier of a test: the one that it is marked with, else the first that holds its file."""
    marked = [tier for tier in TIERS if tier in marks]
    holding = [tier for tier in TIERS if file in table[tier]]
    return next(iter([*marked, *holding]), None)


def place_of(file: str, seconds: dict[str, float]) -> tuple[int, float, str]:
    """What to sort files by: first the cheap folders, then in each of them the longest first."""
    group = next((place for place, start in enumerate(FIRST) if file.startswith(start)), len(FIRST))
    return group, -seconds.get(file, 0.0), file


def measured(report: Path) -> dict[str, float]:
    """The seconds of each file in a report that pytest wrote with --junitxml."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = Path(*case.attrib["classname"].split(".")[1:])
        seconds[f"{module}.py"] += float(case.attrib["time"])
    return {file: round(total, 1) for file, total in seconds.items()}


def update(report: Path, path: Path = TABLE) -> None:
    """Write the seconds of a report into the table, for the tier that the report is named for."""
    table = read_table(path)
    table[report.stem] |= measured(report)
    text = yaml.safe_dump(
        {tier: dict(sorted(table[tier].items())) for tier in TIERS}, sort_keys=False
    )
    path.write_text(_HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        update(Path(argument))
