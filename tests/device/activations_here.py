"""Counts what a dense layer keeps for the backward pass, on the simulated device in bfloat16."""

from __future__ import annotations

import gc

from transformers import LlamaConfig

from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import pick_device
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.footprint import layer_bytes
from mrlhf.roles.actor import Actor
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.training.engine import ModelEngine
from tests.device.measures import LENGTH, SEQUENCES, example, join
from tests.simulated_device.state import DEVICE

# Query heads, key heads and the widths of the model and of its MLP: sizes that differ in one.
SIZES = ((4, 4, 64, 128), (8, 4, 64, 128), (4, 2, 64, 128), (4, 4, 128, 128), (4, 4, 64, 256))


def compare() -> dict[str, tuple[float, int]]:
    """The bytes that a layer keeps for a token, as counted and by the rule."""
    join()
    found = {}
    for recompute in ("none", "full"):
        for sizes in SIZES:
            one, three = (_peak(_spec(layers, *sizes), recompute) for layers in (1, 3))
            counted = (three - one) / 2 / (SEQUENCES * LENGTH)
            rule = sum(layer_bytes(_spec(1, *sizes), recompute))
            found[f"{recompute}, {sizes}"] = (counted, rule)
    return found


def _spec(layers: int, heads: int, kv_heads: int, hidden: int, ffn: int) -> ModelSpec:
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return FAMILIES["llama"].read_config(config.to_dict(), "lm")


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
