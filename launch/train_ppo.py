"""Trains a policy with PPO.

Usage: torchrun --nproc-per-node=N launch/train_ppo.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import PPOConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run.program import Program, main
from mrlhf.trainers.ppo_run import train_ppo

if __name__ == "__main__":
    sys.exit(main(Program(PPOConfig, preflight, dry_run, train_ppo), sys.argv[1:]))
