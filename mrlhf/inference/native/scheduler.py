"""Who runs in the next pass through the model, how many tokens of each, and in which blocks of the
cache.

Samples are rows, numbered prompt after prompt. Every pass takes one token of each row that has one
left to compute, and of the others as many prompt tokens as the budget allows: prompts go in chunks,
and rows enter while there are blocks. Where blocks run out, the row that entered last gives its own
back and is computed again later. Pure arithmetic on lengths and token ids, so every rank of a
replica comes to the same schedule alone; it knows no tensors of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrlhf.inference.native.blocks import BlockManager

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One pass.

    Attributes:
        rows: that take part, [sequences].
        starts: tokens of each that are in the cache already, [sequences].
        counts: tokens of each to be computed now, [sequences].
        complete: places in `rows` of those computed to their last token, whose logits are wanted,
            [complete].
        draws: rows that get their next token after it: those, then rows that share their prompt,
            [draws].
        sources: the place in `complete` whose logits each of `draws` uses, [draws].
        copies: (from, to) blocks to be copied after it, before the next.
    """

    rows: Ints
    starts: Ints
    counts: Ints
    complete: Ints
    draws: Ints
    sources: Ints
    copies: list[tuple[int, int]]


@dataclass(frozen=True)
class _Forks:
    """Rows that begin with a prompt just computed for another, the places of those others, and
    copies to be made.
    """

    rows: list[int]
    sources: list[int]
    copies: list[tuple[int, int]]


