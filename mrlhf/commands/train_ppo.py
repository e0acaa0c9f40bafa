"""Trains a policy with PPO.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-ppo --config FILE
           [--config FILE ...] [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import PPOConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run import program
from mrlhf.trainers.ppo_run import train_ppo


def main() -> int:
    """Run the program with the arguments of the process."""
    return program.main(program.Program(PPOConfig, preflight, dry_run, train_ppo), sys.argv[1:])
