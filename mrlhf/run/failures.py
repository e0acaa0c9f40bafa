"""How a job fails: one rank says why, once, and no rank leaves before that is said.

The ranks agree through the job's store. The first rank that fails takes the word, and the others
are silent: most of them fail only because the first one has left them. Every rank ends with the
same exit code, and leaves the same message for torchrun's summary. This file does not know what the
ranks do.
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
from mrlhf.job import STORE_S, Launch, connect_before_start, write_error_file
from mrlhf.run.hangs import is_time_out

logger = logging.getLogger(__name__)

BAD_INPUT = 2
FAILED = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_POLL_S = 0.02
_SAID_S = 10.0  # a rank that has the word and is silent for so long is not there any more
_HEARD_S = 5.0  # the launcher ends other ranks later, and its store with them
_HEARD_OF_LOSS_S = 1.0  # one rank is not there any more, and the others notice that too
_FAILURE = "failure"
_LOST = ("closed by peer", "reset by peer", "broken pipe", "socket closed", "remote process exited")


class Told(Exception):
    """Some rank has said why the job fails, so this one ends in silence.

    Attributes:
        code: the exit code of every rank.
    """

    def __init__(self, failure: Failure) -> None:
        """Keep the failure's exit code."""
        super().__init__(failure.text)
        self.code = failure.code


@dataclass(frozen=True)
class Failure:
    """Why the job fails.

    Attributes:
        rank: the rank that says so.
        code: the exit code of every rank.
        text: the message.
        moment: when it failed, in seconds since 1970.
        is_cause: whether the message says why, and not only that another rank is gone.
        trace: a traceback that is said after the message, and that the summary leaves out; it
            begins on a line of its own.
    """

    rank: int
    code: int
    text: str
    moment: float
    is_cause: bool = True
    trace: str = ""

    @property
    def whole(self) -> str:
        """What the user is told: the message and the traceback."""
        return self.text + self.trace

    def leave_for_summary(self) -> None:
        """Leave the message for torchrun's summary, which says of a killed rank how it ended."""
        if self.is_cause:
            write_error_file(self.text, self.moment)


class Failures:
    """Where the ranks of a job agree on the one failure that ends it."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Begin without a failure.

        Args:
            store: shared by all ranks of this attempt, and used by nothing else.
            rank: number of this rank.
            world_size: number of ranks.
        """
        self._store = store
        self._rank = rank
        self._heard = [f"rank {other} has heard" for other in range(world_size)]

    def others_speak(self) -> bool:
        """Whether another rank has taken the word, and with it ends the job."""
        key = "speaker 0"
        return self._store.check([key]) and self._store.get(key) != str(self._rank).encode()

    def look(self) -> Failure | None:
        """What another rank has said, if one has; this rank counts as one that knows it."""
        if not self._store.check([_FAILURE]):
            return None
        failure = Failure(**json.loads(self._store.get(_FAILURE)))
        if failure.rank == self._rank:
            return None
        self._store.set(self._heard[self._rank], "1")
        return failure

    def wait(self, limit_s: float) -> Failure | None:
        """What another rank says within `limit_s`, if one does."""
        latest = time.monotonic() + limit_s
        while (failure := self.look()) is None and time.monotonic() < latest:
            time.sleep(_POLL_S)
        return failure

    def raise_if_told(self) -> None:
        """End this rank's start if another rank has failed.

        Raises:
            Told: it has.
        """
        failure = self.look()
        if failure is not None:
            failure.leave_for_summary()
            raise Told(failure)

    def tell(self, own: Failure, say: Callable[[str], object]) -> Failure:
        """Say why this rank fails, unless another rank has the word; call it in the main thread.

        It returns when one rank has spoken, and the others have heard it or are not there. From
        then on signals that ask for a stop are ignored, since the process ends anyway.

        Args:
            own: the failure of this rank.
            say: shows a message to the user.

        Returns:
            The failure that ends the job.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

        speaks = True
        heard: Failure | None = None
        try:
            for turn in itertools.count():
                speaks = self.takes_turn(turn)
                heard = None if speaks else self.wait(_SAID_S)
                if speaks or heard is not None:
                    break
        except (RuntimeError, OSError):
            # A rank that has found no store speaks; one that was waiting for another is silent.
            logger.debug("the job's store has gone", exc_info=True)

        stands = heard or own
        if speaks:
            say(own.whole)
        stands.leave_for_summary()
        if speaks:
            self._publish(own)
        return stands

    def takes_turn(self, turn: int) -> bool:
        """Whether this rank may speak in this turn; the turns before it have passed in silence."""
        mine = str(self._rank)
        return bool(self._store.compare_set(f"speaker {turn}", "", mine) == mine.encode())

    def _publish(self, own: Failure) -> None:
        """Let the other ranks know, and wait until they do or are not there."""
        try:
            self._store.set(_FAILURE, json.dumps(asdict(own)))
            others = [key for rank, key in enumerate(self._heard) if rank != self._rank]
            latest = time.monotonic() + (_HEARD_S if own.is_cause else _HEARD_OF_LOSS_S)
            while others and not self._store.check(others) and time.monotonic() < latest:
                time.sleep(_POLL_S)
        except (RuntimeError, OSError):
            logger.debug("the job's store has gone", exc_info=True)


def tell_before_start(launch: Launch, own: Failure, say: Callable[[str], object]) -> Failure:
    """`Failures.tell` for a process that has not joined the job; it waits for a store briefly."""
    if launch.world_size == 1:
        say(own.whole)
        own.leave_for_summary()
        return own
    try:
        store = connect_before_start(STORE_S)
    except MrlhfError:
        # Rather several times than not at all.
        say(own.whole)
        return own
    return Failures(store, launch.rank, launch.world_size).tell(own, say)


def log_failure(text: str) -> None:
    """Show the message as a log line."""
    logger.error("%s", text)


def explain(error: BaseException, rank: int, at_start: bool) -> Failure:
    """What there is to say about an error.

    Args:
        error: what has ended this rank's part.
        rank: number of this rank.
        at_start: whether nothing was trained yet. What goes wrong then will go wrong again, so it
            counts as bad input.
    """
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
