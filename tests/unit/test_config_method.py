"""What must hold between the keys of losses, correction and sampling, dynamic sampling included.

Each mistake is refused, and nothing else is; so is a number of what is switched off. The keys of
rewards and advantages are tested in `test_config_advantages`.
"""

from dataclasses import replace

import pytest
import torch

from mrlhf.preflight import check
from mrlhf.rl.names import POLICY_LOSS_TRAITS
from mrlhf.rl.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOptions,
    policy_loss,
)
from tests.unit.configurations import ppo, problems

GRPO = {"algorithm__adv_estimator": "grpo"}
GDPO = {"algorithm__adv_estimator": "gdpo"}
OTB = {"algorithm__adv_estimator": "optimal_token_baseline"}
CORRECTION = "algorithm__rollout_correction"
ADAPTIVE = {"algorithm__use_kl_in_reward": True}
GEO_MEAN = (
    "actor.policy_loss.loss_mode geo_mean is defined for one advantage a response, but "
    "algorithm.adv_estimator {} gives one a token; use another estimator, such as grpo, or "
    "another loss"
)
TRUNCATED = (
    "rollout.top_k {}, rollout.top_p {}: truncated sampling breaks PPO's probability ratio, "
    "because training uses the whole distribution; set rollout.top_k=-1 rollout.top_p=1.0"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"algorithm__filter_groups": {"enable": True}, "rollout__n": 1},
            "algorithm.filter_groups.enable compares the answers to a prompt, but rollout.n is 1; "
            "set rollout.n to at least 2",
        ),
        (
            {**OTB, "actor__policy_loss__loss_mode": "geo_mean"},
            GEO_MEAN.format("optimal_token_baseline"),
        ),
        (
            {"actor__policy_loss__loss_mode": "geo_mean"},
            "actor.policy_loss.loss_mode geo_mean is defined for one advantage a response, but "
            "algorithm.adv_estimator gae gives one a token; use another estimator, such as grpo, "
            "or another loss",
        ),
        (
            {
                "algorithm__adv_estimator": "reinforce_plus_plus",
                "algorithm__gamma": 0.9,
                "actor__policy_loss__loss_mode": "geo_mean",
            },
            GEO_MEAN.format("reinforce_plus_plus with algorithm.gamma 0.9"),
        ),
        (
            {
                "algorithm__adv_estimator": "reinforce_plus_plus",
                "algorithm__use_kl_in_reward": True,
                "actor__policy_loss__loss_mode": "geo_mean",
            },
            GEO_MEAN.format(
                "reinforce_plus_plus with the KL in the reward at algorithm.kl_placement token"
            ),
        ),
        (
            {
                "algorithm__adv_estimator": "remax",
                "algorithm__use_kl_in_reward": True,
                "actor__policy_loss__loss_mode": "geo_mean",
            },
            GEO_MEAN.format("remax with the KL in the reward at algorithm.kl_placement token"),
        ),
        (
            {
                "actor__clip_ratio": 0.1,
                "actor__clip_ratio_low": 0.2,
                "actor__clip_ratio_high": 0.28,
            },
            "actor.clip_ratio 0.1 has no effect beside actor.clip_ratio_low 0.2 and "
            "actor.clip_ratio_high 0.28; leave it at 0.2, or set one of these to null",
        ),
        (
            {"actor__tau_pos": 2.0},
            "actor.tau_pos 2.0 has no effect with actor.policy_loss.loss_mode vanilla; leave it at "
            "1.0, or use sapo",
        ),
        (
            {"actor__policy_loss": {"loss_mode": "kl_cov", "clip_cov_lb": 0.5}},
            "actor.policy_loss.clip_cov_lb 0.5 has no effect with actor.policy_loss.loss_mode "
            "kl_cov; leave it at 1.0, or use clip_cov",
        ),
        (
            {"actor__policy_loss": {"loss_mode": "clip_cov", "ppo_kl_coef": 1.0}},
            "actor.policy_loss.ppo_kl_coef 1.0 has no effect with actor.policy_loss.loss_mode "
            "clip_cov; leave it at 0.1, or use kl_cov",
        ),
        (
            {"actor__policy_loss": {"loss_mode": "mine.py:loss", "kl_cov_ratio": 0.1}},
            "actor.policy_loss.kl_cov_ratio 0.1 has no effect with actor.policy_loss.loss_mode "
            "mine.py:loss; leave it at 0.0002, or use kl_cov",
        ),
        (
            {
                "actor__policy_loss__loss_mode": "mine.py:loss",
                "actor__clip_ratio": 0.1,
                "actor__clip_ratio_low": 0.2,
                "actor__clip_ratio_high": 0.28,
            },
            "actor.clip_ratio 0.1 has no effect beside actor.clip_ratio_low 0.2 and "
            "actor.clip_ratio_high 0.28; leave it at 0.2, or set one of these to null",
        ),
        (
            {"actor__policy_loss__loss_mode": "gspo", "actor__clip_ratio_c": 10.0},
            "actor.clip_ratio_c 10.0 has no effect with actor.policy_loss.loss_mode gspo; leave it "
            "at 3.0, or use vanilla, dppo_tv or dppo_kl",
        ),
        (
            {"actor__policy_loss__loss_mode": "sapo", "actor__clip_ratio_high": 0.28},
            "actor.clip_ratio_high 0.28 has no effect with actor.policy_loss.loss_mode sapo; leave "
            "it at null, or use vanilla, gspo, cispo, geo_mean, clip_cov, dppo_tv or dppo_kl",
        ),
        (
            {CORRECTION: {"preset": "bypass_pg_is"}, "actor__clip_ratio": 0.1},
            "actor.clip_ratio 0.1 has no effect with algorithm.rollout_correction.loss_type "
            "reinforce; leave it at 0.2, or use vanilla, gspo, cispo, geo_mean, clip_cov, dppo_tv "
            "or dppo_kl",
        ),
        (
            {"actor__loss_scale_factor": 5.0},
            "actor.loss_scale_factor 5.0 has no effect with actor.loss_agg_mode token-mean; leave "
            "it out, or use seq-mean-token-sum-norm",
        ),
        (
            {"critic__loss_scale_factor": 5.0},
            "critic.loss_scale_factor 5.0 has no effect with critic.loss_agg_mode token-mean; "
            "leave it out, or use seq-mean-token-sum-norm",
        ),
        (
            {CORRECTION: {"rollout_is_threshold": 3.0}},
            "algorithm.rollout_correction.rollout_is_threshold 3.0 has no effect, since "
            "algorithm.rollout_correction.rollout_is is null; leave it at 2.0, or set that to "
            "token or sequence",
        ),
        (
            {CORRECTION: {"rollout_rs_threshold": 2.0}},
            "algorithm.rollout_correction.rollout_rs_threshold 2.0 has no effect, since "
            "algorithm.rollout_correction.rollout_rs is null; leave it at null, or name the "
            "statistic there",
        ),
        ({"rollout__top_p": 0.9}, TRUNCATED.format(-1, 0.9)),
        ({"rollout__top_k": 50}, TRUNCATED.format(50, 1.0)),
        (
            {"rollout__top_k": 50, "actor__policy_loss__loss_mode": "cispo"},
            TRUNCATED.format(50, 1.0),
        ),
        (
            {
                "rollout__top_p": 0.5,
                "actor__policy_loss__loss_mode": "gpg",
                CORRECTION: {"rollout_is": "token"},
            },
            TRUNCATED.format(-1, 0.5),
        ),
        (
            {
                "rollout__top_p": 0.5,
                "actor__policy_loss__loss_mode": "gpg",
                CORRECTION: {"bypass_mode": True},
            },
            TRUNCATED.format(-1, 0.5),
        ),
        (
            {CORRECTION: {"rollout_is_batch_normalize": True}},
            "algorithm.rollout_correction.rollout_is_batch_normalize true has no effect, since "
            "algorithm.rollout_correction.rollout_is is null; leave it at false, or set that to "
            "token or sequence",
        ),
        (
            {CORRECTION: {"loss_type": "reinforce"}},
            "algorithm.rollout_correction.loss_type reinforce needs "
            "algorithm.rollout_correction.bypass_mode; turn that on or set loss_type to ppo_clip",
        ),
        (
            {CORRECTION: {"preset": "bypass_pg_is"}, "actor__policy_loss__loss_mode": "gspo"},
            "algorithm.rollout_correction.loss_type reinforce and actor.policy_loss.loss_mode "
            "gspo are two losses; set loss_mode to vanilla or loss_type to ppo_clip",
        ),
        (
            {CORRECTION: {"bypass_mode": True, "rollout_is": "sequence"}},
            "algorithm.rollout_correction.rollout_is sequence with bypass_mode and loss_type "
            "ppo_clip: the ratio is to the engine's policy already and would count twice; set "
            "rollout_is to null or loss_type to reinforce",
        ),
        (
            {
                CORRECTION: {"bypass_mode": True},
                "algorithm__use_kl_in_reward": True,
                "algorithm__kl_penalty": "full",
            },
            "algorithm.kl_penalty full needs the forward pass that "
            "algorithm.rollout_correction.bypass_mode saves; choose another algorithm.kl_penalty, "
            "such as k1, or turn bypass_mode off",
        ),
        (
            {CORRECTION: {"bypass_mode": True}, "actor__router_replay": "old"},
            "actor.router_replay old needs the forward pass that "
            "algorithm.rollout_correction.bypass_mode saves; turn bypass_mode off or set "
            "actor.router_replay to rollout",
        ),
        (
            {"rollout__engine": "vllm", "actor__router_replay": "rollout"},
            "actor.router_replay rollout needs the experts that the engine chose, which "
            "rollout.engine vllm does not record; set rollout.engine to native, or "
            "actor.router_replay to old or none",
        ),
        (
            {"data__gen_batch_size": 96},
            "data.gen_batch_size 96 has no effect beside data.train_batch_size 64, since "
            "algorithm.filter_groups.enable is false; leave it out, or turn that on",
        ),
        (
            {
                "data__gen_batch_size": 20,
                "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 3},
            },
            "algorithm.filter_groups.max_num_gen_batches 3 x data.gen_batch_size 20 = 60 prompts "
            "never fill data.train_batch_size 64; raise max_num_gen_batches to at least 4 or "
            "gen_batch_size",
        ),
        (
            {
                "algorithm__filter_groups": {"enable": True, "metric": "acc"},
                "reward__terms": [{"name": "format"}],
            },
            "algorithm.filter_groups.metric acc needs to know which responses are right, but no "
            "reward term says whether a response is right; add {name: exact_match, weight: 0}, "
            "gsm8k, or a function that returns acc, to reward.terms",
        ),
        (
            {"actor__positive_lm_coef": 0.1, "reward__terms": [{"name": "gsm8k_flexible"}]},
            "actor.positive_lm_coef 0.1 needs to know which responses are right, but no reward "
            "term says whether a response is right; add {name: exact_match, weight: 0}, gsm8k, or "
            "a function that returns acc, to reward.terms",
        ),
    ],
)
def test_each_mistake_is_one_line_with_numbers_and_remedy(changes, expected):
    assert problems(ppo(**changes), 8) == [expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"actor__kl_loss_coef": 0.3},
            "actor.kl_loss_coef 0.3 has no effect, since actor.use_kl_loss is false; leave it at "
            "0.001, or turn that on",
        ),
        (
            {"actor__kl_loss_type": "k2"},
            "actor.kl_loss_type k2 has no effect, since actor.use_kl_loss is false; leave it at "
            "low_var_kl, or turn that on",
        ),
        (
            {"algorithm__kl_penalty": "k3"},
            "algorithm.kl_penalty k3 has no effect, since algorithm.use_kl_in_reward is false; "
            "leave it at kl, or turn that on",
        ),
        (
            {"algorithm__kl_ctrl": {"horizon": 5}},
            "algorithm.kl_ctrl.horizon 5 has no effect, since algorithm.use_kl_in_reward is "
            "false; leave it at 10000, or turn that on",
        ),
        (
            {**ADAPTIVE, "algorithm__kl_ctrl": {"horizon": 5}},
            "algorithm.kl_ctrl.horizon 5 has no effect, since algorithm.kl_ctrl.type is fixed; "
            "leave it at 10000, or use adaptive",
        ),
        (
            {"algorithm__filter_groups": {"max_num_gen_batches": 3}},
            "algorithm.filter_groups.max_num_gen_batches 3 has no effect, since "
            "algorithm.filter_groups.enable is false; leave it at 10, or turn that on",
        ),
        (
            {"algorithm__overlong_buffer": {"len": 9}},
            "algorithm.overlong_buffer.len 9 has no effect, since "
            "algorithm.overlong_buffer.enable is false; leave it at null, or turn that on",
        ),
        (
            {"critic__optim": {"min_lr_ratio": 0.1}},
            "critic.optim.min_lr_ratio 0.1 has no effect, since critic.optim.lr_decay_style is "
            "constant; leave it at 0.0, or use linear or cosine",
        ),
        (
            {"actor__optim": {"lr_decay_steps": 9}},
            "actor.optim.lr_decay_steps 9 has no effect, since actor.optim.lr_decay_style is "
            "constant; leave it at null, or use linear or cosine",
        ),
        (
            {"trainer__total_epochs": 3},
            "trainer.total_epochs 3 has no effect, since trainer.total_steps is set; leave it at "
            "1, or set that to null",
        ),
        (
            {"trainer__min_steps": 3},
            "trainer.min_steps 3 has no effect, since trainer.total_steps is set; leave it at 0, "
            "or set that to null",
        ),
        (
            {"trainer__keep_best_mode": "min"},
            "trainer.keep_best_mode min has no effect, since trainer.keep_best is null; leave it "
            "at max, or name a metric there",
        ),
        (
            {"reward__timeout_s": 5.0},
            "reward.timeout_s 5.0 has no effect, since reward.terms holds no function of your "
            "own; leave it at 60.0, or name one there",
        ),
    ],
)
def test_a_number_of_what_is_switched_off_is_refused(changes, expected):
    assert problems(ppo(**changes), 8) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {**GDPO, "actor__policy_loss__loss_mode": "geo_mean"},
        {**GRPO, "actor__policy_loss__loss_mode": "geo_mean"},
        {**GRPO, "algorithm__use_kl_in_reward": True, "actor__policy_loss__loss_mode": "geo_mean"},
        {
            "algorithm__adv_estimator": "reinforce_plus_plus",
            "actor__policy_loss__loss_mode": "geo_mean",
        },
        {"algorithm__adv_estimator": "remax", "actor__policy_loss__loss_mode": "geo_mean"},
        {
            "algorithm__adv_estimator": "remax",
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_placement": "terminal",
            "actor__policy_loss__loss_mode": "geo_mean",
        },
        {"actor__clip_ratio": 0.1, "actor__clip_ratio_high": 0.28},
        {"actor__clip_ratio_low": 0.1, "actor__clip_ratio_high": 0.28},
        {"rollout__top_p": 0.5, "rollout__top_k": 5, "actor__policy_loss__loss_mode": "gpg"},
        {"actor__policy_loss__loss_mode": "sapo", "actor__tau_pos": 2.0, "actor__tau_neg": 1.0},
        {
            "actor__policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1},
            "actor__clip_ratio": 0.1,
        },
        {"actor__policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}},
        {"actor__policy_loss__loss_mode": "dppo_tv", "actor__clip_ratio_c": 10000.0},
        {
            "actor__policy_loss": {"loss_mode": "mine.py:loss", "ppo_kl_coef": 1.0},
            "actor__tau_pos": 2.0,
            "actor__clip_ratio_c": 10.0,
        },
        # numbers of a model that is not built
        {**GRPO, "critic": {"cliprange_value": 0.2, "loss_scale_factor": 5.0}},
        {**GRPO, "critic": {"optim": {"min_lr_ratio": 0.1}}},
        {
            "actor__loss_agg_mode": "seq-mean-token-sum-norm",
            "actor__loss_scale_factor": 5.0,
            "critic__loss_agg_mode": "seq-mean-token-sum-norm",
            "critic__loss_scale_factor": 7.0,
        },
        {CORRECTION: {"preset": "decoupled_token_icepop", "rollout_is": None}},
        {CORRECTION: {"preset": "bypass_pg_geo_rs_token_tis", "rollout_is_batch_normalize": True}},
        {CORRECTION: {"preset": "bypass_ppo_clip"}, "actor__policy_loss__loss_mode": "gspo"},
        {CORRECTION: {"bypass_mode": True}, "algorithm__use_kl_in_reward": True},
        {"data__gen_batch_size": 96, "algorithm__filter_groups": {"enable": True, "metric": "acc"}},
        {
            "data__gen_batch_size": 16,
            "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 4},
        },
        {"reward__terms": [{"name": "my.py:score"}], "actor__positive_lm_coef": 0.1},
        {
            "reward__terms": [{"name": "exact_match", "weight": 0.0}, {"name": "format"}],
            "actor__positive_lm_coef": 0.1,
        },
        {"reward__terms": [{"name": "format"}], "algorithm__filter_groups": {"enable": True}},
    ],
)
def test_what_resembles_a_mistake_passes(changes):
    check(ppo(**changes), 8)


