"""torchrun, with three things changed: how it takes signals, fails fast, and what it exits with.

torchrun kills its workers 30 seconds after it gets SIGTERM, dies of SIGUSR1, and exits with code 1
whatever the code of its workers. Here it hands signals on and waits, and it exits with the code by
which its workers ask to be queued again. Everything else, the command line included, is torchrun's.
This file does not know what the workers are.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from mrlhf.run.program import BAD_INPUT, FAILED, QUEUE_AGAIN

logger = logging.getLogger(__name__)

STOP_TIMEOUT_OPTION = "--stop-timeout"
STOP_TIMEOUT_S = 600.0

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_FINAL_CODES = (BAD_INPUT, QUEUE_AGAIN)  # starting the workers again would change nothing


class ForwardingAgent(LocalElasticAgent):
    """torchrun's agent for this machine's workers; see the top of this file."""

    stop_timeout_s = STOP_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._end_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start them; from then on signals are theirs."""
        # A worker imports for seconds before it has handlers. Until then it ignores SIGUSR1, which
        # Slurm sends to all processes of a job and which would end it; the batch script repeats it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        started = super()._start_workers(worker_group)
        # torchrun has just installed handlers of its own.
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers once; torchrun calls it many times a second."""
        codes = self._exit_codes()
        if self._end_at is not None:
            self._remaining_restarts = 0
            if time.monotonic() > self._end_at:
                logger.error(
                    "the workers have not ended %g s after the signal", self.stop_timeout_s
                )
                self._kill_workers()

        failed = [code for code in codes if code not in (None, 0, *_FINAL_CODES)]
        final = [code for code in codes if code in _FINAL_CODES]
        if failed:
            # One that waits for a worker that is not there any more would not end by itself.
            self._kill_workers()
        elif final:
            self._remaining_restarts = 0
            if None in codes:
                self._end_at = self._end_at or time.monotonic() + self.stop_timeout_s
                return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._end_at is None:
            self._end_at = time.monotonic() + self.stop_timeout_s
        for pid in self._running():
            os.kill(pid, number)

    def _kill_workers(self) -> None:
        for pid in self._running():
            os.kill(pid, signal.SIGKILL)

    def _exit_codes(self) -> list[int | None]:
        """The exit code of each worker of this machine, None while it runs."""
        return [process.poll() for process in self._workers()]

    def _running(self) -> list[int]:
        """The process ids of the workers that run, each of which is a child of this process."""
        return [process.pid for process in self._workers() if process.poll() is None]

    def _workers(self) -> list[subprocess.Popen]:
        assert isinstance(self._pcontext, SubprocessContext), "the workers are no programs"
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()]


def exit_code(codes: Sequence[int]) -> int:
    """What the launcher exits with.

    Args:
        codes: the exit codes, other than 0, of this machine's workers; negative for those that a
            signal has killed.

    Returns:
        75 or 2 if that is what all workers say that were not killed, else 1.
    """
    said = {code for code in codes if code > 0}
    return said.pop() if len(said) == 1 and said <= set(_FINAL_CODES) else FAILED


def main(argv: Sequence[str]) -> int:
    """Do as torchrun does with these arguments, which may begin with `--stop-timeout SECONDS`.

    Returns:
        0 if all workers of this machine succeed; 75 if they ask to be queued again; 2 if they have
        got bad input; otherwise 1.
    """
    arguments = list(argv)
    if arguments and arguments[0].split("=")[0] == STOP_TIMEOUT_OPTION:
        value = arguments.pop(0).partition("=")[2]
        ForwardingAgent.stop_timeout_s = _seconds(value or (arguments.pop(0) if arguments else ""))

    # Until there are workers, nothing is lost if the job stops.
    for number in _FORWARDED:
        signal.signal(number, _stop_before_start)

    # torchrun names its agent's class here, and takes no other from its caller.
    launcher_api.LocalElasticAgent = ForwardingAgent  # type: ignore[misc]
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        code = exit_code([failure.exitcode for failure in error.failures.values()])
        if code == FAILED:
            sys.stderr.write(f"{error}\n")
        return code
    finally:
        # Python resets its handlers as it ends; a signal would then change the exit code.
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN)
    return 0


def _stop_before_start(number: int, frame: FrameType | None) -> None:
    sys.exit(QUEUE_AGAIN)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        sys.exit(f"error: {STOP_TIMEOUT_OPTION} takes a number of seconds, not {text!r}")
