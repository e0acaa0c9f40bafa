"""What must hold between the keys that make up the method: advantages, loss, reward, correction,
dynamic sampling.

Each complaint is one line with the numbers and the remedy. Refused are

- a key that the chosen advantage estimator, policy loss, aggregation or correction does not read,
  unless it has its default value;
- what would destroy or contradict the method.

The numbers of a model that is not built may stay, so that a file without a critic can be laid over
one with a critic. The numbers of what a key of their own section switches off are the business of
`checks`. This file knows no rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.fields import Section
from mrlhf.config.roots import PPOConfig
from mrlhf.config.sections import CLIP_RATIO, CriticSection
from mrlhf.preflight.term_checks import term_problems
from mrlhf.rl.names import (
    ESTIMATOR_TRAITS,
    POLICY_LOSS_TRAITS,
    EstimatorTraits,
    PolicyLossTraits,
    estimator_traits,
    policy_loss_traits,
)
from mrlhf.roles.policy_loss import configured_loss

NORMALISED = "seq-mean-token-sum-norm"


def method_problems(config: PPOConfig) -> Iterator[str]:
    """Every complaint about the method, one line each."""
    yield from _estimator_problems(config)
    yield from _prompt_group_problems(config)
    yield from _reward_problems(config)
    yield from _loss_problems(config)
    yield from _unread_loss_keys(config)
    yield from _unread_scale_factors(config)
    yield from _correction_problems(config)
    yield from _replay_problems(config)
    yield from _sampling_problems(config)
    yield from _length_problems(config)
    yield from term_problems(config)


def objective(config: PPOConfig) -> tuple[str, str]:
    """The name of the policy loss that trains the actor, and the key and value that choose it."""
    correction = config.algorithm.rollout_correction
    loss = configured_loss(config.actor, correction)
    if loss == "reinforce":
        return loss, "algorithm.rollout_correction.loss_type reinforce"
    return loss, f"actor.policy_loss.loss_mode {loss}"


def _estimator_problems(config: PPOConfig) -> Iterator[str]:
    """Keys that the advantage estimator does not read, or that contradict each other."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    reads = estimator_traits(name).reads
    chosen = f"algorithm.adv_estimator {name}"
    yield from _unread_keys("algorithm", algorithm, reads, chosen, ESTIMATOR_TRAITS)
    if algorithm.use_critic and "use_critic" not in reads:
        yield (
            f"algorithm.use_critic true has no effect with algorithm.adv_estimator {name}; leave "
            "it at false, or use an estimator of your own (path/to/file.py:function)"
        )

    alpha = algorithm.lam_length_alpha
    longest = config.data.max_response_length
    reads_lambda = "lam_length_alpha" in reads
    if reads_lambda and alpha is not None and algorithm.lam != 1.0:
        yield (
            f"algorithm.lam {algorithm.lam} and algorithm.lam_length_alpha {alpha} both set the "
            "lambda of the advantages; leave lam at 1.0 or lam_length_alpha at null"
        )
    if reads_lambda and alpha is not None and alpha * longest <= 1:
        yield (
            f"algorithm.lam_length_alpha {alpha} x data.max_response_length {longest} = "
            f"{alpha * longest:g} is not above 1, so lambda would be 0 for every response; raise "
            f"lam_length_alpha above {1 / longest:g} or the length"
        )
    if not config.needs_critic and config.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup {config.trainer.critic_warmup} waits for a critic, but "
            f"algorithm.adv_estimator {name} has none; set trainer.critic_warmup to 0 or use gae"
        )


