"""The keys of a configuration that have no effect, because other keys decide so.

This is the one place that knows them. `load` leaves such a key out if it stands in another file
than the key that decides; `preflight` refuses the rest. The keys of a model that is not built are
not looked at, so that a file without a critic can be laid over one with a critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.config.fields import Section
from mrlhf.config.roots import PPOConfig, Root
from mrlhf.config.sections import CLIP_RATIO, CriticSection
from mrlhf.rl.names import (
    ESTIMATOR_TRAITS,
    POLICY_LOSS_TRAITS,
    EstimatorTraits,
    PolicyLossTraits,
    estimator_traits,
    policy_loss_traits,
)

NORMALISED = "seq-mean-token-sum-norm"
_ESTIMATOR = "algorithm.adv_estimator"
_LOSS_MODE = "actor.policy_loss.loss_mode"
_LOSS_TYPE = "algorithm.rollout_correction.loss_type"
_SHAPES_THE_SUM = (
    "use_kl_in_reward",
    "reward_norm",
    "reward_clip",
    "overlong_buffer.enable",
    "missing_eos_penalty",
)


@dataclass(frozen=True)
class Unread:
    """A key that has another value than its default, and no effect.

    Attributes:
        key: its dotted name.
        value: what it holds.
        why: what is the case, in words that follow "has no effect".
        remedy: what to do about it.
        deciders: the keys that decide so.
    """

    key: str
    value: Any
    why: str
    remedy: str
    deciders: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key} {in_yaml(self.value)} has no effect{self.why}; {self.remedy}"


def unread_keys(config: Root) -> Iterator[Unread]:
    """Every such key once."""
    told: set[str] = set()
    for unread in _all(config):
        if unread.key not in told:
            told.add(unread.key)
            yield unread


def trained_loss(config: PPOConfig) -> tuple[str, str]:
    """The name of the policy loss that trains the actor, and the key that chooses it."""
    loss_mode = config.actor.policy_loss.loss_mode
    loss = config.algorithm.rollout_correction.trained_loss(loss_mode)
    return loss, _LOSS_MODE if loss == loss_mode else _LOSS_TYPE


def in_yaml(value: object) -> str:
    """`value` as it is written in a file."""
    return "null" if value is None else str(value).lower()


def _all(config: Root) -> Iterator[Unread]:
    if isinstance(config, PPOConfig):
        yield from _of_estimator(config)
        yield from _of_loss(config)
        yield from _of_aggregation(config)
        yield from _of_sampling(config)
    yield from _of_switches(config)


def _of_switches(config: Root) -> Iterator[Unread]:
    """Numbers of what a key of their own section switches off."""
    not_built: set[str] = set()
    if isinstance(config, PPOConfig):
        not_built = {"critic", "reference"} - set(config.roles())

    for path, section in _sections(config, ""):
        if path.split(".")[0] in not_built:
            continue
        for switch, number in section.unread():
            decider = f"{path}.{switch.key}"
            yield Unread(
                f"{path}.{number}",
                section.value_of(number),
                f", since {decider} {switch.state}",
                f"leave it at {in_yaml(section.default_of(number))}, or {switch.remedy}",
                (decider,),
            )


def _sections(section: Section, path: str) -> Iterator[tuple[str, Section]]:
    """`section` and all in it, each with its key."""
    yield path, section
    for name in type(section).subsections():
        yield from _sections(getattr(section, name), f"{path}.{name}" if path else name)


def _of_estimator(config: PPOConfig) -> Iterator[Unread]:
    """Keys that the advantage estimator does not read."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    traits = estimator_traits(name)
    why = f" with {_ESTIMATOR} {name}"
    yield from _of_others("algorithm", algorithm, traits.reads, _ESTIMATOR, why, ESTIMATOR_TRAITS)

    if algorithm.use_critic and "use_critic" not in traits.reads:
        own = "use an estimator of your own (path/to/file.py:function)"
        remedy = f"leave it at false, or {own}"
        yield Unread("algorithm.use_critic", True, why, remedy, (_ESTIMATOR,))

    warmup = config.trainer.critic_warmup
    if warmup and not config.needs_critic:
        yield Unread(
            "trainer.critic_warmup",
            warmup,
            f"{why}, which has no critic",
            "leave it at 0, or use gae",
            (_ESTIMATOR, "algorithm.use_critic"),
        )

    if not traits.compares_terms:
        return
    for key in _SHAPES_THE_SUM:
        if algorithm.value_of(key) != algorithm.default_of(key):
            yield Unread(
                f"algorithm.{key}",
                algorithm.value_of(key),
                f"{why}, which compares the scores of single terms and not their sum",
                "turn it off, or use another estimator, such as grpo",
                (_ESTIMATOR,),
            )


