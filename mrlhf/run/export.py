"""How a trained model leaves a run: a complete Hugging Face checkpoint, tokenizer included."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import CheckpointError, WeightError
from mrlhf.models.families import save_config
from mrlhf.models.generation_config import write_generation_config
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)


def export_checkpoint(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    directory: Path,
    max_shard_mb: int,
    generation_config: str | None = None,
) -> None:
    """Write a model as a complete Hugging Face checkpoint; every rank calls it.

    Args:
        engine: holds the model.
        tokenizer: is saved beside it.
        directory: where the files go; created if it does not exist.
        max_shard_mb: largest safetensors file, MB.
        generation_config: the text of the model's `generation_config.json`, if it has one.

    Raises:
        CheckpointError: a rank could not write, on every rank.
    """
    error = None
    try:
        engine.export(directory, max_shard_mb * 10**6)
        if dist.get_rank() == 0:
            save_config(engine.spec, directory, engine.dtype, tokenizer.pad_id)
            tokenizer.save_pretrained(directory)
            if generation_config is not None:
                write_generation_config(generation_config, directory)
            logger.info("wrote the Hugging Face checkpoint %s", directory)
    except (OSError, WeightError) as failure:
        error = f"cannot write {directory}: {failure}"

    for other in all_gather_objects(error, engine.groups.world):
        if other is not None:
            raise CheckpointError(other)
