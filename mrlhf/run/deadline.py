"""When a run stops by itself, so that its last save ends within the time that it has.

All times are those of the monotonic clock, which nobody puts forward or back. This file does not
know how a run stops.
"""

from __future__ import annotations

_TIME_TO_SAVE_S = 120.0
_TIME_TO_STOP_S = 60.0


def time_to_save(longest_s: float) -> float:
    """Seconds before the end of a job at which its last save must begin.

    The save may have to wait for another one that is being written, so it gets the time of two,
    beside what stopping takes.

    Args:
        longest_s: of the saves so far; 0 before the first one.
    """
    return max(_TIME_TO_SAVE_S, _TIME_TO_STOP_S + 2 * longest_s)


class Deadline:
    """When to stop: at a moment, or early enough before the end of the job."""

    def __init__(self, stop_at: float | None = None, end: float | None = None) -> None:
        """Take the moment that counts.

        Args:
            stop_at: when to stop; None: as the end of the job says.
            end: of the job; None: it is not known.
        """
        self._stop_at = stop_at
        self._end = end
        self._longest_save_s = 0.0

    def saved(self, seconds: float) -> None:
        """Take note that a save has taken so long."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def is_reached(self, now: float) -> bool:
        """Whether it is time to stop."""
        if self._stop_at is not None:
            return now >= self._stop_at
        return self._end is not None and now >= self._end - time_to_save(self._longest_save_s)
