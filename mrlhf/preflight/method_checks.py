"""What must hold between the keys that make up the method: advantages, loss, reward, correction,
dynamic sampling.

Each complaint is one line with the numbers and the remedy. A key that only another advantage
estimator would read is refused rather than ignored, and so is what would destroy or contradict the
method. Numbers that are not in use for another reason may stay: those of another objective, of a KL
or a buffer that is off. It knows no rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.roots import PPOConfig
from mrlhf.config.sections import CLIP_RATIO
from mrlhf.rl.names import COMPARES_ANSWERS, CORRECTNESS_TERMS, DISCOUNTED
from mrlhf.user_code import is_reference


def method_problems(config: PPOConfig) -> Iterator[str]:
    """Every complaint about the method, one line each."""
    yield from _estimator_problems(config)
    yield from _group_problems(config)
    yield from _reward_problems(config)
    yield from _loss_problems(config)
    yield from _correction_problems(config)
    yield from _sampling_problems(config)
    yield from _length_problems(config)
    yield from _correctness_problems(config)


def tells_right_from_wrong(config: PPOConfig) -> bool:
    """Whether a reward term may say which responses are right; a user's function does where it
    returns `acc`.
    """
    return any(term.name in CORRECTNESS_TERMS or ":" in term.name for term in config.reward.terms)


def _estimator_problems(config: PPOConfig) -> Iterator[str]:
    """Keys of one advantage estimator beside another; an estimator of the user's is given all."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    is_own = is_reference(name)
    readers: list[tuple[str, object, object, tuple[str, ...]]] = [
        ("gamma", algorithm.gamma, 1.0, DISCOUNTED),
        ("lam", algorithm.lam, 1.0, ("gae",)),
        ("lam_critic", algorithm.lam_critic, None, ("gae",)),
        ("lam_length_alpha", algorithm.lam_length_alpha, None, ("gae",)),
        ("norm_adv_by_std_in_grpo", algorithm.norm_adv_by_std_in_grpo, True, COMPARES_ANSWERS),
        ("f_norm", algorithm.f_norm, 1.0, ("gpg",)),
    ]
    for key, value, default, estimators in readers:
        if value != default and name not in estimators and not is_own:
            yield (
                f"algorithm.{key} {_yaml(value)} has no effect with algorithm.adv_estimator {name}; leave it at "
                f"{_yaml(default)}, or use {' or '.join(estimators)}"
            )
    if algorithm.use_critic and not is_own:
        yield (
            f"algorithm.use_critic true has no effect with algorithm.adv_estimator {name}; leave "
            "it at false, or use an estimator of your own (path/to/file.py:function)"
        )
    reads_lambda = name == "gae" or is_own
    if reads_lambda and algorithm.lam_length_alpha is not None and algorithm.lam != 1.0:
        yield (
            f"algorithm.lam {algorithm.lam} and algorithm.lam_length_alpha {algorithm.lam_length_alpha} both set the "
            "lambda of the advantages; leave lam at 1.0 or lam_length_alpha at null"
        )
    longest = config.data.max_response_length
    if (
        reads_lambda
        and algorithm.lam_length_alpha is not None
        and algorithm.lam_length_alpha * longest <= 1
    ):
        yield (
            f"algorithm.lam_length_alpha {algorithm.lam_length_alpha} x data.max_response_length {longest} = "
            f"{algorithm.lam_length_alpha * longest:g} is not above 1, so lambda would be 0 for every response; raise "
            f"lam_length_alpha above {1 / longest:g} or the length"
        )
    if not config.needs_critic and config.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup {config.trainer.critic_warmup} waits for a critic, but algorithm.adv_estimator "
            f"{name} has none; set trainer.critic_warmup to 0 or use gae"
        )


