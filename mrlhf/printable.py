"""Makes text safe to show on a terminal, by writing out control characters.

A user's name, path or sample may hold any character; an escape sequence would recolour the
terminal, move its cursor or hide other lines. This file does not know where the text is shown.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

STANDARD_OUTPUT = "standard output"

# C0 except line end and tab, DEL, C1, and characters that change the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with control characters as Python writes them in a string, such as \\x1b."""
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def size_text(nbytes: int) -> str:
    """A number of bytes for people, such as "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000  # type: ignore[assignment]
    return f"{nbytes:.4g} TB"


def wrapped(text: str, stream: TextIO | None) -> str:
    """`text`, with long lines broken between words if `stream` is a terminal."""
    if stream is None or not stream.isatty():  # it is None if it is closed
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False)
        wrapper.break_on_hyphens = False
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def show(text: str, end: str = "\n") -> None:
    """Print `text` and `end` on standard output, at once, so that an error is not lost.

    It is no error if a reader such as `head` has read enough.

    Raises:
        OSError: standard output is full or closed; its `filename` says so.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = sys.stdout.encoding or "utf-8"
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        print(shown, end=end, flush=True)
    except OSError as error:
        # The rest of the buffer must not fail once more when the interpreter ends.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from None
