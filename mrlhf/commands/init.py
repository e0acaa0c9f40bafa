"""Copies the shipped configurations, pages and launch scripts into a directory.

Usage: mrlhf-init [--out DIR]

Pages, configurations and alarms name these files relative to the working directory. This file does
not know their contents.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.printable import show
from mrlhf.version import add_version_option, shipped

FOLDERS = ("configs", "docs", "launch")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Copy the shipped configurations, launch scripts and pages, so that you can "
        "read, run and change them."
    )
    add_version_option(parser)
    where = "where the folders go (default: the working directory)"
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help=where)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy; 0 when done, 2 if a folder is there already."""
    out = parse(arguments).out
    present = [str(out / name) for name in FOLDERS if (out / name).exists()]
    if present:
        sys.stderr.write(f"error: {present[0]} exists; move it away, or give another --out DIR\n")
        return 2

    def copy() -> int:
        for name in FOLDERS:
            shutil.copytree(
                shipped() / name, out / name, ignore=shutil.ignore_patterns("__pycache__")
            )
            show(str(out / name))
        return 0

    return end_command(copy, out)
