"""Converts checkpoints between Hugging Face, Megatron-LM and our training checkpoints.

Usage: python tools/convert_checkpoint.py SOURCE --to FORMAT --out DIR
       python tools/convert_checkpoint.py --inspect DIR
"""

import sys

from mrlhf.commands.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
