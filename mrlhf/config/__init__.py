"""Typed, frozen configuration: sections, the three roots, loading, cross-field checks and the dry run."""

from mrlhf.config.arguments import DryRun, parse_args
from mrlhf.config.checks import check
from mrlhf.config.dry_run import describe, dry_run
from mrlhf.config.load import dump_yaml, load_config
from mrlhf.config.model_files import check_model, check_models
from mrlhf.config.roots import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.schema import flatten

__all__ = [
    "DryRun",
    "PPOConfig",
    "RewardModelConfig",
    "SFTConfig",
    "check",
    "check_model",
    "check_models",
    "describe",
    "dry_run",
    "dump_yaml",
    "flatten",
    "load_config",
    "parse_args",
]
