"""The published configurations for GPUs, as plans read them."""

from __future__ import annotations

from mrlhf.config import PPOConfig, load_config
from mrlhf.config.roots import AnyConfig
from mrlhf.models.spec import ModelSpec
from mrlhf.preflight.model_checks import check_models

GRPO = "configs/gpu/qwen3_8b_grpo_8_gpus.yaml"
MIXTURE = "configs/gpu/qwen3_30b_a3b_grpo_16_gpus.yaml"


def config_of(file: str, *overrides: str) -> PPOConfig:
    """The configuration of a file, for GPUs."""
    return load_config(PPOConfig, file, ["distributed.device=cuda", *overrides])


def specs_of(config: AnyConfig) -> dict[str, ModelSpec]:
    """The specs of its models, by role."""
    return {name: spec for name, spec in check_models(config).items() if spec is not None}
