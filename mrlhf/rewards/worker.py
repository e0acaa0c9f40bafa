"""The process that runs a user's reward function, so that a hang or a crash there cannot take the
trainer with it.

Started by path, not imported, with the standard library alone: `worker.py FD FILE NAME TIMEOUT`.
Talks over the socket
FD: first receives the import path and answers `("ready", None)`; then receives lists of argument
    tuples and answers
each tuple with `("score", value)`, or `("error", (summary, traceback))` once, and drops the rest.
Does not know mrlhf.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


class LoadError(Exception):
    """The function is not there or cannot be called as it will be; the message says why."""


def load(file: Path, name: str) -> Callable[..., Any]:
    """The function `name` of `file`, seen to accept the four arguments."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    names = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    if not callable(vars(module).get(name)):
        near = difflib.get_close_matches(name, names, n=3)
        raise LoadError(
            f"{file} has no function {name!r}; "
            + (f"did you mean {near}?" if near else f"it has {names}")
        )
    function: Callable[..., Any] = vars(module)[name]
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise LoadError(f"{name} in {file} must accept {', '.join(PARAMETERS)}: {error}") from error
    return function


def plain(value: Any) -> Any:
    """`value` in builtin types: numbers of any library as float, whatever is no number as its repr,
    "pred" as text.
    """
    if isinstance(value, dict):
        return {
            str(key): text(item) if key == "pred" else plain(item) for key, item in value.items()
        }
    if isinstance(value, (str, bytes)):
        return repr(value)[:200]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return repr(value)[:200]


def text(value: Any) -> str | None:
    """An answer as it is compared with others; None where there is none."""
    return None if value is None else str(value)


def summarise(error: BaseException, file: Path) -> str:
    """Type, message and line of `error`, on one line."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    place = f" (line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + place


def without_own_frames(error: BaseException) -> str:
    """The traceback of `error` from the user's code on."""
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step or error.__traceback__))


def answer(
    connection: Connection,
    function: Callable[..., Any],
    file: Path,
    calls: list[Any],
    timeout_s: float,
) -> None:
    """Score `calls` one by one, up to the first that fails."""
    for arguments in calls:
        # Should the trainer die while this call hangs, nobody is left to stop it; SIGALRM then
        # does.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 1)
        try:
            value = plain(function(**dict(zip(PARAMETERS, arguments, strict=True))))
        except BaseException as error:
            connection.send(("error", (summarise(error, file), without_own_frames(error))))
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(("score", value))


def main() -> None:
    """Serve until the trainer closes its end."""
    descriptor, file, name, timeout_s = (
        int(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        float(sys.argv[4]),
    )
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        sys.path[:] = [str(file.parent), *connection.recv()]
        try:
            function = load(file, name)
        except LoadError as error:
            connection.send(("error", (str(error), "")))
            return
        except BaseException as error:
            message = f"{file} cannot be imported: {summarise(error, file)}"
            connection.send(("error", (message, without_own_frames(error))))
            return
        connection.send(("ready", None))
        while True:
            answer(connection, function, file, connection.recv(), timeout_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
