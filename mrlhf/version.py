"""The version of mrlhf, the option that shows it, and where the files lie that come with it.

`setup.py` runs this file by itself, so it imports nothing of the package.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

__all__ = ["__version__", "add_version_option", "code_version", "shipped"]

__version__ = "0.12.0"


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the version and ends the program."""
    parser.add_argument("--version", action="version", version=f"mrlhf {__version__}")


def code_version() -> str:
    """The version, with the commit in a clone of the repository."""
    commit = ""
    if (shipped() / ".git").exists() and shutil.which("git"):
        git = ["git", "-C", str(shipped()), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return f"{__version__} ({commit})" if commit else __version__


def shipped() -> Path:
    """The directory of the shipped folders: in an installed package, or beside it in a clone."""
    package = Path(__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent
