"""What is found out before a model is built: cross-checks, batch arithmetic, the dry run."""

from mrlhf.preflight.checks import check
from mrlhf.preflight.dry_run import describe, dry_run, preflight
from mrlhf.preflight.inputs import (
    PPOInputs,
    PreferenceInputs,
    SFTInputs,
    read_ppo_inputs,
    read_preference_inputs,
    read_sft_inputs,
)
from mrlhf.preflight.model_checks import check_models

__all__ = [
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
