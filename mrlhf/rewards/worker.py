"""The process that runs a user's reward function, so that a hang or a crash there does not stop the
trainer.

It is started by its path as `worker.py FD FILE NAME TIMEOUT`, not imported, and uses the standard
library and `user_code.py` alone. It does not know the trainer. It talks over the socket FD:

1. It receives the import path and answers `("ready", None)`.
2. It receives lists of argument tuples and answers each tuple with `("score", value)`. If one
   fails, it answers `("error", (summary, traceback))` and drops the rest of the list.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_user_code() -> ModuleType:
    """`mrlhf/user_code.py` by its path, since importing the package would bring torch."""
    file = Path(__file__).resolve().parents[1] / "user_code.py"
    spec = importlib.util.spec_from_file_location("mrlhf_user_code", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


user_code = load_user_code()


def plain(value: Any) -> Any:
    """`value` in builtin types: a number of any library as a float, anything else as its repr.

    In a dict, "pred" becomes text.
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
    """An answer as text, by which answers are compared; None where there is none."""
    return None if value is None else str(value)


def without_own_frames(error: BaseException) -> str:
    """The traceback of `error`, starting with the user's code."""
    step: TracebackType | None = error.__traceback__
    own_files = (__file__, user_code.__file__)
    while step is not None and step.tb_frame.f_code.co_filename in own_files:
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
        # If the trainer dies while this call hangs, only SIGALRM is left to stop it.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 1)
        try:
            value = plain(function(**dict(zip(PARAMETERS, arguments, strict=True))))
        except BaseException as error:
            summary = user_code.summarise_error(error, file)
            connection.send(("error", (summary, without_own_frames(error))))
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(("score", value))


def main() -> None:
    """Serve until the trainer closes its end."""
    descriptor = int(sys.argv[1])
    file = Path(sys.argv[2])
    name = sys.argv[3]
    timeout_s = float(sys.argv[4])

    # A scheduler sends these to every process of the job; the trainer decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        sys.path[:] = [str(file.parent), *connection.recv()]
        try:
            function = user_code.load_function(file, name, PARAMETERS, by_name=True)
        except user_code.UserCodeError as error:
            trace = "" if error.__cause__ is None else without_own_frames(error.__cause__)
            connection.send(("error", (str(error), trace)))
            return
        connection.send(("ready", None))

        while True:
            answer(connection, function, file, connection.recv(), timeout_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
