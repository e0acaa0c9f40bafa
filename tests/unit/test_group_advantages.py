"""Advantages without a critic, against hand-computed numbers and slow loops over prompt groups.

They are also checked for what must not change them.
"""

import statistics

import pytest
import torch
from hypothesis import given, settings

from mrlhf.rl.group_advantages import (
    flash_reinforce,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from mrlhf.rl.masking import local_moments, whiten
from tests.masked_batches import masked_batches

NAN = float("nan")
# Scores 1, 2, 6 in prompt group 7 (mean 3, variance 7), 0, 4 in prompt group 3 (mean 2,
# variance 8), 5 alone in prompt group 9.
PROMPT_GROUPS = torch.tensor([7, 3, 7, 3, 7, 9])
REWARDS = torch.tensor(
    [
        [1.0, NAN, NAN, NAN, NAN],
        [0.5, -1.5, 1.0, NAN, NAN],
        [NAN, 3.0, NAN, -1.0, NAN],
        [4.0, NAN, NAN, NAN, NAN],
        [1.0, 1.0, 1.0, 1.0, 2.0],
        [0.0, 5.0, NAN, NAN, NAN],
    ],
    dtype=torch.float64,
)
MASK = ~REWARDS.isnan()
PAIRS = PROMPT_GROUPS != 9
LESS_THE_MEAN = [-2.0, -2.0, -1.0, 2.0, 3.0, 5.0]


def _assert_tiled(result, expected, mask=MASK):
    """Each row's number stands at each of its tokens, as advantage and return; elsewhere is 0."""
    tiled = torch.tensor(expected, dtype=torch.float64)[:, None] * mask
    for tensor in result:
        torch.testing.assert_close(tensor, tiled, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        # -2, -1 and 3 over sqrt(7) + 1e-6; -2 and 2 over sqrt(8) + 1e-6; 5 over 1 + 1e-6.
        (grpo, {"norm_by_std": True}, [-0.75592866030, -0.70710653119, -0.37796433015,
                                       0.70710653119, 1.13389299046, 4.99999500001]),
        (grpo, {"norm_by_std": False}, LESS_THE_MEAN),
        (reinforce_plus_plus_baseline, {}, LESS_THE_MEAN),
        # 1 - (2 + 6)/2, 0 - 4, 2 - (1 + 6)/2, 4 - 0, 6 - (1 + 2)/2, 5.
        (rloo, {}, [-3.0, -4.0, -1.5, 4.0, 4.5, 5.0]),
        # Lengths 1, 2, 5: baseline (1 + 4 + 30)/8 = 4.375. Lengths 3, 1: baseline 4/4.
        (opo, {}, [-3.375, -1.0, -2.375, 3.0, 1.625, 5.0]),
        # Five of six scores are not 0: alpha 6/5, over f_norm 2.
        (gpg, {"f_norm": 2.0}, [-1.2, -1.2, -0.6, 1.2, 1.8, 3.0]),
    ],
)  # fmt: skip
def test_literal_numbers(estimator, options, expected):
    _assert_tiled(estimator(REWARDS, MASK, PROMPT_GROUPS, **options), expected)


def test_flash_reinforce_literal_numbers():
    # 1, 0, 2, 4, 6, 5 less 18/6; without the last, which then has no token that trains, less 13/5.
    _assert_tiled(flash_reinforce(REWARDS, MASK), [-2.0, -3.0, -1.0, 1.0, 3.0, 2.0])
    fewer = MASK & (PROMPT_GROUPS != 9)[:, None]
    _assert_tiled(flash_reinforce(REWARDS, fewer), [-1.6, -2.6, -0.6, 1.4, 3.4, 0.0], fewer)


def test_gpg_of_scores_that_are_all_zero():
    _assert_tiled(gpg(0 * REWARDS, MASK, PROMPT_GROUPS, f_norm=2.0), [0.0] * 6)


def test_gdpo_literal_numbers():
    # Whitened, these are what verl 0.9.1's compute_gdpo_outcome_advantage prints for this batch.
    mask = torch.arange(4) < torch.tensor([4, 3, 1, 2, 2])[:, None]
    components = torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0], [0.2, 0.9, 0.4, 0.5, 0.5]])
    prompts = torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.zeros(5, 4, dtype=torch.float64)
    expected = {
        (1.0, 1.0): [0.395608, 0.935935, -2.642411, -0.436956, -0.436956],
        (1.0, 0.25): [1.283841, -0.822101, -1.407735, -0.315332, -0.315332],
    }
    for weights, numbers in expected.items():
        advantages, returns = gdpo(components, weights, rewards, mask, prompts, norm_by_std=True)
        assert advantages.equal(returns)
        white = whiten(advantages, mask, local_moments(advantages, mask))
        assert white[:, 0].tolist() == pytest.approx(numbers, abs=2e-6)

    # 1/3 .. off the mean of the first prompt's first term, half of the second's.
    advantages, _ = gdpo(components, (1.0, 0.5), rewards, mask, prompts, norm_by_std=False)
    assert advantages[:, 0].tolist() == pytest.approx([0.51666667, -0.13333333, -0.38333333, 0, 0])


