"""The dry run, and the layout and batch arithmetic of a run in words.

The dry run checks everything for a number of ranks that need not exist, the data and the user's
functions included. This file returns text, and builds no process group or model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mrlhf.config.preference import DPOSection
from mrlhf.config.roots import AnyConfig, DPOConfig, PPOConfig, PreferenceConfig, SFTConfig
from mrlhf.config.sections import ActorSection, CriticSection, RoleSection
from mrlhf.device import device_kind
from mrlhf.errors import ConfigError
from mrlhf.inference.installed import require_engine
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes
from mrlhf.parallel.pipeline_order import idle_share
from mrlhf.preflight.checks import check, longest_unit
from mrlhf.preflight.inputs import check_inputs
from mrlhf.preflight.method_description import describe_method
from mrlhf.preflight.model_checks import (
    MEBIBYTE,
    cache_block,
    cache_needs,
    check_models,
    without_weights,
)
from mrlhf.preflight.output import check_output
from mrlhf.preflight.paths import absent_paths, require_paths, tokenizer_to_come, without
from mrlhf.preflight.schedule_drawing import draw_schedules, micro_batches
from mrlhf.preflight.user_methods import check_user_methods
from mrlhf.trackers import check_trackers

_DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}


def smallest_world(config: AnyConfig) -> int:
    """The fewest ranks on which the layout of every role fits, and a replica of the engine."""
    smallest = math.lcm(*(AxisSizes.of(role).smallest_world for role in config.roles().values()))
    if isinstance(config, PPOConfig) and AxisSizes.of(config.actor).shares_experts_across:
        return math.lcm(smallest, config.rollout.tp)
    return smallest


@dataclass(frozen=True)
class DryRunResult:
    """What a dry run has found.

    Attributes:
        missing: what the configuration names and this machine lacks, one line each.
        text: the whole report; it begins with what is missing.
    """

    missing: tuple[str, ...]
    text: str


def dry_run(
    config: AnyConfig, world_size: int | None, foresee: Callable[[], str] | None = None
) -> DryRunResult:
    """Check `config` for `world_size` ranks (None: the fewest that fit) and describe the run.

    What this machine lacks is not checked. A model needs no more than its `config.json` here.

    Args:
        config: the whole configuration.
        world_size: ranks.
        foresee: says what a start would do with the output directory.

    Raises:
        ConfigError, DataError, RewardError: one line a mistake.
    """
    if world_size is None:
        world_size = smallest_world(config)
    check(config, world_size)
    check_output(config)
    absent = absent_paths(config)
    missing = (*map(without, absent), *_missing_packages(config))
    to_come = tokenizer_to_come(config)
    if to_come is not None:
        absent.append(to_come)
    specs = check_models(config)
    if isinstance(config, PPOConfig):
        check_user_methods(config, absent)
    steps = check_inputs(config, absent)

    lines = [f"not found: {line}" for line in missing]
    lines += [f"not checked: the weights of {name}" for name in without_weights(config)]
    if to_come is not None:
        lines.append(f"not checked: the data, since {to_come.path} holds no tokenizer")
    fits = "what could be checked" if lines else "configuration"

    lines.append(describe(config, world_size, steps))
    if foresee is not None:
        lines.append(f"  {foresee()}")
    if isinstance(config, PPOConfig):
        lines += _cache(config, specs["rollout"])
    lines += draw_schedules(config, world_size)
    lines.append(f"{fits} fits {_count(world_size, 'rank')}")
    return DryRunResult(missing, "\n".join(lines))


def _missing_packages(config: AnyConfig) -> Iterator[str]:
    """The optional packages that the run needs and this machine lacks, one line each."""
    try:
        check_trackers(config.trainer.trackers)
    except ConfigError as error:
        yield str(error)
    if isinstance(config, PPOConfig):
        try:
            require_engine(config.rollout.engine)
        except ConfigError as error:
            yield str(error)


def preflight(config: AnyConfig, world_size: int) -> str:
    """Check that `config` can run here on `world_size` ranks, and describe the run.

    Raises:
        ConfigError: one line a mistake.
    """
    check(config, world_size)
    check_output(config)
    check_trackers(config.trainer.trackers)
    require_paths(config)
    check_models(config, need_weights=True)
    if isinstance(config, PPOConfig):
        check_user_methods(config)
        require_engine(config.rollout.engine)
    return describe(config, world_size)


def describe(config: AnyConfig, world_size: int, steps: int | None = None) -> str:
    """The layout and the batch arithmetic in words.

    Args:
        config: passes `check` for `world_size`.
        world_size: ranks.
        steps: training steps of the run, if the data were read.
    """
    program = type(config).__name__.removesuffix("Config")
    lines = [f"{program} on {_count(world_size, 'rank')}"]
    lines += _layout(config, world_size)

    if isinstance(config, PPOConfig):
        lines += describe_method(config)
        lines += _ppo_step(config, world_size)
    else:
        if isinstance(config, DPOConfig):
            lines += _preference_loss(config.dpo)
        lines += _supervised_step(config, world_size)
    lines += _run(config, steps)
    return "\n".join(lines)


def _cache(config: PPOConfig, spec: ModelSpec | None) -> Iterator[str]:
    """What the KV cache of one rank has to hold, if the model is known."""
    if spec is None:
        return
    needs = cache_needs(config, spec)
    megabytes = config.rollout.kv_cache_mb
    yield f"the KV cache of a rank on {_DEVICES[device_kind(config.distributed.device)]}"
    yield f"  a sample at full length: {needs}"
    if megabytes is not None:
        fits = _count(megabytes * MEBIBYTE // needs.bytes, "sample")
        yield (
            f"  rollout.kv_cache_mb {megabytes} = {megabytes * MEBIBYTE} bytes: {fits} at full "
            "length"
        )


def _count(number: int, noun: str) -> str:
    """`number` with the noun, in the plural unless it is 1."""
    if number == 1:
        return f"{number} {noun}"
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number} {noun}{plural}"


def _layout(config: AnyConfig, world_size: int) -> Iterator[str]:
    for name, role in config.roles().items():
        sizes = AxisSizes.of(role)
        virtual = f", {role.vpp} virtual stages a rank" if role.vpp > 1 else ""
        yield (
            f"  {name:<12} {sizes} x dp {sizes.dp(world_size)}{virtual}, {role.micro_batch_tokens} "
            "tokens a micro-batch"
        )
    if isinstance(config, PPOConfig):
        rollout = config.rollout
        replicas = _count(world_size // rollout.tp, "replica")
        axes = f"tp {rollout.tp}" if rollout.ep is None else f"tp {rollout.tp}, ep {rollout.ep}"
        yield f"  {'rollout':<12} {axes} x {replicas}, {rollout.engine} engine"


def _micro_batches(role: RoleSection, units: int, longest: int) -> str:
    """The micro-batches that `units` sequences or pairs of `longest` tokens make on one rank.

    With pipeline stages also the share of the step in which a rank is idle.
    """
    each = role.micro_batch_tokens // longest
    count = micro_batches(role, units, longest)
    text = f"{each} a micro-batch: {_count(count, 'micro-batch')}"
    if role.pp == 1:
        return text
    return f"{text}, pipeline bubble {idle_share(count, role.pp, role.vpp):.0%}"


def _ppo_step(config: PPOConfig, world_size: int) -> Iterator[str]:
    data = config.data
    rollout = config.rollout
    samples = config.samples_per_step
    replicas = world_size // rollout.tp
    yield "each training step"
    yield (
        f"  {_count(data.train_batch_size, 'prompt')} x {rollout.n} = {_count(samples, 'sample')}, "
        f"{-(-samples // replicas)} a replica if equally long, {rollout.max_num_seqs} decoded at "
        "once"
    )

    filters = config.algorithm.filter_groups
    if filters.enable:
        yield (
            f"  prompts whose answers all have the same {filters.metric} are replaced: <= "
            f"{filters.max_num_gen_batches} x {_count(data.gen_batch_size, 'prompt')} are generated"
        )

    block = cache_block(config)
    blocks = -(-data.max_length // block)
    yield (
        f"  prompts are computed in steps of <= {rollout.max_prefill_tokens} tokens; KV cache in "
        f"blocks of {block} tokens, <= {_count(blocks, 'block')} per sample"
    )
    yield (
        f"  a sample: <= {data.max_prompt_length} prompt + {data.max_response_length} response = "
        f"{data.max_length} tokens; the step: <= {samples * data.max_length} tokens"
    )

    for name, role in config.trained().items():
        yield from _updates(name, role, config, world_size)


def _updates(
    name: str, role: ActorSection | CriticSection, config: PPOConfig, world_size: int
) -> Iterator[str]:
    """The optimizer steps of one role in a training step, and the micro-batches of each."""
    prompts = role.ppo_mini_batch_size
    mini_batches = config.data.train_batch_size // prompts
    steps = mini_batches * role.ppo_epochs
    yield (
        f"  {name}: {_count(mini_batches, 'mini-batch')} x {_count(role.ppo_epochs, 'epoch')} = "
        f"{_count(steps, 'optimizer step')}"
    )

    n = config.rollout.n
    samples = prompts * n
    per_rank = -(-samples // AxisSizes.of(role).dp(world_size))
    yield (
        f"    a mini-batch: {_count(prompts, 'prompt')} x {n} = {_count(samples, 'sample')}, at "
        f"full length {per_rank} a data-parallel rank and "
        f"{_micro_batches(role, per_rank, longest_unit(config, role.cp))}"
    )


def _preference_loss(section: DPOSection) -> Iterator[str]:
    smoothing = ""
    if section.label_smoothing:
        smoothing = f", label smoothing {section.label_smoothing:g}"
    yield "the method"
    yield f"  loss: {section.loss_type}, beta {section.beta:g}{smoothing}"
    yield "  the reference is asked once about all pairs, before the first step, and then freed"


def _supervised_step(config: SFTConfig | PreferenceConfig, world_size: int) -> Iterator[str]:
    noun = "pair" if isinstance(config, PreferenceConfig) else "sequence"
    batch = config.data.batch_size
    per_rank = -(-batch // AxisSizes.of(config.model).dp(world_size))
    yield "each optimizer step"
    micro_batches = _micro_batches(config.model, per_rank, longest_unit(config, config.model.cp))
    yield (
        f"  {_count(batch, noun)} of <= {longest_unit(config)} tokens, at full length {per_rank} a "
        f"data-parallel rank and {micro_batches}"
    )


def _run(config: AnyConfig, steps: int | None) -> Iterator[str]:
    """How many training steps the run has."""
    trainer = config.trainer
    batch = config.prompts_per_step if isinstance(config, PPOConfig) else config.data.batch_size

    yield "the run"
    epochs = _count(trainer.total_epochs, "epoch")
    if trainer.total_steps is not None:
        yield f"  {_count(trainer.total_steps, 'training step')} (trainer.total_steps)"
    else:
        least = f", at least {trainer.min_steps}" if trainer.min_steps else ""
        count = "training steps" if steps is None else f"= {_count(steps, 'training step')}"
        yield f"  {epochs} x (rows // {batch}){least} {count}"

    if isinstance(config, PPOConfig) and config.trainer.critic_warmup > 1:
        first = config.trainer.critic_warmup
        yield f"  the actor is trained from step {first} on (trainer.critic_warmup)"
