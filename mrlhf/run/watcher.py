"""A thread of each rank that notices signals, the time limit and other ranks' questions at once.

The main thread may be blocked in a collective for long; this thread is not. It does not know what a
run does when it is asked to stop, nor how ranks agree on it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from types import FrameType

import torch.distributed as dist

from mrlhf.parallel.agreed_stop import AgreedStop

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INTERRUPTED_TWICE = 130
ENDED_BY_SIGTERM = 143

_POLL_S = 0.5
_POLL_SOON_S = 0.02
_ANSWER_S = 15.0  # a rank whose watcher is silent for so long is not there any more


class Watcher:
    """Watches over one rank, from `start` to `close`.

    Attributes:
        stops: the stop points of the run, which signals and the time limit use.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, deadline: float | None = None
    ) -> None:
        """Install nothing yet.

        Args:
            store: shared by all ranks; the connection is used by this object alone.
            rank: number of this rank.
            world_size: number of ranks.
            deadline: when to stop, in seconds since 1970; rank 0 alone looks at the clock.
        """
        self.stops = AgreedStop(dist.PrefixStore("stop", store), rank, world_size)
        self._failures = dist.PrefixStore("failure", store)
        self._deadline = deadline if rank == 0 else None
        self._interrupts = 0
        self._asked_at: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def start(self) -> None:
        """Take over the signals and start the thread; call it in the main thread."""
        # Python calls a handler in the main thread, which may be blocked; the number of the signal
        # is written to this pipe at once.
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _noticed_by_the_watcher)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; from then on a signal does what it does to any process."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self._closed.set()
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def tell_failure(self) -> None:
        """Tell all ranks that this one has failed: a SIGTERM is then no request to save."""
        self._failures.set("failed", "1")

    def _run(self) -> None:
        try:
            soon = False
            while not self._closed.is_set():
                for number in self._signals(_POLL_SOON_S if soon else _POLL_S):
                    self._take_signal(number)
                self._look_at_the_clock()
                soon = self.stops.look()
                self._look_for_silent_ranks(soon)
        except (RuntimeError, OSError) as error:
            # Whoever holds the store has gone, and the launcher is about to end this process too.
            self.stops.lose(f"the job's store does not answer ({error})")

    def _signals(self, wait_s: float) -> bytes:
        """The numbers of the signals that have come, after waiting for at most `wait_s` for one."""
        ready, _, _ = select.select([self._read_end], [], [], wait_s)
        return os.read(self._read_end, 64) if ready else b""

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                _end("interrupted twice, so this rank ends without saving", INTERRUPTED_TWICE)
        if number == signal.SIGTERM and self._failures.check(["failed"]):
            _end("ended by SIGTERM, since another rank has failed", ENDED_BY_SIGTERM)
        if number in STOP_SIGNALS:
            self.stops.ask(f"this job got {signal.Signals(number).name}")

    def _look_at_the_clock(self) -> None:
        if self._deadline is not None and time.time() >= self._deadline:
            self._deadline = None
            self.stops.ask("its time is up")

    def _look_for_silent_ranks(self, agreeing: bool) -> None:
        """End this rank if the ranks cannot agree on where to stop, since one is not there."""
        if not agreeing:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _ANSWER_S:
            ranks = ", ".join(map(str, self.stops.missing()))
            _end(f"cannot stop with the others: rank {ranks} gives no answer", ENDED_BY_SIGTERM)


def _noticed_by_the_watcher(number: int, frame: FrameType | None) -> None:
    """A handler in Python, without which the signal would not be written to the pipe."""


def _end(why: str, code: int) -> None:
    """End the process at once."""
    logger.error("%s", why)
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
