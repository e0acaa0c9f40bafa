"""Continuous batching: which prompts are computed next, and which slot of the KV cache each sample lives in.

The samples that run are kept in slots 0 .. active - 1, so that a decode step works on views. It is pure arithmetic on
lengths, the same on every rank that asks the same; it knows neither tokens nor tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """A prompt to be computed once, for one or more of its samples.

    Attributes:
        prompt: index of the prompt.
        rows: the samples that start, numbered prompt * n + sample index.
        slots: the slot of each.
    """

    prompt: int
    rows: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """A running sample changes from slot `source` to slot `target`."""

    source: int
    target: int


class Scheduler:
    """Decides, for one call of `generate`, who enters, and where; `finish` tells it who is done.

    The samples of a prompt enter together, so that the prompt is computed once (where n is larger than `max_num_seqs`,
    in as few parts as possible). Long prompts go first: those computed together are then of like length, and little of
    a batch is padding.
    """

    def __init__(self, prompt_lengths: Sequence[int], n: int, max_num_seqs: int, max_prefill_tokens: int) -> None:
        """Queue `n` samples of each prompt.

        Args:
            prompt_lengths: tokens of each prompt.
            n: samples a prompt.
            max_num_seqs: slots.
            max_prefill_tokens: largest prefill batch, prompts x the longest of them; a longer prompt goes alone.
        """
        self._lengths = list(prompt_lengths)
        assert n >= 1 and max_num_seqs >= 1, (n, max_num_seqs)
        self._max_prefill_tokens = max_prefill_tokens
        self._slots: list[int | None] = [None] * min(max_num_seqs, n * len(self._lengths))
        order = sorted(range(len(self._lengths)), key=lambda prompt: -self._lengths[prompt])
        self._waiting: deque[tuple[int, range]] = deque(
            (prompt, range(prompt * n + first, prompt * n + min(n, first + max_num_seqs)))
            for prompt in order
            for first in range(0, n, max_num_seqs)
        )

    @property
    def slots(self) -> int:
        """Slots that may be used: `max_num_seqs`, or fewer where there are fewer samples."""
        return len(self._slots)

    @property
    def active(self) -> int:
        """Samples that run."""
        return sum(row is not None for row in self._slots)

    @property
    def done(self) -> bool:
        """Whether no sample runs or waits."""
        return not self._waiting and not self.active

    def admit(self) -> list[Admission]:
        """The next prefill batch, long prompts first; empty if nothing waits or fits. Lowest free slots are taken."""
        free = deque(slot for slot, row in enumerate(self._slots) if row is None)
        admitted: list[Admission] = []
        while self._waiting and len(self._waiting[0][1]) <= len(free):
            prompt, rows = self._waiting[0]
            longest = self._lengths[admitted[0].prompt if admitted else prompt]
            if admitted and (len(admitted) + 1) * longest > self._max_prefill_tokens:
                break
            self._waiting.popleft()
            slots = tuple(free.popleft() for _ in rows)
            for slot, row in zip(slots, rows, strict=True):
                self._slots[slot] = row
            admitted.append(Admission(prompt, tuple(rows), slots))
        return admitted

    def finish(self, slots: Sequence[int]) -> None:
        """The samples in these slots are done."""
        for slot in slots:
            assert self._slots[slot] is not None, f"slot {slot} is empty"
            self._slots[slot] = None

    def compact(self) -> list[Move]:
        """The moves, each from the end into a hole, after which the running samples are in slots 0 .. active - 1."""
        count = self.active
        holes = [slot for slot in range(count) if self._slots[slot] is None]
        strays = [slot for slot in range(count, len(self._slots)) if self._slots[slot] is not None]
        for hole, stray in zip(holes, strays, strict=True):
            self._slots[hole], self._slots[stray] = self._slots[stray], None
        return [Move(source=stray, target=hole) for hole, stray in zip(holes, strays, strict=True)]
