"""A thread of each rank that notices signals, the time limit, other ranks' questions and hangs.

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
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from mrlhf.errors import HangError
from mrlhf.metrics import CurrentPhase
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.run.hangs import HangReports, describe

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The launcher starts this process with these held back, so that none is lost or ends it too early.
HELD_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED_TWICE = 130
ENDED_BY_SIGTERM = 143

_POLL_S = 0.5
_POLL_SOON_S = 0.02
_ANSWER_S = 15.0  # a rank whose watcher is silent for so long is not there any more
_END_S = 15.0  # the launcher ends a rank sooner, once another one has failed
_STALL = 0.95  # of the time-out of a collective; then all ranks still answer


class Watcher:
    """Watches over one rank, from `start` to `close`.

    Attributes:
        stops: the stop points of the run, which signals and the time limit use.
        phase: the phase that this rank is in; others read it in a report of a hang.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        output_dir: Path,
        timeout_s: float,
        deadline: float | None = None,
    ) -> None:
        """Install nothing yet.

        Args:
            store: shared by all ranks; the connection is used by this object alone.
            rank: number of this rank.
            world_size: number of ranks.
            output_dir: reports of hangs go to `hangs` in it.
            timeout_s: seconds after which a collective gives up.
            deadline: when to stop, in seconds since 1970; rank 0 alone looks at the clock.
        """
        self.stops = AgreedStop(dist.PrefixStore("stop", store), rank, world_size)
        self.phase = CurrentPhase()
        self._hangs = HangReports(
            dist.PrefixStore("hang", store), rank, world_size, output_dir / "hangs", self.phase
        )
        self._failures = dist.PrefixStore("failure", store)
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = deadline if rank == 0 else None
        self._parent = os.getppid()
        self._progress = (0, 0)
        self._progress_at = time.monotonic()
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
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

    def explain_time_out(self) -> HangError:
        """The error to raise after a collective has timed out on this rank.

        One rank says who is missing, and the launcher then ends the others.
        """
        self._hangs.time_out()
        if not self._hangs.claim():
            time.sleep(_END_S)
            return HangError("this rank has waited too long for others; another rank says for whom")
        report = self._hangs.report(since=self._progress_at)
        return HangError(describe(self._rank, self._timeout_s, report))

    def _run(self) -> None:
        try:
            self._watch()
        except (RuntimeError, OSError) as error:
            self.stops.lose(f"the job's store does not answer ({error})")
            self._watch_alone()

    def _watch(self) -> None:
        """Watch until the run closes this watcher."""
        soon = False
        while not self._closed.is_set():
            signals = self._signals(_POLL_SOON_S if soon else _POLL_S)
            self._look_for_the_launcher()
            for number in signals:
                self._take_signal(number)
            self._look_at_the_clock()
            soon = self.stops.look()
            self._look_for_silent_ranks(soon)
            self._hangs.look()
            self._look_for_a_stall()

    def _watch_alone(self) -> None:
        """End this rank when its launcher goes or a signal comes; ranks cannot agree any more.

        Whoever held the store has gone, the launcher for one. The main thread may still wait in a
        collective for long.
        """
        while not self._closed.is_set():
            signals = self._signals(_POLL_S)
            self._look_for_the_launcher()
            for number in signals:
                if number in STOP_SIGNALS:
                    name = signal.Signals(number).name
                    _end(f"ended by {name}; the job's store has gone", ENDED_BY_SIGTERM)

    def _look_for_the_launcher(self) -> None:
        if os.getppid() != self._parent:
            _end("the launcher has gone, so this rank ends", ENDED_BY_SIGTERM)

    def _signals(self, wait_s: float) -> bytes:
        """The numbers of the signals that have come, after waiting for at most `wait_s` for one."""
        ready, _, _ = select.select([self._read_end], [], [], wait_s)
        return os.read(self._read_end, 64) if ready else b""

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                _end("interrupted twice, so this rank ends without saving", INTERRUPTED_TWICE)
        try:
            if number == signal.SIGTERM and self._failures.check(["failed"]):
                _end("ended by SIGTERM, since another rank has failed", ENDED_BY_SIGTERM)
            if number in STOP_SIGNALS:
                self.stops.ask(f"this job got {signal.Signals(number).name}")
        except RuntimeError:
            os.write(self._write_end, bytes([number]))  # it still has to end this rank
            raise

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

    def _look_for_a_stall(self) -> None:
        """Write down where all ranks are if this one has not got on for nearly the time-out.

        NCCL ends the process when a collective times out, so this cannot wait until then.
        """
        now = time.monotonic()
        progress = (self.phase.entered, self.stops.place)
        if progress != self._progress:
            self._progress = progress
            self._progress_at = now

        stalled_s = now - self._progress_at
        is_long = stalled_s > _STALL * self._timeout_s
        if is_long and not self._hangs.answered_since(self._progress_at):
            report = self._hangs.report(since=self._progress_at)
            logger.warning("no progress: %s", describe(self._rank, stalled_s, report))


def _noticed_by_the_watcher(number: int, frame: FrameType | None) -> None:
    """A handler in Python, without which the signal would not be written to the pipe."""


def _end(why: str, code: int) -> None:
    """End the process at once, also if nobody reads what it says."""
    try:
        logger.error("%s", why)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)
