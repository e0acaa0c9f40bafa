"""The scheduler's invariants over random workloads with few blocks, and small literal cases."""

import itertools
import random

import numpy as np
import pytest

from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.scheduler import Scheduler, Step
from mrlhf.inference.native.state_slots import StateSlots


def make(
    prompts,
    samples,
    max_tokens=4,
    blocks=64,
    block_size=2,
    max_num_seqs=8,
    max_prefill_tokens=64,
    starts_together=1,
    keeps=False,
):
    manager = BlockManager(blocks, block_size, shares=not keeps)
    sizes = (block_size, max_num_seqs, max_prefill_tokens, starts_together)
    slots = StateSlots(max_num_seqs, manager, keeps)
    scheduler = Scheduler(manager, slots, *sizes)
    scheduler.add(prompts, rows_of(samples), [max_tokens] * len(prompts))
    return scheduler, manager


def rows_of(samples: list[int]) -> list[list[int]]:
    """So many rows for each prompt, numbered in order."""
    ends = list(itertools.accumulate(samples))
    return [list(range(end - count, end)) for end, count in zip(ends, samples, strict=True)]


def counts(step: Step) -> dict[int, tuple[int, int]]:
    return {
        row: (start, count)
        for row, start, count in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        )
    }


def test_a_prompt_is_computed_once_for_all_its_samples():
    scheduler, manager = make([[1, 2, 3]], [3])

    step = scheduler.schedule()
    assert counts(step) == {0: (0, 3)}
    assert (step.draws.tolist(), step.sources.tolist()) == ([0, 1, 2], [0, 0, 0])
    assert step.complete.tolist() == [0]

    tables = scheduler.block_tables
    # The full block is shared, the other copied.
    assert tables[0, 0] == tables[1, 0] == tables[2, 0]
    assert step.copies == [(tables[0, 1], tables[1, 1]), (tables[0, 1], tables[2, 1])]
    assert len({int(tables[row, 1]) for row in range(3)}) == 3 and manager.held == 4

    scheduler.end([])
    assert counts(scheduler.schedule()) == {0: (3, 1), 1: (3, 1), 2: (3, 1)}


def test_long_prompts_go_in_chunks_beside_rows_that_decode():
    scheduler, _ = make([[1], [1] * 7], [1, 1], max_prefill_tokens=3)
    first = scheduler.schedule()
    assert counts(first) == {0: (0, 1), 1: (0, 2)} and first.draws.tolist() == [0]
    scheduler.end([])
    second = scheduler.schedule()
    assert counts(second) == {0: (1, 1), 1: (2, 3)} and second.draws.tolist() == [0]
    scheduler.end([])
    third = scheduler.schedule()
    assert counts(third) == {0: (2, 1), 1: (5, 2)} and third.draws.tolist() == [0, 1]


def test_a_common_beginning_is_computed_once_even_in_the_same_pass():
    scheduler, _ = make([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9]], [1, 1, 1])
    assert counts(scheduler.schedule()) == {0: (0, 5), 1: (4, 2), 2: (2, 1)}
    assert scheduler.counts.computed_prompt_tokens == 8


def test_where_blocks_run_out_the_last_to_enter_pays_and_comes_back():
    scheduler, manager = make([[1, 1], [2, 2]], [1, 1], blocks=4, max_tokens=5)
    step = scheduler.schedule()
    assert counts(step) == {0: (0, 2), 1: (0, 2)}
    for drawn in range(2):  # both take a second block
        scheduler.end([])
        step = scheduler.schedule()
        assert counts(step) == {0: (2 + drawn, 1), 1: (2 + drawn, 1)}
    scheduler.end([])  # both need a third block, there is none
    step = scheduler.schedule()
    assert counts(step) == {0: (4, 1)} and scheduler.counts.preemptions == 1
    scheduler.end([])
    step = scheduler.schedule()  # row 1 waits: its prompt and what it drew need three blocks
    assert counts(step) == {0: (5, 1)}
    scheduler.end([0])
    step = scheduler.schedule()
    assert counts(step) == {1: (2, 3)}  # the block of its prompt was still there
    scheduler.end([1])
    assert scheduler.done and manager.held == 0


def test_a_row_starts_where_the_others_find_their_next_block_too():
    for blocks, rows in ((3, {0}), (4, {0, 1})):  # 4: a second one for both
        scheduler, _ = make([[1, 1], [2, 2]], [1, 1], blocks=blocks, max_tokens=3)
        assert counts(scheduler.schedule()).keys() == rows
    scheduler, _ = make([[1, 1, 1]], [4], blocks=9)  # each of the first is copied, and one more
    assert scheduler.schedule().draws.tolist() == [0, 1, 2, 3]
    scheduler, _ = make([[1, 1, 1]], [4], blocks=8)
    assert scheduler.schedule().draws.tolist() == [0, 1, 2]


