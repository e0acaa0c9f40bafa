"""Finds layouts for a configuration on a number of GPUs that need not be there.

Usage: python tools/plan.py --config FILE --gpus N [--gpu h100|FILE] [--out DIR]
"""

import sys

from mrlhf.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
