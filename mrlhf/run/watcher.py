"""A thread of each rank that notices signals, the time limit, other ranks' questions and hangs.

The main thread may be blocked in a collective for long; this thread is not. It does not know what a
run does when it is asked to stop, nor how ranks agree on it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from mrlhf.errors import HangError
from mrlhf.parallel.job import connect, is_store_of_launcher, polling_s
from mrlhf.parallel.phases import Phases
from mrlhf.run.failures import FAILED, STOP_SIGNALS, Failures
from mrlhf.run.hangs import HangReport, HangReports, describe
from mrlhf.run.leaving import ENDED_BY_SIGTERM, leave

logger = logging.getLogger(__name__)

# The launcher starts this process with these held back, so that none is lost or ends it too early.
HELD_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED_TWICE = 130

_TIME_TO_SAVE_S = 120.0
_TIME_TO_STOP_S = 60.0
_POLL_S = 0.5
_POLL_SOON_S = 0.02
_ANSWER_S = 15.0  # a rank whose watcher is silent for so long is not there any more
_END_S = 15.0  # the launcher ends a rank sooner, once another one has failed
_RECONNECT_S = 3.0
_SAY_S = 5.0  # a rank that fails has said why by then
_STALL = 0.95  # of the time-out of a collective; then all ranks still answer
_AGAIN_S = 3600.0  # between two reports of one wait


def time_to_save(longest_s: float) -> float:
    """Seconds before a job's end at which a save must begin; `longest_s`: the longest so far."""
    # Two saves: the last one may have to wait for another that is still being written.
    return max(_TIME_TO_SAVE_S, _TIME_TO_STOP_S + 2 * longest_s)


