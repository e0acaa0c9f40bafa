"""Turns the configuration of verl, TRL or OpenRLHF into ours.

Usage: python tools/import_config.py SCRIPT_OR_YAML [--out my.yaml] [--world-size N]
"""

import sys

from mrlhf.commands.import_config import main

if __name__ == "__main__":
    sys.exit(main())
