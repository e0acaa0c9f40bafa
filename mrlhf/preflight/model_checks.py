"""Checks that each model can be built and that its layout fits it.

A model's `config.json` and the headers of its weight files are enough for that.
`mrlhf.models.families` and `mrlhf.models.weight_files` read them, and what they refuse is refused
here too. This file computes with the numbers that they return, and builds no model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError, WeightError
from mrlhf.inference.cache_size import CacheShape, vllm_cpu_block
from mrlhf.models.families import load_spec
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.models.weight_files import check_weight_files
from mrlhf.weights.stored import holds_weights

logger = logging.getLogger(__name__)

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


def check_models(
    config: PPOConfig | SFTConfig | RewardModelConfig, need_weights: bool = False
) -> dict[str, ModelSpec | None]:
    """Check each role's model, and the layout of each role and of the engine against it.

    Args:
        config: the whole configuration.
        need_weights: whether to refuse a directory that holds a `config.json` alone, although the
            role loads weights; otherwise its weights are not checked.

    Returns:
        The spec of each role's model; None where its `config.json` is not on this machine, so that
        nothing was checked. The engine is named `rollout`.

    Raises:
        ConfigError: one line a mistake.
    """
    problems: list[str] = []
    remarks: list[str] = []
    specs: dict[str, ModelSpec | None] = {}
    if _loads_weights(config):
        unchecked = set() if need_weights else set(without_weights(config))
    else:
        unchecked = set(config.roles())
    refused: set[str] = set()  # paths; roles often share one, and its mistake is reported once
    for name, role in config.roles().items():
        if role.path in refused:
            continue
        try:
            spec = _load(name, role.path, head_of(config, name))
            if spec is not None and name not in unchecked:
                remarks += _check_weights(config, name, spec)
            specs[name] = spec
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
    for remark in dict.fromkeys(remarks):  # roles often share a model
        logger.warning("%s", remark)
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


def _check_weights(
    config: PPOConfig | SFTConfig | RewardModelConfig, name: str, spec: ModelSpec
) -> tuple[str, ...]:
    """Check the headers of the weights that role `name` loads.

    Returns:
        What the user should know, one line each.

    Raises:
        ConfigError: there are none, or they are not those of the model.
    """
    try:
        return check_weight_files(
            config.roles()[name].path, spec, needs_head=name == "reward_model"
        )
    except WeightError as error:
        raise ConfigError(f"{name}: {error}") from None


def without_weights(config: PPOConfig | SFTConfig | RewardModelConfig) -> list[str]:
    """The roles that load weights, but whose directories hold a `config.json` alone."""
    if not _loads_weights(config):
        return []
    roles = []
    for name, role in config.roles().items():
        directory = Path(role.path)
        if (directory / "config.json").is_file() and not holds_weights(directory):
            roles.append(name)
    return roles


def _loads_weights(config: PPOConfig | SFTConfig | RewardModelConfig) -> bool:
    """Whether models begin with stored weights; supervised training may draw them at random."""
    return isinstance(config, PPOConfig) or config.model.init != "random"


def check_vocabulary(name: str, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that makes tokens the model has no embedding for.

    Args:
        name: role that the model is for, for the message.
        spec: the model.
        tokenizer: makes the tokens of the data.

    Raises:
        ConfigError: the tokenizer's vocabulary is larger than the model's.
    """
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{spec.vocab_size}; use the model's own tokenizer, or a model with vocab_size >= "
            f"{tokenizer.vocab_size}"
        )


def cache_needs(config: PPOConfig, spec: ModelSpec) -> CacheNeeds:
    """What a sequence of `data.max_length` tokens takes of the KV cache of one rank of the engine.

    If dtype and device are both "auto", a GPU and bfloat16 are assumed. On a CPU, bfloat16 may be
    widened to float32, and vLLM's blocks hold 32 tokens there, of which it leaves one block unused.
    """
    rollout = config.rollout
    float32 = config.actor.dtype == "float32" or config.distributed.device == "cpu"
    vllm_on_cpu = rollout.engine == "vllm" and config.distributed.device != "cuda"

    block = vllm_cpu_block(rollout.block_size) if vllm_on_cpu else rollout.cache_block
    blocks = -(-config.data.max_length // block)
    if vllm_on_cpu:
        blocks += 1

    shape = CacheShape.on_rank(spec, rollout.tp, itemsize=4 if float32 else 2, block_size=block)
    return CacheNeeds(shape, tokens=blocks * block)


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
