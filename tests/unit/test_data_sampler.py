"""Order, epochs and resumption of the sampler."""

from itertools import islice

import pytest

from mrlhf.data.sampler import StatefulSampler
from mrlhf.errors import DataError


def take(sampler, count):
    return list(islice(sampler, count))


def test_unshuffled_drops_the_short_batch_and_starts_over():
    sampler = StatefulSampler(5, 2, seed=0, shuffle=False)
    assert take(sampler, 5) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    assert (sampler.epoch, sampler.position) == (2, 2)


def test_an_epoch_has_each_row_once_and_epochs_differ():
    sampler = StatefulSampler(12, 3, seed=7)
    epochs = [[row for batch in take(sampler, 4) for row in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_and_on_nothing_else():
    assert take(StatefulSampler(20, 4, seed=1), 10) == take(StatefulSampler(20, 4, seed=1), 10)
    assert take(StatefulSampler(20, 4, seed=1), 10) != take(StatefulSampler(20, 4, seed=2), 10)
    # The literal order must stay: a checkpoint of an older version continues in it.
    assert take(StatefulSampler(8, 4, seed=1), 2) == [[5, 1, 0, 3], [4, 7, 2, 6]]


@pytest.mark.parametrize("done", [0, 1, 4, 5, 9])
def test_resumed_order_is_the_uninterrupted_one(done):
    whole = take(StatefulSampler(11, 2, seed=3), 14)
    first = StatefulSampler(11, 2, seed=3)
    assert take(first, done) == whole[:done]
    second = StatefulSampler(11, 2, seed=3)
    second.load_state_dict(first.state_dict())
    assert take(second, 14 - done) == whole[done:]


def test_resumes_with_another_batch_size():
    first = StatefulSampler(12, 4, seed=3)
    order = next(StatefulSampler(12, 12, seed=3))
    next(first)
    second = StatefulSampler(12, 2, seed=3)
    second.load_state_dict(first.state_dict())
    assert next(second) == order[4:6]


@pytest.mark.parametrize(
    ("change", "word"), [({"num_rows": 13}, "num_rows"), ({"seed": 4}, "seed")]
)
def test_refuses_the_state_of_another_order(change, word):
    sampler = StatefulSampler(12, 4, seed=3)
    with pytest.raises(DataError, match=f"{word} was"):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize("batch_size", [0, 6])
def test_refuses_impossible_batches(batch_size):
    with pytest.raises(DataError, match=r"1\.\.5"):
        StatefulSampler(5, batch_size, seed=0)
