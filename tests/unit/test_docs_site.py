"""The pages as a site: links lead somewhere, each page has its place, no network is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.pages import PAGES, ROOT

# A style, script, font or image of another host.
_FETCHED = re.compile(r"""(?:<(?:link|script|img)[^>]*(?:href|src)=["']?|url\()https?://""")


def test_the_site_is_built_and_holds_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "tools/docs_site.py", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert done.stdout.splitlines()[0] == str(site / "index.html")

    for page in PAGES:
        file = site / page.relative_to(ROOT).with_suffix(".html")
        if page.name in ("README.md", "index.md"):
            file = file.with_name("index.html")
        assert file.is_file(), page
        fetched = _FETCHED.findall(file.read_text(encoding="utf-8"))
        assert not [found for found in fetched if "canonical" not in found], page
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
