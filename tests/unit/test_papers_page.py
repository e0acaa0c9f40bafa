"""docs/papers.md names presets, keys and tests that there are, and every preset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
KEYS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]*arXiv[^|]* \| ([^|]*)\| ([^|]*)\| `([^|]*)` \|$", PAGE, re.MULTILINE)
PRESETS = {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")}


def test_it_names_every_preset_and_no_other() -> None:
    assert {preset.strip().strip("`") for preset, _, _ in ROWS} - {""} == PRESETS


@pytest.mark.parametrize(("_", "words", "test"), ROWS)
def test_its_key_and_test_file_are_there(_: str, words: str, test: str) -> None:
    key, _, value = words.strip().strip("`").partition(": ")
    starts = (f"- `{key}` (", f"- `{key}.")
    rows = [line for line in KEYS.splitlines() if line.startswith(starts)]
    assert rows, key
    assert not value or f"`{value}`" in rows[0]
    assert value in (ROOT / "tests" / "unit" / test).read_text(encoding="utf-8")
