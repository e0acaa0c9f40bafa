"""Sharing out samples over replicas, and the memory of response lengths that it balances by."""

import json
import random

import pytest

from mrlhf.rollout.assignment import ResponseLengths, Share, assign


def as_pairs(shares):
    return [[(share.prompt, list(share.samples)) for share in replica] for replica in shares]


def test_shares_are_balanced_by_prompt_and_expected_response():
    # The loads are 2 x 40 + 10 = 90, 30, 30, 30: the long responses have a replica of their own.
    assert as_pairs(assign([10, 10, 10, 10], [40.0, 10.0, 10.0, 10.0], n=2, replicas=2)) == [
        [(0, [0, 1])],
        [(1, [0, 1]), (2, [0, 1]), (3, [0, 1])],
    ]

    # By prompts alone, 0 and 2 would share a replica.
    assert as_pairs(assign([50, 40, 10, 20], [90.0, 1.0, 100.0, 1.0], n=1, replicas=2)) == [
        [(0, [0]), (3, [0])],
        [(2, [0]), (1, [0])],
    ]


def test_samples_stay_together_unless_replicas_would_wait():
    assert as_pairs(assign([5, 5], [3.0, 3.0], n=4, replicas=2)) == [
        [(0, [0, 1, 2, 3])],
        [(1, [0, 1, 2, 3])],
    ]

    assert as_pairs(assign([5], [3.0], n=5, replicas=3)) == [
        [(0, [1, 2])],
        [(0, [3, 4])],
        [(0, [0])],
    ]
    assert as_pairs(assign([5, 5], [3.0, 3.0], n=4, replicas=4)) == [
        [(0, [0, 1])],
        [(0, [2, 3])],
        [(1, [0, 1])],
        [(1, [2, 3])],
    ]

    assert as_pairs(assign([5, 6], [3.0, 3.0], n=1, replicas=4)) == [[(1, [0])], [(0, [0])], [], []]
    assert as_pairs(assign([8, 8, 8], [30.0, 2.0, 2.0], n=2, replicas=2)) == [
        [(0, [0]), (1, [0, 1])],
        [(0, [1]), (2, [0, 1])],
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_drawn_once_and_equal_prompts_are_not_split(seed):
    rng = random.Random(seed)
    prompts = rng.randint(1, 20)
    n = rng.randint(1, 9)
    replicas = rng.randint(1, 9)
    lengths = [rng.randint(1, 60) for _ in range(prompts)]
    expected = [rng.uniform(1, 200) for _ in range(prompts)]
    shares = assign(lengths, expected, n, replicas)

    drawn = sorted(
        (share.prompt, sample)
        for replica in shares
        for share in replica
        for sample in share.samples
    )
    assert drawn == [(prompt, sample) for prompt in range(prompts) for sample in range(n)]

    assert len(shares) == replicas
    for replica in shares:
        assert replica == sorted(
            replica, key=lambda s: (-expected[s.prompt], s.prompt, s.samples.start)
        )

    if prompts >= replicas:
        even = assign([7] * prompts, [expected[0]] * prompts, n, replicas)
        assert sum(map(len, even)) == prompts
        assert {len(replica) for replica in even} <= {prompts // replicas, -(-prompts // replicas)}
    if prompts * n >= replicas:
        assert all(assign([7] * prompts, [3.5] * prompts, n, replicas))


def test_expected_lengths_are_of_the_prompt_then_of_all_then_the_limit():
    lengths = ResponseLengths()
    assert lengths.expected(7, unknown=64) == 64
    lengths.update([7, 7, 8], [10, 20, 60])
    assert (lengths.expected(7, 64), lengths.expected(8, 64), lengths.expected(9, 64)) == (
        15,
        60,
        30,
    )

    lengths.update([7], [25])
    assert lengths.expected(7, 64) == 20  # (15 + 25) / 2
    assert lengths.expected(9, 64) == 27.5  # (30 + 25) / 2

    for _ in range(2):
        lengths.update([7], [20])
    lengths.update([7], [100])
    lengths.update([7], [100])  # the fifth and sixth visits weigh a fourth each: 40, 55
    assert lengths.expected(7, 64) == 55

    lengths.update([], [])
    assert lengths.expected(7, 64) == 55


def test_memory_is_bounded_and_forgets_the_longest_unseen():
    lengths = ResponseLengths(capacity=2)
    lengths.update([1, 2], [10, 10])
    lengths.update([1, 3], [10, 10])
    lengths.update([4], [90])
    assert len(lengths.state_dict()["uids"]) == 2
    assert lengths.state_dict()["uids"] == [3, 4]

    as_for_an_unknown_prompt = pytest.approx(110 / 3)
    assert lengths.expected(1, 0) == lengths.expected(2, 0) == as_for_an_unknown_prompt


def test_state_goes_through_json_and_goes_on_alike():
    rng = random.Random(0)
    one = ResponseLengths(capacity=5)
    for _ in range(6):
        one.update([rng.randrange(9) for _ in range(4)], [rng.randrange(1, 50) for _ in range(4)])

    two = ResponseLengths(capacity=5)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for lengths in (one, two):
        lengths.update([3, 11], [5, 6])

    assert one.state_dict() == two.state_dict()
    assert [one.expected(uid, 0) for uid in range(12)] == [
        two.expected(uid, 0) for uid in range(12)
    ]


def test_share_is_what_assign_returns():
    assert assign([3], [2.0], n=2, replicas=1) == [[Share(0, range(2))]]
