"""What must hold between keys, and between keys and world size; all of it before anything is built.

Each complaint is one line with both numbers and the remedy. Pure arithmetic on the configuration:
layouts, batches and the run; the method is in `method_checks`, what must hold between keys and
models in `model_files`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.rollout import UTILIZATION
from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.sections import OptimSection
from mrlhf.errors import ConfigError
from mrlhf.preflight.method_checks import method_problems

AnyConfig = PPOConfig | SFTConfig | RewardModelConfig


def check(config: AnyConfig, world_size: int) -> None:
    """Refuse a configuration that cannot run on `world_size` ranks.

    Raises:
        ConfigError: one line a mistake.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size} is below 1; start at least one process")
    problems = list(_layout_problems(config, world_size))
    if isinstance(config, PPOConfig):
        problems += _batch_problems(config, world_size)
        problems += _rollout_problems(config)
        problems += _full_kl_problems(config)
        problems += method_problems(config)
        problems += _reward_problems(config)
    else:
        problems += _supervised_problems(config, world_size)
    problems += _run_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def longest_unit(config: AnyConfig) -> int:
    """Tokens of the longest thing that a micro-batch holds whole: a sequence, or a preference pair."""
    if isinstance(config, RewardModelConfig):
        return 2 * config.data.max_length
    return config.data.max_length


def _layout_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    longest = longest_unit(config)
    for name, role in config.roles().items():
        ranks = role.tp * role.pp
        if world_size % ranks:
            yield (
                f"{name}: world size {world_size} is not divisible by tp {role.tp} x pp {role.pp} = {ranks}; "
                f"start a multiple of {ranks} processes or change {name}.tp or {name}.pp"
            )
        if role.sequence_parallel and role.tp == 1:
            yield f"{name}.sequence_parallel is on with {name}.tp 1; raise {name}.tp or turn it off"
        if role.micro_batch_tokens < longest:
            unit = "pair of sequences" if isinstance(config, RewardModelConfig) else "sequence"
            yield (
                f"{name}.micro_batch_tokens {role.micro_batch_tokens} is less than the longest {unit}, {longest} "
                f"tokens; set {name}.micro_batch_tokens to at least {longest} or lower the data's maximum lengths"
            )


def _batch_problems(config: PPOConfig, world_size: int) -> Iterator[str]:
    prompts, n = config.data.train_batch_size, config.rollout.n
    trained = config.trained()
    for name, role in trained.items():
        size = role.ppo_mini_batch_size
        if prompts % size:
            divisor = max(d for d in range(1, min(size, prompts) + 1) if prompts % d == 0)
            yield (
                f"data.train_batch_size {prompts} is not divisible by {name}.ppo_mini_batch_size {size}; "
                f"set {name}.ppo_mini_batch_size to {divisor}, or the train batch to a multiple of {size}"
            )
        dp = world_size // (role.tp * role.pp)
        if size * n < dp:
            yield (
                f"{name}.ppo_mini_batch_size {size} x rollout.n {n} = {size * n} samples are fewer than the "
                f"data-parallel size {dp} of {name}; set {name}.ppo_mini_batch_size to at least "
                f"{-(-dp // n)} or raise {name}.tp"
            )
    for name, frozen in config.roles().items():
        dp = world_size // (frozen.tp * frozen.pp)
        # what scores a response sees all that are generated, the others those that are trained on
        key, size = (
            ("gen", config.data.gen_batch_size) if name == "reward_model" else ("train", prompts)
        )
        if name not in trained and size * n < dp:
            yield (
                f"data.{key}_batch_size {size} x rollout.n {n} = {size * n} samples are fewer than the "
                f"data-parallel size {dp} of {name}; set data.{key}_batch_size to at least {-(-dp // n)} "
                f"or raise {name}.tp"
            )


def _rollout_problems(config: PPOConfig) -> Iterator[str]:
    rollout, actor = config.rollout, config.actor
    ranks = actor.tp * actor.pp
    if ranks % rollout.tp:
        yield (
            f"rollout.tp {rollout.tp} does not divide actor.tp {actor.tp} x actor.pp {actor.pp} = {ranks}; "
            f"use one of {', '.join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)}"
        )
    if rollout.kv_cache_mb is not None and rollout.gpu_memory_utilization != UTILIZATION:
        yield (
            f"rollout.kv_cache_mb {rollout.kv_cache_mb} and rollout.gpu_memory_utilization "
            f"{rollout.gpu_memory_utilization} both size the KV cache; set rollout.kv_cache_mb to null or leave "
            f"rollout.gpu_memory_utilization at {UTILIZATION}"
        )


def _full_kl_problems(config: PPOConfig) -> Iterator[str]:
    actor, reference = config.actor, config.reference
    if config.needs_full_kl and (reference.tp, reference.pp) != (actor.tp, actor.pp):
        yield (
            f"KL 'full' compares whole distributions rank by rank, but reference is tp {reference.tp} x pp "
            f"{reference.pp} and actor tp {actor.tp} x pp {actor.pp}; leave reference.tp and reference.pp out"
        )


def _reward_problems(config: PPOConfig) -> Iterator[str]:
    names = [term.name for term in config.reward.terms]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"reward.terms holds '{name}' {names.count(name)} times; keep one and add the weights"
    if "reward_model" in names and config.reward_model is None:
        yield "reward.terms holds 'reward_model' but there is no such model; set reward_model.path or remove the term"
    if "reward_model" not in names and config.reward_model is not None:
        yield "reward_model is set but no reward term uses it; add {name: reward_model} to reward.terms or remove it"


def _supervised_problems(config: SFTConfig | RewardModelConfig, world_size: int) -> Iterator[str]:
    dp = world_size // (config.model.tp * config.model.pp)
    if config.data.batch_size < dp:
        yield (
            f"data.batch_size {config.data.batch_size} is less than the data-parallel size {dp} of model; "
            f"set data.batch_size to at least {dp} or raise model.tp"
        )


def _optims(config: AnyConfig) -> dict[str, OptimSection]:
    if isinstance(config, PPOConfig):
        return {f"{name}.optim": role.optim for name, role in config.trained().items()}
    return {"optim": config.optim}


def _run_problems(config: AnyConfig) -> Iterator[str]:
    trainer = config.trainer
    held_out = isinstance(config, RewardModelConfig) and config.data.held_out_fraction > 0
    if trainer.test_freq and not config.data.val_files and not held_out:
        yield f"trainer.test_freq is {trainer.test_freq} but data.val_files is empty; give files or set test_freq to 0"
    if isinstance(config, PPOConfig) and config.trainer.val_sampled and not config.data.val_files:
        yield "trainer.val_sampled is on but data.val_files is empty; give files or turn it off"
    if (
        isinstance(config, PPOConfig)
        and config.trainer.val_n > 1
        and not config.trainer.val_sampled
    ):
        yield (
            f"trainer.val_n {config.trainer.val_n} is of the sampled validation, but trainer.val_sampled is off; "
            "turn that on or leave val_n at 1"
        )
    if trainer.total_steps is None:
        return
    if isinstance(config, PPOConfig) and config.trainer.critic_warmup > trainer.total_steps:
        yield (
            f"trainer.critic_warmup {config.trainer.critic_warmup} is beyond trainer.total_steps "
            f"{trainer.total_steps}, so the actor would never be trained; lower the first or raise the second"
        )
    for name, optim in _optims(config).items():
        if optim.lr_warmup_steps >= trainer.total_steps:
            yield (
                f"{name}.lr_warmup_steps {optim.lr_warmup_steps} is not below trainer.total_steps "
                f"{trainer.total_steps}; lower the first or raise the second"
            )
