"""The places where all ranks of a run may stop together.

A run is a sequence of phases, which all ranks go through in the same order. A phase is made of
units: micro-batches, or passes of the inference engine. If the run is asked to stop, the ranks
agree on one unit of one phase, and every rank stops there. This file does not know why a run stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Phase(Protocol):
    """A phase that this rank is in."""

    def may_begin(self, unit: int) -> bool:
        """Whether to begin `unit`, counted from 0; called before each unit, in order.

        Once it has returned False it does so for every later unit of the phase, and the results of
        the phase are of no use. A unit that has begun may begin again, as a micro-batch does in
        each chunk of an interleaved pipeline.
        """


class StopPoints(Protocol):
    """Agrees with all other ranks on where to stop."""

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Go through one phase; every rank of the run calls it, in the same order.

        Raises:
            Interrupted: when the phase is left, on every rank, if the ranks stop in it.
        """


class NeverStop:
    """The stop points of a program that cannot be asked to stop."""

    @contextmanager
    def phase(self, name: str) -> Iterator[NeverStop]:
        """Go through one phase."""
        yield self

    def may_begin(self, unit: int) -> bool:
        """Begin every unit."""
        return True
