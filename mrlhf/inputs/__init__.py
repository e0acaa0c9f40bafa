"""The inputs of a run: paths, tokenizer, data, rewards and environments, read before models."""

from mrlhf.inputs.read import (
    EngineInputs,
    PPOInputs,
    RowInputs,
    read_ppo_inputs,
    read_row_inputs,
)

__all__ = [
    "EngineInputs",
    "PPOInputs",
    "RowInputs",
    "read_ppo_inputs",
    "read_row_inputs",
]
