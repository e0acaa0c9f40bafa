"""Which prompts of a batch get given responses, and which of its responses each sample gets."""

from __future__ import annotations

from statistics import fmean

from mrlhf.batch import NO_VERSION
from mrlhf.rollout.given import GivenResponses

RESPONSES = {uid: [[uid, 1], [uid, 2, 3]] for uid in range(100, 110)}
UIDS = [*RESPONSES]


def test_the_share_of_the_prompts_is_met_over_many_batches() -> None:
    given = GivenResponses(RESPONSES, share=0.33)
    counts = [len(given.of(UIDS, 1, seed)) for seed in range(400)]
    assert set(counts) == {3, 4}
    assert abs(fmean(counts) - 3.3) < 0.1
    chosen = [row for seed in range(400) for row in given.of(UIDS, 1, seed)]
    assert min(chosen.count(row) for row in range(10)) > 90  # 132 each
    assert given.of(UIDS, 1, 7) == given.of(UIDS, 1, 7) != given.of(UIDS, 1, 8)


def test_one_prompt_at_least_gets_drawn_responses() -> None:
    given = GivenResponses(RESPONSES, share=0.99)
    assert {len(given.of(UIDS[:2], 1, seed)) for seed in range(50)} == {1}
    assert given.of(UIDS[:1], 4, 1) == {}


def test_the_samples_of_a_prompt_take_one_response_each() -> None:
    samples = GivenResponses(RESPONSES, share=0.5).of(UIDS, 3, seed=2)
    assert len(samples) == 15
    for row, sample in samples.items():
        assert sample.row == row and sample.ended and sample.stopped
        assert list(sample.token_ids) == RESPONSES[UIDS[row // 3]][(0, 1, 0)[row % 3]]
        assert [run.version for run in sample.runs] == [NO_VERSION]
