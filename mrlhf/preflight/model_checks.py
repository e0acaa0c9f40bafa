"""What must hold between a layout and the model it is for; each model is known by its `config.json`
alone.

It reads that file and computes with its numbers; it imports no torch and builds no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.errors import ConfigError

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a `config.json` that layouts and memory depend on.

    Attributes:
        file: where they are from.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of one head.
        ffn_size: width of the MLP.
        max_positions: longest sequence, tokens; None where the file does not tell.
    """

    file: Path
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int | None


@dataclass(frozen=True)
class CacheNeeds:
    """What one sequence of full length takes of the KV cache of one rank.

    Attributes:
        num_layers: transformer layers.
        kv_heads: key and value heads on a rank.
        head_dim: width of one head.
        itemsize: bytes of a number.
        tokens: of the longest sequence, in whole blocks.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    tokens: int

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize * self.tokens

    def __str__(self) -> str:
        return (
            f"2 x {self.num_layers} layers x {self.kv_heads} KV heads x {self.head_dim} x {self.itemsize} bytes x "
            f"{self.tokens} tokens = {self.bytes} bytes"
        )


def check_models(config: PPOConfig | SFTConfig | RewardModelConfig) -> list[str]:
    """Check each role's layout, and the engine's, against its model's `config.json`.

    Returns:
        The names of the roles whose `config.json` is not on this machine, which are not checked.

    Raises:
        ConfigError: one line a mistake.
    """
    layouts = {name: (role.path, role.tp, role.pp) for name, role in config.roles().items()}
    if isinstance(config, PPOConfig):
        layouts["rollout"] = (config.actor.path, config.rollout.tp, 1)
    absent, problems = [], []
    for name, (path, tp, pp) in layouts.items():
        try:
            facts = read_facts(name, path)
            if facts is None:
                absent.append(name)
                continue
            _check_layout(name, tp, pp, facts, config.data.max_length)
            if name == "rollout" and isinstance(config, PPOConfig):
                _check_cache(config, facts)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return absent


def read_facts(name: str, path: str) -> ModelFacts | None:
    """The facts of the model in directory `path`, for the role `name`; None where it has no
    `config.json`.

    Raises:
        ConfigError: the file describes no decoder.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        heads = int(facts["num_attention_heads"])
        kv_heads = (
            heads if facts.get("num_key_value_heads") is None else int(facts["num_key_value_heads"])
        )
        head_dim = (
            facts["hidden_size"] // heads if facts.get("head_dim") is None else facts["head_dim"]
        )
        positions = facts.get("max_position_embeddings")
        return ModelFacts(
            file,
            num_layers=int(facts["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(head_dim),
            ffn_size=int(facts["intermediate_size"]),
            max_positions=None if positions is None else int(positions),
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{name}: {file} does not describe a decoder: {type(error).__name__}: {error}"
        ) from None


def cache_needs(config: PPOConfig, facts: ModelFacts) -> CacheNeeds:
    """What a sequence of `data.max_length` tokens takes of the KV cache of one rank of the engine.

    Where dtype and device are both "auto", a GPU and bfloat16 are assumed. On a CPU bfloat16 may be
    widened to float32, and vLLM's blocks there are of 32 tokens, one of them of no use.
    """
    rollout = config.rollout
    float32 = config.actor.dtype == "float32" or config.distributed.device == "cpu"
    vllm_on_cpu = rollout.engine == "vllm" and config.distributed.device != "cuda"
    block = -(-rollout.cache_block // 32) * 32 if vllm_on_cpu else rollout.cache_block
    return CacheNeeds(
        num_layers=facts.num_layers,
        kv_heads=max(1, facts.num_kv_heads // rollout.tp),
        head_dim=facts.head_dim,
        itemsize=4 if float32 else 2,
        tokens=(-(-config.data.max_length // block) + vllm_on_cpu) * block,
    )


def check_model(
    role: str,
    tp: int,
    pp: int,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_size: int,
    replicates_kv_heads: bool = False,
) -> None:
    """Refuse a layout that does not divide a model; the vocabulary is padded and so divides always.

    Args:
        role: section that holds `tp` and `pp`, for the message.
        tp: tensor-parallel size, ranks.
        pp: pipeline-parallel size, ranks.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        ffn_size: width of the MLP.
        replicates_kv_heads: where tp is a multiple of the key and value heads, several ranks hold
            the same one.

    Raises:
        ConfigError: one line a mistake.
    """
    sizes = [
        ("layers", num_layers, "pp", pp),
        ("attention heads", num_heads, "tp", tp),
        ("key and value heads", num_kv_heads, "tp", tp),
        ("intermediate size", ffn_size, "tp", tp),
    ]
    problems = []
    if replicates_kv_heads:
        del sizes[2]
        if num_kv_heads % tp and tp % num_kv_heads:
            fits = ", ".join(
                str(d)
                for d in range(1, num_heads + 1)
                if _spreads(d, num_heads, num_kv_heads, ffn_size)
            )
            problems.append(
                f"{role}.tp {tp} neither divides the model's key and value heads {num_kv_heads} nor is a multiple of "
                f"them; use one of {fits}"
            )
    for what, size, key, parts in sizes:
        if size % parts:
            fits = ", ".join(str(d) for d in range(1, parts) if size % d == 0)
            problems.append(
                f"{role}.{key} {parts} does not divide the model's {what} {size}; use one of {fits}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _spreads(tp: int, num_heads: int, num_kv_heads: int, ffn_size: int) -> bool:
    """Whether an engine of `tp` ranks fits the model."""
    return not (num_heads % tp or ffn_size % tp or (num_kv_heads % tp and tp % num_kv_heads))


def _check_layout(name: str, tp: int, pp: int, facts: ModelFacts, longest: int) -> None:
    check_model(
        name,
        tp,
        pp,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        ffn_size=facts.ffn_size,
        replicates_kv_heads=name == "rollout",
    )
    if facts.max_positions is not None and facts.max_positions < longest:
        raise ConfigError(
            f"{name}: the data's longest sequence, {longest} tokens, is beyond the model's max_position_embeddings "
            f"{facts.max_positions} ({facts.file}); lower the data's maximum lengths"
        )


def _check_cache(config: PPOConfig, facts: ModelFacts) -> None:
    """The KV cache that is asked for holds at least one sequence."""
    megabytes = config.rollout.kv_cache_mb
    needs = cache_needs(config, facts)
    if megabytes is not None and megabytes * MEBIBYTE < needs.bytes:
        raise ConfigError(
            f"rollout.kv_cache_mb {megabytes} = {megabytes * MEBIBYTE} bytes is less than one sequence needs, {needs}; "
            f"set rollout.kv_cache_mb to at least {-(-needs.bytes // MEBIBYTE)} or lower the data's maximum lengths"
        )
