"""GAE against published numbers and its definition as a double sum, and every named estimator.

The estimators are also checked for what must not change them.
"""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings

from mrlhf.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    estimate_advantages,
    gae,
    length_adaptive_lam,
)
from mrlhf.rl.names import ESTIMATOR_TRAITS, AdvantageEstimator
from mrlhf.rl.preference import PairLossOptions, ipo_loss, sigmoid_loss
from mrlhf.rl.token_baselines import TokenProbabilities
from tests.masked_batches import masked_batches
from tests.unit.configurations import ppo

NAN = float("nan")
# Of the published example: A = [0, 0, .56525, .5] at gamma .99 and lambda .95.
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.2, 0.3, 0.4, 0.5]])
MASK = torch.tensor([[False, False, True, True]])
# Scores 3, 1 and 2 in one prompt group, 4 alone in another.
BATCH = AdvantageInputs(
    rewards=torch.tensor([[1.0, 2.0], [1.0, NAN], [0.0, 2.0], [NAN, 4.0]]),
    mask=torch.tensor([[True, True], [True, False], [True, True], [False, True]]),
    prompt_groups=torch.tensor([8, 8, 8, 2]),
    values=torch.tensor([[0.5, 1.0], [0.0, NAN], [1.0, 0.5], [NAN, 3.0]]),
    greedy_scores=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    components=torch.tensor([[3.0, 1.0, 2.0, 4.0], [0.0, 0.0, 3.0, 1.0]]),
)


def _slow_gae(rewards, values, mask, gamma, lam):
    """A_t = sum over later valid tokens of (gamma lam)^l delta, as if only these existed."""
    advantages = torch.zeros_like(values)
    for row in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[row, t]]
        r = [rewards[row, t].item() for t in valid]
        v = [values[row, t].item() for t in valid] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(valid))]
        for i, t in enumerate(valid):
            advantages[row, t] = sum(
                (gamma * lam[row]) ** (j - i) * deltas[j] for j in range(i, len(valid))
            )
    return advantages


def test_worked_example():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.99, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.56525, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.96525, 1.0]]))


def test_each_row_may_have_its_own_lambda():
    inputs = [tensor.repeat(3, 1) for tensor in (REWARDS, VALUES, MASK)]
    lam = torch.tensor([0.95, 0.0, 1.0], dtype=torch.float64)
    advantages, returns = gae(*inputs, gamma=0.99, lam=lam)
    # The first delta is .095; what follows it counts .99 * lambda * .5.
    expected = torch.tensor(
        [[0.0, 0.0, 0.56525, 0.5], [0.0, 0.0, 0.095, 0.5], [0.0, 0.0, 0.59, 0.5]]
    )
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + torch.tensor([0.0, 0.0, 0.4, 0.5]))


