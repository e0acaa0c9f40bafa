"""How a command ends: bad input becomes one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from mrlhf.errors import MrlhfError


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
