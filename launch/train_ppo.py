"""Trains a policy with PPO.

Usage: torchrun --nproc-per-node=N launch/train_ppo.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]
"""

import sys

from mrlhf.commands.train import ppo

if __name__ == "__main__":
    sys.exit(ppo())
