"""Trains a reward model.

Usage: torchrun --nproc-per-node=N launch/train_rm.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import RewardModelConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run.program import Program, main
from mrlhf.trainers.reward_model import train_reward_model

if __name__ == "__main__":
    sys.exit(main(Program(RewardModelConfig, preflight, dry_run, train_reward_model), sys.argv[1:]))
