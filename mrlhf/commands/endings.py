"""How a command ends: bad input becomes one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mrlhf.errors import MrlhfError


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in the command line in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"error: {message}; see --help\n")


def end_command(action: Callable[[], int], place: Path) -> int:
    """Do `action`; returns its exit code, or 2 after an error, which is told in one line.

    `place` is where the command writes, for an error of the system that names no file.
    """
    try:
        return action()
    except MrlhfError as error:
        sys.stderr.write(f"error: {error}\n")
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or place}: {error.strerror or error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 2
