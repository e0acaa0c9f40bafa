"""The inputs of a run: paths, tokenizer, data, rewards and environments, read before models."""

from mrlhf.inputs.read import (
    EngineInputs,
    PPOInputs,
    PreferenceInputs,
    SFTInputs,
    read_ppo_inputs,
    read_preference_inputs,
    read_sft_inputs,
)

__all__ = [
    "EngineInputs",
    "PPOInputs",
    "PreferenceInputs",
    "SFTInputs",
    "read_ppo_inputs",
    "read_preference_inputs",
    "read_sft_inputs",
]
