"""The batch arithmetic of a run in full, and the dry run that checks everything for a world size
that need not exist.

It returns text and builds nothing: no process group, no model, no data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.sections import ActorSection, CriticSection, RoleSection
from mrlhf.inference.installed import require_engine
from mrlhf.preflight.checks import AnyConfig, check, longest_unit
from mrlhf.preflight.method_description import describe_method
from mrlhf.preflight.model_checks import MEBIBYTE, cache_needs, check_models, read_facts
from mrlhf.preflight.user_methods import check_user_methods


def smallest_world(config: AnyConfig) -> int:
    """The fewest ranks on which the layout of every role fits."""
    return math.lcm(*(role.tp * role.pp for role in config.roles().values()))


def dry_run(config: AnyConfig, world_size: int | None) -> str:
    """Check `config` for `world_size` ranks (None: the fewest that fit) and describe the run.

    Raises:
        ConfigError: one line a mistake.
    """
    world_size = smallest_world(config) if world_size is None else world_size
    check(config, world_size)
    if isinstance(config, PPOConfig):
        check_user_methods(config)
    absent = check_models(config)
    lines = [describe(config, world_size)]
    if isinstance(config, PPOConfig):
        lines += _cache(config)
    if absent:
        lines.append(f"not checked, no config.json here: {', '.join(absent)}")
    return "\n".join([*lines, f"configuration fits {_count(world_size, 'rank')}"])


def preflight(config: AnyConfig, world_size: int) -> str:
    """Check that `config` can run here on `world_size` ranks, and describe the run.

    Raises:
        ConfigError: one line a mistake.
    """
    check(config, world_size)
    check_models(config)
    if isinstance(config, PPOConfig):
        check_user_methods(config)
        require_engine(config.rollout.engine)
    return describe(config, world_size)


def describe(config: AnyConfig, world_size: int, num_rows: int | None = None) -> str:
    """The layout and the batch arithmetic in words.

    Args:
        config: passes `check` for `world_size`.
        world_size: ranks.
        num_rows: rows of the training files, where they are known.
    """
    lines = [
        f"{type(config).__name__.removesuffix('Config')} on {_count(world_size, 'rank')}",
        *_layout(config, world_size),
    ]
    if isinstance(config, PPOConfig):
        lines += [*describe_method(config), *_ppo_step(config, world_size)]
    else:
        lines += [*_supervised_step(config, world_size)]
    return "\n".join([*lines, *_run(config, num_rows)])


def _cache(config: PPOConfig) -> Iterator[str]:
    """What the KV cache of one rank has to hold, where the model is known."""
    facts = read_facts("rollout", config.actor.path)
    if facts is None:
        return
    needs, megabytes = cache_needs(config, facts), config.rollout.kv_cache_mb
    yield "the KV cache of a rank"
    yield f"  a sample at full length: {needs}"
    if megabytes is not None:
        fits = _count(megabytes * MEBIBYTE // needs.bytes, "sample")
        yield f"  rollout.kv_cache_mb {megabytes} = {megabytes * MEBIBYTE} bytes: {fits} at full length"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _layout(config: AnyConfig, world_size: int) -> Iterator[str]:
    for name, role in config.roles().items():
        dp = world_size // (role.tp * role.pp)
        yield f"  {name:<12} tp {role.tp} x pp {role.pp} x dp {dp}, {role.micro_batch_tokens} tokens a micro-batch"
    if isinstance(config, PPOConfig):
        replicas = world_size // config.rollout.tp
        name = f"{config.rollout.engine} engine"
        yield f"  {'rollout':<12} tp {config.rollout.tp} x {_count(replicas, 'replica')}, {name}"


def _micro_batches(role: RoleSection, units: int, longest: int) -> str:
    """How many micro-batches `units` things of `longest` tokens make on one data-parallel rank;
    shorter ones, fewer.
    """
    each = role.micro_batch_tokens // longest
    return f"{each} a micro-batch: {_count(-(-units // each), 'micro-batch')}"


def _ppo_step(config: PPOConfig, world_size: int) -> Iterator[str]:
    data, n = config.data, config.rollout.n
    samples = config.samples_per_step
    replicas = world_size // config.rollout.tp
    yield "each training step"
    yield (
        f"  {_count(data.train_batch_size, 'prompt')} x {n} = {_count(samples, 'sample')}, "
        f"{-(-samples // replicas)} a replica if equally long, {config.rollout.max_num_seqs} decoded at once"
    )
    groups = config.algorithm.filter_groups
    if groups.enable:
        yield (
            f"  prompts whose answers all have the same {groups.metric} are replaced: <= {groups.max_num_gen_batches} "
            f"x {_count(data.gen_batch_size, 'prompt')} are generated"
        )
    yield (
        f"  prompts are computed in steps of <= {config.rollout.max_prefill_tokens} tokens; KV cache in blocks of "
        f"{config.rollout.cache_block} tokens, <= {-(-data.max_length // config.rollout.cache_block)} a sample"
    )
    yield (
        f"  a sample: <= {data.max_prompt_length} prompt + {data.max_response_length} response = {data.max_length} "
        f"tokens; the step: <= {samples * data.max_length} tokens"
    )
    for name, role in config.trained().items():
        yield from _updates(name, role, config, world_size)


def _updates(
    name: str, role: ActorSection | CriticSection, config: PPOConfig, world_size: int
) -> Iterator[str]:
    prompts, n = role.ppo_mini_batch_size, config.rollout.n
    mini_batches = config.data.train_batch_size // prompts
    samples = prompts * n
    per_rank = -(-samples * role.tp * role.pp // world_size)
    yield (
        f"  {name}: {_count(mini_batches, 'mini-batch')} x {_count(role.ppo_epochs, 'epoch')} = "
        f"{_count(mini_batches * role.ppo_epochs, 'optimizer step')}"
    )
    yield (
        f"    a mini-batch: {_count(prompts, 'prompt')} x {n} = {_count(samples, 'sample')}, at full length {per_rank} "
        f"a data-parallel rank and {_micro_batches(role, per_rank, longest_unit(config))}"
    )


def _supervised_step(config: SFTConfig | RewardModelConfig, world_size: int) -> Iterator[str]:
    noun = "pair" if isinstance(config, RewardModelConfig) else "sequence"
    batch = config.data.batch_size
    per_rank = -(-batch * config.model.tp * config.model.pp // world_size)
    yield "each optimizer step"
    yield (
        f"  {_count(batch, noun)} of <= {longest_unit(config)} tokens, at full length {per_rank} a data-parallel rank "
        f"and {_micro_batches(config.model, per_rank, longest_unit(config))}"
    )


def _run(config: AnyConfig, num_rows: int | None) -> Iterator[str]:
    trainer = config.trainer
    batch = (
        config.data.train_batch_size if isinstance(config, PPOConfig) else config.data.batch_size
    )
    yield "the run"
    if trainer.total_steps is not None:
        yield f"  {_count(trainer.total_steps, 'training step')} (trainer.total_steps)"
    elif num_rows is not None:
        yield (
            f"  {_count(trainer.total_epochs, 'epoch')} x ({num_rows} rows // {batch}) = "
            f"{_count(trainer.steps(num_rows, batch), 'training step')}"
        )
    else:
        yield f"  {_count(trainer.total_epochs, 'epoch')} x (rows // {batch}) training steps"
    if isinstance(config, PPOConfig) and config.trainer.critic_warmup > 1:
        yield f"  the actor is trained from step {config.trainer.critic_warmup} on (trainer.critic_warmup)"
