"""Reads a path in a configuration: `~` and `${VARIABLE}` are replaced as in a shell.

It does not know whether anything exists at the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mrlhf.config.user_code import check_name, is_reference

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_VARIABLE = re.compile(r"\$(\w+|\{[^{}]*\})")


def expand_path(text: str) -> str:
    """Replace a `~` at the start of `text`, and environment variables.

    Raises:
        ValueError: it is empty or an address and no path, or names a user or a variable that does
            not exist.
    """
    if not text.strip():
        raise ValueError("should be a path, and is empty")
    if not text.isprintable():
        raise ValueError("should be a path, and holds characters that cannot be printed")

    path = _VARIABLE.sub(_value, text)
    scheme = _SCHEME.match(path.strip())
    if scheme is not None:
        raise ValueError(
            f"should be a path of the file system, and '{scheme[0]}' begins an address; copy what "
            "is there into a directory, and name that"
        )
    if path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            user = path.split("/")[0]
            raise ValueError(f"'{user}' names no user of this machine; write the path in full")
    if not path.strip():
        raise ValueError("should be a path, and is empty once its variables are replaced")
    return path


def expand_name(name: object, known: Sequence[str]) -> str:
    """A known name, or "path/to/file.py:function" with its path expanded; else ValueError."""
    text = check_name(name, known)
    if not is_reference(text):
        return text
    path, _, function = text.rpartition(":")
    return f"{expand_path(path)}:{function}"


def _value(match: re.Match[str]) -> str:
    """The value of the environment variable that `match` names."""
    name = match[1].strip("{}")
    value = os.environ.get(name)
    if value is None:
        raise ValueError(f"the environment variable {name or match[0]} is not set")
    return value
