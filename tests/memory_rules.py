"""The rules of docs/memory.md for what a layout takes of a GPU's memory.

`tests/device/test_activations.py` counts what they say of activations; the rest is arithmetic.
"""

from __future__ import annotations

import math

from mrlhf.config import PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.activations import layer_bytes

WEIGHT = 2
GRADIENT = 4
MAIN_AND_MOMENTS = 12


def weights_of_a_rank(spec: ModelSpec, layout: ParallelLayout) -> tuple[float, float]:
    """The weights that a rank holds on average: those of experts, and all others."""
    experts = 0.0
    others = 0.0
    for name, shape in FAMILIES[spec.family].tensor_shapes(spec).items():
        if ".experts." in name:
            experts += math.prod(shape) / (layout.ep * layout.etp * layout.pp)
        else:
            others += math.prod(shape) / (layout.tp * layout.pp)
    return experts, others


def trained_bytes(spec: ModelSpec, layout: ParallelLayout) -> float:
    """Weights, gradients, main weights and moments of a rank."""
    experts, others = weights_of_a_rank(spec, layout)
    copies = layout.dp * layout.cp
    of_experts = experts * (WEIGHT + GRADIENT + MAIN_AND_MOMENTS / layout.edp)
    return of_experts + others * (WEIGHT + GRADIENT + MAIN_AND_MOMENTS / copies)


def kept_by_layers(section: RoleSection, spec: ModelSpec, layout: ParallelLayout) -> float:
    """What the layers of a rank keep of the micro-batches under way."""
    stages = layout.pp * layout.vpp
    kept = layout.pp if layout.vpp == 1 else layout.pp * (layout.vpp + 1) - 1
    layers = math.ceil(spec.num_layers / stages)
    tokens = section.micro_batch_tokens / layout.cp
    whole, split = layer_bytes(spec, section.recompute)
    each = split / layout.tp + whole / (layout.tp if section.sequence_parallel else 1)
    return kept * layers * tokens * each


def gigabytes(config: PPOConfig, specs: dict[str, ModelSpec], world_size: int) -> dict[str, float]:
    """What each owner of a rank's memory takes; `specs` are the models by role."""
    found: dict[str, float] = {}
    activations = []
    for role, spec in specs.items():
        section = config.actor if role == "actor" else config.critic
        layout = ParallelLayout.for_world(role, world_size, AxisSizes.of(section))
        found[role] = trained_bytes(spec, layout)
        activations.append(kept_by_layers(section, spec, layout))

    actor = specs["actor"]
    layout = ParallelLayout.for_world("actor", world_size, AxisSizes.of(config.actor))
    held = WEIGHT * sum(weights_of_a_rank(actor, layout))
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        found["reference"] = held

    shapes = FAMILIES[actor.family].tensor_shapes(actor).values()
    found["engine"] = WEIGHT * sum(map(math.prod, shapes)) / config.rollout.tp
    if config.rollout.tp == layout.tp:
        found["engine"] -= held
    found["activations"] = max(activations)
    return {owner: nbytes / 1e9 for owner, nbytes in found.items()}
