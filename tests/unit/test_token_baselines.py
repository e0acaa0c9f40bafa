"""The optimal token baselines against verl's numbers, a slow loop, and each other.

The literal numbers were printed by verl 0.9.1's compute_optimal_token_baseline_advantage and
compute_multi_turn_optimal_token_baseline_advantage for the same batch.
"""

import pytest
import torch
from hypothesis import given, settings

from mrlhf.rl.token_baselines import (
    TokenProbabilities,
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from tests.masked_batches import masked_batches

FLOAT = torch.float64
REWARDS = torch.tensor(
    [[0, 0, 0, 1], [0, -0.5, 2, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 3, 0, 0]], dtype=FLOAT
)
PROMPTS = torch.tensor([0, 0, 0, 1, 1])
FULL = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
HOLES = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0]]).bool()
PROBABILITIES = TokenProbabilities(
    torch.tensor(
        [
            [0.5, 0.25, 0.8, 0.4],
            [0.1, 0.9, 0.3, 0.5],
            [0.6, 0.5, 0.5, 0.5],
            [0.2, 0.7, 0.5, 0.9],
            [0.4, 0.4, 0.5, 0.5],
        ],
        dtype=FLOAT,
    ).log(),
    torch.tensor(
        [
            [0.4, 0.3, 0.7, 0.3],
            [0.2, 0.85, 0.3, 0.5],
            [0.5, 0.5, 0.5, 0.5],
            [0.3, 0.6, 0.5, 0.85],
            [0.35, 0.4, 0.5, 0.5],
        ],
        dtype=FLOAT,
    ),
)
WEIGHTED = TokenProbabilities(
    PROBABILITIES.logprobs,
    PROBABILITIES.sum_of_squares,
    torch.tensor(
        [[1, 2, 0.5, 1], [1.5, 1, 1, 1], [0.25, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 1]], dtype=FLOAT
    ),
)
OF_PAIR = [[-0.75862068, -1.27777777, 0, 0], [1.24137932, 1.22222223, 0, 0]]
OF_VERL = {
    "whole": [
        [-0.29411764, -0.23333333, -0.57377049, 1.0],
        [0.20588236, 0.26666667, 0.42622951, 0],
        [-0.29411764, 0, 0, 0],
        *OF_PAIR,
    ],
    "whole, weighted": [
        [-0.42154566, -0.19491525, -0.45283019, 1.0],
        [0.07845434, 0.30508475, 0.54716981, 0],
        [-0.42154566, 0, 0, 0],
        *OF_PAIR,
    ],
    "holes": [
        [-0.29411764, 0, -0.77777777, 1e-8],
        [0.20588236, 1e-8, 0.22222223, 0],
        [-0.29411764, 0, 0, 0],
        [0, -2.12962961, 0, 0],
        [5e-8, 0.37037039, 0, 0],
    ],
    "holes, tir": [
        [-0.29411764, 0, -0.33870967, -0.63636363],
        [0.20588236, 0.16129033, 0.36363637, 0],
        [-0.29411764, 0, 0, 0],
        [0, -1.8333333, 0, -2.4642857],
        [0.6666667, 0.5357143, 0, 0],
    ],
    "holes, tir, weighted": [
        [-0.42154566, 0, -0.42201834, -0.76433121],
        [0.07845434, 0.07798166, 0.23566879, 0],
        [-0.42154566, 0, 0, 0],
        [0, -1.8333333, 0, -2.22580644],
        [0.6666667, 0.77419356, 0, 0],
    ],
}


@pytest.mark.parametrize(
    ("function", "mask", "probabilities", "title"),
    [
        (optimal_token_baseline, FULL, PROBABILITIES, "whole"),
        (optimal_token_baseline, FULL, WEIGHTED, "whole, weighted"),
        (tir_optimal_token_baseline, FULL, PROBABILITIES, "whole"),
        (tir_optimal_token_baseline, FULL, WEIGHTED, "whole, weighted"),
        (optimal_token_baseline, HOLES, PROBABILITIES, "holes"),
        (tir_optimal_token_baseline, HOLES, PROBABILITIES, "holes, tir"),
        (tir_optimal_token_baseline, HOLES, WEIGHTED, "holes, tir, weighted"),
    ],
)
def test_the_numbers_are_those_of_verl(function, mask, probabilities, title):
    advantages, _ = function(REWARDS, mask, PROMPTS, probabilities)
    torch.testing.assert_close(
        advantages, torch.tensor(OF_VERL[title], dtype=FLOAT), rtol=1e-6, atol=2e-8
    )


