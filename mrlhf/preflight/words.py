"""A run in words: its layout, the keys that were set, the arithmetic of its batches, its length.

The numbers come from `batches` and `model_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig
from mrlhf.config.tree import flatten, in_yaml
from mrlhf.config.unread import default_of
from mrlhf.device import device_kind, dtype_on
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.lora import without_adapters
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.batches import RoleWork, longest_unit, role_work, trained_models
from mrlhf.preflight.model_bytes import ModelBytes, merged_bytes, training_bytes
from mrlhf.preflight.model_checks import MEBIBYTE, cache_needs
from mrlhf.printable import size_text


def describe(config: AnyConfig, world_size: int, steps: int | None = None) -> str:
    """Describe the layout and the batch arithmetic; `steps` is known if the data were read."""
    program = type(config).__name__.removesuffix("Config")
    lines = [f"{program} on {count(world_size, 'rank')}"]
    lines += _layout(config, world_size)
    lines += _set_keys(config)
    if isinstance(config, PPOConfig):
        lines += _ppo_step(config, world_size)
    else:
        lines += _supervised_step(config, world_size)
    lines += _run(config, steps)
    return "\n".join(lines)


def describe_memory(
    config: AnyConfig, specs: Mapping[str, ModelSpec | None], world_size: int, on: str
) -> Iterator[str]:
    """The bytes of each known model that is trained on a rank, whose device is `on`: "on a GPU"."""
    kind = device_kind(config.distributed.device)
    for name, (role, optim) in trained_models(config).items():
        spec = specs.get(name)
        if spec is None:
            continue

        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        itemsize = dtype_on(role.dtype, kind).itemsize
        states_of = (optim.splits_states, optim.name == "muon")
        needed = training_bytes(spec, layout, itemsize, *states_of)
        dtype = str(dtype_on(role.dtype, kind)).removeprefix("torch.")
        yield f"memory of {name} on a rank: {_sizes(needed)} ({dtype} {on})"
        if spec.keeps_weights:
            trained, every = parameter_counts(spec)
            yield f"  {trained:,} of {every:,} parameters train"
            needed = training_bytes(without_adapters(spec), layout, itemsize, *states_of)
            yield f"  if all weights were trained: {_sizes(needed)}"
            is_actor = isinstance(config, PPOConfig) and name == "actor"
            if is_actor and config.value_of("rollout.lora") == "merged":
                merged = size_text(merged_bytes(spec, layout, itemsize))
                yield f"  weights merged for the engine (rollout.lora): {merged} more"


def _sizes(sizes: ModelBytes) -> str:
    parts = [f"{owner} {size_text(size)}" for owner, size in vars(sizes).items()]
    return ", ".join(parts)


def describe_cache(config: PPOConfig, spec: ModelSpec | None, on: str) -> Iterator[str]:
    """The size of a sample in the KV cache of one rank, if the model is known."""
    if spec is None:
        return
    needs = cache_needs(config, spec)
    megabytes = config.rollout.kv_cache_mb
    yield f"the KV cache of a rank {on}"
    yield f"  a sample at full length: {needs}"
    if megabytes is not None:
        fits = count(megabytes * MEBIBYTE // needs.bytes, "sample")
        yield (
            f"  rollout.kv_cache_mb {megabytes} = {size_text(megabytes * MEBIBYTE)}: {fits} at "
            "full length"
        )


def count(number: int, noun: str) -> str:
    """`number` with the noun, in the plural unless it is 1."""
    if number == 1:
        return f"{number} {noun}"
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number} {noun}{plural}"


def _layout(config: AnyConfig, world_size: int) -> Iterator[str]:
    for name, role in config.roles().items():
        sizes = AxisSizes.of(role)
        virtual = f", {role.vpp} virtual stages a rank" if role.vpp > 1 else ""
        work = f"{role.micro_batch_tokens} tokens a micro-batch"
        if name == "judge_model":
            work = "native engine"
        yield f"  {name:<12} {sizes} x dp {sizes.dp(world_size)}{virtual}, {work}"
    if isinstance(config, PPOConfig):
        rollout = config.rollout
        replicas = count(world_size // rollout.tp, "replica")
        axes = f"tp {rollout.tp}" if rollout.ep is None else f"tp {rollout.tp}, ep {rollout.ep}"
        yield f"  {'rollout':<12} {axes} x {replicas}, {rollout.engine} engine"


def _set_keys(config: AnyConfig) -> Iterator[str]:
    """The keys that are read and not at their defaults, a line for each section."""
    by_section: dict[str, list[str]] = {}
    for key, value in flatten(config).items():
        section = key.split(".")[0]
        if section in config.unbuilt or not config.reads(key) or value == default_of(config, key):
            continue
        by_section.setdefault(section, []).append(f"{key} {in_yaml(value)}")

    yield "keys that are not at their defaults"
    for keys in by_section.values():
        yield f"  {', '.join(keys)}"


def _share(work: RoleWork) -> str:
    """One rank's part of a batch, its micro-batches and, with pipeline stages, its idle share."""
    text = (
        f"at full length {work.per_rank} a data-parallel rank and {work.per_micro_batch} a "
        f"micro-batch: {count(work.micro_batches, 'micro-batch')}"
    )
    return text if work.role.pp == 1 else f"{text}, pipeline bubble {work.bubble:.0%}"


def _ppo_step(config: PPOConfig, world_size: int) -> Iterator[str]:
    data = config.data
    rollout = config.rollout
    samples = config.samples_per_step
    replicas = world_size // rollout.tp
    yield "each training step"
    yield (
        f"  {count(data.train_batch_size, 'prompt')} x {rollout.n} = {count(samples, 'sample')}, "
        f"{-(-samples // replicas)} a replica if equally long, {rollout.max_num_seqs} decoded at "
        "once"
    )

    for work in role_work(config, world_size):
        if not work.is_trained:
            continue
        yield (
            f"  {work.name}: {count(work.mini_batches, 'mini-batch')} x "
            f"{count(work.epochs, 'epoch')} = "
            f"{count(work.mini_batches * work.epochs, 'optimizer step')}"
        )
        yield (
            f"    a mini-batch: {count(work.rows, 'prompt')} x {rollout.n} = "
            f"{count(work.units, 'sample')}, {_share(work)}"
        )


def _supervised_step(config: AnyConfig, world_size: int) -> Iterator[str]:
    noun = config.rows[:-1] if isinstance(config, PreferenceConfig) else "sequence"
    (work,) = (work for work in role_work(config, world_size) if work.is_trained)
    yield "each optimizer step"
    yield f"  {count(work.units, noun)} of <= {longest_unit(config)} tokens, {_share(work)}"


def _run(config: AnyConfig, steps: int | None) -> Iterator[str]:
    """The number of training steps."""
    trainer = config.trainer
    batch = config.prompts_per_step if isinstance(config, PPOConfig) else config.data.batch_size

    yield "the run"
    epochs = count(trainer.total_epochs, "epoch")
    if trainer.total_steps is not None:
        yield f"  {count(trainer.total_steps, 'training step')} (trainer.total_steps)"
    else:
        least = f", at least {trainer.min_steps}" if trainer.min_steps else ""
        total = "training steps" if steps is None else f"= {count(steps, 'training step')}"
        yield f"  {epochs} x (rows // {batch}){least} {total}"
