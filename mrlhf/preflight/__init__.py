"""Checks before a model is built: between keys, of inputs and models, and the dry run."""

from mrlhf.preflight.checks import check
from mrlhf.preflight.dry_run import dry_run, preflight
from mrlhf.preflight.inputs import (
    EngineInputs,
    PPOInputs,
    PreferenceInputs,
    SFTInputs,
    read_ppo_inputs,
    read_preference_inputs,
    read_sft_inputs,
)
from mrlhf.preflight.model_checks import check_models
from mrlhf.preflight.words import describe

__all__ = [
    "EngineInputs",
    "PPOInputs",
    "PreferenceInputs",
    "SFTInputs",
    "check",
    "check_models",
    "describe",
    "dry_run",
    "preflight",
    "read_ppo_inputs",
    "read_preference_inputs",
    "read_sft_inputs",
]
