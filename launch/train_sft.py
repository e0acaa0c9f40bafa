"""Fine-tunes a language model.

Usage: torchrun --nproc-per-node=N launch/train_sft.py --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]
"""

import sys

from mrlhf.commands.train import sft

if __name__ == "__main__":
    sys.exit(sft())
