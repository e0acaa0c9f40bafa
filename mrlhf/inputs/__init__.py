"""The inputs of a run: paths, tokenizer, data, rewards and environments, read before models."""

from mrlhf.inputs.read import (
    EngineInputs,
    PPOInputs,
    PreferenceInputs,
    RowInputs,
    read_ppo_inputs,
    read_preference_inputs,
    read_row_inputs,
)

__all__ = [
    "EngineInputs",
    "PPOInputs",
    "PreferenceInputs",
    "RowInputs",
    "read_ppo_inputs",
    "read_preference_inputs",
    "read_row_inputs",
]