def _group_problems(config: PPOConfig) -> Iterator[str]:
    """What compares the answers to one prompt, where there is one answer."""
    algorithm, n = config.algorithm, config.rollout.n
    if n == 1:
        users = []
        if algorithm.adv_estimator in COMPARES_ANSWERS:
            users.append(f"algorithm.adv_estimator {algorithm.adv_estimator}")
        if algorithm.filter_groups.enable:
            users.append("algorithm.filter_groups.enable")
        if algorithm.reward_norm == "group":
            users.append("algorithm.reward_norm group")
        for user in users:
            yield f"{user} compares the answers to a prompt, but rollout.n is 1; set rollout.n to at least 2"
    if algorithm.reward_norm is not None and algorithm.adv_estimator == "remax":
        yield (
            f"algorithm.reward_norm {algorithm.reward_norm} with algorithm.adv_estimator remax: the greedy answer's "
            "score, which is taken off, would stay on another scale; set algorithm.reward_norm to null"
        )


def _reward_problems(config: PPOConfig) -> Iterator[str]:
    """The KL in the reward, and rewards that are rescaled one by one."""
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    takes_single_rewards = algorithm.adv_estimator == "gae" or is_reference(algorithm.adv_estimator)
    if algorithm.whiten_rewards and not takes_single_rewards:
        yield (
            f"algorithm.whiten_rewards rescales single rewards, but algorithm.adv_estimator {algorithm.adv_estimator} "
            "compares sums over responses; turn whiten_rewards off or use gae"
        )
    if not algorithm.use_kl_in_reward or control.type != "adaptive":
        return
    samples, key = config.samples_per_step, "algorithm.kl_ctrl"
    if samples >= 5 * control.horizon:
        yield (
            f"{key}.horizon {control.horizon} is too short for data.train_batch_size x rollout.n = {samples} samples a "
            f"step: the coefficient could change by -0.2 x {samples} / {control.horizon} and so reach 0 or less; raise "
            f"horizon above {samples // 5}"
        )
    if control.kl_coef == 0:
        yield (
            f"{key}.kl_coef {control.kl_coef} with {key}.type adaptive stays 0 for ever, since it is multiplied; set "
            "kl_coef above 0 or use_kl_in_reward to false"
        )


def _differ_within_a_response(config: PPOConfig) -> str | None:
    """Why the advantages of a response's tokens differ, or None where they are all the same."""
    algorithm = config.algorithm
    name, of_each_token = (
        algorithm.adv_estimator,
        algorithm.use_kl_in_reward and algorithm.kl_placement == "token",
    )
    if name == "gae":
        return f"algorithm.adv_estimator {name}"
    if name == "reinforce_plus_plus" and algorithm.gamma != 1.0:
        return f"algorithm.adv_estimator {name} with algorithm.gamma {algorithm.gamma}"
    if name in ("reinforce_plus_plus", "remax") and of_each_token:
        return f"algorithm.adv_estimator {name} with the KL in the reward at algorithm.kl_placement token"
    return None


def _loss_problems(config: PPOConfig) -> Iterator[str]:
    actor, rollout, mode = config.actor, config.rollout, config.actor.policy_loss.loss_mode
    reason = _differ_within_a_response(config)
    if mode == "geo_mean" and reason is not None:
        yield (
            f"actor.policy_loss.loss_mode geo_mean is defined for one advantage a response, but {reason} gives one a "
            "token; use another estimator, such as grpo, or another loss"
        )
    if (
        actor.clip_ratio != CLIP_RATIO
        and actor.clip_ratio_low is not None
        and actor.clip_ratio_high is not None
    ):
        yield (
            f"actor.clip_ratio {actor.clip_ratio} has no effect beside actor.clip_ratio_low {actor.clip_ratio_low} and "
            f"actor.clip_ratio_high {actor.clip_ratio_high}; leave it at {CLIP_RATIO}, or set one of these to null"
        )
    if rollout.truncates and (mode != "gpg" or config.algorithm.rollout_correction.active):
        yield (
            f"rollout.top_k {rollout.top_k}, rollout.top_p {rollout.top_p}: truncated sampling breaks PPO's "
            "probability ratio, because training uses the whole distribution; set rollout.top_k=-1 rollout.top_p=1.0"
        )


