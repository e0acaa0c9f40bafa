"""Trains a policy with PPO.

Usage: torchrun --nproc-per-node=N launch/train_ppo.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import PPOConfig
from mrlhf.trainers.ppo import train_ppo
from mrlhf.trainers.program import main

if __name__ == "__main__":
    sys.exit(main(PPOConfig, train_ppo, sys.argv[1:]))