class Scheduler:
    """The rows of one call of `generate`."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        max_tokens: int,
        manager: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
    ) -> None:
        """Queue the samples of every prompt, in order.

        Args:
            prompts: token ids.
            samples: rows of each prompt.
            max_tokens: longest response, tokens.
            manager: of the cache's blocks; it has room for the longest row alone.
            block_size: tokens a block.
            max_num_seqs: rows that run at once.
            max_prefill_tokens: prompt tokens computed in one pass.
        """
        self._prompts, self._manager, self._block_size = prompts, manager, block_size
        self._max_num_seqs, self._max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._prompt_of = np.repeat(np.arange(len(prompts)), samples)
        rows = len(self._prompt_of)
        prompt_lengths = np.fromiter((len(prompt) for prompt in prompts), np.int64, len(prompts))
        self.prompt_lengths: Ints = prompt_lengths[self._prompt_of]
        self.lengths: Ints = self.prompt_lengths.copy()
        longest = int(prompt_lengths.max(initial=0)) + max_tokens
        self.block_tables = np.zeros((rows, -(-longest // block_size)), dtype=np.int32)
        self._computed = np.zeros(rows, dtype=np.int64)
        self._counted = np.zeros(rows, dtype=np.int64)
        self._held = np.zeros(rows, dtype=np.int64)
        self._running: list[int] = []
        # Rows that wait for another row of their prompt to be computed, by that row.
        self._followers: dict[int, list[int]] = {}
        ends = np.cumsum(samples).tolist()
        self._waiting: deque[list[int]] = deque(
            list(range(end - count, end)) for end, count in zip(ends, samples, strict=True) if count
        )
        self.preemptions = 0
        self.computed_prompt_tokens = 0
        self.peak_blocks = 0

    @property
    def done(self) -> bool:
        """Whether no row runs or waits."""
        return not self._waiting and not self._running

    def schedule(self) -> Step:
        """The next pass, which the caller then runs."""
        preempted = self._grow()
        running = np.array(self._running, dtype=np.int64)
        counts = self.lengths[running] - self._computed[running]
        budget = self._max_prefill_tokens
        for place in np.flatnonzero(counts > 1).tolist():
            counts[place] = min(int(counts[place]), budget)
            budget -= int(counts[place])
        rows, counts = running[counts > 0], counts[counts > 0]
        starts = self._computed[rows]
        self._computed[rows] += counts
        forks = _Forks([], [], [])
        for place in np.flatnonzero(starts < self.prompt_lengths[rows]).tolist():
            self._spread(int(rows[place]), int(starts[place]), place, forks)
        entered: list[tuple[int, int, int]] = []
        while budget > 0 and not preempted and (row := self._admit()) is not None:
            start = int(self._computed[row])
            count = min(int(self.lengths[row]) - start, budget)
            budget -= count
            self._computed[row] += count
            self._spread(row, start, len(rows) + len(entered), forks)
            entered.append((row, start, count))
        if entered:
            columns = np.array(entered, dtype=np.int64).T
            rows, starts, counts = (
                np.concatenate(pair) for pair in zip((rows, starts, counts), columns, strict=True)
            )
        self.peak_blocks = max(self.peak_blocks, self._manager.held)
        complete = np.flatnonzero(starts + counts == self.lengths[rows])
        draws, sources = rows[complete], np.arange(len(complete))
        if forks.rows:
            draws = np.append(draws, forks.rows)
            sources = np.append(sources, np.searchsorted(complete, forks.sources))
        return Step(rows, starts, counts, complete, draws, sources, forks.copies)

    def record(self, draws: Ints, ended: Sequence[int]) -> None:
        """Each of `draws` has one token more; those of them in `ended` are done."""
        self.lengths[draws] += 1
        for row in ended:
            self._give_back(row)
        if gone := set(ended):
            self._running = [row for row in self._running if row not in gone]

    def _spread(self, row: int, start: int, place: int, forks: _Forks) -> None:
        """Give others what `row`, computed from `start` on, has of its prompt now."""
        known, computed = int(self.prompt_lengths[row]), int(self._computed[row])
        # What is computed again after a preemption was counted before.
        self.computed_prompt_tokens += max(
            0, min(known, computed) - max(start, int(self._counted[row]))
        )
        self._counted[row] = max(int(self._counted[row]), min(known, computed))
        held = self.block_tables[row, : self._held[row]].tolist()
        self._manager.publish(self._prompts[self._prompt_of[row]][:computed], held)
        if computed == self.lengths[row] and row in self._followers:
            started = self._fork(row, self._followers.pop(row), forks.copies)
            forks.rows.extend(started)
            forks.sources.extend([place] * len(started))

    def _fork(self, leader: int, followers: list[int], copies: list[tuple[int, int]]) -> list[int]:
        """Start `followers` with the computed prompt of `leader`; those for whom there is no block
        wait on.
        """
        full, rest = divmod(int(self.lengths[leader]), self._block_size)
        shared = self.block_tables[leader, :full].tolist()
        for place, row in enumerate(followers):
            own = self._manager.take(1 if rest else 0)
            if own is None:
                self._waiting.appendleft(followers[place:])
                return followers[:place]
            self._manager.share(shared)
            if own:
                copies.append((int(self.block_tables[leader, full]), own[0]))
            self._hold(row, shared + own)
            self._computed[row] = self.lengths[row]
            self._running.append(row)
        return followers

    def _grow(self) -> bool:
        """Give every running row a block for its newest token; whether rows that entered last had
        to pay for it.
        """
        before = self.preemptions
        running = np.array(self._running, dtype=np.int64)
        short = running[self._held[running] * self._block_size < self.lengths[running]]
        for row in short.tolist():
            while self._held[row]:  # it may itself be the one to go
                if (own := self._manager.take(1)) is not None:
                    self.block_tables[row, self._held[row]] = own[0]
                    self._held[row] += 1
                    break
                self._preempt(self._running[-1])
        return self.preemptions > before

    def _preempt(self, row: int) -> None:
        self._running.remove(row)
        self._give_back(row)
        self._computed[row] = 0
        self._waiting.appendleft([row, *self._followers.pop(row, [])])
        self.preemptions += 1

    def _admit(self) -> int | None:
        """The next row to run, with blocks for all its tokens; None where none waits or fits."""
        room = self._max_num_seqs - len(self._running) - sum(map(len, self._followers.values()))
        if not self._waiting or room < 1:
            return None
        group = self._waiting[0]
        row = group[0]
        length = int(self.lengths[row])
        prompt = self._prompts[self._prompt_of[row]]
        # A row that was preempted may share its whole prompt; one that draws its first token
        # computes a token at least.
        known = self._manager.known_prefix(prompt if length == len(prompt) else [*prompt, -1])
        self._manager.share(known)
        own = self._manager.take(-(-length // self._block_size) - len(known))
        if own is None:
            self._manager.release(known)
            assert self._running, "the cache has no room for one row alone"
            return None
        self._hold(row, known + own)
        self._computed[row] = len(known) * self._block_size
        self._running.append(row)
        followers = group[1 : min(room, 1 + self._manager.available)]
        if followers:
            self._followers[row] = followers
        self._waiting.popleft()
        if rest := group[1 + len(followers) :]:
            self._waiting.appendleft(rest)
        return row

    def _hold(self, row: int, blocks: list[int]) -> None:
        self.block_tables[row, : len(blocks)] = blocks
        self._held[row] = len(blocks)

    def _give_back(self, row: int) -> None:
        self._manager.release(self.block_tables[row, : self._held[row]].tolist())
        self._held[row] = 0
