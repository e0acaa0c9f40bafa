"""The method of a PPO configuration in words."""

import pytest

from mrlhf.preflight import describe
from mrlhf.preflight.method_description import describe_method
from tests.unit.configurations import ppo

GRPO = {"algorithm__adv_estimator": "grpo"}
CORRECTION = "algorithm__rollout_correction"


def test_the_method_in_words():
    config = ppo(
        algorithm__lam_length_alpha=0.05,
        algorithm__lam_critic=1.0,
        actor__clip_ratio_high=0.28,
        actor__positive_lm_coef=0.1,
        actor__use_kl_loss=True,
        actor__entropy_coeff=0.01,
        actor__target_kl_stop=0.05,
        actor__optim={"skip_grad_norm": 20.0},
        critic__optim={"skip_grad_norm": 30.0},
        algorithm__rollout_correction={
            "preset": "decoupled_geo_rs_seq_tis",
            "rollout_is_batch_normalize": True,
        },
    )

    assert list(describe_method(config)) == [
        "the method",
        "  rewards: scores",
        "  advantages: gae, gamma 1.0, lambda 1 - 1 / (0.05 x length), of the critic's targets 1.0",
        "  policy loss: vanilla, clip -0.2 +0.28, dual clip 3, - 0.01 x entropy, + 0.1 x negative "
        "log-likelihood of right responses",
        "  KL in the loss: + 0.001 x KL low_var_kl to the reference",
        "  aggregation: token-mean",
        "  rollout correction: decoupled, sequence weights cut off at 2, divided by their mean, "
        "kept where seq_mean_k1 in 0.999..1.001",
        "  an update stops before the step whose actor/ppo_kl is above 0.05",
        "  actor: steps with a gradient norm above 20 are skipped",
        "  critic: steps with a gradient norm above 30 are skipped",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "scores"),
        (
            {
                "reward_norm": "running",
                "reward_clip": 5.0,
                "overlong_buffer": {"enable": True, "len": 20, "penalty_factor": 0.5},
                "missing_eos_penalty": 2.0,
                "use_kl_in_reward": True,
                "kl_penalty": "k3",
                "kl_ctrl": {"type": "adaptive", "kl_coef": 0.02},
                "whiten_rewards": True,
            },
            "scores normalised (running), clipped to -/+ 5, up to -0.5 in the last 20 of 60 "
            "tokens, -2 where cut off, minus 0.02 (adaptive, target 0.1, horizon 10000) x KL k3 "
            "of each token, whitened",
        ),
        (
            {"use_kl_in_reward": True, "kl_placement": "terminal"},
            "scores, minus 0.001 x KL kl of the response off its last token",
        ),
    ],
)
def test_what_becomes_of_the_scores_in_words(changes, expected):
    config = ppo(**{f"algorithm__{key}": value for key, value in changes.items()})
    assert f"  rewards: {expected}" in describe_method(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {
                **GRPO,
                "algorithm__norm_adv_by_std_in_grpo": False,
                "actor__policy_loss__loss_mode": "gspo",
            },
            [
                "  no critic: grpo needs none",
                "  rewards: scores",
                "  advantages: grpo, not divided by the standard deviation",
                "  policy loss: gspo, clip -0.2 +0.2",
                "  aggregation: seq-mean-token-mean",
                "  rollout correction: none, the mismatch is only measured",
            ],
        ),
        (
            {"algorithm__adv_estimator": "gpg", CORRECTION: {"preset": "bypass_pg_token_icepop"}},
            [
                "  no critic: gpg needs none",
                "  rewards: scores",
                "  advantages: gpg, divided by 1.0",
                "  policy loss: reinforce",
                "  aggregation: token-mean",
                "  rollout correction: bypass, old = the engine's log-probs, token weights 0 "
                "outside 0.5..5",
            ],
        ),
        (
            {"algorithm__adv_estimator": "remax", "actor__policy_loss__loss_mode": "gpg"},
            [
                "  no critic: remax needs none",
                "  rewards: scores",
                "  advantages: remax, against a greedy answer to each prompt",
                "  policy loss: gpg",
                "  aggregation: token-mean",
                "  rollout correction: none, the mismatch is only measured",
            ],
        ),
        (
            {
                "algorithm__adv_estimator": "reinforce_plus_plus",
                "actor__policy_loss__loss_mode": "kl_cov",
                CORRECTION: {"preset": "decoupled_k3_rs"},
            },
            [
                "  no critic: reinforce_plus_plus needs none",
                "  rewards: scores",
                "  advantages: reinforce_plus_plus, gamma 1.0",
                "  policy loss: kl_cov",
                "  aggregation: token-mean",
                "  rollout correction: decoupled, kept where seq_mean_k3 <= 0.01",
                "  one more forward pass a mini-batch: a statistic of the current policy over all "
                "of it comes first",
            ],
        ),
    ],
)
def test_other_methods_in_words(changes, expected):
    assert list(describe_method(ppo(**changes))) == ["the method", *expected]


def test_dynamic_sampling_in_words():
    config = ppo(
        data__gen_batch_size=96, algorithm__filter_groups={"enable": True, "max_num_gen_batches": 5}
    )
    line = (
        "  prompts whose answers all have the same score are replaced: <= 5 x 96 prompts are "
        "generated"
    )
    assert line in describe(config, 8).splitlines()
