"""Typed, frozen configuration: sections, the five roots, loading, overrides and help."""

from mrlhf.config.arguments import DryRun, parse_args
from mrlhf.config.load import dump_yaml, load_config
from mrlhf.config.roots import CriticConfig, DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.tree import flatten

__all__ = [
    "CriticConfig",
    "DPOConfig",
    "DryRun",
    "PPOConfig",
    "RewardModelConfig",
    "SFTConfig",
    "dump_yaml",
    "flatten",
    "load_config",
    "parse_args",
]
