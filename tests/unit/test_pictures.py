"""The pictures of README and docs are of today's report and terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import ROOT
from tools.pictures import TERMINAL, VIEWS, drawn_by, made_up_page, mark, mark_of, parts_of_view

IMAGES = ROOT / "docs" / "images"
TAKEN = sorted(file.name for file in IMAGES.glob("*.png"))


@pytest.mark.parametrize("name", TAKEN)
def test_a_picture_is_of_what_is_shown_today(name: str) -> None:
    assert mark_of(IMAGES / name) == drawn_by(name), (
        f"what docs/images/{name} shows has changed since it was taken: run make screenshots"
    )


def test_every_picture_is_known_and_on_a_page() -> None:
    assert {"report.png", "rollouts.png", TERMINAL} <= set(TAKEN) <= {*VIEWS, TERMINAL}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in TAKEN:
        assert f"images/{name})" in text
    first = re.search(r"!\[[^]]*\]\(docs/images/(\S+)\)", pages[0].read_text(encoding="utf-8"))
    assert first is not None and ("english.png" not in TAKEN or first[1] == "english.png")


def test_only_what_a_picture_shows_counts(tmp_path: Path) -> None:
    page, _ = made_up_page()
    assert all(drawn_by(name) == drawn_by(name, page) for name in VIEWS)

    def changed(place: str, by: str) -> set[str]:
        edited, count = re.subn(place, by, page, flags=re.MULTILINE)
        assert count == 1, place
        return {
            name
            for name in ("report.png", "rollouts.png")
            if drawn_by(name, edited) != drawn_by(name, page)
        }

    assert changed(r"^function verdict\(run\) \{", r"\g<0> run = { ...run };") == {"report.png"}
    assert changed(r"^function fillList\(.*\{", r"\g<0> void 0;") == {"rollouts.png"}
    assert changed("</style>", "p { color: red; }</style>") == {"report.png", "rollouts.png"}
    assert changed(r"^function verdict\(run\) \{", "// A comment.\n\\g<0>\n\n") == set()
    assert changed(r"^function timeline\(.*\{", r"\g<0> void 0;") == set()
    assert parts_of_view(page, "overview") != parts_of_view(page, "inspector")

    picture = tmp_path / TERMINAL
    picture.write_bytes((IMAGES / TERMINAL).read_bytes())
    mark(picture, "0" * 64)
    assert mark_of(picture) == "0" * 64
