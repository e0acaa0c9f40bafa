"""When a run stops by itself, so that its last save ends in time.

All times are those of the monotonic clock. This file does not know how a run stops.
"""

from __future__ import annotations

_TIME_TO_SAVE_S = 120.0
_TIME_TO_STOP_S = 60.0


def time_to_save(longest_s: float) -> float:
    """Seconds before a job's end at which a save must begin; `longest_s`: the longest so far."""
    # Two saves: the last one may have to wait for another that is still being written.
    return max(_TIME_TO_SAVE_S, _TIME_TO_STOP_S + 2 * longest_s)


class Deadline:
    """When to stop: at a moment, or early enough before the end of the job."""

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
