"""Trains a reward model.

Usage: torchrun --nproc-per-node=N launch/train_rm.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]
"""

import sys

from mrlhf.commands.train import reward_model

if __name__ == "__main__":
    sys.exit(reward_model())
