"""Checks that each layout fits its model, using only the model's `config.json`.

`mrlhf.models.families` reads that file, and what it refuses is refused here too. This file computes
with the numbers that it returns, and builds no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError
from mrlhf.inference.cache_size import CacheShape, vllm_cpu_block
from mrlhf.inference.engine_sizes import engine_tp_problem
from mrlhf.inference.vllm.pieces import unsupported_feature
from mrlhf.models.families import load_spec
from mrlhf.models.parallel_sizes import pp_problem, tp_problem
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

    problems += _layout_problems(config, specs)
    problems += _position_problems(config, specs)
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


def _layout_problems(
    config: PPOConfig | SFTConfig | RewardModelConfig, specs: Mapping[str, ModelSpec | None]
) -> Iterator[str]:
    """Layouts that do not fit their models, a line for each key, and a KV cache that is too small.

    Args:
        config: the run.
        specs: of each role and the engine, as far as they are known.
    """
    actor_fits = True
    for name, role in config.roles().items():
        spec = specs.get(name)
        if spec is None:
            continue
        if isinstance(config, PPOConfig) and name == "reference" and _is_as_actor(config):
            continue  # its problems are the actor's, whose keys it inherits
        problems = (
            tp_problem(f"{name}.tp", role.tp, spec),
            pp_problem(f"{name}.pp", role.pp, spec),
        )
        if name == "actor":
            actor_fits = problems == (None, None)
        yield from filter(None, problems)

    spec = specs.get("rollout")
    if isinstance(config, PPOConfig) and spec is not None:
        yield from _engine_problems(config, spec, actor_fits)


def _is_as_actor(config: PPOConfig) -> bool:
    """Whether the reference is the actor's model in the actor's layout."""
    actor = config.actor
    reference = config.reference
    return (reference.path, reference.tp, reference.pp) == (actor.path, actor.tp, actor.pp)


def _engine_problems(config: PPOConfig, spec: ModelSpec, actor_fits: bool) -> Iterator[str]:
    """An engine that does not fit the actor's model, or else whose KV cache does not."""
    # The replicas lie on the actor's ranks; if their number must change, it excludes no size.
    ranks = config.actor.tp * config.actor.pp if actor_fits else None
    problem = engine_tp_problem(config.rollout.engine, config.rollout.tp, spec, ranks)
    feature = unsupported_feature(spec) if config.rollout.engine == "vllm" else None
    if feature is not None:
        yield (
            f"rollout.engine is vllm, which is not supported for a model with {feature}; set "
            f"rollout.engine=native"
        )
    elif problem is not None:
        yield problem
    else:
        yield from _cache_problems(config, spec)


def _position_problems(
    config: PPOConfig | SFTConfig | RewardModelConfig, specs: Mapping[str, ModelSpec | None]
) -> Iterator[str]:
    """Data that is longer than a model's positions; a line for each model directory."""
    longest = config.data.max_length
    reported: set[str] = set()
    for name, role in config.roles().items():
        spec = specs.get(name)
        if spec is None or spec.max_positions >= longest or role.path in reported:
            continue
        reported.add(role.path)
        yield (
            f"{name}: the data's longest sequence, {longest} tokens, is beyond the model's "
            f"max_position_embeddings {spec.max_positions} ({Path(role.path) / 'config.json'}); "
            "lower the data's maximum lengths"
        )


def _cache_problems(config: PPOConfig, spec: ModelSpec) -> Iterator[str]:
    """A KV cache that does not hold even one sequence."""
    megabytes = config.rollout.kv_cache_mb
    needs = cache_needs(config, spec)
    if megabytes is not None and megabytes * MEBIBYTE < needs.bytes:
        yield (
            f"rollout.kv_cache_mb {megabytes} = {megabytes * MEBIBYTE} bytes is less than one "
            f"sequence needs, {needs}; set rollout.kv_cache_mb to at least "
            f"{-(-needs.bytes // MEBIBYTE)} or lower the data's maximum lengths"
        )
