"""Conditions between the keys of the method: advantages, loss, reward, correction, dynamic
sampling.

Each complaint is one line with the numbers and the remedy. Only keys that destroy or contradict the
method are refused here; `config.unread` deals with keys that have no effect. A user's function or
environment tells its names only when it is called, so with one of them names are checked on the
first step. This file knows no rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.roots import PPOConfig
from mrlhf.config.unread import is_read
from mrlhf.rl.names import CORRECTNESS_TERMS, estimator_traits, policy_loss_traits

_SHARES_OF_RIGHT = ("/acc@", "/pass@", "/maj@")


def method_problems(config: PPOConfig) -> Iterator[str]:
    """All complaints about the method, one line each."""
    yield from _prompt_group_problems(config)
    yield from _reward_problems(config)
    yield from _loss_problems(config)
    yield from _correction_problems(config)
    yield from _replay_problems(config)
    yield from _sampling_problems(config)
    yield from _length_problems(config)
    yield from _weight_problems(config)
    yield from _component_problems(config)
    yield from _correctness_problems(config)


def _prompt_group_problems(config: PPOConfig) -> Iterator[str]:
    """Comparisons of the answers to one prompt, although there is only one answer."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    traits = estimator_traits(name)
    users = []
    if traits.compares_answers:
        users.append(f"algorithm.adv_estimator {name}")
    if algorithm.filter_groups.enable:
        users.append("algorithm.filter_groups.enable")
    if algorithm.reward_norm == "group":
        users.append("algorithm.reward_norm group")
    if users and config.rollout.n == 1:
        yield (
            f"{users[0]} compares the answers to a prompt, but rollout.n is 1; set rollout.n to at "
            "least 2"
        )

    if algorithm.reward_norm is not None and traits.needs_greedy_answer:
        yield (
            f"algorithm.reward_norm {algorithm.reward_norm} with algorithm.adv_estimator {name}: "
            "the greedy answer's score, which is taken off, would stay on another scale; set "
            "algorithm.reward_norm to null"
        )


def _reward_problems(config: PPOConfig) -> Iterator[str]:
    """The coefficient of the KL in the reward."""
    algorithm = config.algorithm
    control = algorithm.kl_ctrl
    if not algorithm.use_kl_in_reward or control.type != "adaptive":
        return
    samples = config.samples_per_step
    if samples >= 5 * control.horizon:
        yield (
            f"algorithm.kl_ctrl.horizon {control.horizon} is too short for data.train_batch_size "
            f"x rollout.n = {samples} samples a step: the coefficient could change by -0.2 x "
            f"{samples} / {control.horizon} and so reach 0 or less; raise horizon above "
            f"{samples // 5}"
        )
    if control.kl_coef == 0:
        yield (
            f"algorithm.kl_ctrl.kl_coef {control.kl_coef} with algorithm.kl_ctrl.type adaptive "
            "stays 0 for ever, since it is multiplied; set kl_coef above 0 or use_kl_in_reward to "
            "false"
        )


