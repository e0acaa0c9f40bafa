"""The pictures that code draws are those of the pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.pages import ROOT


def test_the_pictures_are_current_and_on_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "tools/drawings.py", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    drawn = sorted(tmp_path.iterdir())
    assert [file.name for file in drawn] == ["hand_over.svg", "layout.svg", "step.svg"]

    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    for file in drawn:
        kept = ROOT / "docs" / "images" / file.name
        assert kept.read_text("utf-8") == file.read_text("utf-8"), "run make drawings"
        ElementTree.parse(file)
        assert f"(images/{file.name})" in pages
