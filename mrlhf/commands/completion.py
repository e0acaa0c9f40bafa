"""Prints the script that lets a shell complete commands, options, keys of mrlhf and their values.

Options are read in the sources of the commands, most of which would import torch.

Usage: source <(mrlhf completion bash)
       source <(mrlhf completion zsh)
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mrlhf.commands.docs import read_pages
from mrlhf.commands.entry import SUBCOMMANDS, Subcommand
from mrlhf.config.roots import PROGRAMS, PPOConfig
from mrlhf.config.tree import nodes
from mrlhf.printable import show
from mrlhf.version import add_version_option, shipped

# An option, or the name of a parser of its own.
_OPTION = re.compile(r'(?:\(\s*(?:"-h", )?"(?=--)|add_parser\(\s*")([\w-]+)"')


def main(arguments: Sequence[str] | None = None) -> int:
    """Print; 0 when done."""
    parser = argparse.ArgumentParser(
        description="Print a script for your shell: source <(mrlhf completion bash)"
    )
    add_version_option(parser)
    parser.add_argument("shell", choices=["bash", "zsh"])
    parser.parse_args(arguments)
    show(script())
    return 0


def script() -> str:
    """Return the script, which both shells run."""
    names = [row.name for row in SUBCOMMANDS]
    keys = {name: node for root in PROGRAMS.values() for name, node in nodes(root).items()}
    values = {name: " ".join(_values(node.field.annotation)) for name, node in keys.items()}
    parts = {
        "names": " ".join(names),
        "commands": " | ".join(names),
        "programs": " ".join(f"mrlhf-{name}" for name in names),
        "values": "\n".join(f'{key}) words="{words}" ;;' for key, words in values.items() if words),
        "options": "\n".join(f'{row.name}) words="{_words(row)}" ;;' for row in SUBCOMMANDS),
    }
    text = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")
    return re.sub("@([a-z]+)@", lambda place: parts[place[1]], text)


def _words(row: Subcommand) -> str:
    """What may follow the name of a command."""
    roots = {f"train-{name}": root for name, root in PROGRAMS.items()}
    spec = find_spec("mrlhf.config.arguments" if row.name in roots else row.module)
    assert spec is not None and spec.origin is not None
    words = _OPTION.findall(Path(spec.origin).read_text(encoding="utf-8"))

    root = roots.get(row.name, PPOConfig if row.name in ("plan", "doctor", "generate") else None)
    if root is not None:
        words += [f"{name}=" for name, node in nodes(root).items() if not node.is_section]
    if row.name == "docs":
        words += read_pages(shipped())
    return " ".join(words)


def _values(annotation: Any) -> list[str]:
    """The words that a key of this type takes, if it takes any."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return list(map(str, get_args(annotation)))
    parts = () if get_origin(annotation) is list else get_args(annotation)
    return [word for part in parts for word in _values(part)]
