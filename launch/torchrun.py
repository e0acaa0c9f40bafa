"""torchrun for schedulers. Plain torchrun starts, saves and resumes a run too; it cannot

- exit with the ranks' code: 75, which asks to be queued again, or 2 for bad input; its own is 1;
- take a signal that a scheduler repeats: the third one makes it leave its ranks to themselves;
- hold a signal back while ranks import, and end the others at once when a rank dies.

Usage: python launch/torchrun.py <the arguments of torchrun>
"""

import sys

from mrlhf.run.elastic import main

if __name__ == "__main__":
    sys.exit(main())
