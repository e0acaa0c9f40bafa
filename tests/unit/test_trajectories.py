"""Responses in which the policy did not draw every token, from rewards to metrics.

Two slow references: loops over the drawn tokens of each response, and the same batch with all other
tokens cut out, which must give the same numbers wherever lengths do not matter.
"""

from dataclasses import replace
from statistics import fmean, variance
from typing import get_args

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.metrics import data_metrics
from mrlhf.rl.names import AdvantageEstimator
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.components import RewardComponents
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.experience import ModelOutputs, make_experience
from mrlhf.trainers.ppo.work import correction_metrics
from tests.rollouts import as_episodes, make_rollout, with_holes

N = 2
# One letter a token: d was drawn by the policy, t is a tool's.
RESPONSES = ("ddttdd", "dtd", "tddd", "dddtt", "ddddddd", "dtdtdtd")
KL_COEF = 0.1
ESTIMATORS = get_args(AdvantageEstimator)
CORRECTIONS = (
    {},
    {"rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1},
    {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.2},
)


def _batch(texts):
    """The responses `texts`, a table for each kind of number, and rubbish where none was drawn."""
    width = max(map(len, texts))
    there = torch.tensor([[position < len(text) for position in range(width)] for text in texts])
    drawn = torch.tensor(
        [[text[position : position + 1] == "d" for position in range(width)] for text in texts]
    )

    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(5, sum(text.count("d") for text in texts), generator=generator)
    tables = torch.full((5, *drawn.shape), 1e3).masked_fill(~there, 0.0)
    tables[:, drawn] = numbers

    engine = tables[0] - 3
    prompts = Prompts(
        [[1, 2]] * len(texts), list(range(len(texts))), [""] * len(texts), ["x"] * len(texts),
        [""] * len(texts), [{}] * len(texts),
    )  # fmt: skip
    whole = make_rollout(
        prompts,
        [row % N for row in range(len(texts))],
        there.long(),
        there,
        engine.masked_fill(~there, 0.0),
        torch.ones(len(texts), dtype=torch.bool),
    )
    return {
        "rollout": with_holes(whole, ~drawn),
        "policy": engine + 0.3 * tables[1],
        "ref": engine + 0.3 * tables[2],
        "values": tables[3],
        "entropy": tables[4],
    }


BATCH = _batch(RESPONSES)
COMPACT = _batch([text.replace("t", "") for text in RESPONSES])
SCORES = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.25])
GREEDY = torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0])


def _experience(batch, **algorithm):
    section = AlgorithmSection.model_validate(algorithm)
    scores = Scores(SCORES, {"exact_match": [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]})
    collected = Collected(batch["rollout"], scores, GREEDY, 5, {})
    squares = torch.sigmoid(batch["entropy"]) if "token_baseline" in section.adv_estimator else None
    policy = Evaluation(batch["policy"], batch["entropy"], None, squares)
    components = None
    if section.adv_estimator == "gdpo":
        table = torch.stack([SCORES, GREEDY.flip(0)])
        components = RewardComponents(("a", "b"), (1.0, 0.5), table)
    if section.rollout_correction.bypass_mode:
        policy = None
    outputs = ModelOutputs(policy, batch["ref"], batch["values"])
    return make_experience(collected, SCORES, outputs, section, KL_COEF, components)


def _drawn(table, rollout):
    """The numbers of each response's drawn tokens, a list a response."""
    return [row[mask].tolist() for row, mask in zip(table, rollout.loss_mask, strict=True)]


def _slow_rewards(placement):
    """Rewards of the drawn tokens: the score on the last one, and each token's KL or all of it."""
    rewards = []
    policy = _drawn(BATCH["policy"], BATCH["rollout"])
    reference = _drawn(BATCH["ref"], BATCH["rollout"])
    for score, ours, theirs in zip(SCORES.tolist(), policy, reference, strict=True):
        penalties = [KL_COEF * (p - q) for p, q in zip(ours, theirs, strict=True)]
        if placement == "terminal":
            penalties = [0.0] * (len(penalties) - 1) + [sum(penalties)]
        row = [-penalty for penalty in penalties]
        row[-1] += score
        rewards.append(row)
    return rewards


def _slow_gae(rewards, values, gamma, lam):
    advantages = []
    later_advantage = 0.0
    later_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        error = reward + gamma * later_value - value
        later_advantage = error + gamma * lam * later_advantage
        later_value = value
        advantages.insert(0, later_advantage)
    return advantages


def test_the_reported_score_has_the_rewards_of_turns():
    of_turns = [[0.5, 0.25], [], [1.0], [0.0, -0.5], [0.0], [0.125] * 4]
    episodes = as_episodes(BATCH["rollout"], of_turns)
    experience, _ = _experience({**BATCH, "rollout": episodes})
    expected = SCORES + torch.tensor([0.75, 0.0, 1.0, -0.5, 0.0, 0.5])
    torch.testing.assert_close(experience.scores, expected)
    torch.testing.assert_close(experience.token_rewards.sum(dim=1), expected)


