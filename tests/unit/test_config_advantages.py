"""What must hold between the keys of rewards and advantages.

Each mistake is refused, and nothing else is. The keys of losses, correction and sampling are tested
in `test_config_method`.
"""

import pytest

from mrlhf.preflight import check
from tests.unit.configurations import ppo, problems

GRPO = {"algorithm__adv_estimator": "grpo"}
GDPO = {"algorithm__adv_estimator": "gdpo"}
OTB = {"algorithm__adv_estimator": "optimal_token_baseline"}
SUM_ALONE = (
    "{} has no effect with algorithm.adv_estimator gdpo, which compares the scores of single terms "
    "and not their sum; turn it off, or use another estimator, such as grpo"
)
NOT_RIGHT = (
    "{} needs to know which responses are right, but no reward term says whether a response is "
    "right; add {{name: exact_match, weight: 0}}, gsm8k, or a function that returns acc, to "
    "reward.terms"
)
CORRECTION = "algorithm__rollout_correction"
ADAPTIVE = {"algorithm__use_kl_in_reward": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {**GRPO, "rollout__n": 1},
            "algorithm.adv_estimator grpo compares the answers to a prompt, but rollout.n is 1; "
            "set rollout.n to at least 2",
        ),
        (
            {"algorithm__adv_estimator": "grpo_passk", "rollout__n": 1},
            "algorithm.adv_estimator grpo_passk compares the answers to a prompt, but rollout.n "
            "is 1; set rollout.n to at least 2",
        ),
        (
            {"algorithm__reward_norm": "group", "rollout__n": 1},
            "algorithm.reward_norm group compares the answers to a prompt, but rollout.n is 1; "
            "set rollout.n to at least 2",
        ),
        (
            {"algorithm__adv_estimator": "remax", "algorithm__reward_norm": "running"},
            "algorithm.reward_norm running with algorithm.adv_estimator remax: the greedy "
            "answer's score, which is taken off, would stay on another scale; set "
            "algorithm.reward_norm to null",
        ),
        (
            {**GRPO, "trainer__critic_warmup": 3},
            "trainer.critic_warmup 3 has no effect with algorithm.adv_estimator grpo, which has no "
            "critic; leave it at 0, or use gae",
        ),
        (
            {**GRPO, "algorithm__lam": 0.95},
            "algorithm.lam 0.95 has no effect with algorithm.adv_estimator grpo; leave it at 1.0, "
            "or use gae",
        ),
        (
            {"algorithm__adv_estimator": "rloo", "algorithm__lam_critic": 1.0},
            "algorithm.lam_critic 1.0 has no effect with algorithm.adv_estimator rloo; leave it "
            "at null, or use gae",
        ),
        (
            {"algorithm__adv_estimator": "opo", "algorithm__lam_length_alpha": 0.05},
            "algorithm.lam_length_alpha 0.05 has no effect with algorithm.adv_estimator opo; "
            "leave it at null, or use gae",
        ),
        (
            {"algorithm__lam": 0.9, "algorithm__lam_length_alpha": 0.05},
            "algorithm.lam 0.9 has no effect, since algorithm.lam_length_alpha sets the lambda of "
            "the advantages; leave it at 1.0, or set that to null",
        ),
        (
            {"algorithm__adv_estimator": "remax", "algorithm__gamma": 0.99},
            "algorithm.gamma 0.99 has no effect with algorithm.adv_estimator remax; leave it at "
            "1.0, or use gae or reinforce_plus_plus",
        ),
        (
            {"algorithm__norm_adv_by_std_in_grpo": False},
            "algorithm.norm_adv_by_std_in_grpo false has no effect with algorithm.adv_estimator "
            "gae; leave it at true, or use grpo, grpo_passk or gdpo",
        ),
        (
            {**GRPO, "algorithm__gdpo_reward_keys": ["gsm8k"]},
            "algorithm.gdpo_reward_keys ['gsm8k'] has no effect with algorithm.adv_estimator grpo; "
            "leave it at null, or use gdpo",
        ),
        (
            {**GDPO, "rollout__n": 1},
            "algorithm.adv_estimator gdpo compares the answers to a prompt, but rollout.n is 1; "
            "set rollout.n to at least 2",
        ),
        (
            {**GDPO, "algorithm__gdpo_reward_keys": ["gsm8k", "style"]},
            "algorithm.gdpo_reward_keys names style, which no term of reward.terms reports (they "
            "are gsm8k); name one of these, or add a function that returns style",
        ),
        (
            {**GDPO, "algorithm__gdpo_reward_keys": ["gsm8k", "gsm8k"]},
            "algorithm.gdpo_reward_keys names gsm8k 2 times; name it once and add the weights",
        ),
        (
            {**GDPO, "algorithm__gdpo_reward_weights": [1.0]},
            "algorithm.gdpo_reward_weights needs algorithm.gdpo_reward_keys, which says what is "
            "weighted; set both",
        ),
        (
            {
                **GDPO,
                "algorithm__gdpo_reward_keys": ["gsm8k"],
                "algorithm__gdpo_reward_weights": [1.0, 2.0],
            },
            "algorithm.gdpo_reward_weights has 2 numbers for the 1 names in "
            "algorithm.gdpo_reward_keys; give one for each",
        ),
        (
            {
                **GDPO,
                "algorithm__gdpo_reward_keys": ["gsm8k"],
                "algorithm__gdpo_reward_weights": [0.0],
            },
            "algorithm.gdpo_reward_weights is 0 for every term, so nothing could be learned; give "
            "another weight",
        ),
        (
            {**GDPO, "algorithm__use_kl_in_reward": True},
            SUM_ALONE.format("algorithm.use_kl_in_reward true"),
        ),
        (
            {**GDPO, "algorithm__reward_norm": "group"},
            SUM_ALONE.format("algorithm.reward_norm group"),
        ),
        ({**GDPO, "algorithm__reward_clip": 5.0}, SUM_ALONE.format("algorithm.reward_clip 5.0")),
        (
            {**GDPO, "algorithm__missing_eos_penalty": 0.5},
            SUM_ALONE.format("algorithm.missing_eos_penalty 0.5"),
        ),
        (
            {**GDPO, "algorithm__overlong_buffer": {"enable": True, "len": 4}},
            SUM_ALONE.format("algorithm.overlong_buffer.enable true"),
        ),
        (
            {**OTB, CORRECTION: {"bypass_mode": True}},
            "algorithm.adv_estimator optimal_token_baseline needs the probabilities of the whole "
            "vocabulary, from the forward pass that algorithm.rollout_correction.bypass_mode "
            "saves; turn bypass_mode off or use another estimator, such as rloo",
        ),
        (
            {"reward__terms": [{"name": "gsm8k", "weight": 0.0}, {"name": "format", "weight": 0}]},
            "reward.terms gives every term the weight 0 (gsm8k, format), so every score would be 0 "
            "and nothing could be learned; give at least one term another weight",
        ),
        (
            {"trainer__keep_best": "val/x/acc@1", "reward__terms": [{"name": "format"}]},
            NOT_RIGHT.format("trainer.keep_best val/x/acc@1"),
        ),
        (
            {"trainer__export_best": "val/x/pass@4", "reward__terms": [{"name": "format"}]},
            NOT_RIGHT.format("trainer.export_best val/x/pass@4"),
        ),
        (
            {**GRPO, "algorithm__f_norm": 2.0},
            "algorithm.f_norm 2.0 has no effect with algorithm.adv_estimator grpo; leave it at "
            "1.0, or use gpg",
        ),
        (
            {**ADAPTIVE, "algorithm__kl_ctrl": {"type": "adaptive", "horizon": 25}},
            "algorithm.kl_ctrl.horizon 25 is too short for data.train_batch_size x rollout.n = "
            "128 samples a step: the coefficient could change by -0.2 x 128 / 25 and so reach 0 "
            "or less; raise horizon above 25",
        ),
        (
            {
                **ADAPTIVE,
                "data__train_batch_size": 80,
                "algorithm__kl_ctrl": {"type": "adaptive", "horizon": 32},
            },
            "algorithm.kl_ctrl.horizon 32 is too short for data.train_batch_size x rollout.n = "
            "160 samples a step: the coefficient could change by -0.2 x 160 / 32 and so reach 0 "
            "or less; raise horizon above 32",
        ),
        (
            {**ADAPTIVE, "algorithm__kl_ctrl": {"type": "adaptive", "kl_coef": 0.0}},
            "algorithm.kl_ctrl.kl_coef 0.0 with algorithm.kl_ctrl.type adaptive stays 0 for ever, "
            "since it is multiplied; set kl_coef above 0 or use_kl_in_reward to false",
        ),
        (
            {"algorithm__adv_estimator": "remax", "algorithm__whiten_rewards": True},
            "algorithm.whiten_rewards true has no effect with algorithm.adv_estimator remax; leave "
            "it at false, or use gae",
        ),
        (
            {"algorithm__lam_length_alpha": 0.015625, "data__max_response_length": 64},
            "algorithm.lam_length_alpha 0.015625 x data.max_response_length 64 = 1 is not above "
            "1, so lambda would be 0 for every response; raise lam_length_alpha above 0.015625 or "
            "the length",
        ),
        (
            {"algorithm__overlong_buffer": {"enable": True}},
            "algorithm.overlong_buffer.enable is on without algorithm.overlong_buffer.len; set "
            "len to the number of last tokens to penalise, below data.max_response_length 60",
        ),
        (
            {"algorithm__overlong_buffer": {"enable": True, "len": 60}},
            "algorithm.overlong_buffer.len 60 is not below data.max_response_length 60, so every "
            "response would be penalised; lower the first or raise the second",
        ),
    ],
)
def test_each_mistake_is_one_line_with_numbers_and_remedy(changes, expected):
    assert problems(ppo(**changes), 8) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__gamma": 0.9, "algorithm__lam": 0.9, "algorithm__lam_critic": 0.5},
        {"algorithm__lam_length_alpha": 0.05, "algorithm__lam_critic": 1.0},
        {
            "algorithm__adv_estimator": "reinforce_plus_plus",
            "algorithm__gamma": 0.9,
            "rollout__n": 1,
        },
        {"algorithm__adv_estimator": "grpo_passk", "algorithm__norm_adv_by_std_in_grpo": False},
        {"algorithm__adv_estimator": "gpg", "algorithm__f_norm": 2.0},
        {"algorithm__adv_estimator": "rloo", "rollout__n": 1},
        {"algorithm__reward_norm": "batch", "rollout__n": 1},
        {**GRPO, "algorithm__reward_norm": "running", "algorithm__reward_clip": 5.0},
        {
            **GDPO,
            "reward__terms": [{"name": "my.py:f", "weight": 0.0}],
            "algorithm__gdpo_reward_keys": ["f"],
        },
        {
            **GDPO,
            "reward__terms": [{"name": "my.py:f"}],
            "algorithm__gdpo_reward_keys": ["style"],
            "algorithm__gdpo_reward_weights": [-1.0],
        },
        {**OTB, "rollout__n": 1, CORRECTION: {"preset": "decoupled_token_is"}},
        {"trainer__keep_best": "val/x/acc@1"},
        {"trainer__keep_best": "val/x/reward_mean", "reward__terms": [{"name": "format"}]},
        {**ADAPTIVE, "algorithm__kl_ctrl": {"type": "adaptive", "horizon": 26}},
        {"algorithm__whiten_rewards": True},
        {"algorithm__lam_length_alpha": 0.017},
        {"algorithm__overlong_buffer": {"enable": True, "len": 59}},
    ],
)
def test_what_resembles_a_mistake_passes(changes):
    check(ppo(**changes), 8)
