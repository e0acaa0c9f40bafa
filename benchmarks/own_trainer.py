"""The trainer of `launch/train_ppo.py` in a process that a benchmark has started as one rank.

It knows no case.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from mrlhf.config import PPOConfig, load_config
from mrlhf.device import pick_device
from mrlhf.inputs import read_ppo_inputs
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer

TIMEOUT_S = 600.0
_TIMING = "timing_s/"


def make_trainer(keys: Mapping[str, Any], overrides: Sequence[str], directory: Path) -> PPOTrainer:
    """Join the job, and make the trainer with these keys; its files go into the directory."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ["RANK"])
    device = pick_device("cpu", rank)
    init_distributed(device, TIMEOUT_S)

    file = directory / f"ours-{os.environ['MASTER_PORT']}-{rank}.yaml"
    file.write_text(yaml.safe_dump(keys))
    config = load_config(PPOConfig, file, overrides)
    run = Run(device, rank, dist.get_world_size(), GroupFactory(TIMEOUT_S), directory)
    return PPOTrainer(config, run, assemble(config, read_ppo_inputs(config), run))


def phases_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each phase of a step."""
    return {
        name.removeprefix(_TIMING): value
        for name, value in metrics.items()
        if name.startswith(_TIMING)
    }


def leave() -> None:
    """End this rank's part in the job, when all have come so far."""
    dist.barrier()
    dist.destroy_process_group()
