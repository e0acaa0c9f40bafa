"""Each part of the preset sao, with literal numbers: the mask, the critic's passes, GAE, lambda."""

from pathlib import Path

import pytest
import torch

from mrlhf.config import PPOConfig, load_config
from mrlhf.rl.advantages import gae, length_adaptive_lam
from mrlhf.roles.policy_loss import PolicyBatch, PolicyLossSettings

FILE = Path(__file__).parents[2] / "configs" / "algorithms" / "sao.yaml"


@pytest.fixture(scope="module")
def config() -> PPOConfig:
    keys = ["actor.path=m", "reward.terms=[{name: gsm8k}]", "data.train_files=a.jsonl"]
    return load_config(PPOConfig, FILE, [*keys, "trainer.output_dir=o"])


def test_a_token_outside_the_bounds_has_no_gradient_and_counts(config: PPOConfig) -> None:
    """Of the ratios 0.69, 0.8, 2 and 6.1 the first and the last are outside 0.7 and 6."""
    ratios = torch.tensor([[0.69, 0.8, 2.0, 6.1]])
    engine = torch.full((1, 4), -2.0)
    logprobs = (engine + ratios.log()).requires_grad_()
    advantages = torch.tensor([[1.0, 2.0, -1.0, -3.0]])
    drawn = torch.ones(1, 4, dtype=torch.bool)
    settings = PolicyLossSettings.of(config.actor, config.algorithm.rollout_correction)
    batch = PolicyBatch(
        drawn, drawn, engine, advantages, None, None, None, settings.token_weights(drawn)
    )
    corrected = settings.corrected(batch, logprobs)
    assert corrected.mask.all() and not settings.needs_mini_batch_pass
    _, losses = settings.loss(corrected, logprobs)
    losses.sum().backward()

    assert corrected.weights is not None and logprobs.grad is not None
    torch.testing.assert_close(corrected.weights, torch.tensor([[0.0, 0.8, 2.0, 0.0]]))
    # -weight x advantage, whatever its sign; the ratio itself has no gradient.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.6, 2.0, 0.0]]))


def test_gae_goes_over_what_the_policy_said(config: PPOConfig) -> None:
    """The token of a tool, whose value is absurd, is skipped; lambda is of the two other tokens."""
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[0.2, 999.0, 0.4]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    algorithm = config.algorithm
    assert algorithm.lam_length_alpha is not None and algorithm.lam_critic == 1.0
    lam = length_adaptive_lam(mask, algorithm.lam_length_alpha)
    assert lam.tolist() == pytest.approx([1 - 1 / (1.5 * 2)])
    advantages, _ = gae(rewards, values, mask, algorithm.gamma, lam)
    # The last: 1 - 0.4. The first: 0.4 - 0.2, and 2/3 of the last.
    assert advantages[0].tolist() == pytest.approx([0.2 + 0.6 * 2 / 3, 0.0, 0.6])
    _, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam_critic)
    assert returns[0].tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_the_rest_is_keys(config: PPOConfig) -> None:
    critic, rollout = config.critic, config.rollout
    assert (critic.ppo_epochs, config.actor.ppo_epochs, rollout.n) == (2, 1, 1)
    assert list(critic.freeze) == ["*.self_attn.*"] and not config.actor.freeze
    assert rollout.partial.is_on and config.trainer.critic_warmup == 11
    assert not config.needs_reference