def test_the_critic_may_have_a_lambda_of_its_own():
    inputs = AdvantageInputs(REWARDS, MASK, torch.tensor([0]), VALUES)
    options = AdvantageOptions(gamma=0.99, lam=0.95, critic_lam=1.0)
    advantages, returns = estimate_advantages(ADVANTAGE_ESTIMATORS["gae"], inputs, options)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.56525, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.99, 1.0]]))
    _, coupled = estimate_advantages(
        ADVANTAGE_ESTIMATORS["gae"], inputs, replace(options, critic_lam=None)
    )
    torch.testing.assert_close(coupled, torch.tensor([[0.0, 0.0, 0.96525, 1.0]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@given(batch=masked_batches())
@settings(max_examples=60)
def test_gae_equals_the_double_sum_under_any_mask(batch, gamma, lam):
    rewards = batch.rewards
    values = batch.values
    mask = batch.mask

    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(
        advantages, _slow_gae(rewards, values, mask, gamma, [lam] * len(mask))
    )
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])
    assert advantages[~mask].abs().sum() == returns[~mask].abs().sum() == 0

    adaptive = length_adaptive_lam(mask, alpha=0.5)
    advantages, _ = gae(rewards, values, mask, gamma, adaptive)
    torch.testing.assert_close(
        advantages, _slow_gae(rewards, values, mask, gamma, adaptive.tolist())
    )


def test_length_adaptive_lambda_literal_numbers():
    lengths = [0, 10, 20, 100, 400]
    mask = torch.arange(400) < torch.tensor(lengths)[:, None]
    expected = [0.0, 0.0, 0.0, 0.8, 0.95]  # 1 - 1/(.05 * 10) = -1 is clamped, 1 - 1/5, 1 - 1/20
    torch.testing.assert_close(
        length_adaptive_lam(mask, 0.05), torch.tensor(expected, dtype=torch.float64)
    )
    with_holes = torch.tensor([[True, False, True]])
    assert length_adaptive_lam(with_holes, 2.0).tolist() == [0.75]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # gamma .5, lambda .5: row 0: deltas 1 + .5 - .5 and 2 - 1; row 2: 0 + .25 - 1 and 2 - .5.
        ("gae", [[1.25, 1.0], [1.0, 0.0], [-0.375, 1.5], [0.0, 1.0]]),
        ("grpo", [[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 4.0]]),  # norm_by_std is off
        ("rloo", [[1.5, 1.5], [-1.5, 0.0], [0.0, 0.0], [0.0, 4.0]]),
        # Lengths 2, 1, 2: baseline (6 + 1 + 4)/5 = 2.2.
        ("opo", [[0.8, 0.8], [-1.2, 0.0], [-0.2, -0.2], [0.0, 4.0]]),
        ("gpg", [[0.25, 0.25], [-0.25, 0.0], [0.0, 0.0], [0.0, 1.0]]),  # alpha 4/4, f_norm 4
        ("reinforce_plus_plus", [[2.0, 2.0], [1.0, 0.0], [1.0, 2.0], [0.0, 4.0]]),
        ("reinforce_plus_plus_baseline", [[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 4.0]]),
        ("flash_reinforce", [[0.5, 0.5], [-1.5, 0.0], [-0.5, -0.5], [0.0, 1.5]]),
        ("remax", [[2.0, 1.0], [-1.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]),
        ("grpo_passk", [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 4.0]]),
        # 1, -1, 0 and 4 alone; -1, -1, 2 and 1 alone, with the weight .5
        ("gdpo", [[0.5, 0.5], [-1.5, 0.0], [1.0, 1.0], [0.0, 4.5]]),
    ],
)
def test_each_name_stands_for_its_estimator_with_its_options(name, expected):
    options = AdvantageOptions(
        gamma=0.5, lam=0.5, norm_by_std=False, f_norm=4.0, component_weights=(1.0, 0.5)
    )
    advantages, returns = estimate_advantages(ADVANTAGE_ESTIMATORS[name], BATCH, options)
    torch.testing.assert_close(advantages, torch.tensor(expected))
    to_go = torch.tensor([[3.0, 2.0], [1.0, 0.0], [2.0, 2.0], [0.0, 4.0]])
    values = BATCH.values.masked_fill(~BATCH.mask, 0)
    expected_returns = {"gae": advantages + values, "remax": to_go}.get(name, advantages)
    torch.testing.assert_close(returns, expected_returns)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match=r"\(4, 2\), \(4, 1\)"):
        replace(BATCH, mask=BATCH.mask[:, :1])
    with pytest.raises(AssertionError, match=r"\(3,\), \(4, 2\)"):
        replace(BATCH, prompt_groups=BATCH.prompt_groups[:3])
    with pytest.raises(AssertionError, match=r"\(2, 3\) components, \(4,\) rows"):
        replace(BATCH, components=BATCH.components[:, :3])
    with pytest.raises(AssertionError, match="bool"):
        estimate_advantages(
            ADVANTAGE_ESTIMATORS["rloo"], replace(BATCH, mask=BATCH.mask.long()), AdvantageOptions()
        )