def test_rows_start_together():
    """128 prompts of 8 samples through 256 places, with responses of up to 1,024 tokens."""
    generator = random.Random(3)
    lengths = np.array([min(1024, 1 + int(generator.expovariate(1 / 300))) for _ in range(1024)])
    found = {}
    for together in (1, 16):
        scheduler, _ = make(
            [[number] * 200 for number in range(128)], [8] * 128, 1024, 256 * 20, 64, 256, 8192,
            together,
        )  # fmt: skip
        drawn = np.zeros(1024, dtype=np.int64)
        passes = mixed = 0
        while not scheduler.done:
            step = scheduler.schedule()
            passes += 1
            mixed += len(step.rows) != len(step.draws) or (step.counts > 1).any()
            drawn[step.draws] += 1
            ended = step.draws[drawn[step.draws] == lengths[step.draws]]
            scheduler.end(ended.tolist())
        assert scheduler.counts.preemptions == 0
        found[together] = (passes, mixed / passes)
    assert found[1][1] > 0.2 and found[16][1] < 0.05
    assert found[16][0] < 1.03 * found[1][0]


def test_a_prompt_takes_over_what_an_ended_row_has_computed_or_room_is_made():
    turn, others = [1, 2, 3, 100], [7] * 4
    for prompts, blocks, starts in (
        ([[*turn, 5]], 8, [3]),  # all but the token drawn last
        ([[1, 2, 3, 101, 5]], 8, [3]),
        ([turn[:3]], 8, [0]),  # it would have nothing to compute
        ([[1, 2, 9, 100]], 8, [0]),
        ([[*turn, 5], [*turn, 6]], 8, [3, 0]),  # a state goes on once
        ([others, [*turn, 5]], 7, [0, 3]),
        ([others, [*turn, 5]], 6, [0]),  # the first has left too few blocks for the second
        ([others], 3, [0]),  # what was kept is given up
    ):
        scheduler, manager = make([turn[:3]], [1], blocks=blocks, max_num_seqs=2, keeps=True)
        scheduler.schedule()
        scheduler.share_response(0, turn)
        scheduler.end([0])
        assert scheduler.done and manager.held == 2
        scheduler.add(prompts, rows_of([1] * len(prompts)), [2] * len(prompts))
        assert scheduler.schedule().starts.tolist() == starts, (prompts, blocks)