def _differ_within_a_response(config: PPOConfig) -> str | None:
    """The reason why the tokens of a response have different advantages; None if equal."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    traits = estimator_traits(name)
    if traits.needs_values or traits.needs_squared_probabilities:
        return f"algorithm.adv_estimator {name}"
    if not traits.sums_later_rewards:
        return None

    if is_read(config, "algorithm.gamma") and algorithm.gamma != 1.0:
        return f"algorithm.adv_estimator {name} with algorithm.gamma {algorithm.gamma}"
    if algorithm.use_kl_in_reward and algorithm.kl_placement == "token":
        return (
            f"algorithm.adv_estimator {name} with the KL in the reward at algorithm.kl_placement "
            "token"
        )
    return None


def _loss_problems(config: PPOConfig) -> Iterator[str]:
    """Keys that contradict the policy loss."""
    actor = config.actor
    rollout = config.rollout
    mode = actor.policy_loss.loss_mode

    reason = _differ_within_a_response(config)
    if mode == "geo_mean" and reason is not None:
        yield (
            "actor.policy_loss.loss_mode geo_mean is defined for one advantage a response, but "
            f"{reason} gives one a token; use another estimator, such as grpo, or another loss"
        )
    uses_ratio = policy_loss_traits(mode).uses_ratio or config.algorithm.rollout_correction.active
    if rollout.truncates and uses_ratio:
        yield (
            f"rollout.top_k {rollout.top_k}, rollout.top_p {rollout.top_p}: truncated sampling "
            "breaks PPO's probability ratio, because training uses the whole distribution; set "
            "rollout.top_k=-1 rollout.top_p=1.0"
        )


def _correction_problems(config: PPOConfig) -> Iterator[str]:
    """Keys that contradict the correction of the engine's policy."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    mode = config.actor.policy_loss.loss_mode
    key = "algorithm.rollout_correction"

    reinforce = correction.loss_type == "reinforce"
    if reinforce and not correction.bypass_mode:
        yield (
            f"{key}.loss_type reinforce needs {key}.bypass_mode; turn that on or set loss_type to "
            "ppo_clip"
        )
    if reinforce and correction.bypass_mode and mode != "vanilla":
        yield (
            f"{key}.loss_type reinforce and actor.policy_loss.loss_mode {mode} are two losses; set "
            "loss_mode to vanilla or loss_type to ppo_clip"
        )
    if correction.bypass_mode and not reinforce and correction.rollout_is is not None:
        yield (
            f"{key}.rollout_is {correction.rollout_is} with bypass_mode and loss_type ppo_clip: "
            "the ratio is to the engine's policy already and would count twice; set rollout_is to "
            "null or loss_type to reinforce"
        )
    if correction.bypass_mode and algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        yield (
            f"algorithm.kl_penalty full needs the forward pass that {key}.bypass_mode saves; "
            "choose another algorithm.kl_penalty, such as k1, or turn bypass_mode off"
        )
    estimator = algorithm.adv_estimator
    if correction.bypass_mode and estimator_traits(estimator).needs_squared_probabilities:
        yield (
            f"algorithm.adv_estimator {estimator} needs the probabilities of the whole vocabulary, "
            f"from the forward pass that {key}.bypass_mode saves; turn bypass_mode off or use "
            "another estimator, such as rloo"
        )


def _replay_problems(config: PPOConfig) -> Iterator[str]:
    """Experts to be replayed although nothing records them."""
    replay = config.actor.router_replay
    engine = config.rollout.engine
    if replay == "rollout" and not config.rollout.records_experts:
        yield (
            f"actor.router_replay rollout needs the experts that the engine chose, which "
            f"rollout.engine {engine} does not record; set rollout.engine to native, or "
            "actor.router_replay to old or none"
        )
    if replay == "old" and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "actor.router_replay old needs the forward pass that "
            "algorithm.rollout_correction.bypass_mode saves; turn bypass_mode off or set "
            "actor.router_replay to rollout"
        )


