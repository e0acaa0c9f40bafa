"""Writes the data files and tokenizers of the shipped examples and recipes.

Usage: python tools/prepare_data.py arithmetic --out DIR
       python tools/prepare_data.py gsm8k --source DIR --out DIR
"""

import sys

from mrlhf.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