class Workload:
    """A random workload on few blocks, and all that it must have read and written.

    Attributes:
        text: for each row, its prompt and the tokens drawn for it, each row with tokens of its own.
        coming: prompts and their rows that are not added yet.
        stored: by slot of the cache, all tokens that the one there has seen.
        states: by slot of states, all tokens that they have seen; if they are kept, some prompts go
            on from a row that has ended.
        said: all tokens of those rows, in the order in which they have ended.
        carried: tokens of prompts that were not computed, since states were kept.
        finished: rows that have ended.
        unread: rows that the last pass has ended, and those that drew a token too many.
    """

    def __init__(self, seed: int, late: bool, behind: bool, keeps: bool = False) -> None:
        self.behind = behind
        self.keeps = keeps
        self.haste = 0.1 if keeps else 0.5
        self.unread: tuple[list[int], list[int]] = ([], [])
        self.generator = random.Random(seed)
        draw = self.generator.randrange
        self.block_size = self.generator.choice([1, 2, 4])
        self.max_tokens = draw(1, 9)
        prompts = [[draw(2) for _ in range(draw(1, 14))] for _ in range(draw(1, 30))]
        samples = [draw(1, 6) for _ in prompts]
        self.longest = max(map(len, prompts)) + self.max_tokens + (30 if keeps else 0)
        longest = -(-self.longest // self.block_size)
        blocks = longest + draw(0, 12)
        self.most_rows = draw(1, 9)
        self.budget = draw(1, 20)

        # Half of the prompts are there from the start; the others come one by one.
        first = (1 + len(prompts)) // 2 if late else len(prompts)
        self.scheduler, self.manager = make(
            prompts[:first], samples[:first], self.max_tokens, blocks, self.block_size,
            self.most_rows, self.budget, draw(1, 4), keeps,
        )  # fmt: skip
        self.coming = list(zip(prompts, rows_of(samples), strict=True))[first:]
        self.lengths = [draw(1, self.max_tokens + 1) for _ in range(sum(samples))]
        pairs = zip(prompts, samples, strict=True)
        self.text = [list(prompt) for prompt, count in pairs for _ in range(count)]
        self.starts = [len(tokens) for tokens in self.text]
        self.stored: dict[int, object] = {}
        self.states: dict[int, list[int]] = {}
        self.said: list[list[int]] = []
        self.carried = 0
        self.begun: set[int] = set()
        self.finished: set[int] = set()

    def add_some(self) -> None:
        """Let another prompt come, now and then; always if nothing else is to be done."""
        if self.coming and (self.scheduler.done or self.generator.random() < self.haste):
            prompt, rows = self.coming.pop(0)
            before = self.generator.choice(self.said[-2:]) if self.said else []
            if len(before) + len(prompt) + self.max_tokens <= self.longest:
                prompt = before + prompt
                for row in rows:
                    self.text[row] = list(prompt)
                    self.starts[row] = len(prompt)
            self.scheduler.add([prompt], [rows], [self.max_tokens])

    def compute(self, step: Step) -> None:
        """Write the step's tokens, then read all before them, then copy blocks."""
        counted = counts(step)
        assert not counted.keys() & self.finished and all(
            count >= 1 for _, count in counted.values()
        )
        for row, (start, count) in counted.items():
            for position in range(start, start + count):
                self.stored[self._slot(row, position)] = tuple(self.text[row][: position + 1])
        for row, (start, count) in counted.items():
            for position in range(start + count):
                seen = tuple(self.text[row][: position + 1])
                assert self.stored[self._slot(row, position)] == seen
        prefill = sum(count for _, count in counted.values() if count > 1)
        assert len(step.rows) <= self.most_rows and prefill <= self.budget

        if self.keeps:
            self._go_on(counted, step)
        size = self.block_size
        for source, target in step.copies:
            for place in range(size):
                self.stored[target * size + place] = self.stored.get(source * size + place)

    def _go_on(self, counted: dict[int, tuple[int, int]], step: Step) -> None:
        slots = [int(self.scheduler.slots[row]) for row in counted]
        assert len(set(slots)) == len(slots)
        for slot, (row, (start, count)) in zip(slots, counted.items(), strict=True):
            assert start == 0 or self.states[slot] == self.text[row][:start]
            self.states[slot] = self.text[row][: start + count]
            self.carried += 0 if row in self.begun else start
        self.begun |= {*step.rows.tolist(), *step.draws.tolist()}
        for source, target in step.state_copies:
            self.states[target] = self.states[source]

    def draw(self, step: Step) -> None:
        """Draw a token for each row that the step completes, and end those that are long enough.

        Where it is `behind`, it ends those of the step before: others have drawn already.
        """
        drawn = step.draws.tolist()
        assert len(set(drawn)) == len(drawn)
        for row, source in zip(drawn, step.sources.tolist(), strict=True):
            assert self.text[step.rows[step.complete[source]]] == self.text[row]
        for row in drawn:
            self.text[row].append(100 + row)
        ended = [row for row in drawn if self._drawn(row) == self.lengths[row]]
        excess = [row for row in drawn if self._drawn(row) > self.lengths[row]]
        if self.behind:
            self.unread, (ended, excess) = (ended, excess), self.unread
        self.end(ended, excess)

    def end(self, ended: list[int], excess: list[int]) -> None:
        for row in ended if self.keeps else []:
            self.said.append(self.text[row][: self.starts[row] + self.lengths[row]])
            self.scheduler.share_response(row, self.said[-1])
        self.scheduler.end(ended)
        self.finished |= set(ended)
        for row in excess:
            self.text[row].pop()

    def assert_complete(self) -> None:
        rows = range(len(self.text))
        self.scheduler._state_slots.make_room(10**9)  # what is kept is given up
        assert self.scheduler.done and self.finished == set(rows) and self.manager.held == 0
        assert [self._drawn(row) for row in rows] == self.lengths
        wanted = [len(tokens) for tokens in self.text]
        more = self.scheduler.lengths[: len(rows)] - wanted
        assert set(more.tolist()) <= ({0, 1} if self.behind else {0})

    def _slot(self, row: int, position: int) -> int:
        block, place = divmod(position, self.block_size)
        return self.scheduler.block_tables[row, block] * self.block_size + place

    def _drawn(self, row: int) -> int:
        return len(self.text[row]) - self.starts[row]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_doubled_or_read_before_it_is_written(seed, late, behind):
    workload = Workload(seed, late, behind)
    run(workload)
    assert late or len(workload.scheduler.lengths) == len(workload.text)


def run(workload: Workload) -> None:
    for _ in range(20_000):
        workload.add_some()
        if workload.scheduler.done:
            break
        step = workload.scheduler.schedule()
        workload.compute(step)
        workload.draw(step)
    workload.end(*workload.unread)
    workload.assert_complete()


@pytest.mark.parametrize("behind", [False, True])
def test_states_have_seen_what_comes_before_the_tokens_that_are_computed(behind):
    """Prompts begin with rows that have ended, and take their states over while those are kept."""
    carried = []
    for seed in range(24):
        workload = Workload(seed, late=True, behind=behind, keeps=True)
        run(workload)
        carried.append(workload.carried > 0)
    assert 8 < sum(carried) < 24, carried
