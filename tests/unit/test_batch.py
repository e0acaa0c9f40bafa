"""Selecting and joining the batches of a step."""

import pytest
import torch

from mrlhf.batch import Prompts, Rollout


def _rollout(uids, lengths, n=2, version=3):
    """`n` responses to each prompt; token t of a response is 100 * row + t."""
    prompts = Prompts(
        [[uid] * 2 for uid in uids], list(uids), [str(u) for u in uids], ["x"] * len(uids), ["1"] * len(uids),
        [{"uid": uid} for uid in uids],
    ).repeat(n)  # fmt: skip
    width = max(lengths)
    positions = torch.arange(width)
    mask = positions < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, 100 * torch.arange(len(lengths))[:, None] + positions, 0)
    return Rollout(
        prompts=prompts,
        sample_index=[row % n for row in range(len(lengths))],
        response_ids=ids,
        response_mask=mask,
        rollout_logprobs=-ids.float(),
        stopped=torch.tensor([length < width for length in lengths]),
        version=version,
    )


def test_groups_are_the_samples_of_a_prompt_also_where_a_prompt_comes_twice():
    assert _rollout([7, 9, 7], [1, 2, 3, 1, 1, 2]).groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert _rollout([7, 9], [1, 2], n=1).groups.tolist() == [0, 1]


def test_select_takes_everything_of_a_row_along():
    chosen = _rollout([7, 9], [1, 3, 2, 3]).select([2, 3, 1])
    assert chosen.prompts.uid == [9, 9, 7]
    assert chosen.prompts.extra_info == [{"uid": 9}, {"uid": 9}, {"uid": 7}]
    assert chosen.sample_index == [0, 1, 1]
    assert chosen.response_ids.tolist() == [[200, 201, 0], [300, 301, 302], [100, 101, 102]]
    assert chosen.response_lengths == [2, 3, 3]
    assert chosen.rollout_logprobs[0].tolist() == [-200.0, -201.0, 0.0]
    assert chosen.stopped.tolist() == [True, False, False]
    assert chosen.version == 3


def test_join_pads_to_the_longest_and_keeps_the_order():
    joined = Rollout.join([_rollout([7], [1, 2]), _rollout([9, 4], [4, 1, 3, 2])])
    assert joined.prompts.uid == [7, 7, 9, 9, 4, 4]
    assert joined.response_lengths == [1, 2, 4, 1, 3, 2]
    assert (
        joined.response_ids.shape
        == joined.response_mask.shape
        == joined.rollout_logprobs.shape
        == (6, 4)
    )
    assert joined.response_ids[1].tolist() == [100, 101, 0, 0]
    assert joined.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.sequences()[0] == [7, 7, 0]


def test_two_versions_of_the_policy_make_no_batch():
    with pytest.raises(AssertionError, match="one version"):
        Rollout.join([_rollout([7], [1, 2]), _rollout([9], [1, 2], version=4)])
