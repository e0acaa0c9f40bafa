"""Statistics within prompt groups, by literal numbers.

The estimators that use them are compared with slow loops.
"""

import torch

from mrlhf.rl.prompt_groups import PromptGroups, standardise_by_prompt

BY_PROMPT = PromptGroups(torch.tensor([5, -2, 5, 9, -2, 5]))
SCORES = torch.tensor([1.0, 3.0, 4.0, 7.0, 5.0, 10.0], dtype=torch.float64)


def test_each_row_gets_the_figures_of_its_group():
    assert BY_PROMPT.size.tolist() == [3, 2, 3, 1, 2, 3]
    assert BY_PROMPT.single.tolist() == [False, False, False, True, False, False]
    assert BY_PROMPT.total(SCORES).tolist() == [15.0, 8.0, 15.0, 7.0, 8.0, 15.0]
    assert BY_PROMPT.lowest(SCORES).tolist() == [1.0, 3.0, 1.0, 7.0, 3.0, 1.0]
    assert BY_PROMPT.highest(SCORES).tolist() == [10.0, 5.0, 10.0, 7.0, 5.0, 10.0]
    assert BY_PROMPT.highest(-SCORES).tolist() == [-1.0, -3.0, -1.0, -7.0, -3.0, -1.0]


def test_centred_scores_and_their_std():
    centred = BY_PROMPT.centred(SCORES)
    assert centred.tolist() == [-4.0, -1.0, -1.0, 7.0, 1.0, 5.0]
    # sqrt((16 + 1 + 25) / 2), sqrt((1 + 1) / 1), and 1 for the row alone.
    expected = torch.tensor([21.0, 2.0, 21.0, 1.0, 2.0, 21.0], dtype=torch.float64)
    torch.testing.assert_close(BY_PROMPT.std(centred).square(), expected)


def test_weighted_mean_and_a_group_that_weighs_nothing():
    weights = torch.tensor([3, 0, 0, 0, 0, 1])  # mean 13/4 in group 5, nothing to go by in group -2
    assert BY_PROMPT.centred(SCORES, weights).tolist() == [-2.25, 0.0, 0.75, 7.0, 2.0, 6.75]


def test_standardised_scores():
    scores = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    result = standardise_by_prompt(scores, PromptGroups(torch.tensor([0, 0, 1])))
    expected = torch.tensor([-0.70710628119, 0.70710628119, 1.99999800000], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_no_rows():
    empty = torch.zeros(0)
    by_prompt = PromptGroups(empty.long())
    assert by_prompt.centred(empty).tolist() == by_prompt.std(empty).tolist() == []
