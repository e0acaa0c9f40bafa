"""The pages lead to each other: every link names a file that is there, and a heading in it.

The keys that they name are those of the configuration.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrlhf.config.roots import PROGRAMS
from mrlhf.config.tree import nodes

ROOT = Path(__file__).parents[2]
# Pages of other systems have their keys.
WITH_KEYS = [
    page for page in (ROOT / "docs").glob("*.md") if not page.name.startswith("coming_from")
]
KEYS = {name for root in PROGRAMS.values() for name in nodes(root)}
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}
# An item of a list, a key and a column of verl.
OTHERS = {"reward.terms.0.weight", "trainer.val_only", "reward_model.ground_truth"}
_KEY = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+)(?:[=: ][^`]*)?`")
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*/README.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *RECIPES,
]


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_an_index_names_every_page_and_recipe() -> None:
    for index in (ROOT / "docs" / "index.md", ROOT / "docs" / "lab" / "README.md"):
        named = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
        linked = {(index.parent / name).resolve() for name in named}
        pages = {page for page in PAGES if page.parent == index.parent} - {index}
        recipes = set(RECIPES) if index.name == "index.md" else set()
        assert not (pages | recipes) - linked


def test_the_readme_leads_to_the_index() -> None:
    assert "](docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", WITH_KEYS, ids=lambda page: page.stem)
def test_its_keys_exist(page: Path) -> None:
    named = set(_KEY.findall(page.read_text(encoding="utf-8")))
    assert not named - KEYS - OTHERS
