"""How a scored rollout becomes an experience: correction, advantages and whitening, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.experience import ModelOutputs, make_experience
from mrlhf.trainers.ppo.work import correction_metrics
from tests.rollouts import make_rollout

MASK = torch.tensor([[True, True, True], [True, True, False]])
ENGINE = torch.tensor([[-1.0, -2.0, -1.0], [-0.5, -3.0, 0.0]])
# The trainer finds one token four times as likely as the engine did: the last one of the first
# response.
TRAINER = ENGINE + torch.tensor([[0.0, 0.0, math.log(4)], [0.0, math.log(1.5), 0.0]])
VALUES = torch.tensor([[0.25, 0.5, 0.5], [0.0, 0.75, 0.0]])
CARELESS = """
def f(inputs, options):
    inputs.rewards.add_(1)
    inputs.values.zero_()
    inputs.mask.numpy()[:] = False
    return inputs.rewards, inputs.values
"""


def _collected(scores=(1.0, 0.0)):
    prompts = Prompts([[1], [1]], [0, 0], ["", ""], ["", ""], ["", ""], [{}, {}])
    rollout = make_rollout(prompts, [0, 1], MASK.long(), MASK, ENGINE, torch.tensor([True, True]))
    return Collected(
        rollout, Scores(torch.tensor(scores), {"exact_match": [1.0, 0.0]}), None, 5, {}
    )


def _experience(algorithm, old=TRAINER, values=VALUES, ref=None, teacher=None):
    collected = _collected()
    policy = None if old is None else Evaluation(old, torch.zeros(2, 3), None)
    outputs = ModelOutputs(policy, ref, values, teacher)
    return make_experience(
        collected, collected.scores.total, outputs, AlgorithmSection.model_validate(algorithm), 0.1
    )


def test_a_rejected_token_leaves_losses_and_whitening_but_not_its_response():
    correction = {
        "rollout_is": "token",
        "rollout_is_threshold": 1.25,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": 2.0,
    }
    experience, kl = _experience({"rollout_correction": correction})

    assert experience.loss_mask.tolist() == [[True, True, False], [True, True, False]]
    assert experience.weights.tolist() == [[1.0, 1.0, 1.25], [1.0, 1.25, 0.0]]
    assert torch.equal(experience.old_logprobs, TRAINER) and kl is None

    # The reward of 1 stands on the rejected token, and still reaches the tokens before it.
    assert experience.returns.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    raw = torch.tensor([0.75, 0.5, 0.0, -0.75])
    wanted = (raw - raw.mean()) / raw.std()
    assert experience.advantages[experience.loss_mask].tolist() == pytest.approx(
        wanted.tolist(), abs=1e-6
    )
    assert experience.positive.tolist() == [True, False]


def test_what_a_users_estimator_writes_into_its_inputs_stays_there(tmp_path):
    (tmp_path / "careless.py").write_text(CARELESS)
    rewards = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    values = VALUES.tolist()
    mask = MASK.tolist()

    experience, _ = _experience({"adv_estimator": f"{tmp_path}/careless.py:f"})
    assert experience.advantages.tolist() == [[1.0, 1.0, 2.0], [1.0, 1.0, 0.0]]
    assert experience.returns.tolist() == [[0.0] * 3, [0.0] * 3]
    assert experience.token_rewards.tolist() == rewards
    assert experience.values.tolist() == values
    assert experience.loss_mask.tolist() == experience.rollout.loss_mask.tolist() == mask


def test_bypass_takes_the_engines_log_probabilities_and_corrects_later():
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    experience, _ = _experience(
        {"adv_estimator": "grpo", "rollout_correction": correction}, old=None, values=None
    )

    assert torch.equal(experience.old_logprobs, ENGINE)
    assert torch.equal(experience.loss_mask, MASK)
    assert experience.weights is experience.values is None

    size = 0.5 / (0.5**0.5 + 1e-6)  # scores 1 and 0: mean .5, unbiased std sqrt(.5)
    wanted = [[size] * 3, [-size, -size, 0.0]]
    assert torch.allclose(experience.advantages, torch.tensor(wanted), atol=1e-6)


def test_the_kl_is_that_of_the_trainer_and_goes_off_each_token():
    ref = TRAINER - torch.tensor([[0.5, 0.0, 1.0], [0.0, 0.25, 0.0]])
    experience, kl = _experience({"use_kl_in_reward": True}, ref=ref)
    wanted = torch.tensor([[-0.05, 0.0, 0.9], [0.0, -0.025, 0.0]])
    assert torch.allclose(experience.token_rewards, wanted, atol=1e-6)
    assert kl == pytest.approx((1.5 / 3 + 0.25 / 2) / 2, abs=1e-6)


def test_a_teacher_adds_its_log_ratio_to_each_drawn_token():
    teacher = TRAINER + torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.25, 9.0]])
    algorithm = {"distillation": {"mode": "reward", "coef": 0.5}}
    experience, kl = _experience(algorithm, teacher=teacher)
    wanted = torch.tensor([[0.25, 0.0, 0.5], [0.0, 0.125, 0.0]])  # the score is 1 at the third
    assert torch.allclose(experience.token_rewards, wanted, atol=1e-6)
    assert kl is None


def test_whitened_rewards_keep_their_mean():
    experience, _ = _experience({"whiten_rewards": True})
    # Rewards 0, 0, 1, 0, 0 have mean .2 and variance .2.
    scale = 1 / 0.2**0.5
    low = 0.2 - 0.2 * scale
    wanted = [[low, low, low + scale], [low, low, 0.0]]
    assert torch.allclose(experience.token_rewards, torch.tensor(wanted), atol=1e-5)


def test_metrics_of_the_mismatch():
    algorithm = AlgorithmSection.model_validate(
        {"rollout_correction": {"preset": "decoupled_token_is"}}
    )
    rollout = _collected().rollout
    section = algorithm.rollout_correction
    metrics = correction_metrics(TRAINER, rollout, MASK, section, same_weights=MASK)

    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(4) + math.log(1.5)) / 5)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((3 + 16 + 2.25) / 5 - 1, rel=1e-5)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((3 + 2.0 + 1.5) / 5, rel=1e-6)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(0.2)

    # What other weights drew is no fault of the engine.
    later = correction_metrics(TRAINER, rollout, MASK, section, torch.zeros_like(MASK))
    assert metrics["training/rollout_probs_diff_valid"] == 1.0
    assert later["training/rollout_probs_diff_valid"] == 0.0
    of_all = [name for name in metrics if name.startswith("rollout_corr/")]
    assert {name: later[name] for name in of_all} == {name: metrics[name] for name in of_all}

    gaps = [0.0, 0.0, 3 * math.exp(-1.0), 0.0, 0.5 * math.exp(-3.0)]
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(max(gaps), rel=1e-5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(sum(gaps) / 5, rel=1e-5)
    assert not any("rollout_rs" in name for name in metrics)


def test_values_at_places_are_rewards_of_their_tokens():
    placed = torch.tensor([[0.5, 0.0, 0.25], [0.0, -1.0, 0.0]])
    collected = _collected()
    collected = replace(collected, rollout=replace(collected.rollout, placed=placed))
    outputs = ModelOutputs(Evaluation(TRAINER, torch.zeros(2, 3), None), None, VALUES)

    def made(estimator):
        algorithm = AlgorithmSection.model_validate({"adv_estimator": estimator, "gamma": 0.5})
        return make_experience(collected, collected.scores.total, outputs, algorithm, 0.0)[0]

    gae = made("gae")
    assert gae.token_rewards.tolist() == [[0.5, 0.0, 1.25], [0.0, -1.0, 0.0]]
    assert gae.scores.tolist() == [1.75, -1.0]
    # lambda = 1: 0.5 + 0.25 * 1.25, 0.5 * 1.25, 1.25
    wanted = [[0.8125, 0.625, 1.25], [-0.5, -1.0, 0.0]]
    assert gae.returns.tolist() == wanted
    assert made("reinforce_plus_plus").returns.tolist() == wanted
    assert made("rloo").advantages.tolist() == [[2.75] * 3, [-2.75, -2.75, 0.0]]
