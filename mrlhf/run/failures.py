"""How a job fails: one rank reports why, once, and no rank ends before that.

The ranks agree through the job's store. The first rank that fails reports, and the others are
silent: most of them fail only because the first one is gone. Every rank ends with the same exit
code, and leaves the same message for torchrun's summary. This file does not know what the ranks do.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from mrlhf.errors import ConfigError, DataError, HangError, MethodError, MrlhfError, UserTraceback
from mrlhf.parallel.job import STORE_S, Launch, connect_before_start, polling_s, write_error_file
from mrlhf.run.hangs import is_time_out

logger = logging.getLogger(__name__)

BAD_INPUT = 2
FAILED = 1
QUEUE_AGAIN = 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_POLL_S = 0.02
_REPORT_WAIT_S = 10.0  # a rank that has claimed a turn and not reported by then is gone
_READ_WAIT_S = 5.0  # the launcher ends other ranks later, and its store with them
_READ_LOSS_WAIT_S = 1.0  # the failure is a lost rank, which the others notice too
_FAILURE = "failure"
_LOST = ("closed by peer", "reset by peer", "broken pipe", "socket closed", "remote process exited")


class FailureReported(Exception):
    """Some rank has reported why the job fails; this one ends in silence with `code`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.code = failure.code


@dataclass(frozen=True)
class Failure:
    """The reason why the job fails."""

    rank: int  # the rank that reports it
    code: int  # the exit code of every rank
    text: str
    moment: float  # when it failed, in seconds since 1970
    # Whether the message gives the cause, and not only that another rank is gone.
    is_cause: bool = True
    # A traceback, on lines of its own, that the user sees after the message; the summary leaves it
    # out.
    trace: str = ""

    @property
    def whole(self) -> str:
        """The message and the traceback."""
        return self.text + self.trace

    def leave_for_summary(self) -> None:
        """Leave the message for torchrun's summary."""
        if self.is_cause:
            write_error_file(self.text, self.moment)


class Failures:
    """The ranks of a job agree here on the one failure that ends it."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Begin without a failure; all ranks of this attempt share `store`, for this alone."""
        self._store = store
        self._rank = rank
        self._poll_s = polling_s(world_size, _POLL_S)
        self._informed = [f"rank {other} has heard" for other in range(world_size)]

    def another_reports(self) -> bool:
        """Whether another rank has begun to report why the job fails."""
        key = "speaker 0"
        return self._store.check([key]) and self._store.get(key) != str(self._rank).encode()

    def look(self) -> Failure | None:
        """The failure that another rank has reported, if any; this rank then counts as informed."""
        if not self._store.check([_FAILURE]):
            return None
        failure = Failure(**json.loads(self._store.get(_FAILURE)))
        if failure.rank == self._rank:
            return None
        self._store.set(self._informed[self._rank], "1")
        return failure

    def wait(self, limit_s: float) -> Failure | None:
        """The failure that another rank reports within `limit_s`, if any."""
        latest = time.monotonic() + limit_s
        while (failure := self.look()) is None and time.monotonic() < latest:
            time.sleep(self._poll_s)
        return failure

    def raise_if_reported(self) -> None:
        """End this rank's start, with FailureReported, if another rank has failed."""
        failure = self.look()
        if failure is not None:
            failure.leave_for_summary()
            raise FailureReported(failure)

    def report(self, own: Failure, say: Callable[[str], object]) -> Failure:
        """Report why this rank fails, unless another rank does; call it in the main thread.

        It returns the failure that ends the job, when one rank has reported with `say`, and the
        others know or are gone. From then on signals that ask for a stop are ignored, since the
        process ends anyway.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

        reports = True
        other: Failure | None = None
        try:
            for turn in itertools.count():
                reports = self.claim_turn(turn)
                other = None if reports else self.wait(_REPORT_WAIT_S)
                if reports or other is not None:
                    break
        except (RuntimeError, OSError):
            # A rank that has found no store reports; one that was waiting for another is silent.
            logger.debug("the job's store has gone", exc_info=True)

        stands = other or own
        if reports:
            say(own.whole)
        stands.leave_for_summary()
        if reports:
            self._publish(own)
        return stands

    def claim_turn(self, turn: int) -> bool:
        """Whether this rank may report in this turn; the rank of each earlier turn was silent."""
        mine = str(self._rank)
        return bool(self._store.compare_set(f"speaker {turn}", "", mine) == mine.encode())

    def _publish(self, own: Failure) -> None:
        """Inform the other ranks, and wait until they know or are gone."""
        try:
            self._store.set(_FAILURE, json.dumps(asdict(own)))
            others = [key for rank, key in enumerate(self._informed) if rank != self._rank]
            latest = time.monotonic() + (_READ_WAIT_S if own.is_cause else _READ_LOSS_WAIT_S)
            while others and not self._store.check(others) and time.monotonic() < latest:
                time.sleep(self._poll_s)
        except (RuntimeError, OSError):
            logger.debug("the job's store has gone", exc_info=True)


def report_before_start(launch: Launch, own: Failure, say: Callable[[str], object]) -> Failure:
    """Report as `Failures` does, for a process that has not joined the job."""
    if launch.world_size == 1:
        say(own.whole)
        own.leave_for_summary()
        return own
    try:
        store = connect_before_start(STORE_S)
    except MrlhfError:
        # Without a store the ranks cannot agree; several reports are better than none.
        say(own.whole)
        return own
    return Failures(store, launch.rank, launch.world_size).report(own, say)


def log_failure(text: str) -> None:
    """Show the message as a log line."""
    logger.error("%s", text)


def explain(error: BaseException, rank: int, at_start: bool) -> Failure:
    """The failure of rank `rank` that an error means; `at_start` it counts as bad input."""
    if isinstance(error, MrlhfError) and not _waits_for_others(error):
        is_input = isinstance(error, (ConfigError, DataError))
        is_input = is_input or (at_start and not isinstance(error, HangError))
        code = BAD_INPUT if is_input else FAILED
        text = f"{type(error).__name__}: {error}"
        return Failure(rank, code, text, time.time(), trace=users_traceback(error))

    is_cause = True
    trace = ""
    first_line = next(iter(str(error).splitlines()), "")
    if is_time_out(error):
        text = (
            f"HangError: rank {rank} waited longer than distributed.timeout_s for another rank; if "
            f"none is missing, raise the key ({first_line})"
        )
    elif isinstance(error, (RuntimeError, OSError)) and _is_lost_connection(str(error)):
        is_cause = False
        text = (
            f"rank {rank} lost its connection to another rank, which has ended without saying why "
            f"({first_line})"
        )
    else:
        text = f"this rank failed with {type(error).__name__}: {first_line}".rstrip(": ")
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        trace = "\n" + "".join(lines).rstrip()
    return Failure(rank, FAILED, text, time.time(), is_cause, trace)


def users_traceback(error: BaseException) -> str:
    """The traceback of a user's own code, on lines of its own; empty if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UserTraceback):
        cause = cause.__cause__
    return "" if cause is None else str(cause)


def _waits_for_others(error: MrlhfError) -> bool:
    """Whether a user's method failed in a collective, because another rank did not take part."""
    return isinstance(error, MethodError) and (
        is_time_out(error) or _is_lost_connection(str(error))
    )


def _is_lost_connection(text: str) -> bool:
    return any(words in text.lower() for words in _LOST)
