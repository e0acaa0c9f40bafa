"""Runs a user's reward function in the process that `workers/start.py` begins.

It gets lists of lists of arguments, and answers each list of arguments with ["score", value]. If
one fails, it answers ["error", [summary, traceback]] and drops the rest. It uses the standard
library alone, and does not know the trainer.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mrlhf.config import user_code
from mrlhf.workers import child

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load(file: str, name: str) -> tuple[None, Callable[..., None]]:
    """Load the function; UserCodeError if it cannot be used."""
    sys.path.insert(0, str(Path(file).parent))
    function = user_code.load_function(Path(file), name, PARAMETERS, by_name=True)
    return None, partial(_serve, function, Path(file))


def _serve(
    function: Callable[..., Any],
    file: Path,
    messages: Iterator[child.Message],
    connection: socket.socket,
    lifeline: int,
) -> None:
    child.end_by_signals()
    for calls, _ in messages:
        for arguments in calls:
            try:
                value = _plain(function(**dict(zip(PARAMETERS, arguments, strict=True))))
            except BaseException as error:  # also SystemExit: the process serves on
                summary = user_code.summarise_error(error, file)
                child.send(connection, "error", [summary, child.without_own_frames(error)])
                break
            child.send(connection, "score", value)


def _plain(value: Any, key: Any = None) -> Any:
    """`value` in builtin types: a number of any library as a float, else its repr.

    Lists stay lists below a `key` of positions.
    """
    if str(key).endswith("_positions") and isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if isinstance(value, Mapping):
        return {
            str(key): _text(item) if key == "pred" or item is None else _plain(item, key)
            for key, item in value.items()
        }
    if isinstance(value, (str, bytes)):
        return repr(value)[:200]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return repr(value)[:200]


def _text(value: Any) -> str | None:
    """An answer as text, so that answers can be compared; None without one."""
    return None if value is None else str(value)
