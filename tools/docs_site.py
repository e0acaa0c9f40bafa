"""Builds the pages as a site that needs no network: `make docs`.

Usage: python tools/docs_site.py [--out DIR]

The pages keep their places beside each other, so that their links hold here as in the repository.
Links to other files of the repository are followed too: these are copied.
"""

import argparse
import logging
import re
import shutil
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def main() -> int:
    """Build; 0 when done, 1 if a link leads nowhere."""
    parser = argparse.ArgumentParser(description="Build the pages as a site.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "docs", metavar="DIR")
    out: Path = parser.parse_args().out

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    _copy_with_links(ROOT / "README.md", pages)
    for page in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("README.md")]):
        _copy_with_links(page, pages)
    for page in ("CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md"):
        _copy_with_links(ROOT / page, pages)

    keys = {"docs_dir": str(pages), "site_dir": str(out / "site")}
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), **keys))
    except Abort:
        return 1
    print(out / "site" / "index.html")
    print(f"with search: python -m http.server --directory {out / 'site'}")
    return 0


def _copy_with_links(file: Path, pages: Path) -> None:
    """Copy a file to its place, and each file of the repository to which it links."""
    target = pages / file.relative_to(ROOT)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
    if file.suffix != ".md":
        return
    for link in _LINK.findall(_CODE.sub("", file.read_text(encoding="utf-8"))):
        linked = (file.parent / link).resolve()
        if linked.is_file() and ROOT in linked.parents:
            _copy_with_links(linked, pages)


if __name__ == "__main__":
    sys.exit(main())
