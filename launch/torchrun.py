"""torchrun for runs that may be asked to stop: it hands SIGTERM, SIGUSR1 and SIGINT to the workers,
waits until they have saved, and exits with 75 if they ask to be queued again.

Usage: python launch/torchrun.py [--stop-timeout SECONDS] <the arguments of torchrun>
"""

import sys

from mrlhf.run.elastic import main

if __name__ == "__main__":
    sys.exit(main())
