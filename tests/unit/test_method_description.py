"""The method of a PPO configuration in words."""

import pytest

from mrlhf.preflight import describe
from mrlhf.preflight.words import describe_method
from tests.unit.configurations import ppo

CORRECTION = "algorithm__rollout_correction"
NO_OTHERS = "  with all other keys at their defaults"


def test_the_method_in_words():
    config = ppo(
        algorithm__lam_length_alpha=0.05,
        algorithm__lam_critic=1.0,
        algorithm__missing_eos_penalty=2.0,
        actor__clip_ratio_high=0.28,
        actor__use_kl_loss=True,
        actor__entropy_coeff=0.01,
        actor__target_kl_stop=0.05,
        actor__optim={"skip_grad_norm": 20.0},
        critic__optim={"skip_grad_norm": 30.0},
        critic__cliprange_value=0.2,
        algorithm__rollout_correction={
            "preset": "decoupled_geo_rs_seq_tis",
            "rollout_is_batch_normalize": True,
        },
    )

    key = "algorithm.rollout_correction"
    assert list(describe_method(config)) == [
        "the method",
        "  advantages: gae, whitened",
        "  policy loss: vanilla, aggregation: token-mean",
        "  with actor.optim.skip_grad_norm 20.0, actor.clip_ratio_high 0.28, "
        "actor.target_kl_stop 0.05, actor.entropy_coeff 0.01, actor.use_kl_loss true, "
        "critic.optim.skip_grad_norm 30.0, critic.cliprange_value 0.2, algorithm.lam_critic 1.0, "
        "algorithm.lam_length_alpha 0.05, algorithm.missing_eos_penalty 2.0, "
        f"{key}.rollout_is sequence, {key}.rollout_is_batch_normalize true, "
        f"{key}.rollout_rs seq_mean_k1, {key}.rollout_rs_threshold 0.999_1.001",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {
                "algorithm__adv_estimator": "grpo",
                "actor__policy_loss__loss_mode": "gspo",
                # neither of a part that is off nor of a model that is not built
                "actor__kl_loss_coef": 0.3,
                "critic__cliprange_value": 0.2,
            },
            [
                "  no critic: grpo needs none",
                "  advantages: grpo",
                "  policy loss: gspo, aggregation: seq-mean-token-mean",
                NO_OTHERS,
            ],
        ),
        (
            {"algorithm__adv_estimator": "gpg", CORRECTION: {"preset": "bypass_pg_token_icepop"}},
            [
                "  no critic: gpg needs none",
                "  advantages: gpg",
                "  policy loss: reinforce, aggregation: token-mean",
                "  with algorithm.rollout_correction.rollout_is token, "
                "algorithm.rollout_correction.rollout_is_threshold 0.5_5.0, "
                "algorithm.rollout_correction.bypass_mode true, "
                "algorithm.rollout_correction.loss_type reinforce",
            ],
        ),
        (
            {"algorithm__adv_estimator": "remax", "actor__policy_loss__loss_mode": "kl_cov"},
            [
                "  no critic: remax needs none",
                "  advantages: remax, against a greedy answer to each prompt",
                "  policy loss: kl_cov, aggregation: token-mean",
                NO_OTHERS,
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
