"""The scheduler's invariants over random workloads with few blocks, and small literal cases."""

import itertools
import random

import numpy as np
import pytest

from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.scheduler import Scheduler, Step


def make(
    prompts, samples, max_tokens=4, blocks=64, block_size=2, max_num_seqs=8, max_prefill_tokens=64
):
    manager = BlockManager(blocks, block_size)
    scheduler = Scheduler(manager, block_size, max_num_seqs, max_prefill_tokens)
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
    assert (
        step.draws.tolist() == [0, 1, 2]
        and step.sources.tolist() == [0, 0, 0]
        and step.complete.tolist() == [0]
    )

    tables = scheduler.block_tables
    assert (
        tables[0, 0] == tables[1, 0] == tables[2, 0]
    )  # the full block is shared, the other copied
    assert step.copies == [(tables[0, 1], tables[1, 1]), (tables[0, 1], tables[2, 1])]
    assert len({int(tables[row, 1]) for row in range(3)}) == 3 and manager.held == 4

    scheduler.record(step.draws, [])
    assert counts(scheduler.schedule()) == {0: (3, 1), 1: (3, 1), 2: (3, 1)}


def test_long_prompts_go_in_chunks_beside_rows_that_decode():
    scheduler, _ = make([[1], [1] * 7], [1, 1], max_prefill_tokens=3)
    first = scheduler.schedule()
    assert counts(first) == {0: (0, 1), 1: (0, 2)} and first.draws.tolist() == [0]
    scheduler.record(first.draws, [])
    second = scheduler.schedule()
    assert counts(second) == {0: (1, 1), 1: (2, 3)} and second.draws.tolist() == [0]
    scheduler.record(second.draws, [])
    third = scheduler.schedule()
    assert counts(third) == {0: (2, 1), 1: (5, 2)} and third.draws.tolist() == [0, 1]


def test_a_common_beginning_is_computed_once_even_in_the_same_pass():
    scheduler, _ = make([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9]], [1, 1, 1])
    assert counts(scheduler.schedule()) == {0: (0, 5), 1: (4, 2), 2: (2, 1)}
    assert scheduler.counts.computed_prompt_tokens == 8


def test_where_blocks_run_out_the_last_to_enter_pays_and_comes_back():
    scheduler, manager = make([[1, 1], [2, 2]], [1, 1], blocks=3, max_tokens=3)
    step = scheduler.schedule()
    assert counts(step) == {0: (0, 2), 1: (0, 2)}
    scheduler.record(step.draws, [])  # both need a second block, there is one
    step = scheduler.schedule()
    assert counts(step) == {0: (2, 1)} and scheduler.counts.preemptions == 1
    scheduler.record(step.draws, [])
    step = scheduler.schedule()  # row 1 waits: its two tokens and the one drawn need two blocks
    assert counts(step) == {0: (3, 1)}
    scheduler.record(step.draws, [0])
    step = scheduler.schedule()
    assert counts(step) == {1: (2, 1)}  # the block of its prompt was still there
    scheduler.record(step.draws, [1])
    assert scheduler.done and manager.held == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_doubled_or_read_before_it_is_written(seed, late):
    generator = random.Random(seed)
    block_size = generator.choice([1, 2, 4])
    max_tokens = generator.randrange(1, 9)
    prompts = [
        [generator.randrange(2) for _ in range(generator.randrange(1, 14))]
        for _ in range(generator.randrange(1, 30))
    ]
    samples = [generator.randrange(1, 6) for _ in prompts]
    longest = -(-(max(map(len, prompts)) + max_tokens) // block_size)
    blocks = longest + generator.randrange(0, 12)
    most = generator.randrange(1, 9)
    budget = generator.randrange(1, 20)

    # Half of the prompts are there from the start; the others come one by one.
    first = (1 + len(prompts)) // 2 if late else len(prompts)
    scheduler, manager = make(
        prompts[:first], samples[:first], max_tokens, blocks, block_size, most, budget
    )
    coming = list(zip(prompts, rows_of(samples), strict=True))[first:]

    ends = [generator.randrange(1, max_tokens + 1) for _ in range(sum(samples))]
    text = [
        list(prompt) for prompt, count in zip(prompts, samples, strict=True) for _ in range(count)
    ]
    start_of = [len(tokens) for tokens in text]
    stored: dict[int, object] = {}  # cache slot -> everything the token there has seen
    finished: set[int] = set()

    for _ in range(20_000):
        if coming and (scheduler.done or generator.random() < 0.5):
            prompt, rows = coming.pop(0)
            scheduler.add([prompt], [rows], [max_tokens])
        if scheduler.done:
            break

        step = scheduler.schedule()
        prefill = 0
        for row, (start, count) in counts(step).items():
            assert row not in finished and count >= 1
            prefill += count if count > 1 else 0
            for position in range(start, start + count):
                slot = (
                    scheduler.block_tables[row, position // block_size] * block_size
                    + position % block_size
                )
                stored[slot] = tuple(text[row][: position + 1])

        for row, (start, count) in counts(step).items():  # all is written before any of it is read
            for position in range(start + count):
                slot = (
                    scheduler.block_tables[row, position // block_size] * block_size
                    + position % block_size
                )
                assert stored[slot] == tuple(text[row][: position + 1])
        assert len(step.rows) <= most and prefill <= budget

        for source, target in step.copies:
            for place in range(block_size):
                stored[target * block_size + place] = stored.get(source * block_size + place)
        assert len(set(step.draws.tolist())) == len(step.draws)
        for row, source in zip(step.draws.tolist(), step.sources.tolist(), strict=True):
            assert text[step.rows[step.complete[source]]] == text[row]

        ended = []
        for row in step.draws.tolist():
            text[row].append(
                100 + row
            )  # tokens of their own, so that no response is taken for another
            if len(text[row]) - start_of[row] == ends[row]:
                ended.append(row)
        scheduler.record(step.draws, ended)
        finished |= set(ended)

    assert scheduler.done and finished == set(range(len(text))) and manager.held == 0
    assert [len(tokens) - start for tokens, start in zip(text, start_of, strict=True)] == ends
    lengths = [len(tokens) for tokens in text]
    assert np.array_equal(scheduler.lengths[: len(text)], lengths)
    assert late or len(scheduler.lengths) == len(text)