def test_which_estimators_are_whitened():
    whitened = {name for name, traits in ESTIMATOR_TRAITS.items() if traits.whitened}
    assert whitened == {"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}


@pytest.mark.parametrize("name", get_args(AdvantageEstimator))
def test_an_estimator_does_what_its_traits_say(name):
    estimator = ADVANTAGE_ESTIMATORS[name]
    traits = ESTIMATOR_TRAITS[name]
    generator = torch.Generator().manual_seed(5)
    inputs = AdvantageInputs(
        rewards=torch.randn(4, 3, generator=generator),
        mask=torch.ones(4, 3, dtype=torch.bool),
        prompt_groups=torch.tensor([0, 0, 1, 1]),
        values=torch.randn(4, 3, generator=generator),
        greedy_scores=torch.randn(4, generator=generator),
        components=torch.randn(2, 4, generator=generator),
        probabilities=TokenProbabilities(
            -0.2 - torch.rand(4, 3, generator=generator), torch.full((4, 3), 0.9)
        ),
        logprobs=tuple(torch.randn(2, 4, 3, generator=generator)),
    )
    result = torch.stack(estimate_advantages(estimator, inputs, AdvantageOptions()))

    options = {  # by the key that sets them
        "gamma": {"gamma": 0.5},
        "lam": {"lam": 0.5},
        "lam_critic": {"critic_lam": 0.5},
        "lam_length_alpha": {"lam": torch.full((4,), 0.5)},
        "norm_adv_by_std_in_grpo": {"norm_by_std": False},
        "f_norm": {"f_norm": 2.0},
        "gdpo_reward_weights": {"component_weights": (1.0, 0.5)},
        "pair_loss": {"pair_loss": partial(ipo_loss, options=PairLossOptions(0.1, 0.0))},
        "pair_beta": {"pair_loss": partial(sigmoid_loss, options=PairLossOptions(0.2, 0.0))},
    }
    config = ppo(algorithm__adv_estimator=name)
    for key, option in options.items():
        moved = estimate_advantages(estimator, inputs, AdvantageOptions(**option))
        read = not torch.equal(torch.stack(moved), result)
        assert read == config.reads(f"algorithm.{key}"), (
            f"{name} {'reads' if read else 'does not read'} algorithm.{key}; say so in "
            "by_estimator beside the key, in mrlhf/config/algorithm.py"
        )

    needs = {
        "values": traits.needs_values,
        "greedy_scores": traits.needs_greedy_answer,
        "components": traits.compares_terms,
        "probabilities": traits.needs_squared_probabilities,
        "logprobs": traits.pairs,
    }
    for field, needed in needs.items():
        without = replace(inputs, **{field: None})
        if needed:
            with pytest.raises(ValueError, match=f"^{name} needs {field}"):
                estimate_advantages(estimator, without, AdvantageOptions())
        else:
            estimate_advantages(estimator, without, AdvantageOptions())

    differ = bool((result[0] != result[0][:, :1]).any())
    assert differ == (traits.needs_values or traits.sums_later_rewards), _wrong_trait(name)

    equal = replace(
        inputs,
        rewards=torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [0.0, 0.0, 5.0], [0.0, 0.0, 5.0]]),
        components=torch.tensor([[2.0, 2.0, 5.0, 5.0], [1.0, 1.0, 0.0, 0.0]]),
    )
    advantages, _ = estimate_advantages(estimator, equal, AdvantageOptions())
    nothing_to_learn = bool(advantages.abs().max() < 1e-6)
    assert nothing_to_learn == traits.compares_within_prompt, _wrong_trait(name)


def _wrong_trait(name):
    return f"set what {name} does in ESTIMATOR_TRAITS of mrlhf/rl/names.py"


def _by_name(name, batch):
    inputs = AdvantageInputs(
        batch.rewards,
        batch.mask,
        batch.prompt_groups,
        batch.values,
        batch.greedy_scores,
        TokenProbabilities(-batch.values.abs(), 1 / (2 + batch.values.abs())),
        torch.stack([batch.greedy_scores, batch.mask.sum(dim=1)]),
    )
    options = AdvantageOptions(gamma=0.9, lam=0.8, critic_lam=0.7, f_norm=2.5)
    return estimate_advantages(ADVANTAGE_ESTIMATORS[name], inputs, options)


# Of equal responses online_dpo takes the first.
@pytest.mark.parametrize("name", sorted({*get_args(AdvantageEstimator)} - {"online_dpo"}))
@given(batch=masked_batches(smallest_group=2))
@settings(max_examples=60)
def test_order_numbering_and_padding_change_nothing(name, batch):
    advantages, returns = _by_name(name, batch)
    assert advantages[~batch.mask].abs().sum() == returns[~batch.mask].abs().sum() == 0
    assert advantages.isfinite().all() and returns.isfinite().all()

    order = torch.randperm(len(batch.prompt_groups), generator=torch.Generator().manual_seed(11))
    for moved, result in zip(_by_name(name, batch.rows(order)), (advantages, returns), strict=True):
        torch.testing.assert_close(moved, result[order], rtol=1e-12, atol=1e-12)

    renumbered = replace(batch, prompt_groups=-3 * batch.prompt_groups + 1)
    for other, result in zip(_by_name(name, renumbered), (advantages, returns), strict=True):
        torch.testing.assert_close(other, result, rtol=1e-12, atol=1e-12)

    width = batch.mask.shape[1] + 2
    # One column of padding before, one after; both after where the column is a token's place.
    first = 0 if name == "optimal_token_baseline" else 1
    columns = torch.arange(first, first + width - 2)
    spread = {
        name_of: torch.full(
            (len(batch.prompt_groups), width), filler, dtype=tensor.dtype
        ).index_copy(1, columns, tensor)
        for name_of, tensor, filler in (
            ("mask", batch.mask, False),
            ("rewards", batch.rewards, float("inf")),
            ("values", batch.values, NAN),
        )
    }
    for padded, result in zip(
        _by_name(name, replace(batch, **spread)), (advantages, returns), strict=True
    ):
        torch.testing.assert_close(padded[:, columns], result, rtol=1e-12, atol=1e-12)
        assert not padded[:, [first - 1, -1]].any()
