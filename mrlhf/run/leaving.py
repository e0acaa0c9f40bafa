"""How a process of the job ends at once, and how it ends when its launcher has gone.

This file uses the standard library alone. The package imports it before torch, so that the launcher
is known from the start. It does not know what the process does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import NoReturn

logger = logging.getLogger(__name__)

ENDED_BY_SIGTERM = 143

_LOOK_EVERY_S = 1.0
_SAY_S = 2.0
# This process and its parent, when the package was imported; a launcher may go while torch is.
_AT_IMPORT = (os.getpid(), os.getppid())


def leave(code: int, why: str = "") -> NoReturn:
    """End the process at once, also if nobody reads what it says.

    No destructor runs, since one might wait for ranks that hang in a collective.

    Args:
        code: the exit code.
        why: what to log before, as an error.
    """
    # A pipe that is full, or a lock that a blocked thread holds, must not keep the process.
    limit = threading.Timer(_SAY_S, os._exit, [code])
    limit.daemon = True
    limit.start()
    try:
        if why:
            logger.error("%s", why)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)


def end_with_launcher() -> None:
    """End this process soon after the process that started it has ended.

    A thread looks every second, also while the main thread waits in a collective. The first process
    of a container has no launcher, and its parent never changes.
    """
    threading.Thread(target=_look_for_launcher, name="launcher", daemon=True).start()


def _look_for_launcher() -> None:
    pid, parent = _AT_IMPORT
    if pid != os.getpid():  # a fork of the process that has imported this file
        parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    leave(ENDED_BY_SIGTERM, "the launcher has gone, so this rank ends")