def test_grpo_passk_literal_numbers():
    # 6 - 2 over sqrt(7) + 1e-6, 4 - 0 over sqrt(8) + 1e-6.
    rewards = REWARDS[PAIRS]
    mask = MASK[PAIRS]
    prompt_groups = PROMPT_GROUPS[PAIRS]
    expected = [0.0, 0.0, 0.0, 1.41421306237, 1.51185732061]
    _assert_tiled(grpo_passk(rewards, mask, prompt_groups, norm_by_std=True), expected, mask)
    _assert_tiled(
        grpo_passk(rewards, mask, prompt_groups, norm_by_std=False), [0.0, 0.0, 0.0, 4.0, 4.0], mask
    )


def test_grpo_passk_gives_nothing_where_two_are_best_and_a_response_alone_its_score():
    ones = torch.ones(5, 1, dtype=torch.bool)
    rewards = torch.tensor([[3.0], [1.0], [3.0], [2.0], [2.0]], dtype=torch.float64)
    _assert_tiled(
        grpo_passk(rewards, ones, torch.tensor([0, 0, 0, 1, 1]), norm_by_std=True), [0.0] * 5, ones
    )
    alone = grpo_passk(rewards, ones, torch.tensor([0, 0, 1, 2, 2]), norm_by_std=False)
    _assert_tiled(alone, [2.0, 0.0, 3.0, 0.0, 0.0], ones)


def test_reinforce_plus_plus_literal_numbers():
    rewards = torch.tensor([[1.0, 2.0, NAN, 4.0, NAN]])
    for tensor in reinforce_plus_plus(rewards, ~rewards.isnan(), gamma=0.5):
        assert tensor.tolist() == [
            [3.0, 4.0, 0.0, 4.0, 0.0]
        ]  # 4, then 2 + .5 * 4 over the gap, then 1 + .5 * 4


def test_remax_literal_numbers():
    rewards = torch.tensor([[1.0, 2.0, NAN, 4.0, NAN]])
    advantages, returns = remax(rewards, ~rewards.isnan(), greedy_scores=torch.tensor([5.0]))
    assert returns.tolist() == [[7.0, 6.0, 0.0, 4.0, 0.0]]
    assert advantages.tolist() == [[2.0, 1.0, 0.0, -1.0, 0.0]]


def _members(batch, row):
    return [
        other
        for other in range(len(batch.prompt_groups))
        if batch.prompt_groups[other] == batch.prompt_groups[row]
    ]


def _score(batch, row):
    return sum(
        batch.rewards[row, t].item() for t in range(batch.mask.shape[1]) if batch.mask[row, t]
    )


def _slow_baseline_difference(batch, row, baseline):
    """Score less `baseline` of the scores and lengths of the prompt group; a row alone has 0."""
    members = _members(batch, row)
    if len(members) == 1:
        return _score(batch, row)
    return _score(batch, row) - baseline(
        [(_score(batch, i), int(batch.mask[i].sum())) for i in members]
    )


def _mean(group):
    return statistics.fmean(score for score, _ in group)


def _length_weighted_mean(group):
    total = sum(length for _, length in group)
    return sum(score * length for score, length in group) / total if total else 0.0


def _slow_std(batch, row):
    scores = [_score(batch, i) for i in _members(batch, row)]
    return statistics.stdev(scores) if len(scores) > 1 else 1.0


def _slow_lead(batch, row):
    others = [_score(batch, i) for i in _members(batch, row) if i != row]
    return max(_score(batch, row) - max(others), 0.0)


def _slow_rloo(batch, row):
    others = [_score(batch, i) for i in _members(batch, row) if i != row]
    return _score(batch, row) - (statistics.fmean(others) if others else 0.0)


def _slow_flash_reinforce(batch, row):
    counting = [_score(batch, i) for i in range(len(batch.mask)) if batch.mask[i].any()]
    return _score(batch, row) - statistics.fmean(counting or [0.0])


def _slow_gpg(batch, row):
    rows = range(len(batch.prompt_groups))
    alpha = len(rows) / max(1, sum(_score(batch, i) != 0 for i in rows))
    return alpha * _slow_baseline_difference(batch, row, _mean) / 2.5


