"""Trains a policy on preference pairs.

Usage: torchrun --nproc-per-node=N launch/train_dpo.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]
"""

import sys

from mrlhf.commands.train import dpo

if __name__ == "__main__":
    sys.exit(dpo())
