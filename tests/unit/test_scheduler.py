"""The scheduler's invariants, over random workloads, and small literal cases."""

import random

import pytest

from mrlhf.inference.native.scheduler import Admission, Move, Scheduler


def test_a_prompt_enters_with_all_its_samples_and_long_prompts_go_first():
    scheduler = Scheduler([3, 9, 5], n=2, max_num_seqs=4, max_prefill_tokens=100)
    assert scheduler.admit() == [Admission(1, (2, 3), (0, 1)), Admission(2, (4, 5), (2, 3))]
    assert scheduler.admit() == []
    scheduler.finish([1])
    assert scheduler.admit() == []
    assert scheduler.compact() == [Move(source=3, target=1)]
    scheduler.finish([0])
    assert scheduler.admit() == [Admission(0, (0, 1), (0, 3))]
    assert scheduler.compact() == []


def test_more_samples_than_slots_enter_in_parts():
    scheduler = Scheduler([4], n=5, max_num_seqs=2, max_prefill_tokens=100)
    rows = []
    while admitted := scheduler.admit():
        rows.append(admitted[0].rows)
        scheduler.finish(admitted[0].slots)
    assert rows == [(0, 1), (2, 3), (4,)] and scheduler.done


def test_prefill_batches_respect_the_token_limit_padding_included_and_a_longer_prompt_goes_alone():
    scheduler = Scheduler([10, 4, 4, 3, 1], n=1, max_num_seqs=8, max_prefill_tokens=9)
    batches = []
    while admitted := scheduler.admit():
        batches.append([admission.prompt for admission in admitted])
    assert batches == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_runs_once_in_a_dense_set_of_slots(seed):
    rng = random.Random(seed)
    n, slots, tokens = rng.randint(1, 5), rng.randint(1, 12), rng.randint(5, 60)
    lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 25))]
    left = {row: rng.randint(1, 6) for row in range(n * len(lengths))}
    scheduler, in_slot, began = Scheduler(lengths, n, slots, tokens), {}, []

    def draw(slots_now):
        ended = []
        for slot in slots_now:
            left[in_slot[slot]] -= 1
            if left[in_slot[slot]] == 0:
                ended.append(slot)
        for slot in ended:
            del in_slot[slot]
        scheduler.finish(ended)

    steps = 0
    while not scheduler.done:
        steps += 1
        assert steps < 1000
        while admitted := scheduler.admit():
            padded = len(admitted) * max(lengths[a.prompt] for a in admitted)
            assert padded <= tokens or len(admitted) == 1
            for admission in admitted:
                for row, slot in zip(admission.rows, admission.slots, strict=True):
                    assert slot not in in_slot and row // n == admission.prompt
                    in_slot[slot] = row
                    began.append(row)
            draw([slot for admission in admitted for slot in admission.slots])
        for move in scheduler.compact():
            assert move.target not in in_slot
            in_slot[move.target] = in_slot.pop(move.source)
        assert sorted(in_slot) == list(range(scheduler.active)) and scheduler.active <= slots
        draw(list(range(scheduler.active)))
    assert sorted(began) == list(range(n * len(lengths))) and not any(left.values())
