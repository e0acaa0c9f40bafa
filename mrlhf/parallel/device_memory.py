"""The bytes that each owner holds on one rank's device, their peaks by phase, and their bound.

Owners say what they hold. This file knows no owner and no phase by name, and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from mrlhf.errors import MemoryBoundError
from mrlhf.printable import size_text

START = "start"  # the phase before all others
BOUND_KEY = "distributed.device_memory_mb"


class DeviceMemory:
    """The bytes that are held on the device of one rank, by owner.

    Activations, and buffers that live as long as one call, have no owner.
    """

    def __init__(self, bound: int | None = None) -> None:
        """Hold nothing; `bound` is the most bytes of all owners together, None for any number."""
        self._bound = bound
        self._held: dict[str, int] = {}
        self._phase = START
        self._peaks: dict[str, dict[str, int]] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by owner now; owners that hold nothing are missing."""
        return self._held

    def hold(self, owner: str, nbytes: int) -> None:
        """Note that `owner` holds `nbytes` now; MemoryBoundError if all would exceed the bound."""
        held = {name: size for name, size in self._held.items() if name != owner}
        if nbytes:
            held[owner] = nbytes
        if nbytes and self._bound is not None and sum(held.values()) > self._bound:
            raise MemoryBoundError(
                f"{BOUND_KEY} {self._bound / 2**20:g} is too little for phase {self._phase}, which "
                f"needs {in_words(held)}; offload more models, give the engine a smaller "
                "rollout.kv_cache_mb, split models over more ranks, or raise it"
            )
        self._held = held
        self._note()

    def enter(self, phase: str) -> None:
        """Count what is held as part of a phase from now on."""
        self._phase = phase
        self._note()

    def take_peaks(self) -> dict[str, dict[str, int]]:
        """For each phase since the last call, the bytes by owner when it held most."""
        peaks = self._peaks
        self._peaks = {}
        return peaks

    def _note(self) -> None:
        most = self._peaks.get(self._phase)
        if most is None or sum(most.values()) < sum(self._held.values()):
            self._peaks[self._phase] = dict(self._held)


def memory_metrics(peaks: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """`perf/memory_in/<phase>` of training, and `perf/memory/<owner>` in the fullest phase."""
    peaks = {phase: held for phase, held in peaks.items() if phase != START}
    metrics = {f"perf/memory_in/{phase}": sum(held.values()) / 1e9 for phase, held in peaks.items()}
    fullest = max(peaks.values(), key=lambda held: sum(held.values()), default={})
    return metrics | {f"perf/memory/{owner}": nbytes / 1e9 for owner, nbytes in fullest.items()}


def in_words(held: Mapping[str, int]) -> str:
    """The bytes of each owner, the most first."""
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {size_text(nbytes)}" for owner, nbytes in ordered)
