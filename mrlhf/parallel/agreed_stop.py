"""Lets all ranks stop at the same unit of the same stretch of work, without a collective.

A run is a sequence of stretches, which all ranks go through in the same order. A stretch is made of
units: micro-batches, passes of the inference engine, or responses to score.

The ranks agree through the job's key-value store. On each rank a thread, the watcher, talks to the
store, so ranks agree even while their main threads wait for each other in a collective. This file
does not know who asks for a stop, nor how the run stops.

How it works. A place is a number: a stretch and a unit in it. Stretches are counted alike on all
ranks. When a watcher sees that a stop is asked for, it holds its rank where it is, and publishes
that place. When all ranks have published theirs, rank 0 names the place after the furthest one as
the place to stop: no rank has gone beyond it. A rank that is held waits for watchers only, never
for the main thread of another rank, so there is no deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mrlhf.errors import Interrupted

_UNIT_BITS = 32
_LEFT = (1 << _UNIT_BITS) - 1  # the unit of a rank that has done all of a stretch
_NOWHERE = 1 << 128  # beyond every place
_HELD = 0  # before every place: go nowhere until the place to stop is known

_REASON = "reason"
_STOP = "stop"


class AgreedStop:
    """The stop points of one rank.

    `stretch` and `may_begin` are for the main thread; any thread may call the other methods.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Begin before the first stretch.

        All ranks share `store`, and nothing else uses it. It is a connection of its own, since the
        watcher must not wait behind the main thread.
        """
        self._store = store
        self._rank = rank
        self._place_keys = [f"place of rank {number}" for number in range(world_size)]
        self._stretch = 0
        self._place = _LEFT
        self._limit = _NOWHERE
        self._looking = threading.Lock()
        self._changed = threading.Condition()
        self._reason = ""
        self._lost = ""
        self._is_agreed = False
        self._in_stretch = False

    @contextmanager
    def stretch(self) -> Iterator[Callable[[int], bool]]:
        """Go through one stretch, every rank in the same order; it may end as Interrupted."""
        assert not self._in_stretch, "a stretch is inside another one"
        self._stretch += 1
        self._in_stretch = True
        try:
            yield self.may_begin
        finally:
            self._in_stretch = False

        place = (self._stretch << _UNIT_BITS) + _LEFT
        self._place = place
        if place >= self._limit and place >= self._stop_place():
            self._limit = _NOWHERE
            raise Interrupted(self._reason)

    def may_begin(self, unit: int) -> bool:
        """Whether to begin `unit`, counted from 0; called before each unit, in order.

        After the first False all answers are, and the stretch's results are of no use. A unit may
        begin again, as a micro-batch does in each chunk of an interleaved pipeline.
        """
        # This rank writes its place before it reads the limit, and the watcher writes the limit
        # before it reads the place. So either this rank is held or the watcher knows the new place.
        place = (self._stretch << _UNIT_BITS) + unit
        self._place = max(self._place, place)
        return place < self._limit or place < self._stop_place()

    @property
    def place(self) -> int:
        """The place that this rank has come to; it grows."""
        return self._place

    @property
    def asked(self) -> bool:
        """Whether this rank knows that a stop is asked for."""
        return bool(self._reason)

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; if a stop has been asked for before, nothing changes."""
        if not self._reason:
            self._store.compare_set(_REASON, "", reason)
            self.look()

    def look(self) -> bool:
        """Take part in the agreement, now and then; returns whether it is under way."""
        with self._looking:
            return self._look()

    def missing(self) -> list[int]:
        """The ranks that have not said where they are, once a stop is asked for."""
        return [rank for rank, key in enumerate(self._place_keys) if not self._store.check([key])]

    def lose(self, why: str) -> None:
        """Make everybody who waits for an agreement fail with a RuntimeError."""
        with self._changed:
            self._lost = why
            self._changed.notify_all()

    def _look(self) -> bool:
        if self._is_agreed:
            return False
        if not self._reason:
            if not self._store.check([_REASON]):
                return False
            self._hold()

        decides = self._rank == 0 and not self._store.check([_STOP])
        if decides and self._store.check(self._place_keys):
            places = self._store.multi_get(self._place_keys)
            self._store.set(_STOP, str(1 + max(int(place) for place in places)))
        if not self._store.check([_STOP]):
            return True

        with self._changed:
            self._limit = int(self._store.get(_STOP))
            self._is_agreed = True
            self._changed.notify_all()
        return False

    def _hold(self) -> None:
        """Hold this rank before its next place, and publish its present place."""
        self._reason = self._store.get(_REASON).decode()
        self._limit = _HELD
        self._store.set(self._place_keys[self._rank], str(self._place))

    def _stop_place(self) -> int:
        """The place where all ranks stop; waits until they have agreed on it."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit != _HELD or self._lost)
            if self._limit == _HELD:
                raise RuntimeError(f"the ranks cannot agree on where to stop: {self._lost}")
            return self._limit
