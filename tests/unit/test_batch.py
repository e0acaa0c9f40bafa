"""Selecting and joining the batches of a step, and what a rollout may not hold."""

from dataclasses import replace

import pytest
import torch

from mrlhf.batch import NO_VERSION, Prompts, Rollout
from mrlhf.records import ExpertRecord
from tests.rollouts import as_episodes, make_rollout, with_holes


def _rollout(uids, lengths, n=2, version=3):
    """`n` responses to each prompt; token t of a response is 100 * row + t."""
    prompts = Prompts(
        token_ids=[[uid] * 2 for uid in uids],
        uid=list(uids),
        text=[str(uid) for uid in uids],
        data_source=["x"] * len(uids),
        ground_truth=["1"] * len(uids),
        extra_info=[{"uid": uid} for uid in uids],
    ).repeat(n)

    width = max(lengths)
    positions = torch.arange(width)
    mask = positions < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, 100 * torch.arange(len(lengths))[:, None] + positions, 0)

    return make_rollout(
        prompts=prompts,
        sample_index=[row % n for row in range(len(lengths))],
        response_ids=ids,
        response_mask=mask,
        rollout_logprobs=-ids.float(),
        stopped=torch.tensor([length < width for length in lengths]),
        version=version,
    )


def test_prompt_groups_are_the_samples_of_a_prompt_also_where_a_prompt_comes_twice():
    assert _rollout([7, 9, 7], [1, 2, 3, 1, 1, 2]).prompt_groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert _rollout([7, 9], [1, 2], n=1).prompt_groups.tolist() == [0, 1]


def test_rewards_of_turns_add_to_scores():
    scores = torch.tensor([1.0, 0.0, -1.0, 2.0])
    rollout = _rollout([7, 9], [3, 2, 1, 2])
    assert rollout.with_turn_rewards(scores).tolist() == [1.0, 0.0, -1.0, 2.0]

    holes = torch.zeros(rollout.shape, dtype=torch.bool)
    holes[0, 1] = True
    rewards = [[0.5, 0.25], [0.0, 0.5], [], [-0.25]]
    episodes = as_episodes(with_holes(rollout, holes), rewards)
    assert episodes.turn_rewards().tolist() == [
        [0.5, 0.0, 0.25],
        [0.0, 0.5, 0.0],
        [0.0, 0.0, 0.0],
        [-0.25, 0.0, 0.0],
    ]
    assert episodes.with_turn_rewards(scores).tolist() == [1.75, 0.5, -1.0, 1.75]


def test_a_teacher_reads_other_prompts_and_the_same_responses():
    rollout = _rollout([7, 9], [3, 2, 1, 2])
    own = rollout.sequences()
    other = rollout.sequences([[1], [2, 2, 2], [3], [4]])
    assert other.prompt_lengths.tolist() == [1, 3, 1, 1]
    assert [other[row].tolist() for row in range(4)] == [
        [1, 0, 1, 2],
        [2, 2, 2, 100, 101],
        [3, 200],
        [4, 300, 301],
    ]
    for row in range(4):
        response = own[row][int(own.prompt_lengths[row]) :]
        assert torch.equal(other[row][int(other.prompt_lengths[row]) :], response)
    assert (other.width, other.rows.tolist()) == (own.width, own.rows.tolist())


def test_select_takes_everything_of_a_row_along():
    chosen = _rollout([7, 9], [1, 3, 2, 3]).select([2, 3, 1])
    assert chosen.prompts.uid == [9, 9, 7]
    assert chosen.prompts.extra_info == [{"uid": 9}, {"uid": 9}, {"uid": 7}]
    assert chosen.sample_index == [0, 1, 1]
    assert chosen.response_ids.tolist() == [[200, 201, 0], [300, 301, 302], [100, 101, 102]]
    assert chosen.response_lengths == [2, 3, 3]
    assert chosen.rollout_logprobs[0].tolist() == [-200.0, -201.0, 0.0]
    assert chosen.stopped.tolist() == [True, False, False]
    assert chosen.loss_mask.sum(dim=1).tolist() == [2, 3, 3]
    assert chosen.versions[0].tolist() == [3, 3, NO_VERSION]


