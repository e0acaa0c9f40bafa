"""Chooses the rows of the next pass through the model, their tokens, and their blocks of the cache.

A row is a sample. Every pass computes one token of each row that has only its newest token left to
compute. Of the other rows it computes as many prompt tokens as the budget allows: long prompts are
computed in chunks, and further rows start while there are blocks, for the tokens that are soon
drawn too. Where blocks run out, the row that started last gives its own back and is computed again
later.

This is pure arithmetic on lengths and token ids, without tensors, so every rank of a replica
computes the same schedule by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.rows import enlarged
from mrlhf.inference.native.state_slots import KeptState, StateSlots

Ints = NDArray[np.int64]

_SOON = 16  # tokens for which rows that run must find blocks before another starts
_MOST_PASSES = 16  # that free places for rows stay empty until there are enough of them


@dataclass(frozen=True)
class Step:
    """One pass."""

    rows: Ints  # the rows that take part, [sequences]
    starts: Ints  # tokens of each that are in the cache already, [sequences]
    counts: Ints  # tokens of each that are computed now, [sequences]
    # places in `rows` of the rows computed to their last token, whose logits are needed, [complete]
    complete: Ints
    # rows that get their next token: the complete ones, then rows that share their prompt, [draws]
    draws: Ints
    sources: Ints  # for each of `draws`, the place in `complete` whose logits it uses, [draws]
    copies: list[tuple[int, int]]  # (from, to) blocks, to be copied between this pass and the next
    state_copies: list[tuple[int, int]]  # (from, to) slots of states, copied then too

    @property
    def decodes(self) -> bool:
        """Whether every row computes its newest token alone, and gets its next one."""
        sizes = (len(self.rows), len(self.complete), len(self.draws))
        return sizes == (self.counts.sum(),) * 3


@dataclass
class Counts:
    """The scheduler's counts since they were last taken."""

    steps: int = 0  # passes
    computed_prompt_tokens: int = 0  # each once for all samples that share it
    preemptions: int = 0  # rows that had to give their blocks back
    peak_blocks: int = 0  # the largest number of blocks held


@dataclass(frozen=True)
class _Fork:
    """Rows that start with the prompt that another row, the leader, has just computed."""

    place: int  # the leader's place in the pass
    rows: list[int]  # the rows that start, in order
    copies: list[tuple[int, int]]  # (from, to) blocks to be copied for them
    slots: list[tuple[int, int]]  # (from, to) slots of states to be copied for them


