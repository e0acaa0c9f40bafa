"""Merges the summaries of runs that follow each other (SFT, reward model, PPO) into one file.

Usage: python tools/merge_summaries.py --out DIR RUN_DIR [RUN_DIR ...]
"""

import sys

from mrlhf.commands.merge_summaries import main

if __name__ == "__main__":
    sys.exit(main())
