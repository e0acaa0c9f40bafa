"""The version of mrlhf, and the option that shows it.

`setup.py` runs this file by itself, so it imports nothing of the package.
"""

from __future__ import annotations

import argparse

__all__ = ["__version__", "add_version_option"]

__version__ = "0.8.0"


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the version and ends the program."""
    parser.add_argument("--version", action="version", version=f"mrlhf {__version__}")
