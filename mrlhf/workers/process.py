"""A process that runs a user's code, from the trainer's side: messages, output and its end.

Messages are lines of JSON. This file does not know what a message means.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mrlhf.errors import MrlhfError, UserTraceback
from mrlhf.workers.child import SIGNALS_OF_THE_JOB

_START = Path(__file__).with_name("start.py")
_OUTPUT_BYTES = 4000
_END_S = 5.0  # for a process that has closed its connection
# Words in the errors of Python if the memory limit refuses memory, a process or a thread.
_NO_MEMORY = ("MemoryError", "Cannot allocate memory", "can't start new thread")
# The signals by which libraries end a process that gets no memory.
_OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP)


@dataclass(frozen=True)
class Limits:
    """The time and memory that a user's code may use."""

    timeout_s: float = 60.0  # longest time of one call, seconds
    # most private memory of each of its processes, MB (RLIMIT_DATA); None: no limit
    memory_mb: int | None = None
    key: str = "reward.memory_mb"  # that sets it

    @property
    def hint(self) -> str:
        """The advice in the error of a function that had too little memory."""
        return f"{self.key} = {self.memory_mb} limits its memory"


class WorkerProcess:
    """A running worker."""

    def __init__(
        self,
        service: str,
        given: Sequence[Any],
        limits: Limits,
        title: str,
        error: type[MrlhfError],
    ) -> None:
        """Start the process; `load` waits until it has loaded the user's code.

        Args:
            service: a module of the package, see `start.py`.
            given: to the service, to load.
            limits: of time, for what is sent, and of memory.
            title: with which errors begin.
            error: the type of all errors that are raised.
        """
        self._title = title
        self._error = error
        self._limits = limits
        self.was_signalled = False  # a signal of the job has ended it
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        # Appending, so that the two processes need not agree on a position.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)

        # Its other end closes when this process ends, however it ends; the kernel tells the worker.
        lifeline, held = os.pipe()
        passed = [theirs.fileno(), lifeline]
        numbers = map(str, [*passed, limits.memory_mb or 0])
        with theirs:
            # Its own group, so that what the function starts can be killed with it.
            self._popen = subprocess.Popen(
                [sys.executable, "-u", str(_START), service, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,
                # A set of texts has the same order in each process, so functions of it are alike.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        os.close(lifeline)
        self._end = weakref.finalize(self, _end, self._popen, self._socket, held)
        self.send({"path": sys.path, "given": list(given)})

    @property
    def has_ended(self) -> bool:
        """Whether the process was stopped, or had ended when an answer was due."""
        return self._output.closed

    def load(self, timeout_s: float, what: str) -> Any:
        """The description of the user's code; the error names it as `what` if it cannot be used."""
        kind, value = self.receive(timeout_s, " while its file was imported")
        if kind == "ready":
            return value
        self.stop()
        summary, trace = value
        cause = UserTraceback(trace) if trace else None
        raise self._error(f"cannot load {what}: {self.with_limit(summary)}") from cause

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and with a short one descriptors, which the process gets as its own.

        Values that JSON does not have arrive as text. If the worker is gone or does not read,
        `receive` reports that.
        """
        line = json.dumps(message, default=str).encode() + b"\n"
        self._socket.settimeout(self._limits.timeout_s)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            if descriptors:
                socket.send_fds(self._socket, [line], descriptors)
            else:
                self._socket.sendall(line)

    def receive(self, timeout_s: float, when: str = "") -> tuple[str, Any]:
        """The kind and the value of the next message.

        If it does not come in time, or the process has ended, the process is stopped, and the error
        says so and `when`.
        """
        self._socket.settimeout(timeout_s)
        line = b""
        problem = ""
        try:
            line = self._lines.readline()
        except TimeoutError:
            problem = f"took more than {timeout_s:g} s and was stopped"
        except ConnectionResetError:
            pass
        if not line.endswith(b"\n"):
            problem = problem or self._ending()
            raise self.failure(problem + when, self.stop()) from None
        kind, value = json.loads(line)
        return kind, value

    def failure(self, what: str, printed: str) -> MrlhfError:
        """The error that says what happened to the user's code, and what it printed."""
        output = f"; it printed: {printed}" if printed else ""
        return self._error(f"{self._title} {what}{output}")

    def with_limit(self, summary: str) -> str:
        """The summary of an error; if the memory limit is the cause, the limit is named too."""
        is_limited = self._limits.memory_mb is not None
        if is_limited and any(words in summary for words in _NO_MEMORY):
            return f"{summary}; {self._limits.hint}"
        return summary

    def drain(self) -> str:
        """The end of what was printed since the previous call, on one line."""
        descriptor = self._output.fileno()
        start = max(0, os.fstat(descriptor).st_size - _OUTPUT_BYTES)
        printed = os.pread(descriptor, _OUTPUT_BYTES, start).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        return " | ".join(printed.split("\n")).strip(" |")

    def stop(self) -> str:
        """Kill the process and its group; returns what it printed last."""
        if self.has_ended:
            return ""
        self._end()
        printed = self.drain()
        self._output.close()
        return printed

    def _ending(self) -> str:
        """How the process ended by itself, and which limit may be why; call it before `stop`."""
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the trainer, and was stopped"
        if code >= 0:
            return f"ended its process (exit code {code})"

        which = signal.Signals(-code)
        self.was_signalled = which in SIGNALS_OF_THE_JOB
        hint = ""
        if which == signal.SIGKILL:
            hint = ", which the kernel sends when memory runs out"
        elif which in _OUT_OF_MEMORY and self._limits.memory_mb is not None:
            hint = f"; {self._limits.hint}"
        return f"ended its process (signal {which.name}{hint})"


def _end(popen: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)  # also if the worker has ended: others may be left
    popen.wait()
    connection.close()
    os.close(lifeline)
