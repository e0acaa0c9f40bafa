"""How a trained model leaves a run: a complete Hugging Face checkpoint, tokenizer included."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.models.families import save_config
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)


def export_checkpoint(
    engine: ModelEngine, tokenizer: Tokenizer, directory: Path, max_shard_mb: int
) -> None:
    """Write a model as a complete Hugging Face checkpoint; every rank calls it.

    Args:
        engine: holds the model.
        tokenizer: is saved beside it.
        directory: where the files go; created if it does not exist.
        max_shard_mb: largest safetensors file, MB.
    """
    is_main_rank = dist.get_rank() == 0
    if is_main_rank:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    engine.export(directory, max_shard_mb * 10**6)

    if is_main_rank:
        save_config(engine.spec, directory, engine.dtype, tokenizer.pad_id)
        tokenizer.save_pretrained(directory)
        logger.info("wrote the Hugging Face checkpoint %s", directory)
    dist.barrier()
