"""The script of a process that runs a user's code, so that a hang or a crash touches no trainer.

It is started by its path as `start.py SERVICE FD LIFELINE MEMORY_MB`, and talks over the socket FD
in lines of JSON. It gets {"path", "given"}, loads the module SERVICE with what is given, and
answers ["ready", what the code offers] or ["error", [summary, traceback]]. All further messages
are those of the service. This file does not know them.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_PARTS = ("", ".config", ".episodes", ".episodes.environments", ".rewards", ".workers")


def import_alone(*names: str) -> list[Any]:
    """Modules of the package, without the package itself, which would import torch.

    The user's code can still import the package as it is.
    """
    for part in _PARTS:
        folder = ModuleType(f"mrlhf{part}")
        folder.__path__ = [str(_PACKAGE.joinpath(*part.split(".")))]
        sys.modules[folder.__name__] = folder
    modules = [importlib.import_module(name) for name in names]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mrlhf"]:
        del sys.modules[name]
    return modules


def main() -> None:
    """Serve until the trainer closes its end."""
    child, user_code, service = import_alone(
        "mrlhf.workers.child", "mrlhf.config.user_code", sys.argv[1]
    )
    descriptor, lifeline, memory_mb = map(int, sys.argv[2:])
    child.end_with_trainer(lifeline)
    child.outlive_signals_of_the_job()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    child.keep_from_forks(connection)
    child.limit_resources(memory_mb)

    with suppress(BrokenPipeError, ConnectionResetError, StopIteration):
        messages = child.messages(connection)
        request, _ = next(messages)
        sys.path[:] = request["path"]
        try:
            offer, serve = service.load(*request["given"])
        except user_code.UserCodeError as error:
            cause = error.__cause__
            trace = "" if cause is None else child.without_own_frames(cause)
            child.send(connection, "error", [str(error), trace])
        else:
            child.send(connection, "ready", offer)
            serve(messages, connection, lifeline)
    os.killpg(0, signal.SIGKILL)  # and with this process all that the user's code has left


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # the user's code has spawned this process
    sys.meta_path.append(import_alone("mrlhf.config.user_code")[0].FindByName())