@pytest.mark.parametrize("placement", ["token", "terminal"])
def test_rewards_and_advantages_are_those_of_a_loop_over_drawn_tokens(placement):
    gamma = 0.9
    lam = 0.8
    experience, kl = _experience(
        BATCH, use_kl_in_reward=True, kl_penalty="k1", kl_placement=placement, gamma=gamma, lam=lam
    )
    rollout = BATCH["rollout"]

    rewards = _slow_rewards(placement)
    for found, wanted in zip(_drawn(experience.token_rewards, rollout), rewards, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert not experience.token_rewards[~rollout.loss_mask].any()

    values = _drawn(BATCH["values"], rollout)
    rows = [_slow_gae(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    flat = [advantage for row in rows for advantage in row]
    mean = fmean(flat)
    std = variance(flat) ** 0.5
    for row, found in enumerate(_drawn(experience.advantages, rollout)):
        assert found == pytest.approx([(a - mean) / std for a in rows[row]], abs=1e-4)
    for row, found in enumerate(_drawn(experience.returns, rollout)):
        sums = [a + v for a, v in zip(rows[row], values[row], strict=True)]
        assert found == pytest.approx(sums, abs=1e-4)
    assert not experience.advantages[~rollout.loss_mask].any()

    policy = _drawn(BATCH["policy"], rollout)
    reference = _drawn(BATCH["ref"], rollout)
    kls = []
    for ours, theirs in zip(policy, reference, strict=True):
        kls.append(fmean(p - q for p, q in zip(ours, theirs, strict=True)))
    assert kl == pytest.approx(fmean(kls), abs=1e-5)


def _assert_same_at_drawn_tokens(found, wanted):
    """Both experiences hold the same numbers at drawn tokens, and the first 0 at all others."""
    for name in ("token_rewards", "advantages", "returns", "weights"):
        ours = getattr(found, name)
        theirs = getattr(wanted, name)
        if ours is None:
            assert theirs is None, name
            continue
        drawn = found.rollout.loss_mask
        torch.testing.assert_close(ours[drawn], theirs[wanted.rollout.loss_mask])
        assert not ours[~drawn].any(), name

    kept = found.loss_mask[found.rollout.loss_mask]
    assert kept.equal(wanted.loss_mask[wanted.rollout.loss_mask])


# In `optimal_token_baseline` a tool's tokens move what follows them to another place.
@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"optimal_token_baseline"}))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_the_other_tokens_might_as_well_be_cut_out(estimator, correction):
    settings = {
        "adv_estimator": estimator,
        "rollout_correction": correction,
        "use_kl_in_reward": True,
        "whiten_rewards": estimator == "gae",
    }
    if estimator == "gae":
        settings |= {"lam_length_alpha": 0.5, "lam_critic": 0.7}
    found, kl = _experience(BATCH, **settings)
    if estimator == "tir_optimal_token_baseline":
        settings["adv_estimator"] = "optimal_token_baseline"
    wanted, wanted_kl = _experience(COMPACT, **settings)

    _assert_same_at_drawn_tokens(found, wanted)
    assert kl == pytest.approx(wanted_kl, abs=1e-6)
    if correction.get("rollout_rs"):
        assert 0 < found.loss_mask.sum() < found.rollout.loss_mask.sum()


def test_in_bypass_mode_a_token_that_was_not_drawn_has_no_log_probability():
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    found, _ = _experience(BATCH, adv_estimator="grpo", rollout_correction=correction)
    assert found.loss_mask.equal(BATCH["rollout"].loss_mask)
    assert not found.old_logprobs[~found.loss_mask].any()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_metrics_are_of_drawn_tokens_and_lengths_of_all(correction):
    settings = {"rollout_correction": correction, "use_kl_in_reward": True}
    found, _ = _experience(BATCH, **settings)
    wanted, _ = _experience(COMPACT, **settings)

    ours = data_metrics(found, max_prompt_length=3)
    theirs = data_metrics(wanted, max_prompt_length=3)
    lengths = [len(text) for text in RESPONSES]
    assert ours["response_length/mean"] == pytest.approx(fmean(lengths))
    assert (ours["response_length/min"], ours["response_length/max"]) == (3, 7)
    of_lengths = ("response_length/", "response_length_non_aborted/")
    for name in (name for name in ours if not name.startswith(of_lengths)):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name

    section = AlgorithmSection.model_validate(settings).rollout_correction
    mismatch, wanted_mismatch = (
        correction_metrics(batch["policy"], batch["rollout"], mask, section, same_weights=mask)
        for batch in (BATCH, COMPACT)
        for mask in [batch["rollout"].loss_mask]
    )
    assert mismatch == pytest.approx(wanted_mismatch, rel=1e-5)
    assert mismatch["rollout_corr/kl"] != 0


def test_the_overlong_penalty_counts_tokens_that_were_not_drawn():
    algorithm = AlgorithmSection.model_validate(
        {"overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 2.0}}
    )
    shaper = RewardShaper(algorithm, max_response_length=7)
    shaped = shaper.shape(torch.zeros(len(RESPONSES)), BATCH["rollout"])
    wanted = [min(0.0, (3 - len(text)) / 4 * 2.0) for text in RESPONSES]
    assert shaped.tolist() == pytest.approx(wanted)


def test_an_experience_may_not_train_what_was_not_drawn():
    experience, _ = _experience(BATCH)
    with pytest.raises(AssertionError, match="that the policy did not draw"):
        replace(experience, loss_mask=BATCH["rollout"].response_mask)
