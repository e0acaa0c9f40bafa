"""The commands that pages tell a reader to run, so that tests run them as they stand.

A test gets the commands of a page from `commands_of` and runs them.
`tests/unit/test_page_commands.py` finds these calls in the sources of the tests, and fails for a
command that no test gets.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs" / "recipes").glob("*/README.md")),
]

# In a block that does not say what it is, a line with one of these as its first word is a command.
PROGRAMS = {
    *("bash", "cat", "cd", "export", "git", "hf", "kill", "make", "mkdir", "mrlhf", "pip"),
    *("printf", "python", "sbatch", "scancel", "scontrol", "source", "tensorboard", "torchrun"),
}
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s+)# .*")
_FILE = re.compile(r"(?<=Write\sthis\sas\s)`([\w/.]+)`|`([\w/]+\.\w+)`:$")
_INDENTED = re.compile(r"(?<=\n)\n((?:    .+\n)+)")


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str  # the page's path in the repository
    text: str  # as a shell takes it, its continued lines joined, without a comment

    @property
    def words(self) -> list[str]:
        """As a shell splits it."""
        return shlex.split(self.text)


def read_commands(page: Path) -> list[Command]:
    """All commands of a page, in order."""
    text = page.read_text(encoding="utf-8")
    blocks = [(match.start(), match[1], match[2]) for match in _FENCED.finditer(text)]
    rest = _FENCED.sub(lambda match: "x" * len(match[0]), text)
    blocks += [(match.start(), "", match[1]) for match in _INDENTED.finditer(rest)]

    name = str(page.relative_to(ROOT))
    found = []
    for _, kind, block in sorted(blocks):
        if kind in ("bash", "sh"):
            found += [Command(name, command) for command in _split(block)]
        elif kind == "" and is_command(block.replace("\\\n", "")):
            found += [Command(name, command) for command in _split(block) if is_command(command)]
    return found


def files(page: str) -> dict[str, str]:
    """The files that a page tells a reader to write, by name.

    Each is a block of Python, YAML or JSON under a paragraph with "Write this as" and the name, or
    with the name at its end.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found = {}
    before = 0
    for block in _FENCED.finditer(text):
        paragraph = text[before : block.start()].rstrip().split("\n\n")[-1]
        name = _FILE.search(paragraph)
        before = block.end()
        if name is not None and block[1] in ("python", "yaml", "json"):
            found[name[1] or name[2]] = block[2]
    return found


def commands_of(page: str, pattern: str = "") -> list[str]:
    """The commands of a page in which `pattern` is found, for a test that runs them.

    Args:
        page: its path in the repository, such as "docs/report.md"; a literal.
        pattern: a regular expression; a literal. All commands match the empty one.
    """
    texts = [command.text for command in read_commands(ROOT / page)]
    found = [text for text in texts if re.search(pattern, text)]
    assert found, f"{page} has no command with {pattern!r}"
    return found


def is_command(block: str) -> bool:
    """Whether the first word of a block or a line, after assignments, is the name of a program."""
    first = re.match(r"\s*(?:[A-Z_]+=\S+\s+)*([\w.-]+)(?=\s|$)", block)
    return first is not None and (first[1] in PROGRAMS or first[1].startswith("mrlhf-"))


def _split(block: str) -> list[str]:
    """The commands of a block: a line that ends with a backslash, or in a quotation, goes on."""
    found = []
    pending = ""
    for line in block.splitlines():
        pending += line if pending.endswith("\n") else _COMMENT.sub("", line).strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
            continue
        try:
            words = shlex.split(pending)
        except ValueError:  # a quotation goes on
            pending += "\n"
            continue
        if words:
            found.append(pending)
        pending = ""

    assert not pending, f"a command does not end: {pending}"
    return found
