"""Fine-tunes a language model.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-sft --config FILE
           [--config FILE ...] [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import SFTConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run import program
from mrlhf.trainers.sft import train_sft


def main() -> int:
    """Run the program with the arguments of the process."""
    return program.main(program.Program(SFTConfig, preflight, dry_run, train_sft), sys.argv[1:])
