"""Fine-tunes a language model.

Usage: torchrun --nproc-per-node=N launch/train_sft.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N]]
"""

import sys

from mrlhf.config import SFTConfig
from mrlhf.trainers.program import main
from mrlhf.trainers.sft import train_sft

if __name__ == "__main__":
    sys.exit(main(SFTConfig, train_sft, sys.argv[1:]))