OPTIONS = {  # of the policy losses, by the key that sets them
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "clip_c",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "ppo_kl_coef": "ppo_kl_coef",
}


def test_a_key_is_refused_exactly_where_the_loss_does_not_read_it():
    generator = torch.Generator().manual_seed(5)
    shape = (6, 12)
    inputs = PolicyLossInputs(
        logprob=-torch.rand(shape, generator=generator) * 3,
        old_logprob=-torch.rand(shape, generator=generator) * 3,
        advantages=torch.randn(shape, generator=generator),
        mask=torch.ones(shape, dtype=torch.bool),
        selected=torch.rand(shape, generator=generator) < 0.5,
    )

    keys = {key for traits in POLICY_LOSS_TRAITS.values() for key in traits.reads}
    # the covariance losses choose tokens by the others, before the loss is computed
    assert keys - set(OPTIONS) == {
        "clip_ratio",
        "clip_cov_ratio",
        "clip_cov_lb",
        "clip_cov_ub",
        "kl_cov_ratio",
    }

    for name, function in POLICY_LOSSES.items():
        loss = policy_loss(function, inputs, PolicyLossOptions()).per_token
        for key, option in OPTIONS.items():
            moved = replace(PolicyLossOptions(), **{option: 1.5})
            read = not torch.equal(policy_loss(function, inputs, moved).per_token, loss)
            assert read == (key in POLICY_LOSS_TRAITS[name].reads), (name, key)
