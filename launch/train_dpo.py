"""Trains a policy on preference pairs.

Usage: torchrun --nproc-per-node=N launch/train_dpo.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import DPOConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run.program import Program, main
from mrlhf.trainers.dpo import train_dpo

if __name__ == "__main__":
    sys.exit(main(Program(DPOConfig, preflight, dry_run, train_dpo), sys.argv[1:]))
