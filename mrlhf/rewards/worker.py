"""The process that runs a user's reward function, so that a hang or a crash there does not stop the
trainer.

It is started by its path as `worker.py FD LIFELINE FILE NAME MEMORY_MB`, not imported, and
uses the standard library and `user_code.py` alone. It does not know the trainer. It talks over the
socket FD, in lines of JSON:

1. It receives the import path and answers `["ready", null]`.
2. It receives lists of lists of arguments, and answers each list of arguments with
   `["score", value]`. If one fails, it answers `["error", [summary, traceback]]` and drops the
   rest.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_user_code() -> ModuleType:
    """Load `config/user_code.py` by its path, since importing the package would import torch."""
    file = Path(__file__).resolve().parents[1] / "config" / "user_code.py"
    spec = importlib.util.spec_from_file_location("mrlhf_user_code", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


user_code = load_user_code()


def plain(value: Any) -> Any:
    """`value` in builtin types: a number of any library as a float, anything else as its repr.

    In a dict, "pred" becomes text, and None stays.
    """
    if isinstance(value, Mapping):
        return {
            str(key): text(item) if key == "pred" or item is None else plain(item)
            for key, item in value.items()
        }
    if isinstance(value, (str, bytes)):
        return repr(value)[:200]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return repr(value)[:200]


def text(value: Any) -> str | None:
    """An answer as text, so that answers can be compared; None without one."""
    return None if value is None else str(value)


def without_own_frames(error: BaseException) -> str:
    """The traceback of `error`, starting with the user's code."""
    step: TracebackType | None = error.__traceback__
    own_files = (__file__, user_code.__file__)
    while step is not None and step.tb_frame.f_code.co_filename in own_files:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step or error.__traceback__))


def send(connection: socket.socket, kind: str, value: Any) -> None:
    """Send one message."""
    connection.sendall(json.dumps([kind, value]).encode() + b"\n")


def limit_resources(memory_mb: int) -> None:
    """Limit the private memory (MB; 0: no limit) of this process and of each that it starts.

    On systems other than Linux some limits do not exist and are left out.
    """
    if memory_mb:
        nbytes = memory_mb * 10**6
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))

    # If the machine runs out of memory, the kernel ends these processes before the trainer.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_trainer(lifeline: int) -> None:
    """Have the kernel kill this process and its group as soon as the trainer has gone.

    `lifeline` is the read end of a pipe whose other end only the trainer holds. No thread has to
    run for that, so it works while a call hangs in C. On systems other than Linux nothing is done.
    """
    os.set_inheritable(lifeline, False)
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
        poller = select.poll()
        poller.register(lifeline, select.POLLHUP)
        if poller.poll(0):  # it has gone before
            os.killpg(0, signal.SIGKILL)


def answer(
    connection: socket.socket, function: Callable[..., Any], file: Path, calls: list[Any]
) -> None:
    """Score `calls` one by one and stop at the first that fails."""
    for arguments in calls:
        try:
            value = plain(function(**dict(zip(PARAMETERS, arguments, strict=True))))
        except BaseException as error:  # also SystemExit: the process serves on
            summary = user_code.summarise_error(error, file)
            send(connection, "error", [summary, without_own_frames(error)])
            return
        send(connection, "score", value)


def main() -> None:
    """Serve until the trainer closes its end."""
    descriptor = int(sys.argv[1])
    end_with_trainer(int(sys.argv[2]))
    file = Path(sys.argv[3])
    name = sys.argv[4]

    # A scheduler sends these to every process of the job; the trainer decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    limit_resources(int(sys.argv[5]))
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
        trace = "" if error.__cause__ is None else without_own_frames(error.__cause__)
        send(connection, "error", [str(error), trace])
        return
    send(connection, "ready", None)

    for line in lines:
        answer(connection, function, file, json.loads(line))


if __name__ == "__main__":
    main()
