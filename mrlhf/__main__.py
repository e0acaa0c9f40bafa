"""`python -m mrlhf` is the command `mrlhf`."""

import sys

from mrlhf.commands.entry import main

if __name__ == "__main__":
    sys.exit(main())
