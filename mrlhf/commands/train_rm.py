"""Trains a reward model.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-rm --config FILE
           [--config FILE ...] [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import RewardModelConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run import program
from mrlhf.trainers.reward_model import train_reward_model


def main() -> int:
    """Run the program with the arguments of the process."""
    return program.main(
        program.Program(RewardModelConfig, preflight, dry_run, train_reward_model), sys.argv[1:]
    )