def _sampling_problems(config: PPOConfig) -> Iterator[str]:
    """Two ways to choose prompts, and too few generated ones for a batch."""
    data = config.data
    filters = config.algorithm.filter_groups
    if not filters.enable:
        return
    if config.rollout.partial.is_on:
        yield (
            "algorithm.filter_groups.enable and rollout.partial both choose the prompts of a "
            "step; turn filter_groups off or set rollout.partial.over to 1"
        )

    most = filters.max_num_gen_batches * data.gen_batch_size
    if most < data.train_batch_size:
        enough = -(-data.train_batch_size // data.gen_batch_size)
        yield (
            f"algorithm.filter_groups.max_num_gen_batches {filters.max_num_gen_batches} x "
            f"data.gen_batch_size {data.gen_batch_size} = {most} prompts never fill "
            f"data.train_batch_size {data.train_batch_size}; raise max_num_gen_batches to at least "
            f"{enough} or gen_batch_size"
        )


def _length_problems(config: PPOConfig) -> Iterator[str]:
    """A lambda that is 0 for every response, and a penalty that none or every response has."""
    longest = config.data.max_response_length
    alpha = config.algorithm.lam_length_alpha
    reads_lambda = is_read(config, "algorithm.lam_length_alpha")
    if reads_lambda and alpha is not None and alpha * longest <= 1:
        yield (
            f"algorithm.lam_length_alpha {alpha} x data.max_response_length {longest} = "
            f"{alpha * longest:g} is not above 1, so lambda would be 0 for every response; raise "
            f"lam_length_alpha above {1 / longest:g} or the length"
        )

    buffer = config.algorithm.overlong_buffer
    if not buffer.enable:
        return
    if buffer.len is None:
        yield (
            "algorithm.overlong_buffer.enable is on without algorithm.overlong_buffer.len; set len "
            "to the number of last tokens to penalise, below data.max_response_length "
            f"{longest}"
        )
    elif buffer.len >= longest:
        yield (
            f"algorithm.overlong_buffer.len {buffer.len} is not below data.max_response_length "
            f"{longest}, so every response would be penalised; lower the first or raise the second"
        )


def _weight_problems(config: PPOConfig) -> Iterator[str]:
    """Terms that all have the weight 0, where only their sum counts."""
    terms = config.reward.terms
    if config.algorithm.gdpo_reward_keys is None and not any(term.weight for term in terms):
        names = ", ".join(term.name for term in terms)
        yield (
            f"reward.terms gives every term the weight 0 ({names}), so every score would be 0 and "
            "nothing could be learned; give at least one term another weight"
        )


def _component_problems(config: PPOConfig) -> Iterator[str]:
    """Terms to compare that do not exist or are named twice, and weights that do not fit them."""
    if not is_read(config, "algorithm.gdpo_reward_keys"):
        return
    key = "algorithm.gdpo_reward_keys"
    keys = config.algorithm.gdpo_reward_keys
    weights = config.algorithm.gdpo_reward_weights
    terms = [term.name for term in config.reward.terms]

    of_weights = "algorithm.gdpo_reward_weights"
    if weights is not None and keys is None:
        yield f"{of_weights} needs {key}, which says what is weighted; set both"
    elif weights is not None and keys is not None and len(keys) != len(weights):
        yield (
            f"{of_weights} has {len(weights)} numbers for the {len(keys)} names in {key}; give one "
            "for each"
        )
    if weights is not None and not any(weights):
        yield f"{of_weights} is 0 for every term, so nothing could be learned; give another weight"

    keys = keys or []
    for name in sorted({name for name in keys if keys.count(name) > 1}):
        yield f"{key} names {name} {keys.count(name)} times; name it once and add the weights"
    if config.rollout.environment or any(":" in term for term in terms):
        return
    for name in keys:
        if name not in terms:
            yield (
                f"{key} names {name}, which no term of reward.terms reports (they are "
                f"{', '.join(terms)}); name one of these, or add a function that returns {name}"
            )


def _correctness_problems(config: PPOConfig) -> Iterator[str]:
    """Keys that need to know which responses are right, although no reward term says it."""
    # A function or an environment of the user's may return acc.
    known = (*CORRECTNESS_TERMS, "environment")
    if any(term.name in known or ":" in term.name for term in config.reward.terms):
        return

    users = []
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric == "acc":
        users.append("algorithm.filter_groups.metric acc")
    if config.actor.positive_lm_coef > 0:
        users.append(f"actor.positive_lm_coef {config.actor.positive_lm_coef}")
    for key in ("keep_best", "export_best"):
        metric = getattr(config.trainer, key)
        if metric is not None and any(share in metric for share in _SHARES_OF_RIGHT):
            users.append(f"trainer.{key} {metric}")

    for user in users:
        yield (
            f"{user} needs to know which responses are right, but no reward term says whether a "
            "response is right; add {name: exact_match, weight: 0}, gsm8k, or a function that "
            "returns acc, to reward.terms"
        )