def _of_loss(config: PPOConfig) -> Iterator[Unread]:
    """Keys of `actor` that the policy loss does not read."""
    actor = config.actor
    loss, decider = trained_loss(config)
    traits = policy_loss_traits(loss)
    sections: dict[str, Section] = {"actor": actor, "actor.policy_loss": actor.policy_loss}
    for path, section in sections.items():
        why = f" with {decider} {loss}"
        yield from _of_others(path, section, traits.reads, decider, why, POLICY_LOSS_TRAITS)

    low = actor.clip_ratio_low
    high = actor.clip_ratio_high
    if traits.clips and actor.clip_ratio != CLIP_RATIO and low is not None and high is not None:
        yield Unread(
            "actor.clip_ratio",
            actor.clip_ratio,
            f" beside actor.clip_ratio_low {low} and actor.clip_ratio_high {high}",
            f"leave it at {CLIP_RATIO}, or set one of these to null",
            ("actor.clip_ratio_low", "actor.clip_ratio_high"),
        )


def _of_aggregation(config: PPOConfig) -> Iterator[Unread]:
    """Divisors of a loss that another aggregation would read."""
    default = config.data.max_response_length
    for name, role in config.trained().items():
        decider = f"{name}.loss_agg_mode"
        mode = role.loss_agg_mode if isinstance(role, CriticSection) else role.agg_mode
        if mode != NORMALISED and role.loss_scale_factor != default:
            yield Unread(
                f"{name}.loss_scale_factor",
                role.loss_scale_factor,
                f" with {decider} {mode}",
                f"leave it out, or use {NORMALISED}",
                (decider,) if role.loss_agg_mode is not None else (decider, _LOSS_MODE),
            )


def _of_sampling(config: PPOConfig) -> Iterator[Unread]:
    """Another number of prompts to generate, although none of them is dropped."""
    data = config.data
    decider = "algorithm.filter_groups.enable"
    if not config.algorithm.filter_groups.enable and data.gen_batch_size != data.train_batch_size:
        yield Unread(
            "data.gen_batch_size",
            data.gen_batch_size,
            f" beside data.train_batch_size {data.train_batch_size}, since {decider} is false",
            "leave it out, or turn that on",
            (decider,),
        )


def _of_others(
    path: str,
    section: Section,
    reads: frozenset[str],
    decider: str,
    why: str,
    table: Mapping[str, EstimatorTraits] | Mapping[str, PolicyLossTraits],
) -> Iterator[Unread]:
    """Keys of `section` that other methods read, but not the one in use.

    Args:
        path: the key of the section.
        section: where the keys stand.
        reads: the keys that the method in use reads.
        decider: the key that chooses the method.
        why: the method in use, in words.
        table: all methods of this kind; the keys that none of them reads are not looked at.
    """
    for key, field in type(section).model_fields.items():
        readers = [name for name, traits in table.items() if key in traits.reads]
        value = getattr(section, key)
        if readers and key not in reads and value != field.default:
            remedy = f"leave it at {in_yaml(field.default)}, or use {_one_of(readers)}"
            yield Unread(f"{path}.{key}", value, why, remedy, (decider,))


def _one_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
