"""The block manager: sharing, order of eviction, and that no block is lost."""

import random

from mrlhf.inference.native.blocks import BlockManager


def test_only_full_blocks_that_leave_a_token_are_shared():
    manager = BlockManager(8, block_size=2)
    blocks = manager.take(3)
    manager.publish([1, 2, 3, 4, 5], blocks)
    assert manager.known_prefix([1, 2, 3, 4, 5]) == blocks[:2]
    assert manager.known_prefix([1, 2, 3, 4]) == blocks[:1]
    assert manager.known_prefix([1, 2, 9, 4, 5]) == blocks[:1]
    assert manager.known_prefix([3, 4, 5]) == []
    assert manager.known_prefix([]) == []


def test_an_equal_block_after_another_prefix_is_not_taken_for_it():
    manager = BlockManager(8, block_size=1)
    first = manager.take(2)
    second = manager.take(2)
    manager.publish([1, 7], first)
    manager.publish([2, 7], second)
    assert manager.known_prefix([1, 7, 0]) == first
    assert manager.known_prefix([2, 7, 0]) == second


def test_what_nobody_holds_is_kept_until_it_is_needed_and_the_longest_unused_goes_first():
    manager = BlockManager(4, block_size=1)
    old = manager.take(2)
    new = manager.take(2)
    manager.publish([1, 2], old)
    manager.publish([3, 4], new)
    manager.release(old)
    manager.release(new)

    assert manager.available == 4 and manager.held == 0
    assert manager.known_prefix([1, 2, 0]) == old

    taken = manager.take(1)
    assert taken == [old[1]]  # the end of the older prefix
    assert manager.known_prefix([1, 2, 0]) == old[:1] and manager.known_prefix([3, 4, 0]) == new

    manager.share(old[:1])
    assert manager.take(2) == [new[1], new[0]]
    assert manager.take(1) is None and manager.known_prefix([3, 4, 0]) == []


def test_holders_are_counted_over_random_use():
    generator = random.Random(0)
    manager = BlockManager(12, block_size=2)
    held: list[list[int]] = []
    shared_ever = 0

    for _ in range(3000):
        if held and generator.random() < 0.5:
            manager.release(held.pop(generator.randrange(len(held))))
        else:
            tokens = [generator.randrange(2) for _ in range(generator.randrange(1, 9))]
            known = manager.known_prefix(tokens)
            manager.share(known)
            own = manager.take(-(-len(tokens) // 2) - len(known))
            if own is None:
                manager.release(known)
                continue
            shared_ever += len(known)
            assert not set(own) & {block for blocks in held for block in blocks}
            held.append(known + own)
            manager.publish(tokens, known + own)
        assert manager.held == len({block for blocks in held for block in blocks})

    assert shared_ever > 500