def test_join_pads_to_the_longest_and_keeps_the_order():
    joined = Rollout.join([_rollout([7], [1, 2]), _rollout([9, 4], [4, 1, 3, 2])])

    assert joined.prompts.uid == [7, 7, 9, 9, 4, 4]
    assert joined.response_lengths == [1, 2, 4, 1, 3, 2]
    tables = (joined.response_ids, joined.response_mask, joined.rollout_logprobs)
    assert {tuple(table.shape) for table in tables} == {(6, 4)}
    assert joined.response_ids[1].tolist() == [100, 101, 0, 0]
    assert joined.prompt_groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.sequences()[0].tolist() == [7, 7, 0]


def _record(counts, first):
    """One mixture, two experts a token; the first one of token t of row r is first + 10 r + t."""
    rows = [[[[first + 10 * r + t, 0]] for t in range(count)] for r, count in enumerate(counts)]
    chosen = torch.tensor([token for row in rows[::-1] for token in row], dtype=torch.uint8)
    counts = torch.tensor(counts)
    begins = counts.flip(0).cumsum(0).flip(0) - counts  # the last row stands first
    return ExpertRecord(chosen, begins, counts)


def test_the_record_of_experts_goes_with_its_rows():
    first = replace(_rollout([7], [1, 2]), experts=_record([2, 3], 0))
    second = replace(_rollout([9, 4], [1, 2, 1, 1]), experts=_record([2, 0, 1, 2], 100))

    joined = Rollout.join([first, second])
    assert joined.experts.counts.tolist() == [2, 3, 2, 0, 1, 2]
    assert joined.experts.begins.tolist() == [0, 2, 5, 7, 7, 8]
    assert joined.experts.chosen[:, 0, 0].tolist() == [0, 1, 10, 11, 12, 100, 101, 120, 130, 131]

    chosen = joined.select([5, 3, 1]).experts
    assert chosen.counts.tolist() == [2, 0, 3] and chosen.begins.tolist() == [0, 2, 2]
    assert chosen.chosen[:, 0, 0].tolist() == [130, 131, 10, 11, 12]
    assert Rollout.join([_rollout([7], [1, 2])] * 2).experts is None

    with pytest.raises(AssertionError, match="some parts have no record of experts"):
        Rollout.join([first, _rollout([9], [1, 2])])


def test_tokens_keep_the_version_that_drew_them():
    holes = torch.tensor([[False, True, False], [False, False, False]])
    joined = Rollout.join(
        [with_holes(_rollout([7], [3, 2]), holes), _rollout([9], [1, 4], version=4)]
    )
    none = NO_VERSION

    assert joined.versions.tolist() == [
        [3, none, 3, none],
        [3, 3, none, none],
        [4, none, none, none],
        [4, 4, 4, 4],
    ]
    assert joined.select([1, 0]).versions.tolist() == [[3, 3, none, none], [3, none, 3, none]]


def test_a_token_that_was_not_drawn_is_there_and_does_not_train():
    holes = torch.tensor([[False, True, False], [True, False, False]])
    rollout = with_holes(_rollout([7], [3, 2]), holes)
    assert rollout.loss_mask.tolist() == [[True, False, True], [False, True, False]]
    assert rollout.response_lengths == [3, 2]
    sequences = rollout.sequences()
    assert [row.tolist() for row in sequences] == [[7, 7, 0, 1, 2], [7, 7, 100, 101]]
    assert sequences.prompt_lengths.tolist() == [2, 2] and sequences.width == 3
    assert rollout.select([1]).loss_mask.tolist() == [[False, True, False]]
    wider = Rollout.join([rollout, _rollout([9], [1, 4])])
    assert wider.loss_mask[1].tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("field", "table", "message"),
    [
        ("loss_mask", [[True, True, True]], "a token trains that is not there"),
        ("loss_mask", [[True, True]], r"\(1, 2\) against tokens \(1, 3\)"),
        ("loss_mask", [[True, False, False]], "exactly the tokens that train have a version"),
        ("response_mask", [[True, False, True]], "a response has a gap"),
        ("rollout_logprobs", [[0.0, 0.0, -1.0]], "a token that does not train has a log-prob"),
        ("sample_index", [0, 1], "2 sample indices and 1 stop flags for 1 prompts"),
    ],
)
def test_tables_that_contradict_each_other_make_no_rollout(field, table, message):
    rollout = _rollout([7], [2, 3]).select([0])
    changed = table if field == "sample_index" else torch.tensor(table)
    with pytest.raises(AssertionError, match=message):
        replace(rollout, **{field: changed})
