"""The process that runs a user's reward function, so that a hang or a crash there does not stop the
trainer.

It is started by its path as `worker.py FD LIFELINE FILE NAME MEMORY_MB`, not imported, and
uses the standard library and `child.py` alone. It does not know the trainer. It talks over the
socket FD, in lines of JSON:

1. It receives the import path and answers `["ready", null]`.
2. It receives lists of lists of arguments, and answers each list of arguments with
   `["score", value]`. If one fails, it answers `["error", [summary, traceback]]` and drops the
   rest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_CHILD = Path(__file__).resolve().parents[1] / "workers" / "child.py"
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def _loaded(file: Path) -> ModuleType:
    """A file of the package, loaded by its path, since importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(f"mrlhf_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


child = _loaded(_CHILD)
user_code = child.user_code


def answer(
    connection: socket.socket, function: Callable[..., Any], file: Path, calls: list[Any]
) -> None:
    """Score `calls` one by one and stop at the first that fails."""
    for arguments in calls:
        try:
            value = child.plain(function(**dict(zip(PARAMETERS, arguments, strict=True))))
        except BaseException as error:  # also SystemExit: the process serves on
            summary = user_code.summarise_error(error, file)
            child.send(connection, "error", [summary, child.without_own_frames(error)])
            return
        child.send(connection, "score", value)


def main() -> None:
    """Serve until the trainer closes its end."""
    descriptor = int(sys.argv[1])
    child.end_with_trainer(int(sys.argv[2]))
    file = Path(sys.argv[3])
    name = sys.argv[4]

    child.ignore_signals_of_the_job()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    child.limit_resources(int(sys.argv[5]))
    with suppress(BrokenPipeError, ConnectionResetError):
        serve(connection, file, name)
    os.killpg(0, signal.SIGKILL)  # and with this process all that the user's code has left


def serve(connection: socket.socket, file: Path, name: str) -> None:
    """Load the function and answer requests until the trainer closes its end."""
    lines = connection.makefile("rb")
    sys.path[:] = [str(file.parent), *json.loads(lines.readline() or "[]")]
    try:
        function = user_code.load_function(file, name, PARAMETERS, by_name=True)
    except user_code.UserCodeError as error:
        trace = "" if error.__cause__ is None else child.without_own_frames(error.__cause__)
        child.send(connection, "error", [str(error), trace])
        return
    child.send(connection, "ready", None)

    for line in lines:
        answer(connection, function, file, json.loads(line))


if __name__ == "__main__":
    main()
