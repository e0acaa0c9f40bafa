"""What must hold between keys, and between keys and the number of ranks, before anything is built.

Each complaint is one line with both numbers and the remedy. This file checks layouts, batches and
the run by arithmetic on the configuration. `method_checks` checks the method, `model_checks` what
must hold between keys and models.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.fields import Section
from mrlhf.config.rollout import UTILIZATION
from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.sections import OptimSection
from mrlhf.errors import ConfigError
from mrlhf.preflight.method_checks import in_yaml, method_problems

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
    problems += _unread_numbers(config)

    if problems:
        raise ConfigError("\n".join(problems))


def longest_unit(config: AnyConfig) -> int:
    """Tokens of the longest unit that one micro-batch must hold: a sequence, or a pair of them."""
    if isinstance(config, RewardModelConfig):
        return 2 * config.data.max_length
    return config.data.max_length


def _layout_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    longest = longest_unit(config)
    unit = "pair of sequences" if isinstance(config, RewardModelConfig) else "sequence"

    for name, role in config.roles().items():
        ranks = role.tp * role.pp
        if world_size % ranks:
            yield (
                f"{name}: world size {world_size} is not divisible by tp {role.tp} x pp {role.pp} "
                f"= {ranks}; start a multiple of {ranks} processes or change {name}.tp or "
                f"{name}.pp"
            )
        if role.sequence_parallel and role.tp == 1:
            yield f"{name}.sequence_parallel is on with {name}.tp 1; raise {name}.tp or turn it off"
        if role.micro_batch_tokens < longest:
            yield (
                f"{name}.micro_batch_tokens {role.micro_batch_tokens} is less than the longest "
                f"{unit}, {longest} tokens; set {name}.micro_batch_tokens to at least {longest} or "
                "lower the data's maximum lengths"
            )


def _batch_problems(config: PPOConfig, world_size: int) -> Iterator[str]:
    """Mini-batches that do not divide the batch, and batches that leave ranks without samples."""
    prompts = config.data.train_batch_size
    n = config.rollout.n
    trained = config.trained()

    for name, role in trained.items():
        size = role.ppo_mini_batch_size
        if prompts % size:
            divisor = max(_divisors(prompts, most=size))
            yield (
                f"data.train_batch_size {prompts} is not divisible by {name}.ppo_mini_batch_size "
                f"{size}; set {name}.ppo_mini_batch_size to {divisor}, or the train batch to a "
                f"multiple of {size}"
            )
        dp = world_size // (role.tp * role.pp)
        if size * n < dp:
            yield (
                f"{name}.ppo_mini_batch_size {size} x rollout.n {n} = {size * n} samples are fewer "
                f"than the data-parallel size {dp} of {name}; set {name}.ppo_mini_batch_size to at "
                f"least {-(-dp // n)} or raise {name}.tp"
            )

    for name, frozen in config.roles().items():
        if name in trained:
            continue
        key = "data.train_batch_size"
        size = prompts
        if name == "reward_model":  # scores all responses, not only those that are trained on
            key = "data.gen_batch_size"
            size = config.data.gen_batch_size
        dp = world_size // (frozen.tp * frozen.pp)
        if size * n < dp:
            yield (
                f"{key} {size} x rollout.n {n} = {size * n} samples are fewer than the "
                f"data-parallel size {dp} of {name}; set {key} to at least {-(-dp // n)} or raise "
                f"{name}.tp"
            )


def _rollout_problems(config: PPOConfig) -> Iterator[str]:
    rollout = config.rollout
    actor = config.actor
    ranks = actor.tp * actor.pp
    if ranks % rollout.tp:
        divisors = ", ".join(str(divisor) for divisor in _divisors(ranks, most=ranks))
        yield (
            f"rollout.tp {rollout.tp} does not divide actor.tp {actor.tp} x actor.pp {actor.pp} = "
            f"{ranks}; use one of {divisors}"
        )

    if rollout.kv_cache_mb is not None and rollout.gpu_memory_utilization != UTILIZATION:
        yield (
            f"rollout.kv_cache_mb {rollout.kv_cache_mb} and rollout.gpu_memory_utilization "
            f"{rollout.gpu_memory_utilization} both size the KV cache; set rollout.kv_cache_mb to "
            f"null or leave rollout.gpu_memory_utilization at {UTILIZATION}"
        )


def _divisors(number: int, most: int) -> list[int]:
    """The divisors of `number` that are at most `most`."""
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _full_kl_problems(config: PPOConfig) -> Iterator[str]:
    actor = config.actor
    reference = config.reference
    if config.needs_full_kl and (reference.tp, reference.pp) != (actor.tp, actor.pp):
        yield (
            "KL 'full' compares whole distributions rank by rank, but reference is tp "
            f"{reference.tp} x pp {reference.pp} and actor tp {actor.tp} x pp {actor.pp}; leave "
            "reference.tp and reference.pp out"
        )


def _reward_problems(config: PPOConfig) -> Iterator[str]:
    names = [term.name for term in config.reward.terms]
    for name in sorted(set(names)):
        count = names.count(name)
        if count > 1:
            yield f"reward.terms holds '{name}' {count} times; keep one and add the weights"

    uses_model = "reward_model" in names
    if uses_model and config.reward_model is None:
        yield (
            "reward.terms holds 'reward_model' but there is no such model; set reward_model.path "
            "or remove the term"
        )
    if not uses_model and config.reward_model is not None:
        yield (
            "reward_model is set but no reward term uses it; add {name: reward_model} to "
            "reward.terms or remove it"
        )


def _supervised_problems(config: SFTConfig | RewardModelConfig, world_size: int) -> Iterator[str]:
    dp = world_size // (config.model.tp * config.model.pp)
    if config.data.batch_size < dp:
        yield (
            f"data.batch_size {config.data.batch_size} is less than the data-parallel size {dp} of "
            f"model; set data.batch_size to at least {dp} or raise model.tp"
        )


def _optims(config: AnyConfig) -> dict[str, OptimSection]:
    """The optimizers of the models that are trained, by their keys."""
    if isinstance(config, PPOConfig):
        return {f"{name}.optim": role.optim for name, role in config.trained().items()}
    return {"optim": config.optim}


def _run_problems(config: AnyConfig) -> Iterator[str]:
    """Validation without data, and schedules longer than the run."""
    trainer = config.trainer
    held_out = isinstance(config, RewardModelConfig) and config.data.held_out_fraction > 0
    if trainer.test_freq and not config.data.val_files and not held_out:
        yield (
            f"trainer.test_freq is {trainer.test_freq} but data.val_files is empty; give files or "
            "set test_freq to 0"
        )
    if isinstance(config, PPOConfig):
        yield from _validation_problems(config)

    if trainer.total_steps is None:
        return
    if isinstance(config, PPOConfig) and config.trainer.critic_warmup > trainer.total_steps:
        yield (
            f"trainer.critic_warmup {config.trainer.critic_warmup} is beyond trainer.total_steps "
            f"{trainer.total_steps}, so the actor would never be trained; lower the first or raise "
            "the second"
        )
    for name, optim in _optims(config).items():
        if optim.lr_warmup_steps >= trainer.total_steps:
            yield (
                f"{name}.lr_warmup_steps {optim.lr_warmup_steps} is not below trainer.total_steps "
                f"{trainer.total_steps}; lower the first or raise the second"
            )


def _validation_problems(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.val_sampled and not config.data.val_files:
        yield ("trainer.val_sampled is on but data.val_files is empty; give files or turn it off")


def _unread_numbers(config: AnyConfig) -> Iterator[str]:
    """Numbers of what is switched off; those of models that are not built may stay."""
    not_built = set(config.model_fields) & {"critic", "reference"} - set(config.roles())
    told: set[str] = set()
    for path, section in _sections(config, ""):
        if path.split(".")[0] in not_built:
            continue
        for switch, number in section.unread():
            key = f"{path}.{number}"
            if key in told:
                continue
            told.add(key)
            value = in_yaml(section.value_of(number))
            yield (
                f"{key} {value} has no effect, since {path}.{switch.key} {switch.state}; leave it "
                f"at {in_yaml(section.default_of(number))}, or {switch.remedy}"
            )


def _sections(section: Section, path: str) -> Iterator[tuple[str, Section]]:
    """`section` and all in it, each with its key."""
    yield path, section
    for name in type(section).subsections():
        yield from _sections(getattr(section, name), f"{path}.{name}" if path else name)
