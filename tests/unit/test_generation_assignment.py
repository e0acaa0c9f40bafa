"""Samples are shared out over replicas, balanced by the response lengths of earlier steps."""

import json
import random

import pytest

from mrlhf.rollout.assignment import ResponseLengths, assign


@pytest.mark.parametrize(
    ("lengths", "expected", "n", "replicas", "shares"),  # by replica: prompts and their samples
    [
        # The loads are 2 x 40 + 10 = 90, 30, 30, 30: one replica draws nothing but the long one.
        (
            [10] * 4,
            [40.0, 10.0, 10.0, 10.0],
            2,
            2,
            [{0: [0, 1]}, {1: [0, 1], 2: [0, 1], 3: [0, 1]}],
        ),
        # By the lengths of the prompts alone, 0 and 2 would share a replica.
        ([50, 40, 10, 20], [90.0, 1.0, 100.0, 1.0], 1, 2, [{0: [0], 3: [0]}, {2: [0], 1: [0]}]),
        # Samples stay together unless replicas would wait.
        ([5, 5], [3.0, 3.0], 4, 2, [{0: [0, 1, 2, 3]}, {1: [0, 1, 2, 3]}]),
        ([5], [3.0], 5, 3, [{0: [1, 2]}, {0: [3, 4]}, {0: [0]}]),
        ([5, 5], [3.0, 3.0], 4, 4, [{0: [0, 1]}, {0: [2, 3]}, {1: [0, 1]}, {1: [2, 3]}]),
        ([5, 6], [3.0, 3.0], 1, 4, [{1: [0]}, {0: [0]}, {}, {}]),
        ([8] * 3, [30.0, 2.0, 2.0], 2, 2, [{0: [0], 1: [0, 1]}, {0: [1], 2: [0, 1]}]),
    ],
)
def test_shares_are_balanced_by_prompt_and_expected_response(
    lengths, expected, n, replicas, shares
):
    found = assign(lengths, expected, n, replicas)
    assert [[(share.prompt, list(share.samples)) for share in own] for own in found] == [
        list(own.items()) for own in shares
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_drawn_once_and_equal_prompts_are_not_split(seed):
    rng = random.Random(seed)
    prompts = rng.randint(1, 20)
    n = rng.randint(1, 9)
    replicas = rng.randint(1, 9)
    lengths = [rng.randint(1, 60) for _ in range(prompts)]
    expected = [rng.uniform(1, 200) for _ in range(prompts)]
    assigned = assign(lengths, expected, n, replicas)

    drawn = []
    for shares in assigned:
        for share in shares:
            drawn += [(share.prompt, sample) for sample in share.samples]
    assert sorted(drawn) == [(prompt, sample) for prompt in range(prompts) for sample in range(n)]

    assert len(assigned) == replicas
    for shares in assigned:
        assert shares == sorted(
            shares, key=lambda share: (-expected[share.prompt], share.prompt, share.samples.start)
        )

    if prompts >= replicas:
        even = assign([7] * prompts, [expected[0]] * prompts, n, replicas)
        assert sum(map(len, even)) == prompts
        assert {len(shares) for shares in even} <= {prompts // replicas, -(-prompts // replicas)}
    if prompts * n >= replicas:
        assert all(assign([7] * prompts, [3.5] * prompts, n, replicas))


def test_expected_lengths_are_of_the_prompt_then_of_all_then_the_limit():
    lengths = ResponseLengths()
    assert lengths.expected(7, unknown=64) == 64

    lengths.update([7, 7, 8], [10, 20, 60])
    assert [lengths.expected(uid, 64) for uid in (7, 8, 9)] == [15, 60, 30]

    lengths.update([7], [25])
    assert lengths.expected(7, 64) == 20  # (15 + 25) / 2
    assert lengths.expected(9, 64) == 27.5  # (30 + 25) / 2

    for length in (20, 20, 100, 100):
        lengths.update([7], [length])
    assert lengths.expected(7, 64) == 55  # the last two visits weigh a fourth each: 40, then 55

    lengths.update([], [])
    assert lengths.expected(7, 64) == 55


def test_memory_is_bounded_and_forgets_the_longest_unseen():
    lengths = ResponseLengths(capacity=2)
    lengths.update([1, 2], [10, 10])
    lengths.update([1, 3], [10, 10])
    lengths.update([4], [90])
    assert len(lengths.state_dict()["uids"]) == 2
    assert lengths.state_dict()["uids"] == [3, 4]
    of_an_unknown_prompt = pytest.approx(110 / 3)
    assert lengths.expected(1, 0) == lengths.expected(2, 0) == of_an_unknown_prompt


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
    for uid in range(12):
        assert one.expected(uid, 0) == two.expected(uid, 0)
