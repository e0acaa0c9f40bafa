"""The figures of docs/memory.md are those of the preflight, and its command runs."""

from __future__ import annotations

import shlex
import subprocess
import sys

from tests.pages import ROOT, commands_of
from tests.sizing import PAGE, TABLE, table


def test_the_table_is_up_to_date() -> None:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python -m tests.sizing"


def test_the_dry_run_of_the_page_passes() -> None:
    (command,) = commands_of("docs/memory.md", "--dry-run")
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "what could be checked fits 8 ranks" in done.stdout
