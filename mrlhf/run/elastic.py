"""torchrun, with four things changed: how it takes signals, fails fast, exits, and what it says.

torchrun kills its workers 30 seconds after it gets SIGTERM, dies of SIGUSR1, and exits with code 1
whatever the code of its workers. Here it hands signals on and waits, and it exits with the code by
which its workers ask to be queued again. A launcher whose workers do so waits for the others, since
one of them holds the store. Where a worker has said why it failed, torchrun's own account of that
is left out. Everything else, the command line included, is torchrun's.
This file does not know what the workers are.
"""

from __future__ import annotations

import functools
import logging
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
from mrlhf.run.leaving import end_on_signals
from mrlhf.run.program import BAD_INPUT, FAILED, QUEUE_AGAIN
from mrlhf.run.watcher import HELD_SIGNALS
from mrlhf.version import add_version_option

logger = logging.getLogger(__name__)
_TORCHRUN = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

STOP_TIMEOUT_OPTION = "--stop-timeout"
STOP_TIMEOUT_S = 600.0

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_IN_USE = "address already in use"
_FINAL_CODES = (BAD_INPUT, QUEUE_AGAIN)  # starting the workers again would change nothing
_BAD_INPUT_S = 5.0  # for the other workers to see the bad input too
_OTHER_LAUNCHERS_S = 30.0  # for their workers to end, which have saved as well


class ForwardingAgent(LocalElasticAgent):
    """torchrun's agent for this machine's workers; see the top of this file."""

    def __init__(self, *args: Any, stop_timeout_s: float, signals: set[int], **kwargs: Any) -> None:
        """Start nothing yet.

        Args:
            args: for torchrun's agent.
            stop_timeout_s: seconds that the workers have to end after a signal.
            signals: the numbers of the signals that this launcher has got are added to it.
            kwargs: for torchrun's agent.
        """
        super().__init__(*args, **kwargs)
        self._stop_timeout_s = stop_timeout_s
        self._signals = signals
        self._end_at: float | None = None
        self._bad_input_at: float | None = None
        self._log_level = _TORCHRUN.level

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start them; from then on signals are theirs, and so are those that came before."""
        # A worker imports for seconds before it has handlers; a signal waits until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            started = super()._start_workers(worker_group)
            # torchrun has just installed handlers of its own.
            for number in _FORWARDED:
                signal.signal(number, self._forward)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)

        for earlier in sorted(self._signals):
            self._end_at = time.monotonic() + self._stop_timeout_s
            self._send(earlier)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers once; torchrun calls it many times a second."""
        codes = self._exit_codes()
        failed = [code for code in codes if code not in (None, 0, *_FINAL_CODES)]
        final = [code for code in codes if code in _FINAL_CODES]
        if self._signals or final:
            self._remaining_restarts = 0

        if failed:
            # One that waits for a worker that is not there any more would not end by itself.
            self._kill_workers()
        elif None in codes:
            self._end_late_workers(codes)
            # torchrun might see the end of a worker that was not seen here, and log it.
            return RunResult(state=WorkerState.HEALTHY)

        # torchrun would log how each worker ends.
        is_said = bool(final) or self._have_told()
        _TORCHRUN.setLevel(logging.CRITICAL if is_said else self._log_level)
        result = super()._monitor_workers(worker_group)
        if final and set(codes) <= {0, QUEUE_AGAIN}:
            self._exit_barrier_timeout = _OTHER_LAUNCHERS_S
            self._exit_barrier()
        return result

    def _end_late_workers(self, codes: Sequence[int | None]) -> None:
        """Kill those that run too long after a signal, or after another worker has ended."""
        now = time.monotonic()
        if QUEUE_AGAIN in codes:
            self._end_at = self._end_at or now + self._stop_timeout_s
        if BAD_INPUT in codes:
            self._bad_input_at = self._bad_input_at or now

        if self._end_at is not None and now > self._end_at:
            logger.error("the workers have not ended %g s after the signal", self._stop_timeout_s)
            self._kill_workers()
        elif self._bad_input_at is not None and now > self._bad_input_at + _BAD_INPUT_S:
            logger.info("a worker has got bad input, so the launcher ends the others")
            self._kill_workers()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(number)
        if self._end_at is None:
            self._end_at = time.monotonic() + self._stop_timeout_s
        self._send(number)

    def _send(self, number: int) -> None:
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

    def _have_told(self) -> bool:
        """Whether a worker has left a message that says why it fails."""
        assert self._pcontext is not None, "there are no workers"
        return any(os.path.isfile(file) for file in self._pcontext.error_files.values())

    def _workers(self) -> list[subprocess.Popen]:
        assert isinstance(self._pcontext, SubprocessContext), "the workers are no programs"
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()]


def exit_code(codes: Sequence[int], signals: Set[int] = frozenset()) -> int:
    """What the launcher exits with.

    Args:
        codes: the exit codes, other than 0, of this machine's workers; negative for those that a
            signal has killed.
        signals: those that the launcher has handed on. A worker that dies of one of them has not
            begun its run, so it loses nothing.

    Returns:
        2 if a worker says so: the others fail when it is not there any more. 75 if all workers say
        so that were not killed, or have died of `signals`. Else 1.
    """
    said = {QUEUE_AGAIN if -code in signals else code for code in codes}
    said = {code for code in said if code > 0}
    if BAD_INPUT in said:
        return BAD_INPUT
    return QUEUE_AGAIN if said == {QUEUE_AGAIN} else FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Do as torchrun does with these arguments, which may begin with `--stop-timeout SECONDS`.

    Args:
        argv: None: the arguments of the process.

    Returns:
        0 if all workers of this machine succeed; 75 if they ask to be queued again; 2 if one has
        got bad input; otherwise 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    stop_timeout_s = STOP_TIMEOUT_S
    if arguments and arguments[0].split("=")[0] == STOP_TIMEOUT_OPTION:
        value = arguments.pop(0).partition("=")[2]
        stop_timeout_s = _seconds(value or (arguments.pop(0) if arguments else ""))

    # Until there are workers, nothing is lost if the job stops.
    end_on_signals()

    # torchrun names its agent's class here, and takes no other from its caller.
    signals: set[int] = set()
    launcher_api.LocalElasticAgent = functools.partial(  # type: ignore[misc,assignment]
        ForwardingAgent, stop_timeout_s=stop_timeout_s, signals=signals
    )
    parser = get_args_parser()
    add_version_option(parser)
    options = parser.parse_args(arguments)
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
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN)
    return 0


def _no_rendezvous(error: Exception, options: Any) -> str:
    """Why the launchers do not find each other, on one line."""
    if _IN_USE in str(error).lower():
        return (
            f"port {options.master_port} of this machine is in use; give another --master-port, or "
            "--standalone, which chooses a free one"
        )
    return f"the launchers do not find each other: {printable(str(error)).splitlines()[0]}"


def _message(error: ChildFailedError) -> str | None:
    """What a worker has said about its failure; None if all have ended without a word."""
    for failure in error.failures.values():
        if isinstance(failure.message, dict):
            return str(failure.message["message"])
    return None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        sys.exit(f"error: {STOP_TIMEOUT_OPTION} takes a number of seconds, not {text!r}")
