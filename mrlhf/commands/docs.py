"""Prints a page of the documentation, or one section of it.

Usage: mrlhf docs [TOPIC]

In a clone these are the files of `docs/`, those beside it and those of the recipes; an installed
package has a copy of them.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.errors import ConfigError
from mrlhf.printable import show
from mrlhf.version import add_version_option, shipped

_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print; 0 when done, 2 if there is no such page."""
    parser = argparse.ArgumentParser(description="Print a page of the documentation.")
    add_version_option(parser)
    topic_help = (
        "a page, such as slurm; a section, such as kl-explosion; or both: slurm#variables "
        "(default: list the pages)"
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=topic_help)
    topic: str | None = parser.parse_args(arguments).topic

    def print_it() -> int:
        pages = read_pages(shipped())
        show(list_of_pages(pages) if topic is None else find(pages, topic))
        return 0

    return end_command(print_it, shipped())


def read_pages(folder: Path) -> dict[str, str]:
    """Return the text of each page by its name; recipes are `recipes/<name>`."""
    pages = {path.stem: path for path in (*folder.glob("*.md"), *sorted(folder.glob("docs/*.md")))}
    for path in sorted(folder.glob("configs/recipes/*/README.md")):
        pages[f"recipes/{path.parent.name}"] = path
    return {name: path.read_text("utf-8") for name, path in pages.items()}


def list_of_pages(pages: Mapping[str, str]) -> str:
    """Return the name and the title of each page, a line each."""
    width = max(map(len, pages))
    lines = [f"{name:<{width}}  {_sections(text)[0][1]}" for name, text in pages.items()]
    return "\n".join([*lines, "", "mrlhf docs TOPIC prints one of them."])


def find(pages: Mapping[str, str], topic: str) -> str:
    """Return the page, or the section, that is called `topic`; ConfigError if there is none."""
    path = topic.removeprefix("docs/").removeprefix("configs/").replace("/README.md", "")
    page, _, anchor = path.replace(".md", "").partition("#")
    if page in pages and not anchor:
        return pages[page]

    wanted = (anchor or page).replace("_", "-").lower()
    sections: dict[str, str] = {}
    for text in [pages[page]] if page in pages else pages.values():
        for name, title, section in _sections(text):
            if wanted in (name, title.lower()):
                return section
            sections.setdefault(name, section)
    names = list(dict.fromkeys([*pages, *sections]))
    part = [name for name in names if wanted in name.replace("_", "-").lower()]
    near = part[:3] or difflib.get_close_matches(wanted, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(f"no page or section is called {topic!r}; {hint}mrlhf docs lists the pages")


def _sections(text: str) -> list[tuple[str, str, str]]:
    """Return the name in links, the title and the text of each section; the first is the page."""
    without_code = _CODE.sub(lambda code: "x" * len(code[0]), text)
    headings = list(_HEADING.finditer(without_code))
    sections = []
    for number, heading in enumerate(headings):
        later = [other for other in headings[number + 1 :] if len(other[1]) <= len(heading[1])]
        end = later[0].start() if later else len(text)
        title = heading[2].replace("`", "")
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        sections.append((name, title, text[heading.start() : end].rstrip()))
    return sections