@given(batch=masked_batches())
@settings(max_examples=60)
def test_equal_the_slow_loops_under_any_mask(batch):
    rewards = batch.rewards
    mask = batch.mask
    prompt_groups = batch.prompt_groups
    rows = range(len(prompt_groups))

    less_the_mean = [_slow_baseline_difference(batch, row, _mean) for row in rows]
    standardised = [less_the_mean[row] / (_slow_std(batch, row) + 1e-6) for row in rows]
    weighted = [_slow_baseline_difference(batch, row, _length_weighted_mean) for row in rows]

    _assert_tiled(grpo(rewards, mask, prompt_groups, norm_by_std=True), standardised, mask)
    _assert_tiled(grpo(rewards, mask, prompt_groups, norm_by_std=False), less_the_mean, mask)
    _assert_tiled(reinforce_plus_plus_baseline(rewards, mask, prompt_groups), less_the_mean, mask)
    _assert_tiled(opo(rewards, mask, prompt_groups), weighted, mask)
    _assert_tiled(
        rloo(rewards, mask, prompt_groups), [_slow_rloo(batch, row) for row in rows], mask
    )
    flash = [_slow_flash_reinforce(batch, row) for row in rows]
    _assert_tiled(flash_reinforce(rewards, mask), flash, mask)
    _assert_tiled(
        gpg(rewards, mask, prompt_groups, f_norm=2.5), [_slow_gpg(batch, row) for row in rows], mask
    )


@given(batch=masked_batches(smallest_group=2))
@settings(max_examples=60)
def test_grpo_passk_equals_the_slow_loop(batch):
    leads = [_slow_lead(batch, row) for row in range(len(batch.prompt_groups))]
    divided = [lead / (_slow_std(batch, row) + 1e-6) for row, lead in enumerate(leads)]
    for norm_by_std, expected in ((False, leads), (True, divided)):
        result = grpo_passk(batch.rewards, batch.mask, batch.prompt_groups, norm_by_std)
        _assert_tiled(result, expected, batch.mask)


@given(batch=masked_batches())
@settings(max_examples=60)
def test_reinforce_plus_plus_and_remax_equal_the_slow_loops(batch):
    discounted, to_go, less_greedy = (torch.zeros_like(batch.rewards) for _ in range(3))
    for row in range(len(batch.mask)):
        valid = [t for t in range(batch.mask.shape[1]) if batch.mask[row, t]]
        for i, t in enumerate(valid):
            later = [batch.rewards[row, s].item() for s in valid[i:]]
            discounted[row, t] = sum(0.9**k * reward for k, reward in enumerate(later))
            to_go[row, t] = sum(later)
            less_greedy[row, t] = sum(later) - batch.greedy_scores[row].item()
    for tensor in reinforce_plus_plus(batch.rewards, batch.mask, gamma=0.9):
        torch.testing.assert_close(tensor, discounted)
    advantages, returns = remax(batch.rewards, batch.mask, batch.greedy_scores)
    assert returns.equal(to_go) and advantages.equal(less_greedy)


@given(batch=masked_batches(row_kinds=("one token", "full")))
@settings(max_examples=60)
def test_a_shift_of_a_groups_scores_changes_nothing_and_the_advantages_of_a_group_sum_to_0(batch):
    alone = torch.tensor(
        [len(_members(batch, row)) == 1 for row in range(len(batch.prompt_groups))]
    )
    shift = (batch.prompt_groups % 7 + 1).double()[:, None]  # one number a group
    is_first = batch.mask & (batch.mask.cumsum(1) == 1)
    shifted = torch.where(is_first, batch.rewards + shift, batch.rewards)

    estimators = (
        lambda rewards: grpo(rewards, batch.mask, batch.prompt_groups, norm_by_std=True)[0],
        lambda rewards: grpo(rewards, batch.mask, batch.prompt_groups, norm_by_std=False)[0],
        lambda rewards: rloo(rewards, batch.mask, batch.prompt_groups)[0],
        lambda rewards: reinforce_plus_plus_baseline(rewards, batch.mask, batch.prompt_groups)[0],
    )
    for estimator in estimators:
        advantages = estimator(batch.rewards)
        moved = estimator(shifted)
        torch.testing.assert_close(moved[~alone], advantages[~alone])
        assert not (is_first & alone[:, None] & (moved == advantages)).any()
        a_row = torch.where(is_first, advantages, 0).sum(dim=1)
        for row in range(len(batch.prompt_groups)):
            if not alone[row]:
                assert a_row[_members(batch, row)].sum().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 2.0**20), (torch.float64, 2.0**40)])
def test_a_large_common_offset_costs_no_digits(dtype, offset):
    scores = torch.tensor([[0.0], [0.25], [0.5], [3.0], [1.0], [1.0]], dtype=dtype)
    prompt_groups = torch.tensor([0, 0, 0, 0, 1, 1])
    mask = torch.ones(6, 1, dtype=torch.bool)
    for norm_by_std in (True, False):
        near, _ = grpo(scores, mask, prompt_groups, norm_by_std)
        far, _ = grpo(scores + offset, mask, prompt_groups, norm_by_std)
        assert far.dtype == dtype
        torch.testing.assert_close(
            far, near, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0
        )


def test_equal_scores_that_binary_fractions_cannot_hold_are_exactly_at_their_mean():
    scores = torch.full((7, 1), 1e6 + 0.1, dtype=torch.float64)
    advantages, _ = grpo(scores, scores > 0, torch.zeros(7, dtype=torch.int64), norm_by_std=True)
    assert advantages.abs().max().item() == 0.0
