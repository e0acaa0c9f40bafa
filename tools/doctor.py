"""Looks over a machine, its ranks, a model and a configuration.

Usage: python tools/doctor.py [--out DIR] [--model DIR] [--config FILE ...] [key.path=value ...]
"""

import sys

from mrlhf.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
