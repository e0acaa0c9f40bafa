"""Trains a critic on stored rollouts.

Usage: torchrun --nproc-per-node=N launch/train_critic.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]
"""

import sys

from mrlhf.commands.train import critic

if __name__ == "__main__":
    sys.exit(critic())
