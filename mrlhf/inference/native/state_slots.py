"""Hands out the slots of states, and keeps the states of ended rows for prompts that go on.

A state cannot be cut back to a part of the tokens that it has seen. So it is kept with all of them
and with the blocks of their keys, and the first prompt that begins with them takes all over. Where
room is needed, what ended first goes first. This is arithmetic on ints, without tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrlhf.inference.native.blocks import BlockManager


@dataclass(frozen=True)
class KeptState:
    """The states of a row that has ended; it holds the blocks."""

    tokens: list[int]  # that the states have seen
    slot: int
    blocks: list[int]


class StateSlots:
    """Hands out slots 0 .. count - 1, of which sequences that run need no more at once."""

    def __init__(self, count: int, manager: BlockManager, keeps: bool) -> None:
        self.keeps = keeps  # whether layers have states
        self._manager = manager
        self._free = list(range(count))
        self._kept: list[KeptState] = []  # what ended first comes first

    def take(self) -> int:
        """Hand out a slot."""
        if not self._free:
            self._drop_first()
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Let a slot be handed out again."""
        self._free.append(slot)

    def keep(self, kept: KeptState) -> None:
        """Keep states until a prompt takes them over, or room is needed."""
        self._kept.append(kept)

    def take_over(self, prompt: Sequence[int], length: int) -> KeptState | None:
        """Hand out the states that have seen most of `prompt`, but less than `length` tokens."""
        fitting = [kept for kept in self._kept if _begins(prompt, kept.tokens, length)]
        longest = max(fitting, key=lambda kept: len(kept.tokens), default=None)
        if longest is not None:
            self._kept.remove(longest)
        return longest

    def make_room(self, blocks: int) -> None:
        """Give up kept states until so many blocks are available, if that is enough."""
        while self._kept and self._manager.available < blocks:
            self._drop_first()

    def _drop_first(self) -> None:
        kept = self._kept.pop(0)
        self._manager.release(kept.blocks)
        self._free.append(kept.slot)


def _begins(prompt: Sequence[int], tokens: list[int], length: int) -> bool:
    seen = len(tokens)
    if seen > len(prompt) or seen >= length or prompt[seen - 1] != tokens[-1]:
        return False
    return list(prompt[:seen]) == tokens
