"""What every trainer needs before its first step, and what it leaves behind: ranks, roles,
checkpoints, summaries.

It knows no algorithm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrlhf.config.load import dump_yaml
from mrlhf.config.roots import Root
from mrlhf.config.sections import DistributedSection, RoleSection
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.device import Device, init_distributed, pick_device, read_launch, seed_everything
from mrlhf.errors import ConfigError
from mrlhf.log import configure_logging
from mrlhf.models.families import save_config
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """This process's part in the job.

    Attributes:
        device: where it computes.
        rank: its number.
        world_size: processes of the job.
        factory: creates the process groups, in the same order on every rank.
        output_dir: where the run writes.
    """

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory
    output_dir: Path

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    def groups(self, name: str, section: RoleSection) -> RoleGroups:
        """The process groups of role `name`."""
        layout = ParallelLayout.for_world(name, self.world_size, section.tp, section.pp)
        return self.factory.role_groups(layout)


def start(config: Root, distributed: DistributedSection, output_dir: str, seed: int) -> Run:
    """Join the job, seed, and write the configuration in full into the output directory."""
    device = pick_device(distributed.device, read_launch().local_rank)
    rank, world_size = init_distributed(device, distributed.timeout_s)
    configure_logging(rank)
    seed_everything(seed)
    directory = Path(output_dir)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        (directory / "metrics.jsonl").unlink(missing_ok=True)
    return Run(device, rank, world_size, GroupFactory(distributed.timeout_s), directory)


def check_vocabulary(name: str, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that makes tokens the model has no embedding for.

    Raises:
        ConfigError: the tokenizer's vocabulary is larger than the model's.
    """
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is {spec.vocab_size}; "
            f"use the model's own tokenizer, or a model with vocab_size >= {tokenizer.vocab_size}"
        )


def export_checkpoint(engine: ModelEngine, tokenizer: Tokenizer, directory: Path, max_shard_mb: int) -> None:
    """Write a model as a complete Hugging Face checkpoint, tokenizer included; every rank calls it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    engine.export(directory, max_shard_mb * 10**6)
    if dist.get_rank() == 0:
        save_config(engine.spec, directory, engine.dtype, tokenizer.pad_id)
        tokenizer.save_pretrained(directory)
        logger.info("wrote the Hugging Face checkpoint %s", directory)
    dist.barrier()


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write the few numbers that a run is judged by, for people and scripts."""
    (output_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