def _prompt_group_problems(config: PPOConfig) -> Iterator[str]:
    """What compares the answers to one prompt, although there is only one answer."""
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
    """The KL in the reward, and rewards that are rescaled one by one."""
    algorithm = config.algorithm
    traits = estimator_traits(algorithm.adv_estimator)
    if algorithm.whiten_rewards and not traits.allows_whitened_rewards:
        yield (
            "algorithm.whiten_rewards rescales single rewards, but algorithm.adv_estimator "
            f"{algorithm.adv_estimator} compares sums over responses; turn whiten_rewards off or "
            "use gae"
        )

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
    """Why the tokens of one response have different advantages; None if they are all the same."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    traits = estimator_traits(name)
    if traits.needs_values or traits.needs_squared_probabilities:
        return f"algorithm.adv_estimator {name}"
    if not traits.sums_later_rewards:
        return None

    if "gamma" in traits.reads and algorithm.gamma != 1.0:
        return f"algorithm.adv_estimator {name} with algorithm.gamma {algorithm.gamma}"
    if algorithm.use_kl_in_reward and algorithm.kl_placement == "token":
        return (
            f"algorithm.adv_estimator {name} with the KL in the reward at algorithm.kl_placement "
            "token"
        )
    return None


def _loss_problems(config: PPOConfig) -> Iterator[str]:
    """What contradicts the policy loss."""
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


def _unread_loss_keys(config: PPOConfig) -> Iterator[str]:
    """Keys of `actor` that the policy loss does not read."""
    actor = config.actor
    loss, chosen = objective(config)
    traits = policy_loss_traits(loss)
    sections: dict[str, Section] = {"actor": actor, "actor.policy_loss": actor.policy_loss}
    for path, section in sections.items():
        yield from _unread_keys(path, section, traits.reads, chosen, POLICY_LOSS_TRAITS)

    low = actor.clip_ratio_low
    high = actor.clip_ratio_high
    if traits.clips and actor.clip_ratio != CLIP_RATIO and low is not None and high is not None:
        yield (
            f"actor.clip_ratio {actor.clip_ratio} has no effect beside actor.clip_ratio_low {low} "
            f"and actor.clip_ratio_high {high}; leave it at {CLIP_RATIO}, or set one of these to "
            "null"
        )


def _unread_scale_factors(config: PPOConfig) -> Iterator[str]:
    """Divisors of a loss that another aggregation would read."""
    default = config.data.max_response_length
    for name, role in config.trained().items():
        mode = role.loss_agg_mode if isinstance(role, CriticSection) else role.agg_mode
        if mode != NORMALISED and role.loss_scale_factor != default:
            yield (
                f"{name}.loss_scale_factor {role.loss_scale_factor} has no effect with "
                f"{name}.loss_agg_mode {mode}; leave it out, or use {NORMALISED}"
            )


def _correction_problems(config: PPOConfig) -> Iterator[str]:
    """What contradicts the correction of the engine's policy."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    mode = config.actor.policy_loss.loss_mode
    key = "algorithm.rollout_correction"

    yield from _unread_weight_keys(correction)

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
    """Experts that are to be replayed although nothing records them."""
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


def _unread_weight_keys(correction: RolloutCorrectionSection) -> Iterator[str]:
    """Keys of the importance weights, although there are no weights."""
    key = "algorithm.rollout_correction"
    if correction.rollout_is is not None:
        return
    if correction.rollout_is_batch_normalize:
        yield (
            f"{key}.rollout_is_batch_normalize is on but there are no weights; set "
            f"{key}.rollout_is to token or sequence, or turn it off"
        )
    default = RolloutCorrectionSection.model_fields["rollout_is_threshold"].default
    if correction.rollout_is_threshold != default:
        yield (
            f"{key}.rollout_is_threshold {correction.rollout_is_threshold} has no effect with "
            f"{key}.rollout_is null; leave it at {default}, or set rollout_is to token or sequence"
        )


def _sampling_problems(config: PPOConfig) -> Iterator[str]:
    """How many prompts are generated for a batch."""
    data = config.data
    filters = config.algorithm.filter_groups
    if not filters.enable:
        if data.gen_batch_size != data.train_batch_size:
            yield (
                f"data.gen_batch_size {data.gen_batch_size} is not data.train_batch_size "
                f"{data.train_batch_size}, and no prompts are dropped; leave gen_batch_size out or "
                "turn algorithm.filter_groups.enable on"
            )
        return

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
    """The penalty of long responses against the longest response."""
    buffer = config.algorithm.overlong_buffer
    longest = config.data.max_response_length
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


def _unread_keys(
    path: str,
    section: Section,
    reads: frozenset[str],
    chosen: str,
    table: Mapping[str, EstimatorTraits] | Mapping[str, PolicyLossTraits],
) -> Iterator[str]:
    """Keys of `section` that have another value than the default, though only others read them.

    Args:
        path: the key of the section.
        section: where the keys stand.
        reads: the keys that the method in use reads.
        chosen: the method in use, in words.
        table: all methods of this kind; the keys that none of them reads are not looked at.
    """
    for key, field in type(section).model_fields.items():
        readers = [name for name, traits in table.items() if key in traits.reads]
        value = getattr(section, key)
        if readers and key not in reads and value != field.default:
            yield _no_effect(f"{path}.{key}", value, field.default, chosen, readers)


def _no_effect(
    key: str, value: object, default: object, chosen: str, readers: Sequence[str]
) -> str:
    """The complaint about a key that only `readers` would read, though `chosen` is in use."""
    *others, last = readers
    names = f"{', '.join(others)} or {last}" if others else last
    return (
        f"{key} {in_yaml(value)} has no effect with {chosen}; leave it at {in_yaml(default)}, or "
        f"use {names}"
    )


def in_yaml(value: object) -> str:
    """`value` as it is written in a file."""
    return "null" if value is None else str(value).lower()
