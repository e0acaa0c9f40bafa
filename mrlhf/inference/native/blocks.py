"""Hands out the blocks of the KV cache, and finds blocks that a new prompt can share.

Every sequence that reads a block holds it. A block that no sequence holds is kept if it is part of
the beginning of a known prompt. When its room is needed, the block unused for longest goes first.
This is arithmetic on ints, without tensors or sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]


class BlockManager:
    """Hands out block numbers 0 .. blocks - 1; with `shares` off no prefix becomes known."""

    def __init__(self, blocks: int, block_size: int, shares: bool = True) -> None:
        self._shares = shares
        self._block_size = block_size
        self._blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        # Known prefixes: (number of the prefix before, tokens of the block) -> block. Each such
        # block has a number of its own, by which the next block of the prefix refers to it.
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 1
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """The number of blocks that can be taken: free ones, and ones kept only for sharing."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """The number of blocks that some sequence holds."""
        return self._blocks - self.available

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks for one sequence; None if fewer are available."""
        if count > self.available:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Let one more sequence hold these blocks."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Let one sequence fewer hold these blocks."""
        for block in reversed(blocks):  # the end of a prefix goes before its beginning
            assert self._holders[block] > 0, f"block {block} is held by nobody"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def known_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The full blocks that already hold the beginning of `tokens`, but never all the tokens."""
        found: list[int] = []
        number = 0
        size = self._block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._known.get((number, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            number = self._numbers[block]
        return found

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Let other prompts share the full blocks that hold the beginning of `tokens`."""
        if not self._shares:
            return
        number = 0
        size = self._block_size
        for place in range(min(len(blocks), len(tokens) // size)):
            key = (number, tuple(tokens[place * size : (place + 1) * size]))
            block = self._known.get(key)
            if block is None:
                block = blocks[place]
                if block in self._keys:  # it is known under another prefix: the chain ends here
                    return
                self._known[key] = block
                self._keys[block] = key
                self._numbers[block] = self._next_number
                self._next_number += 1
            number = self._numbers[block]

    def _evict(self) -> int:
        """Forget the known block that has been unused for longest, and return it."""
        block, _ = self._idle.popitem(last=False)
        del self._known[self._keys.pop(block)], self._numbers[block]
        return block
