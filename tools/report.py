"""Writes the report of one run, or of several to compare, as one HTML file.

Usage: python tools/report.py RUN_DIR [RUN_DIR ...] [--out FILE]
"""

import sys

from mrlhf.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