def _correction_problems(config: PPOConfig) -> Iterator[str]:
    algorithm, key = config.algorithm, "algorithm.rollout_correction"
    correction, mode = algorithm.rollout_correction, config.actor.policy_loss.loss_mode
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        yield (
            f"{key}.rollout_is_batch_normalize is on but there are no weights; set {key}.rollout_is to token or "
            "sequence, or turn it off"
        )
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield f"{key}.loss_type reinforce needs {key}.bypass_mode; turn that on or set loss_type to ppo_clip"
    if correction.loss_type == "reinforce" and correction.bypass_mode and mode != "vanilla":
        yield (
            f"{key}.loss_type reinforce and actor.policy_loss.loss_mode {mode} are two losses; set loss_mode to "
            "vanilla or loss_type to ppo_clip"
        )
    if (
        correction.bypass_mode
        and correction.loss_type == "ppo_clip"
        and correction.rollout_is is not None
    ):
        yield (
            f"{key}.rollout_is {correction.rollout_is} with bypass_mode and loss_type ppo_clip: the ratio is to the "
            "engine's policy already and would count twice; set rollout_is to null or loss_type to reinforce"
        )
    if correction.bypass_mode and algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        yield (
            f"algorithm.kl_penalty full needs the forward pass that {key}.bypass_mode saves; choose another "
            "algorithm.kl_penalty, such as k1, or turn bypass_mode off"
        )


def _sampling_problems(config: PPOConfig) -> Iterator[str]:
    """How many prompts are generated for a batch."""
    data, groups = config.data, config.algorithm.filter_groups
    if not groups.enable:
        if data.gen_batch_size != data.train_batch_size:
            yield (
                f"data.gen_batch_size {data.gen_batch_size} is not data.train_batch_size {data.train_batch_size}, and "
                "no prompts are dropped; leave gen_batch_size out or turn algorithm.filter_groups.enable on"
            )
        return
    most = groups.max_num_gen_batches * data.gen_batch_size
    if most < data.train_batch_size:
        enough = -(-data.train_batch_size // data.gen_batch_size)
        yield (
            f"algorithm.filter_groups.max_num_gen_batches {groups.max_num_gen_batches} x data.gen_batch_size "
            f"{data.gen_batch_size} = {most} prompts never fill data.train_batch_size {data.train_batch_size}; raise "
            f"max_num_gen_batches to at least {enough} or gen_batch_size"
        )


def _length_problems(config: PPOConfig) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, config.data.max_response_length
    if not buffer.enable:
        return
    if buffer.len is None:
        yield (
            "algorithm.overlong_buffer.enable is on without algorithm.overlong_buffer.len; set len to the number of "
            f"last tokens to penalise, below data.max_response_length {longest}"
        )
    elif buffer.len >= longest:
        yield (
            f"algorithm.overlong_buffer.len {buffer.len} is not below data.max_response_length {longest}, so every "
            "response would be penalised; lower the first or raise the second"
        )


def _correctness_problems(config: PPOConfig) -> Iterator[str]:
    """What asks whether a response is right, where no reward term can tell."""
    if tells_right_from_wrong(config):
        return
    users = []
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric == "acc":
        users.append("algorithm.filter_groups.metric acc")
    if config.actor.positive_lm_coef > 0:
        users.append(f"actor.positive_lm_coef {config.actor.positive_lm_coef}")
    for user in users:
        yield (
            f"{user} needs to know which responses are right, but no reward term tells; add {{name: exact_match, "
            "weight: 0}, gsm8k, or a function that returns acc, to reward.terms"
        )


def _yaml(value: object) -> str:
    """`value` as it is written in a file."""
    return "null" if value is None else str(value).lower()
