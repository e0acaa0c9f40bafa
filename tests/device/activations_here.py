"""Counts what a layer keeps for the backward pass, on the simulated device in bfloat16."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import pick_device
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.activations import layer_bytes
from mrlhf.roles.actor import Actor
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.training.engine import ModelEngine
from tests.device.measures import LENGTH, SEQUENCES, example, join
from tests.simulated_device.state import DEVICE

# Query heads, key heads and the widths of the model and of its MLP: sizes that differ in one.
# Widths of the model and of an expert, experts, and those that a token chooses.
MIXTURES = ((64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 8, 2), (64, 64, 8, 4))
CHOSEN = 24
SIZES = ((4, 4, 64, 128), (8, 4, 64, 128), (4, 2, 64, 128), (4, 4, 128, 128), (4, 4, 64, 256))


def compare() -> dict[str, tuple[float, int]]:
    """The bytes that a layer keeps for a token, as counted and by the rule."""
    join()
    models = {
        **{f"dense {sizes}": partial(_dense, *sizes) for sizes in SIZES},
        "with norms of queries and keys": partial(_dense, *SIZES[2], kind=Qwen3Config),
        "gates, norms in float32": _gated,
        "latent attention": partial(_latent, None),
        "latents of queries too": partial(_latent, 48),
        "chosen tokens": partial(_latent, 48, CHOSEN),
        **{f"mixture {sizes}": partial(_mixture, *sizes) for sizes in MIXTURES},
        "experts with own norms": _with_own_norms,
    }
    found = {}
    for recompute in ("none", "full"):
        for name, spec in models.items():
            one, three = (_peak(spec(layers=layers), recompute) for layers in (1, 3))
            counted = (three - one) / 2 / (SEQUENCES * LENGTH)
            rule = sum(layer_bytes(spec(layers=1), recompute))
            if name == "chosen tokens" and recompute == "none":
                # What attention gives is computed again: 4 heads of 24 numbers.
                rule += 4 * CHOSEN - 2 * 4 * 24
            found[f"{recompute}, {name}"] = (counted, rule)
    return found


def _dense(heads: int, kv_heads: int, hidden: int, ffn: int, **options: Any) -> ModelSpec:
    return _spec(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        **options,
    )


def _mixture(hidden: int, ffn: int, experts: int, chosen: int, layers: int) -> ModelSpec:
    return _spec(
        layers,
        Qwen3MoeConfig,
        hidden_size=hidden,
        intermediate_size=64,
        moe_intermediate_size=ffn,
        num_experts=experts,
        num_experts_per_tok=chosen,
        num_key_value_heads=4,
        head_dim=16,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )


def _with_own_norms(layers: int) -> ModelSpec:
    return _spec(
        layers,
        Gemma4TextConfig,
        num_key_value_heads=4,
        head_dim=16,
        global_head_dim=16,
        layer_types=["full_attention"] * layers,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    )


def _latent(q_rank: int | None, chosen: int | None = None, *, layers: int) -> ModelSpec:
    indexer: dict[str, Any] = {"kind": DeepseekV3Config}
    if chosen is not None:
        indexer = {"kind": DeepseekV32Config, "index_topk": chosen, "index_head_dim": 16}
    return _spec(
        layers,
        **indexer,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=layers,
    )


def _gated(layers: int) -> ModelSpec:
    return _spec(
        layers,
        Qwen3NextConfig,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["full_attention"] * layers,
        mlp_only_layers=list(range(layers)),
    )


def _spec(layers: int, kind: Any = LlamaConfig, **sizes: Any) -> ModelSpec:
    defaults = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config = kind(**{**defaults, "num_hidden_layers": layers, **sizes})
    return FAMILIES[config.model_type].read_config(config.to_dict(), "lm")


def _peak(spec: ModelSpec, recompute: str) -> int:
    """The most memory that an update of one micro-batch takes beside what is there before."""
    section = ActorSection(
        path="random",
        dtype="bfloat16",
        recompute=recompute,
        micro_batch_tokens=SEQUENCES * LENGTH,
        ppo_epochs=1,
        loss_scale_factor=1.0,
        optim=ActorOptimSection(lr=1e-6),
    )
    layout = ParallelLayout.for_world("actor", 1, AxisSizes(tp=1, pp=1))
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    engine = ModelEngine(section, spec, groups, pick_device("auto", local_rank=0))
    engine.initialise(seed=1)
    engine.attach_optimizer(section.optim, total_updates=100)
    actor = Actor(engine, PolicyLossSettings.named("vanilla", section, None), 1.0)

    experience = example()
    cut = engine.cut(experience.rollout.sequences(), "response")
    actor.update(experience, cut)  # what is made at first is made
    gc.collect()
    before = DEVICE.memory.allocated
    DEVICE.memory.reset_peak()
    actor.update(experience, cut)
    return DEVICE.memory.peak - before
