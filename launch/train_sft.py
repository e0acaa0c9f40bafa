"""Fine-tunes a language model.

Usage: torchrun --nproc-per-node=N launch/train_sft.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import SFTConfig
from mrlhf.preflight import dry_run, preflight
from mrlhf.run.program import Program, main
from mrlhf.trainers.sft import train_sft

if __name__ == "__main__":
    sys.exit(main(Program(SFTConfig, preflight, dry_run, train_sft), sys.argv[1:]))