def test_returns_are_the_rewards_still_to_come():
    _, returns = optimal_token_baseline(REWARDS, HOLES, PROMPTS, PROBABILITIES)
    assert returns.tolist() == [
        [1, 0, 1, 1],
        [1.5, 1.5, 2, 0],
        [1, 0, 0, 0],
        [0, 0.5, 0, 0],
        [3, 3, 0, 0],
    ]


def test_a_response_alone_keeps_its_returns():
    rewards = torch.tensor([[1, 2], [3, 4]])
    ones = torch.ones(2, 2, dtype=torch.bool)
    half = TokenProbabilities(torch.full((2, 2), -0.7), torch.full((2, 2), 0.5))
    for function in (optimal_token_baseline, tir_optimal_token_baseline):
        advantages, returns = function(rewards, ones, torch.tensor([4, 2]), half)
        assert advantages.tolist() == returns.tolist() == [[3.0, 2.0], [7.0, 4.0]]


def _slow(rewards, mask, prompt_groups, probabilities):
    """The baseline place by place; a token's place is its column."""
    batch, width = mask.shape
    advantages = torch.zeros(batch, width, dtype=FLOAT)
    for row in range(batch):
        together = [i for i in range(batch) if prompt_groups[i] == prompt_groups[row]]
        lengths = {i: int(mask[i].sum()) for i in together}
        others = [lengths[i] for i in together if i != row]

        for place in range(width):
            if not mask[row, place]:
                continue

            above = below = 0.0
            for i in together:
                if mask[i, place]:
                    later = [t for t in range(place, width) if mask[i, t]]
                    earlier = [t for t in range(place + 1) if mask[i, t]]
                    energy = sum(float(probabilities.energy()[i, t]) for t in earlier)
                    above += sum(float(rewards[i, t]) for t in later) * energy
                    below += energy

            baseline = above / (below + 1e-8)
            if not others or (lengths[row] > max(others) and place >= max(others)):
                baseline = 0.0
            to_come = sum(float(rewards[row, t]) for t in range(place, width) if mask[row, t])
            advantages[row, place] = to_come - baseline
    return advantages


@given(batch=masked_batches())
@settings(max_examples=60)
def test_both_equal_the_slow_loop(batch):
    generator = torch.Generator().manual_seed(1)
    shape = batch.mask.shape
    drawn = torch.rand(shape, dtype=FLOAT, generator=generator) * 0.9 + 0.05
    squares = drawn.square() + 0.5 * (1 - drawn).square()
    probabilities = TokenProbabilities(drawn.log().masked_fill(~batch.mask, torch.nan), squares)

    found, _ = optimal_token_baseline(batch.rewards, batch.mask, batch.prompt_groups, probabilities)
    wanted = _slow(batch.rewards, batch.mask, batch.prompt_groups, probabilities)
    torch.testing.assert_close(found, wanted)

    # tir is the same after the tokens that do not train have been cut out.
    order = (~batch.mask).int().argsort(dim=1, stable=True)
    compacted = TokenProbabilities(
        probabilities.logprobs.gather(1, order), squares.gather(1, order)
    )
    wanted = _slow(
        batch.rewards.gather(1, order), batch.mask.gather(1, order), batch.prompt_groups, compacted
    )
    found, _ = tir_optimal_token_baseline(
        batch.rewards, batch.mask, batch.prompt_groups, probabilities
    )
    torch.testing.assert_close(found.gather(1, order), wanted)


def test_a_certain_token_has_no_energy_however_it_is_rounded():
    """In float32 the sum of squares may be smaller than the probability of the token allows."""
    logprob = torch.tensor([[-1e-9, -0.5]])
    squares = torch.tensor([[1 - 2**-24, 0.5]])
    energy = TokenProbabilities(logprob, squares).energy()
    assert energy[0, 0] == 0 and 0 < energy[0, 1] < 1