class Scheduler:
    """The rows that wait and the rows that run; `manager` has room for the longest row alone.

    A row that runs has one of the `slots`, `max_num_seqs` or more, for the states of layers that
    have them. `max_num_seqs` rows run at once, and a pass computes at most `max_prefill_tokens`
    prompt tokens.
    Rows start where so many as `starts_together` can, for some passes: fewer passes start any.
    """

    def __init__(
        self,
        manager: BlockManager,
        slots: StateSlots,
        block_size: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
        starts_together: int = 1,
    ) -> None:
        self._manager = manager
        self._state_slots = slots
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._starts_together = starts_together
        self._passes = 0  # since places became free for rows that wait

        self._prompts: dict[int, Sequence[int]] = {}
        self.block_tables = np.zeros((0, 0), dtype=np.int32)
        self.prompt_lengths: Ints = np.zeros(0, dtype=np.int64)
        self.lengths: Ints = np.zeros(0, dtype=np.int64)
        self._computed = np.zeros(0, dtype=np.int64)  # tokens in the cache
        self._counted = np.zeros(0, dtype=np.int64)  # prompt tokens in `counts` already
        self._held = np.zeros(0, dtype=np.int64)  # blocks
        self.slots: Ints = np.zeros(0, dtype=np.int64)

        # Rows of one prompt wait together, and those that may start follow the first of them: when
        # it has computed the prompt, they start with it.
        self._waiting: deque[list[int]] = deque()
        self._followers: dict[int, list[int]] = {}
        self._running: list[int] = []
        self.counts = Counts()

    @property
    def done(self) -> bool:
        """Whether no row runs or waits."""
        return not self._waiting and not self._running

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        rows_of: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
    ) -> None:
        """Queue the rows of each prompt, behind the waiting ones.

        No waiting or running row has the numbers in `rows_of`. `max_tokens` are the lengths of the
        longest response to each prompt.
        """
        rows = 1 + max((row for rows in rows_of for row in rows), default=-1)
        longest = max(
            (len(prompt) + most for prompt, most in zip(prompts, max_tokens, strict=True)),
            default=0,
        )
        self._make_room(rows, -(-longest // self._block_size))

        for prompt, chosen in zip(prompts, rows_of, strict=True):
            if not chosen:
                continue
            for row in chosen:
                self._prompts[row] = prompt
            self.prompt_lengths[chosen] = len(prompt)
            self.lengths[chosen] = len(prompt)
            self._computed[chosen] = 0
            self._counted[chosen] = 0
            self._waiting.append(list(chosen))

    def schedule(self) -> Step:
        """Return the next pass, which the caller then runs; `lengths` count what it will draw."""
        self.counts.steps += 1
        preempted = self._grow()
        running = np.array(self._running, dtype=np.int64)
        counts = self.lengths[running] - self._computed[running]

        # Rows that have more than one token to compute share the budget, oldest first.
        budget = self._max_prefill_tokens
        for place in np.flatnonzero(counts > 1).tolist():
            counts[place] = min(int(counts[place]), budget)
            budget -= int(counts[place])
        rows = running[counts > 0]
        counts = counts[counts > 0]
        starts = self._computed[rows]
        self._computed[rows] += counts

        forks: list[_Fork] = []
        for place in np.flatnonzero(starts < self.prompt_lengths[rows]).tolist():
            forks.append(self._share_prompt(int(rows[place]), int(starts[place]), place))

        # What is left of the budget goes to rows that start now.
        started: list[tuple[int, int, int]] = []
        may_start = not preempted and self._may_start(bool((counts > 1).any()))
        while may_start and budget > 0 and (row := self._start_next()) is not None:
            start = int(self._computed[row])
            count = min(int(self.lengths[row]) - start, budget)
            budget -= count
            self._computed[row] += count
            forks.append(self._share_prompt(row, start, len(rows) + len(started)))
            started.append((row, start, count))
        if started:
            self._passes = 0
            new_rows, new_starts, new_counts = np.array(started, dtype=np.int64).T
            rows = np.concatenate((rows, new_rows))
            starts = np.concatenate((starts, new_starts))
            counts = np.concatenate((counts, new_counts))
        self.counts.peak_blocks = max(self.counts.peak_blocks, self._manager.held)

        complete = np.flatnonzero(starts + counts == self.lengths[rows])
        draws = rows[complete]
        sources = np.arange(len(complete))
        forked = [row for fork in forks for row in fork.rows]
        if forked:
            leaders = [fork.place for fork in forks for _ in fork.rows]
            draws = np.append(draws, forked)
            sources = np.append(sources, np.searchsorted(complete, leaders))
        copies = [copy for fork in forks for copy in fork.copies]
        state_copies = [slots for fork in forks for slots in fork.slots]
        self.lengths[draws] += 1
        return Step(rows, starts, counts, complete, draws, sources, copies, state_copies)

    def share_response(self, row: int, tokens: Sequence[int]) -> None:
        """Let later prompts share what a row, whose tokens these are, has computed of them.

        If layers have states, a single prompt can take them over, and the row must end.
        """
        held = self.block_tables[row, : self._held[row]].tolist()
        seen = list(tokens[: self._computed[row]])
        if held and self._state_slots.keeps:
            self._state_slots.keep(KeptState(seen, int(self.slots[row]), held))
            self._held[row] = 0
        self._manager.publish(seen, held)

    def end(self, ended: Sequence[int]) -> None:
        """Remove rows; a pass may be scheduled, or run, that they take part in."""
        for row in ended:
            self._release_blocks(row)
            del self._prompts[row]
        if gone := set(ended):
            self._running = [row for row in self._running if row not in gone]
            # A row that was preempted meanwhile waits, without followers.
            self._waiting = deque(rows for rows in self._waiting if rows[0] not in gone)

    def take_counts(self) -> Counts:
        """Return the counts since the last call."""
        counts = self.counts
        self.counts = Counts()
        return counts

    def drop_all(self) -> None:
        """Give back the blocks of all rows, and forget the rows."""
        for row in self._running:
            self._release_blocks(row)
        self._running.clear()
        self._waiting.clear()
        self._followers.clear()
        self._prompts.clear()

    def _make_room(self, rows: int, blocks: int) -> None:
        """Let the arrays have at least `rows` rows, and block tables at least `blocks` columns."""
        self.block_tables = enlarged(self.block_tables, rows, blocks)
        self.prompt_lengths = enlarged(self.prompt_lengths, rows)
        self.lengths = enlarged(self.lengths, rows)
        self._computed = enlarged(self._computed, rows)
        self._counted = enlarged(self._counted, rows)
        self._held = enlarged(self._held, rows)
        self.slots = enlarged(self.slots, rows)

    def _share_prompt(self, row: int, start: int, place: int) -> _Fork:
        """Let other rows use what `row` has computed of its prompt after this pass.

        `start` tokens were in the cache before; `place` is the row's place in the pass.

        Returns:
            The rows that start with the prompt; none if it is not complete.
        """
        prompt_length = int(self.prompt_lengths[row])
        computed = int(self._computed[row])
        done = min(prompt_length, computed)
        counted = int(self._counted[row])
        # What is computed again after a preemption was counted before.
        self.counts.computed_prompt_tokens += max(0, done - max(start, counted))
        self._counted[row] = max(counted, done)

        held = self.block_tables[row, : self._held[row]].tolist()
        self._manager.publish(self._prompts[row][:computed], held)
        if computed < self.lengths[row]:
            return _Fork(place, [], [], [])
        return self._fork(row, place, self._followers.pop(row, []))

    def _fork(self, leader: int, place: int, followers: list[int]) -> _Fork:
        """Start `followers` with the computed prompt of `leader`, whose place is `place`.

        Followers for which there is no block go on waiting, and are not in the result.
        """
        copies: list[tuple[int, int]] = []
        slots: list[tuple[int, int]] = []
        full, rest = divmod(int(self.lengths[leader]), self._block_size)
        shared = self.block_tables[leader, :full].tolist()
        for number, row in enumerate(followers):
            own = self._take(1 if rest else 0)
            if own is None:
                self._waiting.appendleft(followers[number:])
                return _Fork(place, followers[:number], copies, slots)

            self._manager.share(shared)
            if own:
                copies.append((int(self.block_tables[leader, full]), own[0]))
            self._hold(row, shared + own)
            slots.append((int(self.slots[leader]), int(self.slots[row])))
            self._computed[row] = self.lengths[row]
            self._running.append(row)
        return _Fork(place, followers, copies, slots)

    def _grow(self) -> bool:
        """Give running rows a block for their newest token; return whether that preempted any."""
        before = self.counts.preemptions
        running = np.array(self._running, dtype=np.int64)
        short = running[self._held[running] * self._block_size < self.lengths[running]]

        for row in short.tolist():
            while self._held[row]:  # the row itself may be preempted
                if (own := self._take(1)) is not None:
                    self.block_tables[row, self._held[row]] = own[0]
                    self._held[row] += 1
                    break
                self._preempt(self._running[-1])
        return self.counts.preemptions > before

    def _preempt(self, row: int) -> None:
        self._running.remove(row)
        self._release_blocks(row)
        self._computed[row] = 0
        self._waiting.appendleft([row, *self._followers.pop(row, [])])
        self.counts.preemptions += 1

    def _places(self) -> int:
        """How many more rows may run."""
        return self._max_num_seqs - len(self._running) - sum(map(len, self._followers.values()))

    def _may_start(self, is_mixed: bool) -> bool:
        """Whether rows start in this pass; `is_mixed` if it computes prompts in any case."""
        places = self._places()
        self._passes = self._passes + 1 if self._waiting and places else 0
        late = self._passes > _MOST_PASSES
        return self._passes > 0 and (is_mixed or late or places >= self._starts_together)

    def _wanted_soon(self, rows: Sequence[int]) -> int:
        """How many of `rows` need a further block for one of their next tokens."""
        held = self._held[list(rows)] * self._block_size
        return int((held - self.lengths[list(rows)] < _SOON).sum())

    def _start_next(self) -> int | None:
        """Start the next row, with blocks for all its tokens; None if no row waits or fits."""
        room = self._places()
        if not self._waiting or room < 1:
            return None
        rows = self._waiting[0]
        row = rows[0]
        length = int(self.lengths[row])
        prompt = self._prompts[row]

        # A row that was preempted may share its whole prompt. One that draws its first token
        # computes at least one token, for the logits.
        known = self._manager.known_prefix(prompt if length == len(prompt) else [*prompt, -1])
        self._manager.share(known)
        computed = len(known) * self._block_size
        state = self._state_slots.take_over(prompt, length)
        if state is not None:
            known = state.blocks
            computed = len(state.tokens)
        blocks = -(-length // self._block_size)
        is_short = blocks * self._block_size - length < _SOON
        wanted = blocks - len(known)
        kept = self._wanted_soon(self._running) + is_short if self._running else 0
        self._state_slots.make_room(wanted + kept)
        own = self._manager.take(wanted) if self._manager.available >= wanted + kept else None
        if own is None:
            if state is None:
                self._manager.release(known)
            else:
                self._state_slots.keep(state)
            assert self._running, "the cache has no room for one row alone"
            return None
        self._hold(row, known + own, None if state is None else state.slot)
        self._computed[row] = computed
        self._running.append(row)

        # As many other rows of its prompt follow it as there is room for.
        of_each = max(1, (length % self._block_size > 0) + is_short)
        soon = self._wanted_soon(self._running)
        self._state_slots.make_room(soon + of_each * (min(room, len(rows)) - 1))
        spare = self._manager.available - soon
        followers = rows[1 : min(room, 1 + max(0, spare) // of_each)]
        if followers:
            self._followers[row] = followers
        self._waiting.popleft()
        if later := rows[1 + len(followers) :]:
            self._waiting.appendleft(later)
        return row

    def _take(self, count: int) -> list[int] | None:
        """Take blocks for a row that runs, before which kept states give theirs up."""
        self._state_slots.make_room(count)
        return self._manager.take(count)

    def _hold(self, row: int, blocks: list[int], slot: int | None = None) -> None:
        self.block_tables[row, : len(blocks)] = blocks
        self._held[row] = len(blocks)
        self.slots[row] = self._state_slots.take() if slot is None else slot

    def _release_blocks(self, row: int) -> None:
        if self._held[row]:
            self._state_slots.give_back(int(self.slots[row]))
        self._manager.release(self.block_tables[row, : self._held[row]].tolist())
        self._held[row] = 0
