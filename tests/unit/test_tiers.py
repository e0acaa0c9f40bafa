"""Every test file has its place in a tier, and the tiers keep their budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import HERE, TIERS, place_of, read_table, tier_of, update

TABLE = read_table()
FILES = {path.relative_to(HERE).as_posix(): path for path in sorted(HERE.rglob("test_*.py"))}
# Of two workers on two cores: `make test` alone, and what `.ci/run` has left for `make test-full`.
MINUTES = {"verdict": 10, "full": 23}

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_x[1]" time="1.26"/>
<testcase classname="tests.unit.test_a" name="test_x[2]" time="2.5"/>
<testcase classname="tests.test_b" name="test_y" time="0.01"/>
</testsuite></testsuites>"""


def test_every_file_has_a_row_and_every_row_a_file() -> None:
    listed = {file for files in TABLE.values() for file in files}
    missing = FILES.keys() - listed
    assert not missing, f"add {sorted(missing)} to a tier in tests/tiers.yaml, with seconds"
    assert not listed - FILES.keys(), "tests/tiers.yaml names files that are gone"


@pytest.mark.parametrize("file", FILES)
def test_marks_and_rows_agree(file: str) -> None:
    """A mark for a tier without a row is never run; a second row without marks runs nothing."""
    text = FILES[file].read_text(encoding="utf-8")
    marked = {tier for tier in TIERS if re.search(rf"\bpytest\.mark\.{tier}\b", text)}
    holding = [tier for tier in TIERS if file in TABLE[tier]]
    assert marked == set(holding[1:])


@pytest.mark.parametrize("tier", MINUTES)
def test_a_tier_keeps_its_budget(tier: str) -> None:
    minutes = sum(TABLE[tier].values()) / 2 / 60
    assert minutes <= MINUTES[tier], "make something cheaper, or move it to a later tier"


def test_a_test_is_of_its_mark_or_of_the_first_tier_of_its_file() -> None:
    table = {"verdict": {"a.py": 1.0}, "full": {"a.py": 1.0, "b.py": 1.0}, "recipes": {}}
    assert tier_of("a.py", [], table) == "verdict"
    assert tier_of("a.py", ["skipif", "full"], table) == "full"
    assert tier_of("b.py", [], table) == "full"
    assert tier_of("new.py", [], table) is None


def test_the_cheap_folders_come_first_and_then_the_longest() -> None:
    seconds = {"dist/b.py": 9.0, "e2e/a.py": 20.0, "unit/c.py": 1.0, "test_layering.py": 2.0}
    files = sorted([*seconds, "unit/new.py"], key=lambda file: place_of(file, seconds))
    assert files == ["test_layering.py", "unit/c.py", "unit/new.py", "e2e/a.py", "dist/b.py"]


def test_a_report_of_pytest_updates_the_seconds(tmp_path: Path) -> None:
    table = tmp_path / "tiers.yaml"
    table.write_text("verdict: {test_b.py: 4}\nfull: {unit/test_a.py: 9}\nrecipes: {c.py: 5}\n")
    (tmp_path / "verdict.xml").write_text(REPORT)
    update(tmp_path / "verdict.xml", table)
    assert read_table(table) == {
        "verdict": {"test_b.py": 0.0, "unit/test_a.py": 3.8},
        "full": {"unit/test_a.py": 9},
        "recipes": {"c.py": 5},
    }
    assert table.read_text().startswith(tiers._HEAD)
