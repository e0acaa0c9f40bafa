"""The processes of users' code: their limits, their end, and how they report errors.

It is imported without the package and uses the standard library alone. It does not know what a
process is for.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_RECEIVED_BYTES = 1 << 20
# What schedulers send to all processes of a job. The trainer decides about it; a process of users'
# code must neither ignore it, which all that it starts would inherit, nor answer after it: what it
# has started may have ended.
SIGNALS_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Message = tuple[Any, list[int]]  # what the trainer sent, and descriptors that came with it


def without_own_frames(error: BaseException) -> str:
    """The traceback of `error`, starting with the user's code."""
    step: TracebackType | None = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(f"{_PACKAGE}/"):
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step or error.__traceback__))


def send(connection: socket.socket, kind: str, value: Any) -> None:
    """Send one message."""
    send_line(connection, json.dumps([kind, value]).encode() + b"\n")


def send_line(connection: socket.socket, line: bytes) -> None:
    """Send a line; a fork of the user's code that comes back ends here instead."""
    if connection.fileno() < 0:
        os._exit(1)
    connection.sendall(line)


def messages(connection: socket.socket) -> Iterator[Message]:
    """All messages until the trainer closes its end, with the descriptors that came with each."""
    received = bytearray()
    descriptors: list[int] = []
    while True:
        part, passed, _, _ = socket.recv_fds(connection, _RECEIVED_BYTES, 1)
        if not part:
            return
        received += part
        descriptors += passed
        if b"\n" in part:
            *lines, received = received.split(b"\n")
            for line in lines:
                yield json.loads(line), descriptors
                descriptors = []


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


def keep_from_forks(connection: socket.socket) -> None:
    """Let what the user's code forks have no connection, so that it cannot answer as well."""

    def detach() -> None:
        with suppress(OSError):  # the fork of a fork has none either
            os.close(connection.detach())

    os.register_at_fork(after_in_child=detach)


def outlive_signals_of_the_job() -> None:
    """Let no signal of the job end this process until `end_by_signals`; its forks end by them.

    A program that is started has no handler, so it too takes signals as it does from any shell.
    """
    for number in SIGNALS_OF_THE_JOB:
        signal.signal(number, _go_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_THE_JOB)  # the launcher holds some back
    os.register_at_fork(after_in_child=_as_in_plain_python)


def end_by_signals() -> None:
    """Let each signal of the job end this process, unless the user's code has its own handler."""
    # SIGINT raises nothing, since users' code may catch all exceptions.
    for number in SIGNALS_OF_THE_JOB:
        if signal.getsignal(number) in (_go_on, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)


def _as_in_plain_python() -> None:
    end_by_signals()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _go_on(number: int, frame: FrameType | None) -> None:
    """The handler of a process that outlives a signal."""
