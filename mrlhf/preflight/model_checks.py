"""Checks that each layout fits its model, using only the model's `config.json`.

`mrlhf.models.families` reads that file, and what it refuses is refused here too. This file computes
with the numbers that it returns, and builds no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.device import device_kind, dtype_on
from mrlhf.errors import ConfigError
from mrlhf.inference.cache_size import (
    NATIVE_CPU_BLOCK,
    NATIVE_GPU_BLOCK,
    CacheShape,
    vllm_cpu_block,
    vllm_gpu_block,
)
from mrlhf.inference.native.linear import compute_dtype
from mrlhf.models.families import load_spec
from mrlhf.models.spec import Head, ModelSpec

MEBIBYTE = 2**20


@dataclass(frozen=True)
class CacheNeeds:
    """How much of one rank's KV cache a sequence of full length takes.

    Attributes:
        shape: sizes of the rank's cache.
        tokens: length of the longest sequence, in whole blocks.
    """

    shape: CacheShape
    tokens: int

    @property
    def bytes(self) -> int:
        """Bytes that the keys and values of the sequence take on the rank."""
        return self.shape.token_bytes * self.tokens

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"2 x {shape.num_layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} x "
            f"{shape.itemsize} bytes x {self.tokens} tokens = {self.bytes} bytes"
        )


def check_models(config: PPOConfig | SFTConfig | RewardModelConfig) -> dict[str, ModelSpec | None]:
    """Check the layout of each role, and that of the engine, against its model's `config.json`.

    Returns:
        The spec of each role's model; None where its `config.json` is not on this machine, so that
        nothing was checked. The engine is named `rollout`.

    Raises:
        ConfigError: one line a mistake.
    """
    problems: list[str] = []
    specs: dict[str, ModelSpec | None] = {}
    refused: set[str] = set()  # paths; roles often share one, and its mistake is reported once
    for name, role in config.roles().items():
        if role.path in refused:
            continue
        try:
            specs[name] = _load(name, role.path, head_of(config, name))
        except ConfigError as error:
            refused.add(role.path)
            problems.append(str(error))
    if "actor" in specs:
        specs["rollout"] = specs["actor"]

    for name, spec in specs.items():
        try:
            if spec is not None:
                _check_role(config, name, spec)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return specs


def head_of(config: PPOConfig | SFTConfig | RewardModelConfig, name: str) -> Head:
    """The head that the model of role `name` has."""
    if isinstance(config, RewardModelConfig) or name in ("critic", "reward_model"):
        return "scalar"
    return "lm"


def _load(name: str, path: str, head: Head) -> ModelSpec | None:
    """The spec of the model in directory `path`, for the role `name`; None without `config.json`.

    Raises:
        ConfigError: the model is not supported.
    """
    if not (Path(path) / "config.json").is_file():
        return None
    try:
        return load_spec(path, head)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def cache_needs(config: PPOConfig, spec: ModelSpec) -> CacheNeeds:
    """What a sequence of `data.max_length` tokens takes of the KV cache of one rank of the engine.

    If the device is "auto", it is that of this machine.
    """
    rollout = config.rollout
    device = torch.device(device_kind(config.distributed.device))
    dtype = dtype_on(config.actor.dtype, device.type)
    if rollout.engine == "native":
        dtype = compute_dtype(dtype, device)

    block = cache_block(config)
    blocks = -(-config.data.max_length // block)
    if rollout.engine == "vllm" and device.type == "cpu":
        blocks += 1  # vLLM leaves one unused

    shape = CacheShape.on_rank(spec, rollout.tp, itemsize=dtype.itemsize, block_size=block)
    return CacheNeeds(shape, tokens=blocks * block)


def cache_block(config: PPOConfig) -> int:
    """Tokens in one block of the engine's KV cache on the device of the run."""
    wanted = config.rollout.block_size
    on_cpu = device_kind(config.distributed.device) == "cpu"
    if config.rollout.engine == "vllm":
        return vllm_cpu_block(wanted) if on_cpu else vllm_gpu_block(wanted)
    return wanted or (NATIVE_CPU_BLOCK if on_cpu else NATIVE_GPU_BLOCK)


def check_model(
    role: str, tp: int, pp: int, spec: ModelSpec, replicates_kv_heads: bool = False
) -> None:
    """Refuse a layout that does not divide a model.

    The vocabulary is padded, so that every layout divides it.

    Args:
        role: section that holds `tp` and `pp`, for the message.
        tp: tensor-parallel size, ranks.
        pp: pipeline-parallel size, ranks.
        spec: the model.
        replicates_kv_heads: whether several ranks may hold the same key and value head, if tp is a
            multiple of the heads.

    Raises:
        ConfigError: one line a mistake.
    """
    sizes = [
        ("layers", spec.num_layers, "pp", pp),
        ("attention heads", spec.num_heads, "tp", tp),
        ("key and value heads", spec.num_kv_heads, "tp", tp),
        ("intermediate size", spec.ffn_size, "tp", tp),
    ]
    problems = []

    if replicates_kv_heads:
        del sizes[2]
        if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
            candidates = range(1, spec.num_heads + 1)
            fits = [str(size) for size in candidates if _engine_fits(size, spec)]
            problems.append(
                f"{role}.tp {tp} neither divides the model's key and value heads "
                f"{spec.num_kv_heads} nor is a multiple of them; use one of {', '.join(fits)}"
            )

    for what, size, key, parts in sizes:
        if size % parts:
            divisors = [str(divisor) for divisor in range(1, parts) if size % divisor == 0]
            problems.append(
                f"{role}.{key} {parts} does not divide the model's {what} {size}; use one of "
                f"{', '.join(divisors)}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _engine_fits(tp: int, spec: ModelSpec) -> bool:
    """Whether an engine of `tp` ranks fits the model."""
    if spec.num_heads % tp or spec.ffn_size % tp:
        return False
    return spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0


def _check_role(
    config: PPOConfig | SFTConfig | RewardModelConfig, name: str, spec: ModelSpec
) -> None:
    """Refuse a layout of role `name`, or of the engine, that does not fit its model."""
    if name == "rollout" and isinstance(config, PPOConfig):
        check_model(name, config.rollout.tp, 1, spec, replicates_kv_heads=True)
        _check_positions(name, config.actor.path, spec, config.data.max_length)
        _check_cache(config, spec)
    else:
        role = config.roles()[name]
        check_model(name, role.tp, role.pp, spec)
        _check_positions(name, role.path, spec, config.data.max_length)


def _check_positions(name: str, path: str, spec: ModelSpec, longest: int) -> None:
    if spec.max_positions < longest:
        raise ConfigError(
            f"{name}: the data's longest sequence, {longest} tokens, is beyond the model's "
            f"max_position_embeddings {spec.max_positions} ({Path(path) / 'config.json'}); lower "
            "the data's maximum lengths"
        )


def _check_cache(config: PPOConfig, spec: ModelSpec) -> None:
    """Refuse a KV cache that does not hold even one sequence."""
    megabytes = config.rollout.kv_cache_mb
    needs = cache_needs(config, spec)
    if megabytes is not None and megabytes * MEBIBYTE < needs.bytes:
        raise ConfigError(
            f"rollout.kv_cache_mb {megabytes} = {megabytes * MEBIBYTE} bytes is less than one "
            f"sequence needs, {needs}; set rollout.kv_cache_mb to at least "
            f"{-(-needs.bytes // MEBIBYTE)} or lower the data's maximum lengths"
        )
