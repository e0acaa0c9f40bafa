"""Trains a policy on preference pairs.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-dpo --config FILE
           [--config FILE ...] [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import DPOConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run import program
from mrlhf.trainers.dpo import train_dpo


def main() -> int:
    """Run the program with the arguments of the process."""
    return program.main(program.Program(DPOConfig, preflight, dry_run, train_dpo), sys.argv[1:])
