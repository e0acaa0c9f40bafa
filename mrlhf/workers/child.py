"""What the processes of users' code do alike: their limits, their end, and how they report errors.

It is loaded by its path by the scripts of these processes, not imported, and uses the standard
library and `user_code.py` alone. It does not know what a process is for.
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
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


def load_by_path(file: Path) -> ModuleType:
    """A file of the package, without the package, which would import torch."""
    spec = importlib.util.spec_from_file_location(f"mrlhf_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PACKAGE = Path(__file__).resolve().parents[1]
user_code = load_by_path(_PACKAGE / "config" / "user_code.py")


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
    while step is not None and step.tb_frame.f_code.co_filename.startswith(f"{_PACKAGE}/"):
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


def ignore_signals_of_the_job() -> None:
    """Ignore what a scheduler sends to all processes of a job; the trainer decides about it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
