"""Scoring while the engine draws: what has begun counts, and what has not is left to all ranks."""

from array import array
from threading import Semaphore

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.errors import RewardError
from mrlhf.rewards.interface import Scored
from mrlhf.rollout.drawn_sample import DrawnSample, TokenRun
from mrlhf.rollout.early_scores import EarlyScores
from mrlhf.rollout.response import Response
from tests.rollouts import make_rollout

N = 2


class Gate:
    """Gives each response its number of tokens, one at a time as the test lets it."""

    def __init__(self):
        self.begun = []
        self.begins = Semaphore(0)
        self.may_end = Semaphore(0)

    def evaluate(self, inputs):
        (given,) = inputs
        self.begun.append((given.prompt_text, given.response_tokens))
        self.begins.release()
        assert self.may_end.acquire(timeout=60)
        if given.response_tokens == 9:
            raise RewardError("nine is too long")
        return [{"length": Scored(float(given.response_tokens), {})}]

    def let(self, count):
        """Let so many end, and wait until the next has begun."""
        for _ in range(count):
            self.may_end.release()
        for _ in range(count):
            assert self.begins.acquire(timeout=60)


def prompts(*texts):
    """Prompts with equal numbers, as in two splits of the data."""
    size = len(texts)
    nothing = [""] * size
    return Prompts([[1]] * size, list(range(size)), list(texts), nothing, nothing, [{}] * size)


def rollout(given, lengths):
    """`N` responses of ones to each prompt."""
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    index = [row % N for row in range(len(lengths))]
    stopped = torch.ones(len(lengths), dtype=torch.bool)
    return make_rollout(
        given.repeat(N), index, there.int(), there, torch.zeros(there.shape), stopped
    )


def add(early, given, row, length):
    ones = array("i", [1] * length)
    trajectory = DrawnSample(
        row, ones, array("f", [0.0] * length), [TokenRun(length, 0)], ended=True
    )
    response = Response.of_sample(trajectory, given, row // N)
    early.add((row // N, row % N), response, response.read(None, reads_text=False))


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def early(gate):
    scores = EarlyScores(gate.evaluate)
    yield scores
    scores.close()
    for _ in range(20):
        gate.may_end.release()


def test_what_waits_is_left_to_all_ranks_and_what_belongs_elsewhere_goes_on(gate, early):
    train = prompts("a", "b")
    held_out = prompts("c", "d")
    for row, length in ((0, 4), (3, 5), (1, 6)):
        add(early, train, row, length)
    add(early, held_out, 0, 4)
    assert gate.begins.acquire(timeout=60)
    gate.let(1)
    assert gate.begun == [("a", 4), ("b", 5)]

    with early.taking(rollout(train, [4, 6, 3, 5])) as begun:
        assert sorted(begun) == [0, 3]
        gate.may_end.release()
        assert {row: one.evaluated.result()["length"].score for row, one in begun.items()} == {
            0: 4.0,
            3: 5.0,
        }
        assert gate.begun[2:] == []
    assert gate.begins.acquire(timeout=60)
    assert gate.begun[2:] == [("c", 4)]

    with early.taking(rollout(train, [4, 6, 3, 5])) as begun:
        assert begun == {}, "each response counts once"
    with early.taking(rollout(held_out, [4, 1, 1, 1])) as begun:
        assert list(begun) == [0]


def test_other_tokens_or_another_prompt_are_another_response(gate, early):
    add(early, prompts("a"), 0, 4)
    assert gate.begins.acquire(timeout=60)
    for other in (rollout(prompts("a"), [5, 4]), rollout(prompts("b"), [4, 4])):
        with early.taking(other) as begun:
            assert begun == {}
    with early.taking(rollout(prompts("a"), [4, 4])) as begun:
        assert list(begun) == [0]


def test_equal_responses_count_one_after_the_other(gate, early):
    given = prompts("a")
    for _ in range(2):
        add(early, given, 0, 4)
    assert gate.begins.acquire(timeout=60)
    gate.let(1)
    for _ in range(2):
        with early.taking(rollout(given, [4, 7])) as begun:
            assert list(begun) == [0]
    with early.taking(rollout(given, [4, 7])) as begun:
        assert begun == {}


def test_an_error_comes_with_the_score(gate, early):
    given = prompts("a")
    add(early, given, 0, 9)
    add(early, given, 1, 2)
    assert gate.begins.acquire(timeout=60)
    gate.let(1)
    gate.may_end.release()
    with early.taking(rollout(given, [9, 2])) as begun:
        with pytest.raises(RewardError, match="nine is too long"):
            begun[0].evaluated.result()
        assert begun[1].evaluated.result()["length"].score == 2.0