class Deadline:
    """When to stop: at a moment, or early enough before the end of the job for the last save.

    All times are those of the monotonic clock.
    """

    def __init__(self, stop_at: float | None = None, end: float | None = None) -> None:
        """Stop at `stop_at`; if that is None, in time before `end`, the end of the job."""
        self._stop_at = stop_at
        self._end = end
        self._longest_save_s = 0.0

    def saved(self, seconds: float) -> None:
        """Note that a save has taken `seconds`."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def is_reached(self, now: float) -> bool:
        """Whether it is time to stop."""
        if self._stop_at is not None:
            return now >= self._stop_at
        return self._end is not None and now >= self._end - time_to_save(self._longest_save_s)


class Watcher:
    """Watches over one rank, from `start` to `close`."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        output_dir: Path,
        timeout_s: float,
        phases: Phases,
        deadline: Deadline | None = None,
        failures: Failures | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Install nothing yet.

        Args:
            store: shared by all ranks; its connection is used by this object's thread alone.
            timeout_s: seconds after which a collective gives up.
            phases: those of this rank; the ranks agree there to stop after a signal or at the time
                limit. Its `stops` may have the same store.
            deadline: rank 0 alone looks at the clock.
            failures: where another rank reports that the job fails; this one then ends, after a
                call of `on_failure` with the message.
        """
        self.phases = phases
        self._hangs = HangReports(
            dist.PrefixStore("hang", store), rank, world_size, output_dir / "hangs", phases
        )

        self._failures = failures
        self._on_failure = on_failure
        self._rank = rank
        self._timeout_s = timeout_s
        self._world_size = world_size
        self._deadline = deadline if rank == 0 else None
        self._at_start = self._place()
        self._progress = (0, 0)
        self._progress_at = time.monotonic()
        self._last: HangReport | None = None  # since there was progress, if it has silent ranks

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
        """Stop watching; signals then have their usual effect."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self._closed.set()
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    @property
    def has_begun(self) -> bool:
        """Whether the run has reached its first phase."""
        return self._place() != self._at_start

    def explain_time_out(self) -> HangError:
        """The error to raise after a collective has timed out, of which one rank tells more."""
        self._hangs.time_out()
        if not self._hangs.claim():
            time.sleep(_END_S)
            return HangError("this rank has waited too long for others; another rank says for whom")
        report = self._hangs.report(since=self._progress_at)
        return HangError(describe(self._rank, self._timeout_s, report))

    def _place(self) -> tuple[int, int]:
        """A pair of counts that changes whenever the rank makes progress."""
        return self.phases.entered, self.phases.stops.place

    def _run(self) -> None:
        try:
            self._watch()
        except (RuntimeError, OSError) as error:
            self.phases.stops.lose(f"the job's store does not answer ({error})")
            self._watch_alone()

    def _watch(self) -> None:
        soon = False
        while not self._closed.is_set():
            least_s = _POLL_SOON_S if soon else _POLL_S
            signals = self._signals(polling_s(self._world_size, least_s))
            self._look_for_a_failure()
            for number in signals:
                self._take_signal(number)
            self._look_at_the_clock()
            soon = self.phases.stops.look()
            self._look_for_silent_ranks(soon)
            self._hangs.look()
            self._look_for_a_stall()

    def _watch_alone(self) -> None:
        """End this rank when a signal comes; without the store, ranks cannot agree any more.

        If the launcher holds the store and the store cannot be reached again, the launcher is gone,
        and this rank ends at once. (Its parent may be a shell that still lives.)
        """
        if is_store_of_launcher() and not self._closed.is_set():
            try:
                connect(_RECONNECT_S)
            except HangError:
                leave(ENDED_BY_SIGTERM, "the launcher's store has gone, so this rank ends")

        while not self._closed.is_set():
            for number in self._signals(_POLL_S):
                if number in STOP_SIGNALS:
                    name = signal.Signals(number).name
                    leave(ENDED_BY_SIGTERM, f"ended by {name}; the job's store has gone")

    def _look_for_a_failure(self, wait_s: float = 0.0) -> None:
        """End this rank in silence if another one has reported why the job fails."""
        failure = None if self._failures is None else self._failures.wait(wait_s)
        if failure is not None:
            failure.leave_for_summary()
            if self._on_failure is not None:
                self._on_failure(failure.text)
            leave(failure.code)

    def _signals(self, wait_s: float) -> bytes:
        """The numbers of the signals that have come, after waiting for at most `wait_s` for one."""
        ready, _, _ = select.select([self._read_end], [], [], wait_s)
        return os.read(self._read_end, 64) if ready else b""

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                leave(INTERRUPTED_TWICE, "interrupted twice, so this rank ends without saving")

        try:
            others_fail = self._failures is not None and self._failures.another_reports()
            if number == signal.SIGTERM and others_fail:
                # The launcher ends this rank because of that; it does not ask it to save.
                self._look_for_a_failure(_SAY_S)
                leave(ENDED_BY_SIGTERM, "ended by SIGTERM, since another rank has failed")
            if number in STOP_SIGNALS:
                self.phases.stops.ask(f"this job got {signal.Signals(number).name}")
        except RuntimeError:
            os.write(self._write_end, bytes([number]))  # it still has to end this rank
            raise

    def _look_at_the_clock(self) -> None:
        if self._deadline is not None and self._deadline.is_reached(time.monotonic()):
            self._deadline = None
            self.phases.stops.ask("its time is up")

    def _look_for_silent_ranks(self, agreeing: bool) -> None:
        """End this rank if the ranks cannot agree on where to stop, because one is gone."""
        if not agreeing:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _ANSWER_S:
            who = "another rank says for whom it waits"
            if self._hangs.claim():  # one rank asks for the thousands of keys
                who = f"rank {', '.join(map(str, self.phases.stops.missing()))} gives no answer"
            leave(ENDED_BY_SIGTERM, f"cannot stop with the others: {who}")

    def _look_for_a_stall(self) -> None:
        """Write down where all ranks are if this one is stalled for nearly the time-out."""
        now = time.monotonic()
        progress = self._place()
        if progress != self._progress:
            self._progress = progress
            self._progress_at = now
            self._last = None

        stalled_s = now - self._progress_at
        # NCCL ends the process when a collective times out, so this cannot wait until then.
        is_long = stalled_s > _STALL * self._timeout_s
        # A wait for data or storage may last; then a machine that is lost ends no collective.
        since = max(self._progress_at, now - (self._timeout_s if self._last else _AGAIN_S))
        if is_long and not self._hangs.answered_since(since):
            report = self._hangs.report(since)
            text = describe(self._rank, stalled_s, report)
            if self._last and report.silent & self._hangs.unanswered(self._last):
                leave(FAILED, f"HangError: {text}")
            self._last = report if report.silent else None
            logger.warning("no progress: %s", text)


def _noticed_by_the_watcher(number: int, frame: FrameType | None) -> None:
    """A handler in Python, without which the signal would not be written to the pipe."""
