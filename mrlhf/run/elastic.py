"""torchrun with other exit codes, another handling of signals, and an immediate end after a
failure.

- It exits with the code by which its workers ask to be queued again, or say that the input is bad.
- It passes each signal on, even one that a scheduler repeats every second, but not before the
  workers have imported.
- It sets what libraries read of the workers' environment (`library_variables.py`).
- When a worker dies, it kills the others at once, and its last line is the one message that says
  why.

Everything else, such as the command line, is torchrun's. This file does not know what the workers
do.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.launcher.api as launcher_api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, run

from mrlhf.printable import printable
from mrlhf.run.failures import BAD_INPUT, FAILED, QUEUE_AGAIN, STOP_SIGNALS
from mrlhf.run.leaving import end_on_signals
from mrlhf.run.library_variables import set_for_ranks
from mrlhf.run.watcher import HELD_SIGNALS
from mrlhf.version import add_version_option

logger = logging.getLogger(__name__)
_TORCHRUN = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

_IN_USE = "address already in use"
_STOP_S = 600  # for the workers to save after a signal
_BAD_INPUT_S = 5.0  # for the other workers to see the bad input too
_OTHER_LAUNCHERS_S = 30.0  # for their workers to end, which have saved as well


class FailFastAgent(LocalElasticAgent):
    """torchrun's agent for the workers of this machine."""

    def __init__(self, *args: Any, stop_s: float, signals: set[int], **kwargs: Any) -> None:
        """Start nothing yet; workers have `stop_s` to end after one of the `signals` that came."""
        super().__init__(*args, **kwargs)
        self._stop_s = stop_s
        self._signals = signals
        self._end_at = math.inf

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers; they get all later signals, and those that came before."""
        # A worker imports for seconds before it has handlers; a signal waits until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            started = super()._start_workers(worker_group)
            # torchrun's own handlers, which it has just installed, leave the workers to themselves
            # when a third signal comes.
            for number in STOP_SIGNALS:
                signal.signal(number, self._forward)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)

        for earlier in sorted(self._signals):
            self._forward(earlier, None)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers once; torchrun calls it many times a second."""
        codes = [process.poll() for process in self._workers()]
        ended = set(codes) - {None, 0}
        if self._signals or ended & {BAD_INPUT, QUEUE_AGAIN}:
            self._remaining_restarts = 0  # starting the workers again would change nothing

        if ended - {BAD_INPUT, QUEUE_AGAIN}:
            # One that waits for a worker that is not there any more would not end by itself.
            self._send(signal.SIGKILL)
        elif None in codes:
            self._end_late_workers(ended)
            # torchrun might see the end of a worker that was not seen here, and log it.
            return RunResult(state=WorkerState.HEALTHY)

        # torchrun logs how each worker ends, which is noise if a worker has said why.
        _TORCHRUN.disabled = bool(ended & {BAD_INPUT, QUEUE_AGAIN}) or self._has_message()
        result = super()._monitor_workers(worker_group)
        if ended == {QUEUE_AGAIN}:
            # The launcher of another machine may hold the store, which its workers still need.
            self._exit_barrier_timeout = _OTHER_LAUNCHERS_S
            self._exit_barrier()
        return result

    def _end_late_workers(self, ended: Set[int | None]) -> None:
        """Kill workers that run too long after a signal, or after another worker has ended."""
        now = time.monotonic()
        if ended:
            limit_s = _BAD_INPUT_S if BAD_INPUT in ended else self._stop_s
            self._end_at = min(self._end_at, now + limit_s)
        if now > self._end_at:
            if BAD_INPUT not in ended:
                logger.error("the workers have not ended %g s after the signal", self._stop_s)
            self._send(signal.SIGKILL)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(number)
        self._end_at = min(self._end_at, time.monotonic() + self._stop_s)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._workers():
            process.send_signal(number)

    def _has_message(self) -> bool:
        """Whether a worker has left a message that says why it fails."""
        assert self._pcontext is not None, "there are no workers"
        return any(os.path.isfile(file) for file in self._pcontext.error_files.values())

    def _workers(self) -> list[subprocess.Popen]:
        assert isinstance(self._pcontext, SubprocessContext), "the workers are no programs"
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()]


def exit_code(codes: Sequence[int], signals: Set[int] = frozenset()) -> int:
    """The launcher's exit code, from those of this machine's workers that are not 0.

    A code is negative if a signal has killed the worker; `signals` are those that the launcher has
    passed on.
    """
    # A worker that dies of a signal that was passed on has not begun its run, so it loses nothing.
    said = {QUEUE_AGAIN if -code in signals else code for code in codes}
    said = {code for code in said if code > 0}
    if BAD_INPUT in said:  # the others fail when it is gone
        return BAD_INPUT
    return QUEUE_AGAIN if said == {QUEUE_AGAIN} else FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Do as torchrun does with these arguments; None: those of the process.

    Returns:
        0 if all workers of this machine succeed; 75 if they ask to be queued again; 2 if one has
        got bad input; otherwise 1.
    """
    # Until there are workers, nothing is lost if the job stops.
    end_on_signals()
    parser = get_args_parser()
    add_version_option(parser)
    parser.set_defaults(shutdown_timeout=_STOP_S)  # torchrun's is 30
    options = parser.parse_args(argv)
    set_for_ranks()

    # torchrun's launch names its agent's class here, and takes no other from its caller.
    signals: set[int] = set()
    agent = functools.partial(FailFastAgent, stop_s=options.shutdown_timeout, signals=signals)
    launcher_api.LocalElasticAgent = agent  # type: ignore[misc,assignment]
    try:
        run(options)
    except (dist.DistNetworkError, RendezvousError) as error:
        sys.stderr.write(f"error: {_no_rendezvous(error, options)}\n")
        return BAD_INPUT if _IN_USE in str(error).lower() else FAILED
    except ChildFailedError as error:
        code = exit_code([failure.exitcode for failure in error.failures.values()], signals)
        message = _message(error)
        if message is None and code == FAILED:
            sys.stderr.write(f"{error}\n")
        elif message is not None and options.redirects != "0":  # it went to a file alone
            sys.stderr.write(f"error: {printable(message)}\n")
        return code
    finally:
        # Python resets its handlers as it ends; a signal would then change the exit code.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    return 0


def _no_rendezvous(error: Exception, options: Any) -> str:
    """The reason why the launchers do not find each other, on one line."""
    if _IN_USE in str(error).lower():
        return (
            f"port {options.master_port} of this machine is in use; give another --master-port, or "
            "--standalone, which chooses a free one"
        )
    return f"the launchers do not find each other: {printable(str(error)).splitlines()[0]}"


def _message(error: ChildFailedError) -> str | None:
    """A worker's message about its failure; None if no worker has left one."""
    for failure in error.failures.values():
        if isinstance(failure.message, dict):
            return str(failure.message["message"])
    return None
