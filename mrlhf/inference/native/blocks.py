"""Which blocks of the KV cache are free, who holds the others, and which begin with tokens that
another prompt has too.

A block is held by every sequence that reads it. One that nobody holds any more but that begins a
known prompt stays until its room is needed, the longest unused going first. Pure arithmetic on
ints: it knows neither tensors nor sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]


class BlockManager:
    """Hands out block numbers 0 .. blocks - 1."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        # Known prefixes: (number of the prefix before, tokens of the block) -> block; and each such
        # block's own number.
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 1
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones, and those that only wait to be shared."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that some sequence holds."""
        return self._blocks - self.available

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of the caller's own; None where there are not so many."""
        if count > self.available:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """The caller holds these blocks too."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """The caller no longer holds these blocks."""
        for block in reversed(blocks):  # the end of a prefix goes before its beginning
            assert self._holders[block] > 0, f"block {block} is held by nobody"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def known_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that already hold the beginning of `tokens`, full ones only and never all of
        the tokens.
        """
        found: list[int] = []
        number, size = 0, self._block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._known.get((number, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            number = self._numbers[block]
        return found

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Full blocks that hold the beginning of `tokens` may be shared from now on."""
        number, size = 0, self._block_size
        for place in range(min(len(blocks), len(tokens) // size)):
            key = (number, tuple(tokens[place * size : (place + 1) * size]))
            block = self._known.get(key)
            if block is None:
                block = blocks[place]
                if block in self._keys:  # it is known under another prefix: the chain ends here
                    return
                self._known[key], self._keys[block] = block, key
                self._numbers[block], self._next_number = self._next_number, self._next_number + 1
            number = self._numbers[block]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._known[self._keys.pop(block)], self._numbers[block]
        return block
